"""Generated jobs that hang, do not match or die, each with the rank and the lines to blame, and slow ones.

`python tests/hanging_jobs.py [FIRST LAST]` runs them and prints a line for each. Each job is a script as a user would
write it, under the runner of `rankcell run`. `import torch` takes longer than most of these jobs, so one process
imports it, with the import hook in place, and the ranks are forks of it: that is all that differs from a launcher. Two
nodes are ranks that tell the runner so, and meet over the network only.
"""

import contextlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 8.0  # seconds without progress: a busy machine has been seen to stand for some
PATIENCE = 240.0  # seconds after which a job that nobody has ended is ended here
HEAD = """
import os, sys, time, threading, queue, socket, fcntl, subprocess, datetime
import torch
import torch.distributed as dist
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""
INIT = 'dist.init_process_group("gloo")\n'


@dataclass(frozen=True)
class Job:
    """A script, and what is right to say of it. `culprits` is empty for a job that is only slow; where the ranks of a
    circle cannot be told apart it is all of them. `lines` are those of which one must be named.
    """

    name: str
    source: str
    world_size: int
    nodes: int
    culprits: frozenset[int]
    guilty: int | None = None  # the one that did it, if all of a circle may be named

    @property
    def lines(self) -> frozenset[int]:
        """The lines that are marked in the source."""
        return frozenset(n for n, line in enumerate(self.source.split("\n"), 1) if "# <-" in line)


# A step of training, with what one rank does differently. In the templates C is the culprit, N its number of a step,
# S a size, D another rank.
HANGS = {
    "finishes without the last all-reduce": """
for step in range(N + 2):
    dist.broadcast(torch.ones(S), 0)
    if rank == C and step == N + 1:
        break
    dist.all_reduce(torch.ones(S))  # <-
""",
    "skips one step": """
for step in range(N + 2):
    if rank == C and step == N:
        continue
    dist.all_reduce(torch.ones(S))  # <-
""",
    "has one batch more": """
for step in range(N + 2 + (rank == C)):
    dist.all_reduce(torch.ones(S))  # <-
""",
    "a lock": """
lock = threading.Lock()
def save():
    with lock:
        lock.acquire()  # <-
for step in range(N + 2):
    if rank == C and step == N:
        save()
    dist.all_reduce(torch.ones(S))
""",
    "a file that nobody writes": """
import tempfile
pipe = os.path.join(tempfile.mkdtemp(), "data")
os.mkfifo(pipe)
def load():
    with open(pipe) as file:  # <-
        return file.read()
for step in range(N + 2):
    if rank == C and step == N:
        load()
    dist.all_reduce(torch.ones(S))
""",
    "a locked file": """
import tempfile
path = tempfile.mktemp()
first, second = open(path, "w"), open(path, "w")
for step in range(N + 2):
    if rank == C and step == N:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)  # <-
    dist.all_reduce(torch.ones(S))
""",
    "a file that never comes": """
for step in range(N + 2):
    if rank == C and step == N:
        while not os.path.exists("/tmp/never-written"):
            time.sleep(0.05)  # <-
    dist.all_reduce(torch.ones(S))
""",
    "an empty queue": """
work = queue.Queue()
for step in range(N + 2):
    dist.all_reduce(torch.ones(S))
    if rank == C and step == N:
        work.get()  # <-
""",
    "a silent server": """
here, there = socket.socketpair()
for step in range(N + 2):
    if rank == C and step == N:
        here.recv(1)  # <-
    dist.all_reduce(torch.ones(S))
""",
    "a program that does not end": """
for step in range(N + 2):
    if rank == C and step == N:
        subprocess.run(["sleep", "600"])  # <-
    dist.barrier()
""",
    "a worker of a DataLoader": """
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 4 * (N + 2)
    def __getitem__(self, i):
        if rank == C and i == 4 * N:
            threading.Event().wait()  # <-
        return torch.ones(S)
for batch in DataLoader(Data(), batch_size=4, num_workers=1):  # <-
    dist.all_reduce(batch.sum(0))
""",
    "before the process group": (
        HEAD
        + """
if rank == C:
    threading.Event().wait()  # <-
"""
        + INIT
        + """
dist.all_reduce(torch.ones(S))
"""
    ),
    "no send to the next stage": """
for step in range(N + 2):
    x = torch.ones(S)
    if rank > 0:
        dist.recv(x, rank - 1)  # <-
    if rank + 1 < world_size and not (rank == C and step == N):
        dist.send(x, rank + 1)
""",
    "another group first": """
pair = dist.new_group([C, D])
for step in range(N + 2):
    turns = [None, pair] if rank in (C, D) else [None]
    if rank == C and step == N:
        turns.reverse()
    for group in turns:
        dist.all_reduce(torch.ones(S), group=group)  # <-
""",
    "in the sub-group": """
half = world_size // 2
low, high = dist.new_group(list(range(half))), dist.new_group(list(range(half, world_size)))
mine = low if rank < half else high
for step in range(N + 2):
    if not (rank == C and step == N):
        dist.all_reduce(torch.ones(S), group=mine)  # <-
dist.barrier()  # <-
""",
}
CIRCLES = {
    "everybody sends first": """
x = torch.ones(S)
for step in range(N):
    dist.all_reduce(x)
dist.send(x, (rank + 1) % world_size)  # <-
dist.recv(x, (rank - 1) % world_size)
""",
    "two receive first": """
for step in range(N + 2):
    x = torch.ones(S)
    if rank in (C, D):
        other = D if rank == C else C
        if rank == C or step == N:
            dist.recv(x, other)  # <-
            dist.send(x, other)
        else:
            dist.send(x, other)
            dist.recv(x, other)
    dist.all_reduce(x)
""",
}
MISMATCHES = {
    "another list of ranks": """
dist.all_reduce(torch.ones(S))
group = dist.new_group([C] if rank == C else [C, D])  # <-
dist.barrier()
""",
    "a shorter last batch": """
for step in range(N + 2):
    x = torch.ones(S - 1 if rank == C and step == N else S)
    dist.all_reduce(x)  # <-
""",
    "another dtype": """
for step in range(N + 2):
    x = torch.ones(S, dtype=torch.float64 if rank == C and step == N else torch.float32)
    dist.all_reduce(x)  # <-
""",
    "another root": """
for step in range(N + 2):
    dist.broadcast(torch.ones(S), D if rank == C and step == N else E)  # <-
""",
    "another reduce operation": """
for step in range(N + 2):
    dist.all_reduce(torch.ones(S), op=dist.ReduceOp.MAX if rank == C and step == N else dist.ReduceOp.SUM)  # <-
""",
    "a barrier on one rank": """
for step in range(N + 2):
    if rank == C and step == N:
        dist.barrier()  # <-
    dist.all_reduce(torch.ones(S))
""",
    "another order": """
for step in range(N + 2):
    if rank == C and step == N:
        dist.all_reduce(torch.ones(S))  # <-
        dist.broadcast(torch.ones(S), 0)
    else:
        dist.broadcast(torch.ones(S), 0)
        dist.all_reduce(torch.ones(S))
""",
}
DEATHS = {
    "an exception": """
def step_of(step):
    if rank == C and step == N:
        raise ValueError("a bad batch")  # <-
    dist.all_reduce(torch.ones(S))
for step in range(N + 2):
    step_of(step)
""",
    "an exception in a worker": """
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 4 * (N + 2)
    def __getitem__(self, i):
        if rank == C and i == 4 * N:
            raise OSError("no such shard")
        return torch.ones(S)
for batch in DataLoader(Data(), batch_size=4, num_workers=1):  # <-
    dist.all_reduce(batch.sum(0))
""",
    "killed": """
for step in range(N + 2):
    dist.all_reduce(torch.ones(S))
    if rank == C and step == N:
        time.sleep(1.2)  # <- it takes memory
        os.kill(os.getpid(), 9)  # <-
""",
    "os._exit": """
for step in range(N + 2):
    if rank == C and step == N:
        time.sleep(1.2)  # <-
        os._exit(3)  # <-
    dist.all_reduce(torch.ones(S))
""",
    "a crash in C": """
import ctypes
for step in range(N + 2):
    if rank == C and step == N:
        ctypes.string_at(0)  # <-
    dist.all_reduce(torch.ones(S))
""",
    "an index out of range": """
table = list(range(N))
for step in range(N + 2):
    if rank == C:
        x = table[step]  # <-
    dist.all_reduce(torch.ones(S))
""",
    "before the process group": (
        HEAD
        + """
if rank == C:
    open("/no/such/config.yaml")  # <-
"""
        + INIT
        + """
dist.barrier()
"""
    ),
    "sys.exit": """
for step in range(N + 2):
    if rank == C and step == N:
        sys.exit(1)
    dist.all_reduce(torch.ones(S))  # <-
""",
}
SLOW = {
    "computes longer than the limit": """
for step in range(N + 1):
    if rank == C and step == N:
        end = time.time() + 1.6 * LIMIT
        while time.time() < end:
            torch.randn(120, 120) @ torch.randn(120, 120)
    dist.all_reduce(torch.ones(S))
""",
    "reads slowly": """
for step in range(3):
    if rank == C:
        time.sleep(0.5 * LIMIT)
    dist.all_reduce(torch.ones(S))
""",
    "a slow worker": """
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        if rank == C and i == 0:
            end = time.time() + 1.6 * LIMIT
            while time.time() < end:
                torch.randn(100, 100) @ torch.randn(100, 100)
        return torch.ones(S)
for batch in DataLoader(Data(), batch_size=4, num_workers=1):
    dist.all_reduce(batch.sum(0))
""",
    "ends later than the others": """
dist.all_reduce(torch.ones(S))
if rank == C:
    time.sleep(0.7 * LIMIT)
""",
}


def generate(count: int = 100, seed: int = 0) -> list[Job]:
    """`count` jobs, the same for the same seed: every kind in turn; sizes, ranks, steps and nodes by chance."""
    chance = random.Random(seed)
    kinds = [(kind, name) for kind, named in KINDS.items() for name in named]
    found = []
    for number in range(count):
        kind, name = kinds[number % len(kinds)]
        world_size = chance.choice((2, 3, 3, 4, 4, 4, 6, 8, 8, 16))
        if name in ("another group first", "in the sub-group", "a shorter last batch", "another order"):
            world_size = max(world_size, 4)
        nodes = 2 if world_size % 2 == 0 and chance.random() < 0.4 else 1
        ranks = chance.sample(range(world_size), 2)
        culprit, other = ranks
        if name == "no send to the next stage":
            culprit = chance.randrange(world_size - 1)
            other = (culprit + 1) % world_size
        third = next((r for r in range(world_size) if r not in (other,)), 0)
        body = KINDS[kind][name]
        values = {
            "C": culprit,
            "D": other,
            "E": third,
            "N": chance.randrange(1, 4),
            "S": chance.randrange(8, 4000),
        }
        values["LIMIT"] = LIMIT
        whole = body if body.startswith(HEAD) else HEAD + INIT + body
        head = "".join(f"{k} = {v}\n" for k, v in values.items())
        culprits = frozenset() if kind == "slow" else frozenset({culprit})
        if name == "everybody sends first":
            culprits = frozenset(range(world_size))
        elif name == "two receive first" or (world_size == 2 and (kind == "mismatch" or name in _PAIRS)):
            culprits = frozenset(ranks)
        elif (
            name in _PAIRS and values["N"] == 1
        ):  # after one step nothing tells in which order the two are right
            culprits = frozenset(ranks)
        found.append(Job(f"{kind}: {name}", head + whole, world_size, nodes, culprits, culprit))
    return found


_PAIRS = ("another group first",)  # of two ranks none is the odd one
KINDS = {"hang": HANGS, "circle": CIRCLES, "mismatch": MISMATCHES, "dies": DEATHS, "slow": SLOW}


# --- running them


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Forks:
    """The ranks of a job as forks of this process, with the part of a `subprocess.Popen` that the runner uses."""

    def __init__(self, job: Job, folder: Path, environment: dict[str, str]) -> None:
        port = free_port()
        script = folder / "train.py"
        script.write_text(job.source)
        self.returncode: int | None = None
        self._codes: dict[int, int | None] = {}
        for rank in range(job.world_size):
            each = {
                **environment, "RANK": str(rank), "WORLD_SIZE": str(job.world_size), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_FR_BUFFER_SIZE": "2000",
            }  # fmt: skip
            pid = os.fork()
            if pid == 0:
                _be_a_rank(rank, job, script, each, folder)
            self._codes[pid] = None

    def poll(self) -> int | None:
        """The largest exit code once all have ended, None before."""
        for pid, code in self._codes.items():
            if code is None and os.waitpid(pid, os.WNOHANG)[0]:
                self._codes[pid] = 1
        if all(code is not None for code in self._codes.values()):
            self.returncode = 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to all that are there."""
        for pid, code in self._codes.items():
            if code is None:
                os.kill(pid, number)


DUMPER = """
import os, threading, time
def dump():
    while not os.path.exists(f"{folder}/dump"):
        time.sleep(0.2)
    from torch._C._distributed_c10d import _dump_fr_trace
    with open(f"{folder}/fr_rank_{rank}.new", "wb") as file:
        file.write(_dump_fr_trace(includeStackTraces=False))  # with them it takes eight seconds
    os.rename(f"{folder}/fr_rank_{rank}.new", f"{folder}/fr_rank_{rank}")
threading.Thread(target=dump, daemon=True).start()
"""  # what the flight recorder of a rank holds when there is a verdict: nccl would write it, gloo must be asked


def _be_a_rank(rank: int, job: Job, script: Path, environment: dict[str, str], folder: Path) -> None:
    """The life of a rank. It begins as a Python that has just run sitecustomize and imported torch."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(environment)
        sink = os.open(folder / f"out-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        import torch

        from rankcell.jobs import inside

        torch.set_num_threads(1)
        if job.nodes > 1:
            node = rank * job.nodes // job.world_size
            inside.host = lambda: f"node {node}"
        found = inside.arrive(rank, job.world_size)
        exec(compile(DUMPER, "<frozen>", "exec"), {"folder": str(folder), "rank": rank})
        sys.argv = [str(script)]
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # noqa: BLE001 - as the interpreter ends a program
            sys.excepthook(type(error), error, error.__traceback__)
        if found is not None:
            found.end()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def run(job: Job, folder: Path) -> tuple[Any, float]:
    """The runner after the job, and the seconds that it took. The reports are in `folder`/report."""
    from rankcell.jobs import run as runner

    class Tried(runner.Runner):
        def start(self, environment: dict[str, str]) -> Any:
            self.process = Forks(job, folder, environment)
            return self.process

        def say(self, *found: Any) -> None:
            super().say(*found)
            (folder / "dump").touch()
            end = time.monotonic() + 3.0
            while list(folder.glob("fr_rank_*.new")) or (
                not list(folder.glob("fr_rank_*")) and time.monotonic() < end
            ):
                time.sleep(0.2)
                if time.monotonic() > end:
                    break

    tried = Tried(["forks"], limit=LIMIT, report=str(folder / "report"))
    began = time.monotonic()
    said = io.StringIO()

    def too_long(*_: Any) -> None:
        tried.process.send_signal(signal.SIGKILL)

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(int(PATIENCE))
    with contextlib.redirect_stderr(said):
        tried.run()
    signal.alarm(0)
    (folder / "said").write_text(said.getvalue())
    return tried, time.monotonic() - began


def right(job: Job, found: Any) -> tuple[bool, bool]:
    """Whether a verdict (None: there was none) names the right rank, and the right line."""
    if not job.culprits:
        return found is None, found is None
    if found is None:
        return False, False
    named = set(found.culprits)
    lines = {line for file, line in found.places[: 1 + len(named)] if file.endswith("train.py")}
    rank = job.guilty in named and named <= job.culprits if len(job.culprits) > 1 else named == job.culprits
    return rank, bool(lines & job.lines)


def prepare() -> None:
    """Put the import hook into this process and import torch, once."""
    from rankcell.jobs import run as runner

    os.environ["RANKCELL_JOB"] = "/none/yet"
    os.environ["RANKCELL_LIB"] = str(Path(runner.__file__).parents[2])
    runpy.run_path(str(Path(runner.__file__).with_name("hook") / "sitecustomize.py"))
    import torch.distributed
    import torch.multiprocessing.spawn
    import torch.utils.data  # noqa: F401

    from rankcell.jobs import recording  # noqa: F401


def one(number: int, job: Job, keep: str = "") -> dict[str, Any]:
    """Run a job in a folder of its own, and what came of it."""
    folder = Path(tempfile.mkdtemp(prefix=f"job-{number}-"))
    tried, seconds = run(job, folder)
    found = tried.verdicts[0] if tried.verdicts else None
    rank, line = right(job, found)
    row = {
        "number": number, "name": job.name, "ranks": job.world_size, "nodes": job.nodes, "rank": rank, "line": line,
        "seconds": round(seconds, 1), "said": found.headline if found else "",
        "wanted": sorted(job.culprits), "lines": sorted(job.lines),
        "places": [n for _, n in found.places] if found else [],
    }  # fmt: skip
    if keep:
        shutil.copytree(folder, Path(keep) / str(number), dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def by_dumps(folder: Path) -> str | None:
    """What torch's own analyser says of the flight recorder's dumps of a job that was kept; None if it left none."""
    if not list(folder.glob("fr_rank_*")):
        return None
    from torch.distributed.flight_recorder import fr_trace

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            fr_trace.main([str(folder), "-p", "fr_rank_"])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises is its answer
        return f"{type(error).__name__}: {error}"[:60]
    lines = said.getvalue().strip().splitlines()
    return lines[-1][:60] if lines else "nothing"


def main(numbers: Sequence[int], keep: str = "") -> None:
    """Run the jobs of these numbers, print a line of JSON for each."""
    prepare()
    jobs = generate()
    for number in numbers:
        print(json.dumps(one(number, jobs[number], keep)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
    if sys.argv[1:2] == ["--only"]:
        main([int(word) for word in sys.argv[2:]])
    else:
        first, last, *keep = [*sys.argv[1:], *("0", "100")[len(sys.argv) - 1 :]]
        main(range(int(first), int(last)), *keep)
