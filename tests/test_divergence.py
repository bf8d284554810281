"""Which rank called something else than the others, on small programs whose ranks are played here: no processes."""

from collections import Counter
from dataclasses import replace

import pytest

from rankcell.engine.messages import Wait
from rankcell.jobs import verdict
from rankcell.jobs.records import RankRecord
from rankcell.results import Event, Frame

TRAIN = "/home/me/train.py"
WORLD, LOW, HIGH = ("0", (0, 1, 2, 3)), ("1", (0, 1)), ("2", (2, 3))


def play(programs, kept=40):
    """The records of ranks that call what `programs` lists, (name of a group, its ranks, elements, line), where they
    stand in the end.
    """
    n = len(programs)
    calls, waits = [[] for _ in range(n)], [None] * n
    counts = [Counter() for _ in range(n)]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if waits[rank] is None and len(calls[rank]) < len(program):
                name, ranks, size, line = program[len(calls[rank])]
                key, moved = (name, ranks), True
                counts[rank][key] += 1
                seq, where = counts[rank][key], {"line": line, "file": TRAIN}
                text = f"all_reduce(float32[{size}])"
                waits[rank] = Wait("all_reduce", text, name, ranks, key, seq, seq, **where)
                event = Event(
                    rank, "all_reduce", len(calls[rank]), 0, "comm", name, ranks, seq, (size,), "float32"
                )
                calls[rank].append(replace(event, **where))
            wait = waits[rank]
            if wait is not None and all(counts[r][wait.key] >= wait.seq for r in wait.ranks):
                waits[rank], moved = None, True
    return [
        RankRecord(
            rank, n, "finished" if waits[rank] is None else "running", events=tuple(calls[rank][-kept:]),
            waits=() if waits[rank] is None else (waits[rank],), counts=dict(counts[rank]), calls=len(calls[rank]),
        )
        for rank in range(n)
    ]  # fmt: skip


def steps(n, *, without=None, twice=None, turned=None):
    """The lesson's program on four ranks: all sum, then each node. The others are (rank, number of call) where one is
    left out, made twice, or made after the next.
    """
    programs = []
    for rank in range(4):
        calls = [(*WORLD, 1000, 10), (*(LOW if rank < 2 else HIGH), 1, 11)] * n
        for mistake in (without, twice, turned):
            if mistake and mistake[0] == rank:
                at = mistake[1]
                calls[at : at + 2] = {
                    without: calls[at + 1 : at + 2],
                    twice: [calls[at], *calls[at : at + 2]],
                    turned: calls[at : at + 2][::-1],
                }[mistake]
        programs.append(calls)
    return programs


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("mistake", ["without", "twice", "turned"])
def test_a_mistake_at_any_call_is_found(rank, mistake):
    for at in range(2, 9):
        records = play(steps(5, **{mistake: (rank, at)}))
        if any(record.waits for record in records):
            assert verdict.judge(records).culprits == (rank,), at


def test_a_missing_call_is_named_with_both_calls():
    found = verdict.judge(play(steps(5, without=(2, 8))))
    assert found.culprits == (2,) and found.places[0] == (TRAIN, 11)
    assert found.headline == (
        "rank 2 calls all_reduce(float32[1]) of the group of ranks 2, 3 at line 11 of train.py where ranks 0, 1, 3 "
        "call all_reduce(float32[1000]) of the world at line 10 of train.py: it and rank 3 wait for each other."
    )
    assert found.rows[0].startswith("rank 2 ") and "look at what this rank skips" in found.advice


def test_an_extra_call_blames_its_caller():
    """Rank 3 has fewer calls, as all others have."""
    assert verdict.judge(play(steps(3, twice=(2, 5)))).headline == (
        "rank 2 calls all_reduce(float32[1]) of the group of ranks 2, 3 at line 11 of train.py where ranks 0, 1, 3 "
        "have ended, and waits for rank 3, which finished."
    )


def test_of_two_ranks_their_own_past_tells():
    pair, both = ("1", (0, 1)), ("0", (0, 1))
    program = [(*both, 8, 10), (*pair, 8, 11)] * 3
    found = verdict.judge(play([program, [*program[:4], program[5], program[4]]]))
    assert found.culprits == (1,)
    assert "where rank 0 calls all_reduce(float32[8]) of the world at line 10" in found.headline
    first = verdict.judge(play([program[:2], program[:2][::-1]]))
    assert first.culprits == (0, 1), "in a first step nothing tells"
    assert first.headline.startswith("ranks 0, 1 wait for each other in different process groups")


def test_calls_through_one_line_are_told_by_who_came_there():
    """All call in line 18 of a helper; rank 0 comes there from line 34 first."""
    calls = [(*WORLD, 1, 18)] * 3
    records = []
    for r in play([calls, calls[:2], calls[:2], calls[:2]]):
        lines = [34 if (r.rank, e.seq) == (0, 1) else 44 for e in r.events]
        events = tuple(replace(e, outer=((TRAIN, n),)) for e, n in zip(r.events, lines, strict=True))
        records.append(replace(r, events=events))
    assert verdict.judge(records).headline == (
        "rank 0 calls all_reduce(float32[1]) of the world at line 18 of train.py, called from line 34 of train.py, "
        "where ranks 1-3 call all_reduce(float32[1]) of the world at line 18 of train.py, called from line 44 of "
        "train.py, and waits for ranks 1-3, which finished."
    )


def test_several_divergent_ranks_and_a_truncated_record():
    records = play(steps(5, without=(2, 8)))
    strange = replace(records[3].events[-2], line=77)  # rank 3 has called from a line of its own, too
    records[3] = replace(records[3], events=(*records[3].events[:-2], strange, records[3].events[-1]))
    assert verdict.judge(records).culprits == (2, 3)
    assert verdict.judge(play(steps(30, without=(2, 58)), kept=6)).culprits == (2,)


def test_where_no_turn_is_new_most_ranks_tell():
    """One of two calls from one line is left out: what follows it has followed it before."""
    programs = [
        [(*WORLD, 8, 10), (*WORLD, 8, 10), (*(LOW if rank < 2 else HIGH), 1, 11)] * 3 for rank in range(4)
    ]
    del programs[2][3]
    assert verdict.judge(play(programs)).culprits == (2,)


def test_who_is_a_round_ahead_lacks_the_part_that_the_other_waits_for():
    """Rank 1 receives again, where rank 0 waits for its answer the first time."""
    both, records = (0, 1), []
    for rank, line, times in ((0, 20, 1), (1, 30, 2)):
        key = ("0", both, 1 - rank, rank)
        wait = Wait(
            "recv", "recv(float32[8])", "0", both, key, times, times, peer=1 - rank, line=line, file=TRAIN
        )
        one = Event(rank, "recv", 0, 1, "comm", "0", both, 1, (8,), "float32", line=line, file=TRAIN)
        events = tuple(replace(one, seq=n) for n in range(1, times + 1))
        records.append(RankRecord(rank, 2, waits=(wait,), counts={key: times}, calls=times, events=events))
    found = verdict.judge(records)
    assert found.culprits == (1,) and found.places == ((TRAIN, 30),)
    assert found.advice == (
        "Rank 1 has come to line 30 of train.py again, and rank 0 to line 20 of train.py for the first time: has "
        "rank 1 left out the send for which rank 0 waits?"
    )
    forgotten = [replace(record, calls=9) for record in records]  # what happened before is not known
    assert verdict.judge(forgotten).culprits == (0, 1)


def test_who_goes_round_a_loop_once_more_is_named():
    """Two ranks have one batch more, for which all meet in a group of their own."""
    everybody = ("1", (0, 1, 2, 3))
    found = verdict.judge(
        play([[(*everybody, 4, 30)] * (2 if rank < 2 else 1) + [(*WORLD, 1, 64)] for rank in range(4)])
    )
    assert found.advice == (
        "ranks 0, 1 came to line 30 of train.py once more than ranks 2, 3, which went on to line 64 of train.py: do "
        "all ranks go through a loop equally often (batches, steps)?"
    )


def test_a_call_that_may_come_before_a_message_that_is_due_is_asked_for():
    """Rank 0 stands in a barrier that nobody has called before, and rank 1 waits for what rank 0 has sent twice."""
    both, pair = (0, 1), ("0", (0, 1), 0, 1)
    key, where = ("0", both), {"line": 37, "file": TRAIN}
    sent = Event(0, "send", 0, 1, "comm", "0", both, 1, (8,), "float32", peer=1, line=33, file=TRAIN)
    barrier = Event(0, "barrier", 0, 1, "comm", "0", both, 1, (), "", **where)
    heard = replace(sent, rank=1, op="recv", peer=0, line=28)
    waits = (
        Wait("barrier", "barrier()", "0", both, key, 1, 1, **where),
        Wait("recv", "recv(float32[8])", "0", both, pair, 3, 3, peer=0, line=28, file=TRAIN),
    )
    events = (sent, replace(sent, seq=2), barrier), tuple(replace(heard, seq=n) for n in (1, 2, 3))
    counts = {pair: 2, key: 1}, {pair: 3}
    records = [RankRecord(r, 2, waits=(waits[r],), counts=counts[r], calls=3, events=events[r]) for r in both]
    found = verdict.judge(records)
    assert found.culprits == (0, 1) and found.advice == (
        "Rank 0 has come to line 37 of train.py for the first time, and sent to rank 1 before: does its barrier come "
        "too early, before the next send, or has rank 1 gone a round further?"
    )


def test_of_two_that_stand_in_one_function_the_later_one_may_have_left_out_the_part():
    both, pair, key = (0, 1), ("0", (0, 1), 1, 0), ("0", (0, 1))
    recv = Wait("recv", "recv(float32[8])", "0", both, pair, 1, 1, peer=1, line=42, file=TRAIN)
    total = Wait("all_reduce", "all_reduce(float32[1])", "0", both, key, 1, 1, line=50, file=TRAIN)
    records = []
    for rank, wait, line in ((0, recv, 49), (1, total, 50)):
        event = Event(rank, wait.op, 0, 1, "comm", "0", both, 1, (8,), "float32", line=wait.line, file=TRAIN)
        stack = Frame(TRAIN, 80, "main"), Frame(TRAIN, line, "compute")
        more = {"events": (event,), "counts": {wait.key: 1}, "calls": 1, "stack": stack}
        records.append(RankRecord(rank, 2, waits=(wait,), **more))
    found = verdict.judge(records)
    assert found.culprits == (1,) and found.advice == (
        "In compute rank 0 stands at line 49 and rank 1 at line 50: has rank 1 passed the first of them without the "
        "send for which rank 0 waits?"
    )
