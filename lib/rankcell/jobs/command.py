"""The sub-commands `run`, `attach` and `explain` of `rankcell`."""

from importlib import import_module
from typing import Any

LIMIT = 300.0  # seconds


def add_command(commands: Any) -> None:
    """Add them to the sub-commands of an argument parser."""
    run = _add(
        commands,
        "run",
        "run a job and say which rank hangs, does not match, fails or is lost, and where",
        "Run a command whose processes are ranks, such as torchrun, srun or python, without changing it. When it "
        "hangs, or a rank fails, print once who is to blame, and what every rank did.",
    )
    run.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS",
        help=f"without any progress, after which a rank that stands still is reported ({LIMIT:.0f}); what is proved to "
        f"hang is reported at once",
    )  # fmt: skip
    run.add_argument(
        "--on-hang", choices=("end", "report"), default="end", help="end the job (default), or only report"
    )
    run.add_argument(
        "--report", default="", metavar="FOLDER",
        help="where to write what is known of each rank, also when nothing goes wrong",
    )  # fmt: skip
    run.add_argument("program", nargs="...", metavar="-- COMMAND")

    attach = _add(
        commands,
        "attach",
        "say the same of processes that hang already",
        "Say which rank the others wait for, for processes that hang and were started without `rankcell run`, from "
        "their stacks, which py-spy reads.",
    )
    attach.add_argument(
        "pids",
        type=int,
        nargs="*",
        metavar="PID",
        help="of ranks, or of their launcher; all of this user if there is none",
    )
    attach.add_argument(
        "--report", default="", metavar="FOLDER", help="only write the stacks, for `rankcell explain`"
    )

    explain = _add(
        commands,
        "explain",
        "say the same of reports and stacks",
        "Say who is to blame from the reports of `rankcell run`, or from what py-spy or faulthandler print of each "
        "rank, in files such as rank-3.txt.",
    )
    explain.add_argument("folder", metavar="FOLDER", help="with these files")


def _add(commands: Any, name: str, help: str, description: str) -> Any:
    """A sub-command that is carried out by the `main` of the module of its name, imported when it is needed."""
    parser = commands.add_parser(name, help=help, description=description)
    parser.set_defaults(run=lambda options: import_module(f".{name}", __package__).main(options))
    return parser
