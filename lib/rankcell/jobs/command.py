"""The sub-commands `run`, `attach` and `explain` of `rankcell`."""

import argparse
from typing import Any

LIMIT = 300.0  # seconds


def add_command(commands: Any) -> None:
    """Add them to the sub-commands of an argument parser."""
    run = commands.add_parser(
        "run",
        help="run a job and say which rank hangs, does not match, fails or is lost, and where",
        description="Run a command whose processes are ranks, such as torchrun, srun or python, without changing it. "
        "When it hangs, or a rank fails, print once who is to blame, and what every rank did.",
    )
    run.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS",
        help=f"without any progress, after which a rank that stands still is reported ({LIMIT:.0f}); what is proved to "
        f"hang is reported at once",
    )  # fmt: skip
    run.add_argument(
        "--on-hang", choices=("end", "report"), default="end", help="end the job (default), or only report"
    )
    run.add_argument("--report", default="", metavar="FOLDER", help="where to write what is known of each rank")
    run.add_argument(
        "--meet", default="", metavar="NAME",
        help="the same on every node, where each node has a `rankcell run` of its own without Slurm",
    )  # fmt: skip
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    run.set_defaults(run=_run)


def _run(options: Any) -> int:
    from . import run

    return run.main(options)
