"""The sub-commands `run` and `explain` of `rankcell`; what they need is imported when they are used."""

from importlib import import_module
from typing import Any

LIMIT = 300.0  # seconds


def add_command(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a job and say which rank hangs, does not match, fails or is lost, and where",
        description="Run a command whose processes are ranks, such as torchrun, srun or python, without changing it. "
        "When it hangs, or a rank fails, print once who is to blame, and what every rank did, and end the job.",
    )
    limit = f"without any progress, after which a rank that stands still is reported ({LIMIT:.0f})"
    limit += "; what is proved to hang is reported at once"
    run.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help=limit)
    where = "where to write what is known of each rank, also when nothing goes wrong"
    run.add_argument("--report", default="", metavar="FOLDER", help=where)
    run.add_argument("program", nargs="...", metavar="-- COMMAND")
    what = "Say who is to blame from the report that `rankcell run` has written."
    explain = commands.add_parser("explain", help="say the same of a report", description=what)
    explain.add_argument("folder", metavar="FOLDER")
    for parser, name in ((run, "main"), (explain, "explain")):
        parser.set_defaults(run=lambda options, name=name: getattr(import_module(".run", __package__), name)(options))
