"""Ranks on the nodes of a Slurm allocation: like ranks on one machine, and what only nodes can do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankcell import errors
from rankcell.nodes import allocation

pytestmark = pytest.mark.slow
NOTEBOOK = """
import json, sys, traceback
names = {}
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        said = names.pop("answer", None)
    except BaseException as error:
        said = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    print("said " + json.dumps(said, default=repr), flush=True)
"""


class Notebook:
    """A process inside an allocation that runs what it is told, as a notebook's kernel does."""

    def __init__(self, cluster):
        command = ["salloc", "--no-kill", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-uc", NOTEBOOK]
        how = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(command, env={**os.environ, **cluster.environment}, **how)
        self.pid = self.ask("import os; answer = os.getpid()")

    def ask(self, source):
        """The value of `answer` after `source` has run."""
        return self.tell(source) or self.hear()

    def tell(self, source):
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def hear(self):
        for line in self.process.stdout:
            if line.startswith("said "):
                return json.loads(line[5:])
        raise AssertionError("the notebook has ended")


@contextlib.contextmanager
def notebook_on(cluster):
    """A notebook of its own, with four ranks on two nodes."""
    if cluster.mode != "net":
        pytest.skip("needs nodes with networks of their own")
    found = Notebook(cluster)
    try:
        assert found.ask("import rankcell, torch; r = rankcell.Ranks(4, nodes=2); answer = r.world_size") == 4
        yield found
    finally:
        found.process.stdin.close()
        found.process.stdout.close()
        found.process.wait()


@pytest.fixture(scope="module")
def notebook(cluster):
    with notebook_on(cluster) as found:
        yield found


def ours(text="rankcell.nodes.agent"):
    """Pids of the processes with `text` in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.add(int(path.parent.name))
    return found


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def pid_outside(notebook):
    """The pid of the notebook's process in our own table of processes."""
    for pid in ours("names.pop"):
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
        if int(numbers[-1]) == notebook.pid and "salloc" not in Path(f"/proc/{pid}/comm").read_text():
            return pid
    raise AssertionError("no such process")


def began(notebook, source, tmp_path):
    """Start a cell that does not end, and wait until rank 0 runs it."""
    mark = tmp_path / "began"
    notebook.tell(f"r.run({f'import pathlib, time; pathlib.Path({str(mark)!r}).touch(); {source}'!r})")
    until(mark.exists)


def test_each_rank_knows_its_place_and_says_what_it_does(notebook):
    where = "os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'], os.uname().nodename"
    source = f"import os\nfor i in range(2000): print(rank, i)\n(rank, {where})"
    notebook.ask(f"run = r.run({source!r})")
    places = [[r, str(r % 2), "2", f"node{r // 2 + 1}"] for r in range(4)]
    assert notebook.ask("answer = run.values") == places
    assert notebook.ask("answer = run.nodes") == ["node1", "node1", "node2", "node2"]
    for rank, said in enumerate(notebook.ask("answer = [rank.stdout for rank in run.ranks]")):
        assert said == "".join(f"{rank} {i}\n" for i in range(2000))


def test_events_and_bytes_of_all_nodes_stand_side_by_side(notebook):
    notebook.ask("run = r.run('import time\\ntime.sleep(0.1 * rank)\\ndist.barrier()')")
    events = notebook.ask("answer = [(e.start, e.end) for e in run.events if e.op == 'barrier']")
    last = max(start for start, _ in events)
    # nobody left the barrier before the last one came, by a clock that is right to a fraction of 0.1 s
    assert len(events) == 4 and all(start < end and end > last - 0.02 for start, end in events)
    source = "x = torch.ones(2**18)\nif rank == 0: dist.send(x, 2)\nif rank == 2: dist.recv(x, 0)"
    wire = notebook.ask(f"answer = r.run({source!r}).wire")
    assert 2**20 <= wire[0][2] <= 2**20 + 1024
    assert sum(map(sum, wire)) - wire[0][2] < 1024


# fmt: off
FAILURES = {
    "if rank != 3: dist.barrier()": ("Deadlock", "rank 3 finished the cell without the barrier"),
    "g = dist.new_group([0, 2])\nif rank in (0, 2): dist.all_reduce(torch.ones(3 + rank), group=g)": (
        "RankMismatch", "rank 0 calls all_reduce(float32[3]) where rank 2 calls all_reduce(float32[5]): different"),
    "import os\nif rank == 3: os.kill(os.getpid(), 9)\ndist.barrier()": (
        "RankLost", "rank 3 of 4 was killed (SIGKILL)"),
}
# fmt: on


@pytest.mark.parametrize("source", FAILURES)
def test_a_failure_across_nodes_is_explained_and_mended(notebook, source):
    kind, headline = FAILURES[source]
    pids = notebook.ask("r.run('kept = rank'); answer = r.pids")
    said = notebook.ask(f"r.run({source!r})")
    assert said["error"] == kind and said["text"].startswith(headline), said
    left = [0, 1, 2, None if kind == "RankLost" else 3]
    assert notebook.ask("answer = r.run('globals().get(\"kept\")').values") == left
    assert (notebook.ask("answer = r.pids") == pids) == (kind != "RankLost")


@pytest.mark.parametrize("how", ["scancel", "SIGKILL"])
def test_an_allocation_or_notebook_that_ends_leaves_no_rank(cluster, tmp_path, how):
    before = ours()
    with notebook_on(cluster) as found:
        assert len(ours() - before) >= 2
        job = found.ask("import os; answer = os.environ['SLURM_JOB_ID']")
        began(found, "time.sleep(600)", tmp_path)
        if how == "scancel":
            cluster.run("scancel", job)
        else:
            os.kill(pid_outside(found), signal.SIGKILL)
        until(lambda: ours() <= before)


def test_a_lost_node_is_named(cluster, tmp_path):
    """Last: the node is switched off and booted again."""
    with notebook_on(cluster) as found:
        began(found, "[(time.sleep(0.1), dist.barrier()) for _ in range(6000)]", tmp_path)
        cluster.kill_node("node2")
        said = found.hear()
        assert said["error"] == "RankLost", said
        assert said["text"].startswith("ranks 2, 3 of 4 were on node2, which no longer answers")
        assert found.ask("answer = r.alive") is False
    cluster.boot()


class Clock:
    """The channel to a node whose clock is 100 seconds ahead of ours."""

    send = staticmethod(lambda order: None)
    receive = staticmethod(lambda: time.monotonic() + 100)


def test_a_clock_that_is_ahead_has_a_positive_offset():
    node = allocation._Node("node1", Clock, "", 0, (0, ""))
    node.compare_clocks()
    assert node.offset == pytest.approx(100, abs=50)


IN_TWO = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
# fmt: off
IMPOSSIBLE = {
    (8, 2): ({}, "2 nodes need a Slurm allocation, and this notebook runs in none. Start JupyterLab in one: "
             "`salloc --nodes=2 --ntasks-per-node=4 jupyter lab`"),
    (6, 3): (IN_TWO, "3 nodes were asked for, and this allocation has 2 (node[1-2]). Use `--nodes 2`, or a larger one: "
             "`salloc --nodes=3 --ntasks-per-node=2 jupyter lab`"),
    (7, 2): (IN_TWO, "7 ranks cannot be spread evenly over 2 nodes. Take 6 or 8 ranks."),
    (4, 2): (IN_TWO | {"PATH": "/nowhere"}, "srun is not on its PATH"),
    (6, 2): (IN_TWO, "no ranks on 2 nodes: srun ended with code 1.\nsrun: error: no such job"),
}
# fmt: on


@pytest.mark.parametrize("asked", IMPOSSIBLE)
def test_nodes_that_cannot_be_had_say_how_to_get_them(monkeypatch, tmp_path, asked):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: no such job' >&2\nexit 1\n")
    srun.chmod(0o755)
    variables, text = IMPOSSIBLE[asked]
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": tmp_path, "PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises((errors.AllocationError, errors.WorldSizeError)) as caught:
        allocation.Nodes(*asked, "auto")
    assert text in str(caught.value) and not list(tmp_path.glob(".rankcell/*"))
