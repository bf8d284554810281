"""Ranks are real processes with names that persist; what they say and return comes back by rank."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rankcell
from rankcell import errors
from rankcell.engine import launch, system
from rankcell.results import NotSent


def test_every_rank_is_a_process_in_one_group(four):
    """As torchrun starts them, with one thread each."""
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR"
    source = (
        "import os\nx = torch.ones(3, device=device) * rank\ndist.all_reduce(x)\n(os.getpid(), x.tolist(), "
    )
    run = four.run(
        f"{source}[os.environ[n] for n in '{names}'.split()], os.getcwd(), torch.get_num_threads())"
    )
    pids = [pid for pid, *_ in run.values]
    assert len(set(pids)) == 4 and os.getpid() not in pids and pids == four.pids
    for rank, (_, *found) in enumerate(run.values):
        assert found == [[6.0] * 3, [str(rank), "4", str(rank), "4", "127.0.0.1"], str(Path.cwd()), 1]
    assert (run.backend, run.device, run.world_size) == ("gloo", "cpu", 4)


def test_all_output_comes_back_by_rank(four):
    source = """
    import os, sys
    from IPython.display import HTML, display
    print('a', rank)
    display(HTML('<b>x</b>'))
    os.system('echo from a shell')
    os.write(1, b'raw\\n')
    print('err', rank, file=sys.stderr)
    for i in range(50_000): print(i)
    rank ** 2
    """
    four.run("print('before')")
    run = four.run(textwrap.dedent(source))
    assert run.values == [0, 1, 4, 9]
    for rank, result in enumerate(run.ranks):
        assert result.stdout == f"a {rank}\nfrom a shell\nraw\n" + "".join(f"{i}\n" for i in range(50_000))
        assert result.stderr == f"err {rank}\n"
        (shown,) = result.displays
        assert shown.data["text/html"] == "<b>x</b>" and shown.stdout_offset == 4


def test_names_go_to_the_ranks_and_come_back(four):
    source = "there = here * rank; big = torch.zeros(1000, 1000); row = big[0]"
    run = four.run(source, push={"here": torch.arange(2)}, pull=["there", "row"])
    assert [t.tolist() for t in run.pulled["there"]] == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert run.pulled["row"][0].untyped_storage().nbytes() == 4000  # a slice travels without the rest
    assert four.run("there[1].item()").values == [0, 1, 2, 3]  # names persist


def test_values_that_travel_and_those_that_say_why_not(four):
    assert four.run("1 + 1;").values == [None] * 4
    (plain, *_) = four.run("w = torch.ones(2, requires_grad=True); w * 2").values
    assert not plain.requires_grad and plain.tolist() == [2.0, 2.0]
    (lock, *_) = four.run("import threading; threading.Lock()").values
    assert isinstance(lock, NotSent) and "cannot be sent" in lock.reason and "lock" in repr(lock)
    for use in (iter, len, lambda v: v[0], lambda v: v.locked()):
        with pytest.raises(
            (TypeError, AttributeError), match=r"NotSent|stayed on rank .*lock.*: make plain data"
        ):
            use(lock)
    run = four.run("large = torch.zeros(5 << 20); large", only=[0], pull=["large"])
    assert "larger than 16 MiB" in run.ranks[0].value.reason and run.pulled["large"][0].numel() == 5 << 20


def test_a_thread_of_an_earlier_cell_that_prints_is_told(four):
    began = "import threading\ngo = threading.Event()\ndef late():\n    go.wait()\n    print('late')\n"
    four.run(f"{began}thread = threading.Thread(target=late, name='loader'); thread.start()", only=[1])
    assert four.notes == []
    assert [r.stdout for r in four.run("print('now')", only=[1]).ran] == ["now\n"] and four.notes == []
    four.run("go.set(); thread.join()", only=[1])
    assert "On rank 1: a thread of an earlier cell (`loader`) has printed, too" in four.notes[-1]
    four.notes.clear()


def test_a_script_needs_no_main_guard(tmp_path, four):
    """Its functions travel, as those of a cell do, and the end of its world says nothing."""

    def local(width):
        return rank, torch.ones(width).numel()  # noqa: F821 - lent by the rank

    assert four.run(local, kwargs={"width": 5}).values == [(r, 5) for r in range(4)]
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\nimport rankcell\nprint('script runs')\n"
        "def total(n):\n    return sum([dist.get_rank()] * n)\n"
        "print(rankcell.run(total, world_size=2, args=[2]).values)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("script runs\n[0, 2]\n", "")


def test_a_running_cell_shows_output_and_who_waits(four, tmp_path):
    seen, go_on = [], tmp_path / "go on"

    def update(run, doing):
        seen.append((run.ranks[2].stdout, doing))
        if seen[-1] == ("first\n", "ranks 0, 1, 3 waiting in barrier, rank 2 computing"):
            go_on.touch()

    source = f"""
    import pathlib, time
    print('first', flush=True)
    while rank == 2 and not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.02)
    dist.barrier()
    """
    four.run(textwrap.dedent(source), on_update=update, timeout=60)
    assert go_on.exists(), seen


def test_a_rank_that_compiles_says_so(four, tmp_path):
    """The cell goes on once it was said."""
    of_torch = f"import os, time\nwhile not os.path.exists('{tmp_path}/said'): time.sleep(0.01)"

    def update(run, doing):
        if doing == "ranks 0-3 compiling":
            (tmp_path / "said").touch()

    four.run(
        f"exec(compile({of_torch!r}, '/torch/_dynamo/convert_frame.py', 'exec'))",
        on_update=update,
        timeout=60,
    )


def test_ranks_that_end_are_replaced_and_leave_nothing(four):
    with rankcell.Ranks(2) as ranks:
        ranks.run("x = 1")
        assert four.run("world_size").values == [4] * 4  # worlds live side by side
        before = ranks.pids
        os.kill(before[1], signal.SIGKILL)
        while not ranks._workers.received[1].lost:
            ranks._workers.pump(1.0)
        assert ranks.run("'x' in globals()").values == [True, False]
        said = "rank 1 ended between two cells and was replaced: names defined there are gone."
        assert ranks.notes == [said]
        ranks.restart()
        after = ranks.pids
        assert not set(before) & set(after)
        run = ranks.run("y = torch.ones(1); dist.all_reduce(y); (y.item(), 'x' in globals())")
        assert run.values == [(2.0, False)] * 2
        ranks.stop()
    for pid in (*before, *after):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match=r"this world was stopped\. Start another one"):
        ranks.run("1")


@pytest.mark.skipif(not system.LINUX, reason="reads /proc")
def test_nothing_listens_beyond_this_machine(four):
    for member in four._host._members.values():  # a rank talks over unnamed pairs of sockets
        assert member.work.socket.getsockname() == "" and member.control.socket.getsockname() == ""
    links = [p for pid in [*four.pids, os.getpid()] for p in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {os.readlink(p)[8:-1] for p in links if p.is_socket()}  # noqa: PTH115 - as the kernel writes it
    rows = [row.split() for n in ("tcp", "tcp6") for row in Path(f"/proc/net/{n}").read_text().splitlines()]
    listening = {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    assert listening == {"0100007F"}  # 127.0.0.1
    assert Path(four._host.address_for(0)).stat().st_mode & 0o077 == 0  # the store is no other user's


def test_a_torch_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.multiprocessing", None)
    with pytest.raises(errors.StartError, match=r"torch cannot be imported .* in a fresh Python of this"):
        rankcell.Ranks(1)


def test_spawn_starts_ranks_as_mp_spawn_does():
    with rankcell.Ranks(2, start="spawn") as ranks:
        assert ranks.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == [2.0, 2.0]
        with pytest.raises(errors.RankError, match=r"rank 1 of 2 left with exit code 7 \(os._exit\)"):
            ranks.run("import os\nif rank == 1: os._exit(7)\ndist.barrier()")


def test_starting_ranks_leaves_multiprocessing_as_it_was(four):
    code = "import multiprocessing as mp; mp.get_context('{}').Pool(2).map(abs, [-1]), mp.get_start_method()"
    assert multiprocessing.get_start_method(allow_none=True) is None
    for method in ("fork", "forkserver", "spawn"):
        assert four.run(code.format(method), only=[0]).values == [([1], "fork")]


def test_a_number_given_anew_is_left_alone():
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as other:
        launch.end(SimpleNamespace(pid=other.pid, exitcode=0))  # a rank that had this number, long ago
        assert other.poll() is None
        other.kill()


def test_ranks_draw_different_numbers_as_processes_of_a_launcher_do(four):
    drawn = four.run(
        "import numpy, random\ntorch.rand(1).item(), numpy.random.rand(), random.random()"
    ).values
    assert all(len({*numbers}) == 4 for numbers in zip(*drawn, strict=True))
