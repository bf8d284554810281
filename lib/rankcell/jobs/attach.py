"""`rankcell attach`: the verdict for processes that hang already and were started without us.

Their stacks come from py-spy. Whether they compute is seen from the CPU time that they use within a second. Where the
job has torch's flight recorder and its pipe on, every rank is asked for a dump. A job of Slurm is looked at on each of
its nodes, by a step of its own. Nothing is changed in the processes; py-spy stops each for some milliseconds.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine import system
from ..results import name_ranks
from . import explain, flight, inside, records, stacks, verdict
from .records import Record

WATCHED = 1.0  # seconds in which the use of CPU is measured
COMPUTES = 0.1  # of a core: a process that uses more computes
MARK = "rankcell attach:"  # before each line that a node's step prints for us
_LINE = 500  # characters of such a line: srun may mix long lines of two nodes
_TIMES = 3  # how often a job's nodes are asked where their answers arrive damaged
_PIPES = ("TORCH_FR_DUMP_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class Unseen(ValueError):
    """Processes that cannot be looked at, and what would help."""


@dataclass(frozen=True)
class Process:
    """One process of this machine that is a rank."""

    pid: int
    rank: int
    world_size: int
    environment: dict[str, str]


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started. Raises Unseen if it cannot be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise Unseen(f"there is no process {pid} on this machine.") from None
    except PermissionError:
        raise Unseen(f"process {pid} belongs to somebody else: run this as the same user.") from None
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def ranks_among(pids: Sequence[int]) -> list[Process]:
    """The ranks among processes and those that they have started; each rank once, workers of a rank left out.

    Raises:
        Unseen: a process is not there, or belongs to somebody else; or none of them is a rank.
    """
    found: dict[int, Process] = {}
    for pid in pids:
        for each in (pid, *stacks.children(pid)):
            try:
                environment = environment_of(each)
            except Unseen:
                if each == pid:
                    raise
                continue
            rank = environment.get("RANK") or environment.get("SLURM_PROCID", "")
            size = environment.get("WORLD_SIZE") or environment.get("SLURM_NTASKS", "")
            if rank.isdecimal() and int(rank) not in found and _is_python(each):
                found[int(rank)] = Process(each, int(rank), int(size) if size.isdecimal() else 0, environment)
    if not found and pids:
        # no launcher has said which rank they are: in the order in which they were named
        found = {n: Process(p, n, len(pids), environment_of(p)) for n, p in enumerate(pids) if _is_python(p)}
    if not found:
        raise Unseen(
            f"{', '.join(map(str, pids))}: no Python process. Name the ranks, or the launcher of all of them."
        )
    return [process for _, process in sorted(found.items())]


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


def spy() -> str:
    """The path of py-spy. Raises Unseen if it is not installed."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        raise Unseen(
            "stacks of running processes are read by py-spy, which is not installed. `pip install py-spy`, or rankcell "
            "with its extra `attach`, needs no root, and it works for processes that are running already."
        )
    return found


def stack_of(pid: int) -> stacks.Process:
    """The stack of a process, by py-spy. Raises Unseen, with what would help, if it may not be read."""
    done = subprocess.run(
        [spy(), "dump", "--json", "--pid", str(pid)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
        check=False,
    )
    if done.returncode == 0:
        found = stacks.py_spy_json(json.loads(done.stdout))
        if found:
            return found[0]
    said = " ".join(done.stderr.split())[:300]
    hint = ""
    if re.search(r"permission|not permitted|ptrace", said, re.IGNORECASE):
        hint = (
            " A user may read their own processes only if /proc/sys/kernel/yama/ptrace_scope is 0, or with sudo; in a "
            "container with --cap-add SYS_PTRACE. Without that, TORCH_FR_BUFFER_SIZE=2000 in the job's environment and "
            "`rankcell explain` on its dumps are the way, or to start the job with `rankcell run`."
        )
    raise Unseen(f"the stack of process {pid} cannot be read: {said}.{hint}")


def look(processes: Sequence[Process]) -> tuple[list[Record], list[str]]:
    """What can be seen of each process, and sentences about what cannot.

    Raises:
        Unseen: no stack can be read.
    """
    before = {p.pid: inside.used(p.pid, system.process_cpu_seconds(p.pid))[0] for p in processes}
    time.sleep(WATCHED)
    found, problems = [], []
    size = max([p.world_size for p in processes] + [len(processes)])
    for process in processes:
        busy = (
            inside.used(process.pid, system.process_cpu_seconds(process.pid))[0] - before[process.pid]
            > COMPUTES * WATCHED
        )
        try:
            seen = stack_of(process.pid)
        except Unseen as error:
            problems.append(str(error))
            continue
        record = explain.of_process(process.rank, seen, size=size, idle=0.0 if busy else WATCHED)
        workers: list[tuple[str, Any]] = []
        for child in stacks.children(process.pid)[:16]:
            try:
                threads = stack_of(child).threads if _is_python(child) else ()
            except Unseen:
                continue
            workers += [(f"worker process {child}", t.frames) for t in threads[:1]]
        found.append(replace(record, others=(*record.others, *workers)))
    if not found:
        raise Unseen(problems[0])
    dumped, said = _dumps(processes)
    return explain.merged([*found, *flight.records(dumped)]), [*dict.fromkeys(problems), *said]


def _dumps(processes: Sequence[Process]) -> tuple[list[flight.Dump], list[str]]:
    """Dumps of the flight recorder, from processes that write one when they are asked by a pipe."""
    found = []
    for process in processes:
        environment = process.environment
        pipe = next((environment[n] for n in _PIPES if environment.get(n)), "")
        prefix = next((environment[n] for n in _FILES if environment.get(n)), "/tmp/nccl_trace_rank_")
        path = Path(f"{pipe}{process.rank}.pipe")
        if not pipe or not path.exists():
            continue
        asked = time.time()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, b"1\n")
            os.close(fd)
        except OSError:
            continue
        file, end = Path(f"{prefix}{process.rank}"), time.monotonic() + 5
        while time.monotonic() < end and not (file.exists() and file.stat().st_mtime >= asked):
            time.sleep(0.05)
        time.sleep(0.1)
        if file.exists() and file.stat().st_mtime >= asked:
            found.append(flight.Dump(process.rank, flight.load(file.read_bytes()), file.name))
    if found:
        return found, []
    on = any(
        p.environment.get("TORCH_FR_BUFFER_SIZE") or p.environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
        for p in processes
    )
    why = (
        "is on, but can only be asked from outside with nccl and TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
        if on
        else "is off"
    )
    return [], [f"torch's flight recorder {why}: nothing here numbers the operations."]


# --- a job of Slurm


def of_job(job: str) -> tuple[list[Record], list[str]]:
    """What can be seen of the ranks of a Slurm job, on all of its nodes.

    Raises:
        Unseen: Slurm has no such job, or it cannot be looked at.
    """
    command = ["srun", f"--jobid={job}", "--overlap", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none",
               sys.executable, "-m", "rankcell.jobs.attach", job]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    }
    try:
        nodes = _nodes_of(job)
        command[3:3] = [f"--nodes={nodes}", f"--ntasks={nodes}"]
        for _ in range(_TIMES):
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=120,
                check=False,
                env=environment,
            )
            try:
                told = _told(done.stdout)
                break
            except ValueError:
                continue
        else:
            raise Unseen(f"the answers of the nodes of job {job} arrived damaged {_TIMES} times. Try again.")
    except subprocess.TimeoutExpired:
        raise Unseen(f"Slurm did not answer in time, or a node of job {job} does not.") from None
    except FileNotFoundError:
        raise Unseen("there is no srun here: run this where Slurm's commands are.") from None
    found = [records.unpack(r) for node in told for r in node["records"]]
    said = [sentence for node in told for sentence in node["said"]]
    if not found:
        reason = said[0] if said else " ".join(done.stderr.split())[:300]
        raise Unseen(f"nothing of job {job} can be seen: {reason}")
    return sorted(found, key=lambda r: r.rank), list(dict.fromkeys(said))


def _lines(told: dict[str, Any], node: str) -> list[str]:
    """What one node's step prints: JSON in base64, in lines that say whose they are, and a last one without content."""
    data = base64.b64encode(json.dumps(told).encode()).decode()
    pieces = [data[i : i + _LINE] for i in range(0, len(data), _LINE)]
    return [f"{MARK}{node}:{piece}" for piece in [*pieces, ""]]


def _told(text: str) -> list[dict[str, Any]]:
    """What the nodes' steps have printed, among whatever else there is. Raises ValueError if a part is damaged."""
    pieces: dict[str, list[str]] = {}
    for line in text.splitlines():
        _, mark, rest = line.partition(MARK)
        if mark:
            node, _, piece = rest.partition(":")
            pieces.setdefault(node, []).append(piece)
    if any(each[-1] for each in pieces.values()):
        raise ValueError("the end of an answer is missing")
    return [dict(json.loads(base64.b64decode("".join(each), validate=True))) for each in pieces.values()]


def _nodes_of(job: str) -> int:
    """The number of nodes of a job. Raises Unseen if it does not run, or is more than one."""
    done = subprocess.run(
        ["squeue", "--noheader", "--format=%i %T %D", "--jobs", job],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=30,
        check=False,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    if not rows:
        said = " ".join(done.stderr.split())[:200] or "squeue lists none"
        raise Unseen(f"Slurm has no running job {job}: {said}.")
    running = [row for row in rows if row[1] == "RUNNING"]
    if len(running) > 1:
        names = ", ".join(row[0] for row in running[:8])
        raise Unseen(f"job {job} is an array of which {len(running)} jobs run. Name one of them: {names}.")
    if not running or (len(rows) > 1 and running[0][0] != job):
        raise Unseen(f"job {rows[0][0]} does not run, it is {rows[0][1]}.")
    return int(running[0][2])


def pids_of_job(job: str) -> list[int]:
    """The ranks of a Slurm job on this node: Python processes that a launcher has given a rank, or where there are none
    those to which Slurm has given a number.
    """
    ours = os.environ.get("SLURM_STEP_ID"), os.environ.get("SLURM_JOB_ID")
    ranks, tasks = [], []
    for pid in sorted(
        int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()
    ):  # a rank before its workers
        try:
            environment = environment_of(pid)
        except Unseen:
            continue
        step = environment.get("SLURM_STEP_ID"), environment.get("SLURM_JOB_ID")
        if pid == os.getpid() or step[1] != job or step == ours:
            continue
        if "RANK" in environment:
            ranks.append(pid)
        elif "SLURM_PROCID" in environment and (step[0] or "").isdecimal() and _is_python(pid):
            tasks.append(pid)  # in a step of its own, not in the job script
    return ranks or tasks


def on_node(job: str) -> None:
    """One node's part of `of_job`."""
    try:
        pids = pids_of_job(job)
        found, said = look(ranks_among(pids)) if pids else ([], [])
    except Unseen as error:
        found, said = [], [str(error)]
    told = {"records": [records.pack(r) for r in found], "said": said}
    for line in _lines(told, os.environ.get("SLURM_PROCID", "0")):  # the step has one task on each node
        print(line, flush=True)


# --- the command


def main(options: Any) -> int:
    """Look at the processes, or the job, and print the verdict; 0 if anything could be seen."""
    if bool(options.pids) == bool(options.job):
        print("rankcell attach: name processes, or --job ID of a Slurm job.", file=sys.stderr)
        return 2
    try:
        found, said = of_job(options.job) if options.job else look(ranks_among(options.pids))
    except Unseen as error:
        print(f"rankcell attach: {error}", file=sys.stderr)
        return 1
    concluded = explain.explain(found)
    concluded = replace(concluded, unknown=(*concluded.unknown, *said))
    print(f"rankcell: {concluded}\n\n{verdict.details(found, concluded)}")
    computing = [r.rank for r in found if r.idle == 0.0 and not r.waits]
    if computing:
        verb = "uses" if len(computing) == 1 else "use"
        print(
            f"\n{name_ranks(computing)} {verb} the processor: look again in a while, whether the line is the same."
        )
    if options.report:
        records.write(Path(options.report), found)
    return 0


if __name__ == "__main__":
    on_node(sys.argv[1])
