"""The command `rankcell`: each sub-command lives where its work is done."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from . import doctor, room
from .cluster import export
from .grade import command as grade
from .jobs import command as jobs
from .planner import command as plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; the number for the shell is 0 when all went well."""
    parser = argparse.ArgumentParser(
        prog="rankcell", description="Notebook cells that run on several real ranks, and plans for many more."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    export.add_command(commands)
    plan.add_command(commands)
    doctor.add_command(commands)
    jobs.add_command(commands)
    grade.add_command(commands)
    room.add_command(commands)
    options: Any = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
