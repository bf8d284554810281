"""Ranks on the nodes of a Slurm allocation: like ranks on one machine, and what only nodes can do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rankcell import errors
from rankcell.engine import nodes

FOLDER = Path.home() / ".rankcell"
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

    def __init__(self, cluster, *options):
        command = ["salloc", "--no-kill", "--nodes=2", "--ntasks-per-node=2", *options]
        self.process = subprocess.Popen(
            [*command, sys.executable, "-u", "-c", NOTEBOOK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **cluster.environment},
        )
        self.pid = self.ask("import os; answer = os.getpid()")

    def ask(self, source):
        """The value of `answer` after `source` has run."""
        self.tell(source)
        return self.hear()

    def tell(self, source):
        self.process.stdin.write(json.dumps(textwrap.dedent(source)) + "\n")
        self.process.stdin.flush()

    def hear(self):
        for line in self.process.stdout:
            if line.startswith("said "):
                return json.loads(line[5:])
        raise AssertionError("the notebook has ended")

    def start_ranks(self):
        return self.ask("import rankcell; r = rankcell.Ranks(4, nodes=2); answer = r.world_size")

    def end(self):
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def notebook(cluster):
    if cluster.mode != "net":
        pytest.skip("needs nodes with networks of their own")
    found = Notebook(cluster)
    assert found.start_ranks() == 4
    yield found
    found.end()


def ours(text="rankcell.engine.agent"):
    """Pids of the processes with `text` in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in line:
                    found.append(int(folder.name))
    return found


def gone_within(seconds, before):
    """Whether only the agents of `before` are left after so many seconds at most."""
    end = time.monotonic() + seconds
    while not set(ours()) <= before and time.monotonic() < end:
        time.sleep(0.1)
    return set(ours()) <= before


@pytest.mark.slow
def test_each_rank_knows_its_place(notebook):
    source = (
        "import os; (rank, os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'], os.uname().nodename)"
    )
    notebook.ask(f"run = r.run({source!r})")
    assert notebook.ask("answer = run.values") == [
        [0, "0", "2", "node1"],
        [1, "1", "2", "node1"],
        [2, "0", "2", "node2"],
        [3, "1", "2", "node2"],
    ]
    assert notebook.ask("answer = run.nodes") == ["node1", "node1", "node2", "node2"]


@pytest.mark.slow
def test_output_comes_back_by_rank_and_in_order(notebook):
    notebook.ask("run = r.run('for i in range(2000): print(rank, i)\\nrank')")
    for rank in range(4):
        said = notebook.ask(f"answer = run.ranks[{rank}].stdout")
        assert said == "".join(f"{rank} {i}\n" for i in range(2000))


@pytest.mark.slow
def test_names_persist_and_values_travel(notebook):
    notebook.ask("import torch; r.run('x = y * rank', push={'y': torch.ones(1_000_000)})")
    assert notebook.ask("answer = [float(v.sum()) for v in r.run('x', pull=['x']).pulled['x']]") == [
        0.0,
        1e6,
        2e6,
        3e6,
    ]


@pytest.mark.slow
def test_large_values_cross_a_slow_link(cluster, notebook):
    """Longer on the way than a silent node is waited for."""
    cluster.shape("40mbit")
    try:
        notebook.ask("r.run('big = big + rank', push={'big': torch.zeros(3_000_000)})")  # 12 MB
        found = notebook.ask("answer = [float(v.mean()) for v in r.run('pass', pull=['big']).pulled['big']]")
    finally:
        cluster.shape("off")
    assert found == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.slow
def test_a_device_that_the_nodes_lack_leaves_nothing_behind(notebook):
    before = set(ours())
    said = notebook.ask("rankcell.Ranks(4, nodes=2, device='cuda')")
    if said is None:
        pytest.skip("the nodes have GPUs")
    assert said["error"] == "WorldSizeError" and "no GPU that torch can use" in said["text"]
    assert gone_within(15, before)


@pytest.mark.slow
def test_events_of_all_nodes_stand_on_one_clock(notebook):
    notebook.ask("run = r.run('import time\\ntime.sleep(0.1 * rank)\\ndist.barrier()')")
    events = notebook.ask("answer = [(e.rank, e.start, e.end) for e in run.events if e.op == 'barrier']")
    assert len(events) == 4
    last = max(start for _, start, _ in events)
    # nobody left the barrier before the last one came, by a clock that is right to a fraction of 0.1 s
    assert all(start < end and end > last - 0.02 for _, start, end in events)
    assert notebook.ask("answer = run.seconds") > max(end for *_, end in events) - 0.02


@pytest.mark.slow
def test_bytes_are_counted_between_nodes(notebook):
    source = "x = torch.ones(2**18)\nif rank == 0: dist.send(x, 2)\nif rank == 2: dist.recv(x, 0)"
    wire = notebook.ask(f"answer = r.run({source!r}).wire")
    assert 2**20 <= wire[0][2] <= 2**20 + 1024
    assert sum(map(sum, wire)) - wire[0][2] < 1024


@pytest.mark.slow
def test_an_error_names_its_rank(notebook):
    said = notebook.ask("r.run('1 / (rank - 2)')")
    assert said["error"] == "RankError"
    assert said["text"].startswith("rank 2 of 4 failed: ZeroDivisionError: division by zero")


@pytest.mark.slow
def test_a_deadlock_across_nodes_is_explained(notebook):
    said = notebook.ask("r.run('if rank != 3: dist.barrier()')")
    assert said["error"] == "Deadlock"
    assert "rank 3" in said["text"].splitlines()[0]
    assert notebook.ask("answer = r.run('rank').values") == [0, 1, 2, 3]


@pytest.mark.slow
def test_calls_that_do_not_match_across_nodes_are_stopped(notebook):
    notebook.ask("r.run('g = dist.new_group([0, 2])')")
    source = "if rank in (0, 2): dist.all_reduce(torch.ones(3 + rank), group=g)"
    said = notebook.ask(f"before = r.pids; r.run({source!r})")
    assert said["error"] == "RankMismatch", said
    assert "float32[3]" in said["text"] and "float32[5]" in said["text"]
    assert notebook.ask("answer = r.pids == before")
    assert notebook.ask("answer = r.run('rank').values") == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_killed_rank_is_named_and_replaced(notebook):
    notebook.ask("r.run('kept = rank')")
    said = notebook.ask("r.run('import os, signal\\nif rank == 3: os.kill(os.getpid(), 9)\\ndist.barrier()')")
    assert said["error"] == "RankLost"
    assert said["text"].startswith("rank 3 of 4 was killed (SIGKILL)")
    assert notebook.ask("answer = r.run('globals().get(\"kept\")').values") == [0, 1, 2, None]


@pytest.mark.slow
def test_an_interrupt_ends_the_cell_on_all_nodes(notebook):
    notebook.tell("r.run('import time\\ntime.sleep(60)')")
    time.sleep(1.0)
    os.kill(pid_outside(notebook), signal.SIGINT)
    said = notebook.hear()
    assert said["error"] == "RanksInterrupted" and "ranks 0-3  compute at line 2" in said["text"]
    assert notebook.ask("answer = r.run('rank').values") == [0, 1, 2, 3]


def pid_outside(notebook):
    """The pid of the notebook's process in our own table of processes."""
    for pid in ours("names.pop"):
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
        if int(numbers[-1]) == notebook.pid and "salloc" not in Path(f"/proc/{pid}/comm").read_text():
            return pid
    raise AssertionError("no such process")


@pytest.mark.slow
def test_the_key_is_never_on_a_command_line(cluster):
    if cluster.mode != "net":
        pytest.skip("needs nodes with networks of their own")
    seen, lines, over = {}, set(), threading.Event()
    left = set(FOLDER.glob("*.json"))  # by notebooks that were killed together with whoever cleans up

    def watch():
        while not over.is_set():
            for path in set(FOLDER.glob("*.json")) - left:
                with contextlib.suppress(OSError, ValueError):
                    seen[path] = (json.loads(path.read_text())["key"], path.stat().st_mode & 0o777)
            for folder in Path("/proc").iterdir():
                if folder.name.isdigit():
                    for name in ("cmdline", "environ"):
                        with contextlib.suppress(OSError):
                            lines.add((folder / name).read_bytes())
            time.sleep(0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    found = Notebook(cluster)
    try:
        assert found.start_ranks() == 4
    finally:
        over.set()
        thread.join()
        found.end()
    assert len(seen) == 1
    ((path, (key, mode)),) = seen.items()
    assert len(key) == 64 and mode == 0o600 and not path.exists()
    assert FOLDER.stat().st_mode & 0o077 == 0
    assert any(b"rankcell.engine.agent" in line for line in lines)
    assert not any(key.encode() in line or bytes.fromhex(key) in line for line in lines)


@pytest.mark.slow
def test_scancel_leaves_no_process(cluster):
    if cluster.mode != "net":
        pytest.skip("needs nodes with networks of their own")
    before = set(ours())
    found = Notebook(cluster)
    try:
        assert found.start_ranks() == 4
        job = found.ask("answer = os.environ['SLURM_JOB_ID']")
        found.tell("r.run('import time\\ntime.sleep(60)')")
        time.sleep(1.0)
        cluster.run("scancel", job)
        with contextlib.suppress(AssertionError):  # salloc ends the notebook too
            found.hear()
        assert gone_within(15, before)
    finally:
        found.end()


@pytest.mark.slow
def test_a_killed_notebook_leaves_no_rank(cluster):
    if cluster.mode != "net":
        pytest.skip("needs nodes with networks of their own")
    before = set(ours())
    found = Notebook(cluster)
    try:
        assert found.start_ranks() == 4 and len(set(ours()) - before) >= 2
        os.kill(pid_outside(found), signal.SIGKILL)
        assert gone_within(10, before)
    finally:
        found.end()


@pytest.mark.slow
def test_a_lost_node_is_named(cluster):
    """Last: the node is switched off and booted again."""
    if cluster.mode != "net":
        pytest.skip("needs nodes with networks of their own")
    found = Notebook(cluster)
    try:
        assert found.start_ranks() == 4
        found.tell("r.run('import time\\nfor i in range(600): time.sleep(0.1); dist.barrier()')")
        time.sleep(1.0)
        cluster.kill_node("node2")
        said = found.hear()
        assert said["error"] == "RankLost", said
        assert said["text"].startswith("ranks 2, 3 of 4 were on node2, which no longer answers")
        assert found.ask("answer = r.alive") is False
    finally:
        found.end()
        cluster.boot()


def outside(monkeypatch, **variables):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_an_allocation_it_says_how_to_get_one(monkeypatch):
    outside(monkeypatch)
    with pytest.raises(errors.AllocationError) as caught:
        nodes.Nodes(8, 2)
    assert str(caught.value) == (
        "2 nodes need a Slurm allocation, and this notebook runs in none. Start JupyterLab in one: "
        "`salloc --nodes=2 --ntasks-per-node=4 jupyter lab`"
    )


def test_too_few_nodes_are_counted(monkeypatch):
    outside(monkeypatch, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="node[1-2]")
    with pytest.raises(errors.AllocationError) as caught:
        nodes.Nodes(6, 3)
    assert str(caught.value) == (
        "3 nodes were asked for, and this allocation has 2 (node[1-2]). Use `--nodes 2`, or a larger one: "
        "`salloc --nodes=3 --ntasks-per-node=2 jupyter lab`"
    )


def test_ranks_must_spread_evenly(monkeypatch):
    outside(monkeypatch, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="2")
    with pytest.raises(errors.WorldSizeError) as caught:
        nodes.Nodes(5, 2)
    assert str(caught.value) == "5 ranks cannot be spread evenly over 2 nodes. Take 4 or 6 ranks."


def test_srun_must_be_there(monkeypatch, tmp_path):
    outside(monkeypatch, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="2", PATH=str(tmp_path))
    with pytest.raises(errors.AllocationError, match="srun is not on its PATH"):
        nodes.Nodes(4, 2)


def test_an_srun_that_fails_is_quoted(monkeypatch, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: Unable to create step: no such job' >&2\nexit 1\n")
    srun.chmod(0o755)
    outside(monkeypatch, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="2", PATH=f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(errors.AllocationError) as caught:
        nodes.Nodes(4, 2)
    assert "no ranks on 2 nodes: srun ended with code 1.\nsrun: error: Unable to create step" in str(
        caught.value
    )
    assert list((tmp_path / ".rankcell").iterdir()) == []


def test_key_files_of_killed_processes_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine = nodes.write_key(b"k", 1)
    killed, elsewhere = nodes.write_key(b"k", 2), nodes.write_key(b"k", 3)
    for path, change in ((killed, {}), (elsewhere, {"addresses": ["another-machine"]})):
        said = json.loads(path.read_text("utf-8")) | {"pid": ended.pid} | change
        path.write_text(json.dumps(said), "utf-8")
    (tmp_path / ".rankcell" / "notes.json").write_text("[")
    new = nodes.write_key(b"k", 4)
    assert mine.exists() and elsewhere.exists() and new.exists() and not killed.exists()


def node(**more):
    return nodes._Node("node1", None, "", 0, (4, ""), heard=0.0, asked=0.0, **more)


def test_a_silent_node_is_lost_and_a_busy_one_is_not():
    assert node().lost(nodes.SILENT + 1) and not node().lost(nodes.SILENT - 1)
    assert not node(starting=True).lost(nodes.SILENT + 1)
    # 1 GB is on its way to the ranks: the answer stands in line behind it
    assert not node(told=10**9).lost(100.0) and node(told=10**9, taken=10**9).lost(100.0)


def test_a_node_that_sends_much_is_not_lost():
    talking = node()
    talking.heard = 99.0  # a part of a large value has just come; the answer comes after it
    assert not talking.lost(100.0)
