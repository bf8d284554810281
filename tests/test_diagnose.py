"""What a rank waits for, and who waits for whom: from hand-written operations and states, no processes."""

from dataclasses import replace

import pytest

from rankcell.engine import match
from rankcell.engine.diagnose import diagnose, unmatched
from rankcell.engine.messages import Status, Wait
from rankcell.engine.operation import NONBLOCKING_GRACE, Operation, clock, queued
from rankcell.engine.record import Recorder
from rankcell.engine.states import State, from_status, standings

WORLD = (0, 1, 2)


def collective(rank, *, op="all_reduce", group="0", ranks=WORLD, seq=1, line=2):
    """`rank` stands in a collective of its group."""
    wait = Wait(op, f"{op}(float32[4])", group, ranks, (group, ranks), seq, seq, line=line)
    return State(rank, "running", (wait,), {(group, ranks): seq}, calls=seq)


def transfer(rank, op, peer, *, seq=1, ranks=WORLD):
    """`rank` stands in a send to `peer`, or a receive from it (None: from anyone)."""
    pair = (rank, peer) if op == "send" else (peer, rank)
    key = ("0", "p2p", *pair, 0, op)
    return State(rank, "running", (Wait(op, op, "0", ranks, key, seq, seq, peer),), {key: seq}, calls=1)


def test_a_computing_rank_may_still_come():
    assert diagnose([collective(r) for r in WORLD]) is None
    assert diagnose([collective(0), collective(1), State(2, "running")]) is None
    assert diagnose([transfer(0, "recv", 1), transfer(1, "recv", 2), State(2, "running")]) is None
    thread = State(1, "running", collective(1).waits, {}, other_threads=True)
    assert diagnose([transfer(0, "recv", 1), thread, State(2, "finished")]) is None


def test_a_rank_that_finished_never_comes():
    found = diagnose([collective(0), collective(1), State(2, "finished")])
    assert found.blame == 2
    assert found.headline == "rank 2 finished the cell without the all_reduce that ranks 0, 1 wait in."
    assert found.lines[0] == "rank 0  waits in all_reduce(float32[4]) (call 1 of the world, line 2)"
    # of a ring of batches: rank 0 sends to the rank that has finished, rank 2 waits for what it sends
    states = [transfer(0, "send", 1), State(1, "finished", counts={}), transfer(2, "recv", 1)]
    assert diagnose(states).headline == "rank 1 finished without receiving what rank 0 sends."
    states = standings([collective(0), collective(1), State(2, "finished", calls=3)])
    assert states[0].waits_for == (2,) and states[0].line == 2 and states[2].waits_for == ()
    assert states[2].doing == "finished the cell after 3 calls"


def test_a_send_whose_receive_has_just_come_goes_on():
    assert diagnose([transfer(0, "send", 1), transfer(1, "recv", 0), State(2, "finished")]) is None
    second = transfer(0, "send", 1, seq=2)
    assert diagnose([second, transfer(1, "recv", 0, seq=2), State(2, "finished")]) is None
    once = replace(transfer(1, "recv", 0), phase="finished", waits=())
    assert diagnose([transfer(0, "send", 1), once, State(2, "finished")]) is None
    assert diagnose([second, once, State(2, "finished")]).blame == 1


@pytest.mark.parametrize("op", ["all_reduce", "send"])
def test_what_a_rank_called_in_a_group_that_it_has_destroyed_stays_known(op):
    def stands(rank, op):
        o = Operation(op)
        o.group, o.ranks, o.peer = "default" if op == "init_process_group" else "1", (0, 1), 1 - rank
        with ranks[rank].call_by_hand(o, blocks=True):
            waits, counts = ranks[rank].status()
        return State(rank, "running", tuple(replace(w, waiting=True) for w in waits), counts)

    ranks = [Recorder(), Recorder()]
    for rank, recorder in enumerate(ranks):
        recorder.rank = rank
        recorder.join("1")
    slower = stands(0, op)
    stands(1, {"send": "recv"}.get(op, op))
    ranks[1].join("1.1", again=True)
    assert diagnose([slower, stands(1, "init_process_group")]) is None
    # in a group made anew torch gives the same name again: nothing of before counts for it
    ranks[0].join("1.1", again=True)
    assert diagnose([stands(0, op), State(1, "finished", counts=ranks[1].status()[1])]).blame == 1


def test_a_receive_from_anyone_needs_only_one_free_rank():
    assert diagnose([transfer(0, "recv", None), State(1, "running"), State(2, "finished")]) is None
    assert diagnose([transfer(0, "recv", None), State(1, "finished"), State(2, "finished")]) is not None


def test_who_called_less_than_others_that_finished_is_blamed():
    """Rank 1 was a leaf, and did not wait: it called as much as rank 2, and rank 0 called less."""
    key, two = ("0", WORLD), {("0", WORLD): 2}
    states = [
        State(0, "finished", counts={key: 1}),
        State(1, "finished", counts=two),
        collective(2, op="gather", seq=2),
    ]
    found = diagnose(states)
    assert found.headline == "rank 0 finished the cell without the gather that rank 2 waits in."


def test_two_sends_in_different_lines_may_lack_an_earlier_receive():
    pair = [transfer(0, "send", 1, ranks=(0, 1)), transfer(1, "send", 0, ranks=(0, 1))]
    assert diagnose(pair).headline == "ranks 0, 1 all send first, and nobody receives."
    found = diagnose([pair[0], replace(pair[1], waits=(replace(pair[1].waits[0], line=9),))])
    assert found.headline == "ranks 0, 1 all wait in a send, and nobody receives."
    assert found.advice.startswith("Was a recv left out before? If not: a send waits until")


def test_an_operation_that_nobody_stands_in_blocks_nobody():
    wait = Wait("all_reduce", "all_reduce()", "0", WORLD, ("0", WORLD), 1, 1, waiting=False)
    open_only = State(0, "running", (wait,), {("0", WORLD): 1})
    assert diagnose([open_only, State(1, "finished"), State(2, "finished")]) is None
    held = State(0, "running", (wait,), {("0", WORLD): 1}, blocked_in_torch=True)
    assert diagnose([held, State(1, "finished"), State(2, "finished")]) is not None


def test_a_circle_of_messages_and_collectives_is_no_order_of_groups():
    """Stage 0 sends the next batch; stage 1 waits for it in a sum of its pipeline."""
    ranks, sums = (0, 1, 2, 3), {2: (0, 2), 3: (1, 3)}
    found = diagnose(
        [
            *(transfer(r, "send", r + 2, ranks=ranks) for r in (0, 1)),
            *(collective(r, group=str(r), ranks=sums[r]) for r in sums),
        ]
    )
    assert found.headline == "ranks 0, 1 wait in send for ranks 2, 3, which wait for them in all_reduce."
    assert found.advice == (
        "Either ranks 2, 3 left out a recv, or make it only after that all_reduce; "
        "or ranks 0, 1 left out that all_reduce, or call send once too often."
    )
    assert found.culprits == (0, 1, 2, 3)
    found = diagnose([*map(collective, (0, 1)), transfer(2, "recv", 1)])
    assert found.headline == "rank 2 waits in recv for rank 1, which waits for it in all_reduce."
    assert found.advice.startswith(
        "Either rank 1 left out a send, or makes it only after that all_reduce; or rank 2 left out that "
    )
    assert found.culprits == (1, 2)
    behind = [collective(0), transfer(1, "send", 2), transfer(2, "recv", 0)]
    assert diagnose(behind).headline.startswith("rank 2 waits in recv for rank 0, which waits for it")


def test_one_rank_in_another_group_than_all_the_others_is_named():
    found = diagnose([collective(0), collective(1, op="barrier", group="1", line=7), collective(2)])
    assert found.headline == (
        "rank 1 calls barrier(float32[4]) of a group of all ranks at line 7 without all_reduce(float32[4]) of the "
        "world at line 2 that ranks 0, 2 wait in."
    )
    assert found.culprits == (1,) and found.advice.startswith("Has a rank left out a call")
    # rank 3 alone of the three is not in their group's call; rank 0, which is none of them, says nothing about it
    parts = {"group": "1", "ranks": (1, 2, 3)}
    everybody = {"ranks": (0, 1, 2, 3)}
    states = [
        collective(0, **everybody),
        *(collective(r, **parts) for r in (1, 2)),
        collective(3, **everybody),
    ]
    assert diagnose(states).culprits == (3,)
    made = [collective(0), collective(1, op="new_group", group="new_group"), collective(2)]
    assert diagnose(made).advice.endswith(" Or has rank 1 left out that all_reduce?")


def test_a_collective_that_has_come_is_no_end_of_a_message():
    came = replace(transfer(0, "send", 1), counts={("0", "p2p", 0, 1, 0, "send"): 1, ("1", (0, 1)): 1})
    assert diagnose([came, collective(1, group="1", ranks=(0, 1)), State(2, "running")]) is None


def test_groups_of_the_same_ranks_are_told_apart():
    def lines(*groups, ranks=(WORLD, WORLD)):
        states = [collective(r, group=g, ranks=ranks[r]) for r, g in enumerate(groups)]
        named = [replace(s, waits=(replace(s.waits[0], called=f"of {s.rank}"),)) for s in states]
        return diagnose([*named, State(2, "finished")]).lines[:2]

    assert [line.partition(" (call 1 of ")[2] for line in lines("1", "2")] == [
        "group 'of 0' of all ranks, line 2)",
        "group 'of 1' of all ranks, line 2)",
    ]
    assert "of 0" not in str(lines("1", "1"))
    assert "of 0" not in str(lines("1", "2", ranks=((0, 2), WORLD)))
    assert "the world" in lines("0", "1")[0] and "a group of all ranks" in lines("0", "1")[1]


def test_calls_that_nobody_waited_for_are_counted_at_the_end():
    key = ("0", (0, 1))
    assert unmatched({0: {key: 2}, 1: {key: 2}}, [0, 1]) is None
    more = unmatched({0: {key: 3}, 1: {key: 2}}, [0, 1])
    assert more.startswith("rank 0 called 1 collective more than rank 1, and did not wait")
    absent = unmatched({0: {key: 3}, 1: {key: 2}}, [0])
    assert "more than rank 1 (rank 1 did not run this cell), and" in absent


def test_a_thread_that_wakes_up_does_not_stand_still():
    """Who waits for its turn in Python uses next to no CPU time, and leaves its core again and again."""
    before = Status(0, "1", "running", in_torch=True, cpu=1.0, switches=70)
    for later, still in (
        (replace(before, cpu=1.00005), True),
        (replace(before, cpu=1.2), False),
        (replace(before, switches=72), False),
        (replace(before, in_torch=False), False),
    ):
        assert from_status(later, before).blocked_in_torch is still
    assert not from_status(before, None).blocked_in_torch


def operation(start, *, group="0", awaited=None, via="all_reduce", is_async=False, enqueued=True):
    """A call at `start` that only enqueued; the rank waits for it since `awaited`."""
    o = Operation("all_reduce" if via == "all_reduce" else "send")
    o.start, o.issued, o.group, o.via, o.is_async, o.line = start, start + 0.1, group, via, is_async, 7
    o.wait_start, o.enqueued = awaited, enqueued
    o.passed = lambda: False
    return o


ASYNC, BATCH = {"is_async": True}, {"via": "batch_isend_irecv", "is_async": True}
# calls in order, and which of them stand behind another
# fmt: off
CASES = [
    # without async_op they wait for each other, whatever their groups
    ([operation(1), operation(2), operation(3, group="1")], [False, True, True]),
    # those of two groups that nobody waits for run side by side, those of one do not
    ([operation(1, **ASYNC), operation(2, group="1", **ASYNC), operation(3, **ASYNC)], [False, False, True]),
    # what was called before the wait does not wait
    ([operation(1, awaited=5, **ASYNC), operation(2, group="1", **ASYNC), operation(6)], [False, False, True]),
    # a batch is one launch
    ([operation(1, **BATCH), operation(2, **BATCH), operation(3, via="isend", **ASYNC)], [False, False, True]),
    # what the host does beside the device stands behind nothing; what C++ issues is waited for
    ([operation(1), operation(2, enqueued=False), operation(3)], [False, False, True]),
    ([operation(1, via="backward", **ASYNC), operation(2, group="1", **ASYNC)], [False, True]),
]
# fmt: on


@pytest.mark.parametrize(("pending", "expected"), CASES)
def test_which_stand_behind_another(pending, expected):
    assert [behind for _, behind in queued(pending)] == expected


def test_a_rank_waits_for_what_its_device_has_not_done():
    done = operation(1)
    done.passed = lambda: True
    assert operation(1).waiting and not done.waiting and done.finished
    assert not operation(1, is_async=True).waiting and operation(1, is_async=True, awaited=2).waiting
    for finished, end in ((None, 5.0), (3.0, 5.0), (6.0, 6.0)):  # with the wait, or later
        o = operation(1.0, is_async=True, awaited=4.0)
        o.wait_end, o.done = 5.0, finished
        assert o.end == end


def test_a_tensor_on_the_cpu_and_one_on_a_gpu_do_not_match():
    call = ("all_reduce", (("float32", 4),))
    on_gpu = match.Signature("all_reduce(float32[4])", *call)
    on_cpu = match.Signature("all_reduce(float32[4]) on the CPU", *call, device="cpu")
    found = match.difference(on_gpu.packed(), on_cpu.packed(), (0, 1), 0, 1)
    assert found == ("a tensor on the CPU and one on a GPU", "all_reduce(float32[4]) on the CPU")
    assert match.difference(on_cpu.packed(), on_cpu.packed(), (0, 1), 0, 1)[0] == ""


def test_a_call_that_only_begins_something_is_no_wait():
    """Other programs may have the core in the middle of `irecv`: that its message is missing proves nothing."""
    posted, group = Operation("recv"), Operation("new_group")
    found = [posted.waiting]  # not even begun
    # no call takes so long that does not wait
    for name, at in (("start", 0), ("start", -NONBLOCKING_GRACE - 0.1), ("issued", 0), ("wait_start", 0)):
        setattr(posted, name, clock() + at)
        found.append(posted.waiting)
    assert found == [False, False, True, False, True]
    group.start, group.blocks = clock(), True
    assert group.waiting
