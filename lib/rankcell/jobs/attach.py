"""`rankcell attach`: the verdict for processes that hang already and were started without us.

Their stacks come from py-spy. Whether they compute is seen from the CPU time that they use within a second. A job of
Slurm is looked at on each of its nodes, by a step of its own. Nothing is changed in the processes; py-spy stops each
for some milliseconds.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..results import name_ranks
from . import explain, inside, records, stacks, verdict
from .records import RankRecord

WATCHED = 1.0  # seconds in which the use of CPU is measured
COMPUTES = 0.1  # of a core: a process that uses more computes


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
    """Rank -> pid of the Python processes that a launcher has given a rank, among `pids` and what they have started.
    Workers of a rank are left out.

    Raises:
        Unseen: a process is not there, or belongs to somebody else; or none of them is a rank.
    """
    by_name: dict[str, dict[int, int]] = {"RANK": {}, "SLURM_PROCID": {}}
    for pid in pids:
        environment_of(pid)
        for each in (pid, *stacks.children(pid)):
            try:
                environment = environment_of(each)
            except Unseen:
                continue
            for name, ranks in by_name.items():
                if (rank := environment.get(name, "")).isdecimal() and _is_python(each):
                    ranks.setdefault(int(rank), each)
    found = by_name["RANK"] or by_name["SLURM_PROCID"]
    # where no launcher has said which rank they are: in the order in which they were named
    found = found or {n: pid for n, pid in enumerate(pids) if _is_python(pid)}
    if not found:
        raise Unseen(
            f"{', '.join(map(str, pids))}: no Python. Name the ranks, or the launcher of all of them."
        )
    return dict(sorted(found.items()))


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


def stack_of(pid: int) -> tuple[stacks.ThreadStack, ...]:
    """The stack of a process, by py-spy. Raises Unseen, with what would help, if it may not be read."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        raise Unseen("stacks of running processes are read by py-spy: `pip install py-spy` needs no root.")
    command = [spy, "dump", "--full-filenames", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0 and (threads := stacks.printed(done.stdout)):
        return threads
    raise Unseen(
        f"the stack of process {pid} cannot be read: {' '.join(done.stderr.split())[:300]}. A user may read their own "
        "processes only if /proc/sys/kernel/yama/ptrace_scope is 0, or with sudo; in a container with --cap-add "
        "SYS_PTRACE. Else start the job with `rankcell run`, or with TORCH_FR_BUFFER_SIZE=2000 for `rankcell explain`."
    )


def look(ranks: dict[int, int]) -> list[RankRecord]:
    """What can be seen of each rank -> pid. Raises Unseen if no stack can be read."""
    before = {pid: inside.used(pid)[0] for pid in ranks.values()}
    time.sleep(WATCHED)
    found, problem = [], Unseen("no rank is here.")
    for rank, pid in ranks.items():
        busy = inside.used(pid)[0] - before[pid] > COMPUTES * WATCHED
        try:
            threads = stack_of(pid)
            workers = [(child, stack_of(child)) for child in stacks.children(pid)[:16] if _is_python(child)]
        except Unseen as error:
            problem = error
            continue
        environment = environment_of(pid)
        size = environment.get("WORLD_SIZE") or environment.get("SLURM_NTASKS", "0")
        found.append(
            explain.of_threads(rank, threads, workers, size=int(size), idle=0.0 if busy else WATCHED)
        )
    if not found:
        raise problem
    return explain.merged(found)


# --- a job of Slurm


def of_job(job: str) -> list[RankRecord]:
    """What can be seen of the ranks of a Slurm job, on all of its nodes, which share the home directory.

    Raises:
        Unseen: Slurm has no such job, or it cannot be looked at.
    """
    home = Path.home() / ".rankcell"
    home.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        command = ["srun", f"--jobid={job}", "--overlap", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none",
                   sys.executable, "-m", "rankcell.jobs.attach", job, folder]  # fmt: skip
        path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        except FileNotFoundError:
            raise Unseen("there is no srun here: run this where Slurm's commands are.") from None
        found = [records.load(path.read_bytes()) for path in Path(folder).glob("*/rank-*.pickle")]
    if not found:
        raise Unseen(f"nothing of job {job} can be seen: {' '.join(done.stderr.split())[:300]}")
    return explain.merged(found)


def pids_of_job(job: str) -> list[int]:
    """The processes of a Slurm job on this node, those of this step left out, a rank before its workers."""
    found = []
    for pid in sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()):
        try:
            environment = environment_of(pid)
        except Unseen:
            continue
        step = environment.get("SLURM_STEP_ID", "")  # a number in a step of its own, none in the job script
        ours = step == os.environ["SLURM_STEP_ID"]
        if (
            environment.get("SLURM_JOB_ID") == job
            and not ours
            and ("RANK" in environment or step.isdecimal())
        ):
            found.append(pid)
    return found


# --- the command


def main(options: Any) -> int:
    """Look at the processes, or the job, and print the verdict; 0 if anything could be seen."""
    if bool(options.pids) == bool(options.job):
        print("rankcell attach: name processes, or --job ID of a Slurm job.", file=sys.stderr)
        return 2
    try:
        found = of_job(options.job) if options.job else look(ranks_among(options.pids))
    except Unseen as error:
        print(f"rankcell attach: {error}", file=sys.stderr)
        return 1
    print(verdict.text(explain.explain(found), found))
    computing = [r.rank for r in found if r.idle == 0.0 and not r.waits]
    if computing:
        print(f"\n{name_ranks(computing)} computing: look again in a while, whether the line is the same.")
    return 0


if __name__ == "__main__":  # one node's part of `of_job`
    try:
        if pids := pids_of_job(sys.argv[1]):
            records.write(Path(sys.argv[2]) / os.environ["SLURM_PROCID"], look(ranks_among(pids)))
    except Unseen as error:
        sys.exit(str(error))
