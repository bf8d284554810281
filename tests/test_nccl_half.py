"""The engine where calls only enqueue, as on nccl: the failure table of `test_failures.py`, on a stand-in for nccl.

`nccl_stand_in.py` says in what it is like nccl and in what not. All cases run on the same four ranks.
"""

import os
import signal
import sys
import threading
import time

import pytest

import nccl_stand_in
import rankcell
from rankcell import Deadlock, RankLost, RankMismatch, RankTimeout
from rankcell.engine import devices, forks
from rankcell.errors import RanksInterrupted
from test_failures import ENDS, HANGS, MISMATCHES, SLOW, STUCK, fails, works

pytestmark = pytest.mark.slow

# nccl passes tags over: what does not fit over gloo fits here
ALIKE = [name for name in HANGS if name != "send and recv with other tags"]
# the stand-in has these operations; the others are stopped in the same place
MATCHED = [name for name in MISMATCHES if name != "uneven splits"]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four ranks of a fork server of their own, to which torch has brought the stand-in."""
    folder = tmp_path_factory.mktemp("stand_in")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKCELL_STAND_IN", str(folder / "meet"))
        patch.setattr(sys, "path", [*sys.path, nccl_stand_in.install(folder)])
        patch.setattr(forks, "server", forks.ForkServer())
        patch.setattr(devices, "choose", lambda *_: devices.Choice("cpu", nccl_stand_in.NAME, "a stand-in"))
        try:
            with rankcell.Ranks(4) as ranks:
                yield ranks
        finally:
            forks.server.close()


class TestTheStandIn:
    """It is as nccl is, in what the engine must cope with."""

    def test_a_call_gives_no_work_and_the_right_sum(self, four):
        run = four.run("x = torch.ones(2) * rank\nw = dist.all_reduce(x)\n[w is None, x.tolist()]")
        assert run.values == [[True, [6.0, 6.0]]] * 4

    def test_a_call_returns_and_wait_does_not_block(self, four):
        source = """
import time
if rank == 3: time.sleep(1.0)
x = torch.ones(2) * rank
start = time.monotonic()
w = dist.all_reduce(x, async_op=True)
w.wait()
host = time.monotonic() - start
over = w.is_completed()
torch.cpu.synchronize()
[host < 0.5, over, time.monotonic() - start > 0.5, w.is_completed(), x.tolist()]
"""
        values = four.run(source).values
        assert values[0] == [True, False, True, True, [6.0, 6.0]]
        assert [v[4] for v in values] == [[6.0, 6.0]] * 4

    def test_a_hang_shows_at_synchronize_and_no_signal_ends_it(self, four):
        source = "x = torch.ones(2)\nif rank == 0:\n    dist.all_reduce(x)\n    torch.cpu.synchronize()"
        error = fails(four, source, Deadlock)
        assert "rank 0  waits in all_reduce(float32[2]) (call 1 of the world, line 3)" in str(error)

    def test_futures_are_complete_at_once(self, four):
        source = """
import time
if rank == 3: time.sleep(0.5)
w = dist.all_reduce(torch.ones(2), async_op=True)
done = w.get_future().done()
w.wait()
[done, w.is_completed()]
"""
        assert four.run(source).values[0] == [True, False]

    def test_a_communicator_is_no_use_after_abort(self, four):
        source = """
group = dist.new_group([0, 1, 2, 3])
group.abort()
try:
    dist.all_reduce(torch.ones(1), group=group)
    said = ""
except RuntimeError as error:
    said = str(error)
said
"""
        assert all("aborted" in said for said in four.run(source).values)
        four.restart()
        works(four)

    def test_the_watchdog_ends_the_process_of_a_group_whose_time_is_over(self, four):
        source = """
from datetime import timedelta
import time
group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
if rank == 0:
    dist.all_reduce(torch.ones(1), group=group)
time.sleep(20)
"""
        error = fails(four, source, RankLost)
        assert str(error).startswith("rank 0 of 4 was ended by SIGABRT")


@pytest.mark.parametrize("name", ALIKE)
def test_a_hang_is_explained(four, name):
    source, headline, row, advice = HANGS[name]
    four.run("kept = rank")
    pids = four.pids
    error = fails(four, source, Deadlock)
    assert str(error).splitlines()[0] == headline
    assert row in str(error) and advice in str(error)
    assert four.run("kept").values == [0, 1, 2, 3] and four.pids == pids
    assert error.seconds < 10  # proved, not timed out


def test_tags_are_passed_over(four):
    source = HANGS["send and recv with other tags"][0]
    assert four.run(f"{source}\nx.tolist()").values == [[1.0] * 4] * 4


def test_send_first_is_found_also_between_pairs_that_are_connected(four):
    """Then no call blocks on the host: all four sends stand in the queues, and the receives behind them."""
    ring = "x = torch.ones(4)\nnext, last = (rank + 1) % 4, (rank - 1) % 4\n"
    turns = (
        "(dist.send(x, next), dist.recv(x, last)) if rank % 2 else (dist.recv(x, last), dist.send(x, next))\n"
    )
    four.run(ring + turns)
    error = fails(four, ring + "dist.send(x, next)\ndist.recv(x, last)", Deadlock)
    assert str(error).splitlines()[0] == "ranks 0-3 all send first, and nobody receives."
    assert "rank 2  waits in send(float32[4] to rank 3) (call 1 of this pair, line 3)" in str(error)


RING = """
x, y = torch.full((2,), float(rank)), torch.zeros(2)
ops = [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, y, (rank - 1) % 4)]
"""


def test_a_batch_of_sends_and_receives_is_one_launch(four):
    run = four.run(RING + "for w in dist.batch_isend_irecv(ops): w.wait()\ny.tolist()")
    assert run.values == [[(r - 1) % 4] * 2 for r in range(4)]
    assert [e.op for e in run.events if e.rank == 1] == ["send", "recv"]


@pytest.mark.parametrize("connected", [False, True])
def test_a_batch_whose_partner_is_missing(four, connected):
    """First its host waits, as the pair is new; later its device does."""
    four.restart()
    if connected:
        four.run(RING + "for w in dist.batch_isend_irecv(ops): w.wait()")
    source = RING + "if rank != 2:\n    for w in dist.batch_isend_irecv(ops): w.wait()\n    y.tolist()"
    error = fails(four, source, Deadlock)
    assert str(error).splitlines()[0] in (
        "rank 2 finished without receiving what rank 1 sends.",
        "rank 2 finished without sending what rank 3 waits for.",
    )


def test_a_hang_is_found_while_the_host_goes_on(four):
    """The host never waits for its device in this cell: the end of the cell does."""
    source = "x = torch.ones(4)\nif rank != 2:\n    dist.all_reduce(x)\n    y = 1 + 1"
    error = fails(four, source, Deadlock)
    assert str(error).startswith(
        "rank 2 finished the cell without the all_reduce that ranks 0, 1, 3 wait in."
    )


def test_a_hang_of_work_that_was_waited_for(four):
    source = "x = torch.ones(4)\nif rank:\n    w = dist.all_reduce(x, async_op=True)\n    w.wait()"
    assert "rank 0 finished the cell" in str(fails(four, source, Deadlock)).splitlines()[0]


def test_an_extra_collective_that_does_not_wait_is_found(four):
    error = fails(four, "x = torch.ones(4)\nif rank == 0: w = dist.all_reduce(x, async_op=True)", Deadlock)
    assert str(error).startswith(
        "rank 0 called 1 collective more than ranks 1-3, and did not wait for the answer."
    )


def test_an_exception_on_one_rank_frees_the_others(four):
    source = (
        "print('before', rank)\nif rank == 1:\n    1 / 0\nx = torch.ones(4)\ndist.all_reduce(x)\nx.tolist()"
    )
    error = fails(four, source)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 of 4 failed first: ZeroDivisionError: division by zero"
    assert lines[1] == "  ranks 0, 2, 3 waited for it and were freed (`error.run.ranks[r].error`)"
    assert [r.stdout for r in error.run.ranks] == [f"before {r}\n" for r in range(4)]


@pytest.mark.parametrize("name", MATCHED)
def test_calls_that_do_not_match_send_nothing(four, name):
    source, headline = MISMATCHES[name]
    pids = four.pids
    error = fails(four, source, RankMismatch)
    assert headline in str(error).splitlines()[0] and "stopped before it sent anything" in str(error)
    assert four.pids == pids


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_dies_is_named_and_replaced(four, how):
    dies, headline = ENDS[how]
    four.run("kept = rank")
    error = fails(four, f"x = torch.ones(1)\nif rank == 1: {dies}\ndist.all_reduce(x)\nx.item()", RankLost)
    assert str(error).startswith(headline)
    assert four.run("'kept' in globals()").values == [True, False, True, True]


@pytest.mark.alike(5)
@pytest.mark.parametrize("what", STUCK)
def test_an_interrupt_ends_the_cell(four, what):
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(RanksInterrupted, match="the ranks were interrupted while they were here:"):
        four.run(STUCK[what])
    assert time.monotonic() - start < 10
    works(four)


def test_a_timeout_says_where_every_rank_was(four):
    error = fails(four, "import time\nif rank == 1: time.sleep(60)\ndist.barrier()", RankTimeout, timeout=1)
    assert str(error).splitlines()[1:3] == [
        "  ranks 0, 2, 3  wait in barrier() (call 1 of the world, line 3)",
        "  rank 1         computes at line 2",
    ]


@pytest.mark.alike(5)
@pytest.mark.parametrize("what", SLOW)
def test_slow_is_not_stuck(four, what):
    four.run(SLOW[what])
    works(four)


def test_a_slow_rank_that_others_wait_for_in_their_queues_is_not_stuck(four):
    source = "import time\nx = torch.ones(1)\nif rank == 2: time.sleep(2)\ndist.all_reduce(x)\nx.item()"
    assert four.run(source).values == [4.0] * 4


def test_send_in_one_cell_and_receive_in_the_next(four):
    """The pair is connected first: a first call waits on the host for the other side."""
    four.run("x = torch.zeros(3)\nif rank == 0: dist.send(x, 1)\nif rank == 1: dist.recv(x, 0)")
    four.run("x = torch.arange(3.0) if rank == 0 else torch.zeros(3)\nif rank == 0: w = dist.isend(x, 1)")
    run = four.run("if rank == 1: dist.recv(x, 0)\nif rank == 0: w.wait()\nx.tolist()")
    assert run.values[1] == [0.0, 1.0, 2.0]


def test_events_are_recorded_and_nothing_is_kept(four):
    run = four.run("x = torch.ones(4)\nfor _ in range(5): dist.all_reduce(x)\ndist.barrier()")
    assert [e.op for e in run.events if e.rank == 0] == ["all_reduce"] * 5 + ["barrier"]
    assert run.wire is None  # there is no connection whose bytes could be counted
    open_now = "from IPython import get_ipython; len(get_ipython().recorder.open)"
    four.run("dist.all_reduce(torch.ones(1))")
    assert max(four.run(open_now).values) <= 1


def test_values_before_and_after(four):
    run = four.run("x = torch.ones(2) * rank\ndist.all_reduce(x)", values=True)
    event = next(e for e in run.events if e.rank == 1)
    assert event.values.input_before == ((1.0, 1.0),) and event.values.output_after == ((6.0, 6.0),)
