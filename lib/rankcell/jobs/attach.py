"""`rankcell attach`: the verdict for processes that hang already and were started without us.

Their stacks come from py-spy, which also says who computes; it changes nothing in them, and stops each for some
milliseconds. A process belongs to the rank that its launcher has put into its environment. Each machine sees its own
ranks: where there are several, each writes what it sees into one folder, and `rankcell explain` compares.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import explain, stacks


class Unseen(ValueError):
    """Processes that cannot be looked at, and what would help."""


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started. Raises Unseen if it cannot be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise Unseen(f"there is no process {pid} on this machine.") from None
    except PermissionError:
        raise Unseen(f"process {pid} belongs to somebody else: run this as the same user.") from None
    pairs = (item.decode(errors="replace").partition("=") for item in data.split(b"\0") if b"=" in item)
    return {name: value for name, _, value in pairs}


def ranks_among(pids: Sequence[int]) -> dict[int, int]:
    """Rank -> pid of the Python processes that are ranks among `pids` and what they have started, a rank and not its
    workers. Of all processes of this user, and within Slurm of this job, if `pids` is empty.

    Raises:
        Unseen: a process is not there, or belongs to somebody else; or none of them is a rank.
    """
    for pid in pids:
        environment_of(pid)
    tree = [each for pid in pids for each in (pid, *stacks.children(pid))]
    everything = sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal())
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    found: dict[str, dict[int, int]] = {"RANK": {}, "SLURM_PROCID": {}}
    for pid in tree or everything:
        try:
            environment = environment_of(pid)
        except Unseen:
            continue
        ours = not tree and (environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")) == (job, step)
        if not tree and job and (ours or environment.get("SLURM_JOB_ID") != job):
            continue
        for name, ranks in found.items():
            if (rank := environment.get(name, "")).isdecimal() and pid != os.getpid() and _is_python(pid):
                ranks.setdefault(int(rank), pid)
    # where no launcher has said which rank they are: in the order in which they were named
    ranks = found["RANK"] or found["SLURM_PROCID"] or {n: p for n, p in enumerate(pids) if _is_python(p)}
    if not ranks:
        raise Unseen(
            "here is no Python process that is a rank. Name the ranks, or the launcher of all of them."
        )
    return dict(sorted(ranks.items()))


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


def stack_of(pid: int) -> str:
    """The stack of a process, as py-spy prints it. Raises Unseen, with what would help, if it may not be read."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        raise Unseen("stacks of running processes are read by py-spy: `pip install py-spy` needs no root.")
    command = [spy, "dump", "--full-filenames", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0 and stacks.printed(done.stdout):
        return done.stdout
    raise Unseen(
        f"the stack of process {pid} cannot be read: {' '.join(done.stderr.split())[:300]}. A user may read their own "
        "processes only if /proc/sys/kernel/yama/ptrace_scope is 0, or with sudo; in a container with --cap-add "
        "SYS_PTRACE. Else start the job with `rankcell run`."
    )


def main(options: Any) -> int:
    """Look at the processes and print the verdict, or write down what is seen; 0 if all of them could be seen."""
    try:
        seen = {rank: stack_of(pid) for rank, pid in ranks_among(options.pids).items()}
    except Unseen as error:
        print(f"rankcell attach: {error}", file=sys.stderr)
        return 1
    if options.report:
        Path(options.report).mkdir(parents=True, exist_ok=True)
        for rank, text in seen.items():
            (Path(options.report) / f"rank-{rank}.txt").write_text(text)
    else:
        explain.show([explain.of_threads(rank, stacks.printed(text)) for rank, text in seen.items()])
    return 0
