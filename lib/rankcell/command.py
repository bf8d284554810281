"""The command `rankcell`: each sub-command lives where its work is done."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .jobs import command as jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; the number for the shell is 0 when all went well."""
    parser = argparse.ArgumentParser(
        prog="rankcell", description="Notebook cells that run on several real ranks, and plans for many more."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    jobs.add_command(commands)
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] not in commands.choices:
        _add_others(commands)
    options: Any = parser.parse_args(arguments)
    return options.run(options)


def _add_others(commands: Any) -> None:
    """The sub-commands that nobody waits for who runs a job: they import IPython and numpy."""
    from . import doctor
    from .cluster import export
    from .planner import command as plan
    from .teaching import command as grade

    for module in (export, plan, doctor, grade):
        module.add_command(commands)


if __name__ == "__main__":
    sys.exit(main())
