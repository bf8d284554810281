"""The command `rankcell`: each sub-command lives in the part that does its work."""

import argparse
import os
import sys
from collections.abc import Sequence

from . import extensions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; the number for the shell is 0 when all went well."""
    about = "Notebook cells that run on several real ranks, and plans for many more."
    parser = argparse.ArgumentParser(prog="rankcell", description=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if arguments is None else arguments
    for word in extensions.words_of("rankcell"):
        extensions.find(f"rankcell {word}")(commands)
        if given and given[0] in commands.choices:
            break  # the parts below are not imported: nobody who runs a job waits for them
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
