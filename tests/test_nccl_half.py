"""The engine where calls only enqueue, as on nccl: the failure table of `test_failures.py`, on a stand-in for nccl.

`nccl_stand_in.py` says in what it is like nccl and in what not. All cases run on the same four ranks.
"""

import contextlib
import os
import re
import signal
import sys
import threading

import pytest

import nccl_stand_in
import rankcell
from rankcell import Deadlock
from rankcell.engine import devices, launch
from rankcell.errors import RanksInterrupted
from test_failures import HANGS, fails, works

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four ranks of a fork server of their own, to which torch has brought the stand-in."""
    folder = tmp_path_factory.mktemp("stand_in")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKCELL_STAND_IN", str(folder / "meet"))
        patch.setattr(sys, "path", [*sys.path, nccl_stand_in.install(folder)])
        patch.setattr(launch, "server", launch.forkserver.ForkServer())
        patch.setattr(launch, "_folder", "")  # which a fork server takes with it
        patch.setattr(devices, "choose", lambda *_: devices.Choice("cpu", nccl_stand_in.NAME, "a stand-in"))
        with rankcell.Ranks(4) as ranks:
            yield ranks
        with contextlib.suppress(FileNotFoundError):  # its socket is gone already
            launch.server._stop()


def test_send_first_is_found_between_connected_pairs(four):
    """Then no call blocks on the host: all four sends stand in the queues, and the receives behind them."""
    ring = "x = torch.ones(4)\nnext, last = (rank + 1) % 4, (rank - 1) % 4\n"
    pair = "dist.send(x, next), dist.recv(x, last)"
    four.run(f"{ring}({pair}) if rank % 2 else (dist.recv(x, last), dist.send(x, next))")
    error = fails(four, f"{ring}{pair}", Deadlock)
    assert str(error).splitlines()[0] == "ranks 0-3 all send first, and nobody receives."
    assert "rank 2  waits in send(float32[4] to rank 3) (call 1 of this pair, line 3)" in str(error)


RING = """
x, y = torch.full((2,), float(rank)), torch.zeros(2)
ops = [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, y, (rank - 1) % 4)]
"""
BATCH = "for w in dist.batch_isend_irecv(ops): w.wait()\ny.tolist()"


@pytest.mark.parametrize("name", ["RANKCELL_STAND_IN", "RANKCELL_STAND_IN_2"])
def test_a_batch_is_one_launch_and_may_lack_a_partner(four, name):
    """First its host waits, as the pair is new; later its device does. With the nccl of torch 2.15, too."""
    missing = (
        "rank 2 finished without receiving what rank 1 sends.",
        "rank 2 finished without sending what rank 3 waits for.",
    )
    four.restart()
    four.run(f"import os\nos.environ.setdefault('{name}', '1')")
    for _ in range(2):
        error = fails(four, f"{RING}if rank != 2: [w.wait() for w in dist.batch_isend_irecv(ops)]", Deadlock)
        assert str(error).splitlines()[0] in missing
        run = four.run(RING + BATCH)
        assert run.values == [[(r - 1) % 4] * 2 for r in range(4)]
        assert [e.op for e in run.events if e.rank == 1] == ["send", "recv"]


# In these cells the host never waits for its device, and the end of the cell does.
# fmt: off
HANG = {
    "if rank != 2:\n    dist.all_reduce(x)\n    x.tolist()": (
        "rank 2 finished the cell without the all_reduce that ranks 0, 1, 3 wait in."),
    "if rank:\n    w = dist.all_reduce(x, async_op=True)\n    w.wait()": "rank 0 finished the cell without",
    "if rank == 0: w = dist.all_reduce(x, async_op=True)": (
        "rank 0 called 1 collective more than ranks 1-3, and did not wait for the answer."),
    HANGS["two groups in opposite order"][0]: HANGS["two groups in opposite order"][1],
}
# fmt: on


@pytest.mark.parametrize("source", HANG)
def test_a_hang_is_explained_and_mended(four, source):
    four.run("kept = rank")
    pids = four.pids
    assert str(fails(four, f"x = torch.ones(4)\n{source}", Deadlock)).startswith(HANG[source])
    assert four.run("kept").values == [0, 1, 2, 3] and four.pids == pids


def test_a_slow_rank_in_the_others_queues_is_not_stuck(four):
    source = "import time\nx = torch.ones(1)\nif rank == 2: time.sleep(2)\ndist.all_reduce(x)\nx.item()"
    assert four.run(source).values == [4.0] * 4


def test_events_are_recorded_and_nothing_is_kept(four):
    run = four.run(
        "x = torch.ones(4) * rank\nfor _ in range(5): dist.all_reduce(x)\ndist.barrier()", values=True
    )
    events = [e for e in run.events if e.rank == 1]
    assert [e.op for e in events] == ["all_reduce"] * 5 + ["barrier"]
    assert events[0].values.input_before == ((1.0,) * 4,) and events[0].values.output_after == ((6.0,) * 4,)
    assert run.wire is None  # there is no connection whose bytes could be counted
    open_now = "from IPython import get_ipython; len(get_ipython().recorder.open)"
    four.run("dist.all_reduce(torch.ones(1))")
    assert max(four.run(open_now).values) <= 1


# --- ranks that wait inside CUDA, or in the end of their group

# a call from a thread of C++, as autograd's on a GPU, and then the host waits in C
DDP = """
import ctypes
x = torch.ones(2)
def step():
    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: dist.all_reduce(x) and None)
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, call, None)
    libc.pthread_join(thread, None)
step()
if rank == 0:
    raise ValueError("unused parameters")
step()
torch.cpu.synchronize()
"""


def test_ranks_behind_calls_of_autograd_s_thread_are_freed(four):
    error = fails(four, DDP)
    assert str(error).splitlines()[0] == "rank 0 of 4 failed first: ValueError: unused parameters"
    assert re.search(
        r"ranks 1-3 waited for it( in all_reduce \(line \d+\)| at line \d+) and were freed", str(error)
    )


def test_a_rank_in_the_end_of_its_group_calls_nothing_more(four):
    source = """x = torch.ones(2)
for step in range(20):
    if step == 7 and rank == 1:
        continue
    dist.all_reduce(x)
x.sum().item()
dist.destroy_process_group()"""
    error = fails(four, source, Deadlock)
    assert str(error).splitlines()[0] == (
        "rank 1 stands in destroy_process_group (line 7) without the all_reduce that ranks 0, 2, 3 wait in."
    )


def test_all_ranks_leave_and_join_again(four):
    source = "import time\ntime.sleep(rank / 2)\ndist.destroy_process_group()\ndist.init_process_group()"
    four.run(source)
    works(four)


def test_a_full_queue_is_a_wait(four):
    source = "x = torch.ones(2)\nfor step in range(200):\n    if rank != 3: dist.all_reduce(x)"
    error = fails(four, source, Deadlock)
    assert str(error).startswith("rank 3 finished the cell without the all_reduce that ranks 0-2 wait in.")


@pytest.mark.parametrize("source", ["dist.destroy_process_group()", "dist.new_group([0, 1])"])
def test_an_interrupt_ends_such_a_wait(four, source):
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RanksInterrupted):
        four.run(f"import time\nif rank == 1: time.sleep(3600)\n{source}")
    works(four)
