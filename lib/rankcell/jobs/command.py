"""The sub-commands `run`, `attach` and `explain` of `rankcell`."""

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
    run.add_argument(
        "--report", default="", metavar="FOLDER",
        help="where to write what is known of each rank, also when nothing goes wrong",
    )  # fmt: skip
    run.add_argument("program", nargs="...", metavar="-- COMMAND")
    run.set_defaults(run=_run)

    attach = commands.add_parser(
        "attach",
        help="say the same of processes that hang already",
        description="Say which rank the others wait for, for processes that hang and were started without "
        "`rankcell run`, from their stacks, which py-spy reads.",
    )
    attach.add_argument("pids", type=int, nargs="*", metavar="PID", help="of the ranks, or of their launcher")
    attach.add_argument("--job", default="", metavar="ID", help="a job of Slurm, instead")
    attach.set_defaults(run=_attach)

    explain = commands.add_parser(
        "explain",
        help="say the same of reports, dumps and stacks",
        description="Say who is to blame from what is left of a job, mixed and incomplete: reports of `rankcell run`, "
        "dumps of torch's flight recorder, what py-spy and faulthandler print of each rank.",
    )
    explain.add_argument("folder", metavar="FOLDER", help="with these files; or one of them")
    explain.set_defaults(run=_explain)


def _run(options: Any) -> int:
    from . import run

    return run.main(options)


def _attach(options: Any) -> int:
    from . import attach

    return attach.main(options)


def _explain(options: Any) -> int:
    from . import explain

    return explain.main(options)
