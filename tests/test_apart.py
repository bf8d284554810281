"""Which rank has left the order of calls, on small programs whose ranks are played here: no processes.

In each of them one rank leaves a call out, makes one twice, takes two in another order, or skips a step.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from rankcell.engine.messages import Wait
from rankcell.jobs import verdict
from rankcell.jobs.records import Record
from rankcell.results import Event

TRAIN = "/home/me/train.py"


def play(programs, kept=40):
    """The records of ranks that call what `programs` lists, (name of a group, its ranks, elements, line), where they
    stand in the end; None if calls do not match, or all come to their end.
    """
    n = len(programs)
    calls, waits, matched = [[] for _ in range(n)], [None] * n, {}
    counts = [Counter() for _ in range(n)]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if waits[rank] is None and len(calls[rank]) < len(program):
                name, ranks, size, line = program[len(calls[rank])]
                key, moved = (name, ranks), True
                counts[rank][key] += 1
                seq = counts[rank][key]
                if matched.setdefault((key, seq), size) != size:
                    return None
                text = f"all_reduce(float32[{size}])"
                waits[rank] = Wait("all_reduce", text, name, ranks, key, seq, seq, line=line, file=TRAIN)
                calls[rank].append(
                    Event(rank, "all_reduce", len(calls[rank]), 0, "comm", name, ranks, seq, (size,), "float32",
                          line=line, file=TRAIN)
                )  # fmt: skip
            wait = waits[rank]
            if wait is not None and all(counts[r][wait.key] >= wait.seq for r in wait.ranks):
                waits[rank], moved = None, True
    if not any(waits):
        return None
    return [
        Record(
            rank, n, "finished" if waits[rank] is None else "running", events=tuple(calls[rank][-kept:]),
            waits=() if waits[rank] is None else (waits[rank],), counts=dict(counts[rank]), calls=len(calls[rank]),
        )
        for rank in range(n)
    ]  # fmt: skip


def generated(seed, *, even=True):
    """Programs of 4 to 8 ranks that sum in groups of several kinds, and the rank that makes the mistake; unless `even`,
    some ranks lawfully do more than others.
    """
    chance = random.Random(seed)
    n = chance.choice((4, 6, 8, 8))
    half = n // 2

    def group(kind, r):
        first = r // half * half
        return {
            "world": ("0", tuple(range(n))),
            "half": (f"half {first}", tuple(range(first, first + half))),
            "across": (f"across {r % half}", tuple(q for q in range(n) if q % half == r % half)),
            "pair": (f"pair {r // 2}", (r // 2 * 2, r // 2 * 2 + 1)),
        }[kind]

    kinds = [chance.choice(("world", "half", "across", "pair")) for _ in range(chance.randint(2, 4))]
    steps, barrier, alike = chance.randint(2, 4), chance.random() < 0.4, chance.random() < 0.3
    odd = "" if even else chance.choice(("once", "roles"))
    programs = []
    for r in range(n):
        calls = []
        for step in range(steps):
            for i, kind in enumerate(kinds):
                calls.append((step, i, *group(kind, r), 8 if alike else 8 + i, 10 + i))
                if odd == "roles" and i == 0:
                    more = (step, 7, *group("half", r))
                    calls += [(*more, 60, 60)] if r < half else [(*more, 61, 61)] * 2
            if odd == "once" and step == 0 and r < half:
                calls.append((step, 7, *group("half", r), 50, 50))
        programs.append(calls + [(steps, 9, *group("world", r), 1, 30)] * barrier)
    guilty, step, i = chance.randrange(n), chance.randrange(steps), chance.randrange(len(kinds))
    calls = programs[guilty]
    at, other = (
        next(k for k, c in enumerate(calls) if c[:2] == (step, j)) for j in (i, (i + 1) % len(kinds))
    )
    mistake = chance.choice(("leaves out", "twice", "order", "step"))
    if mistake == "leaves out":
        del calls[at]
    elif mistake == "twice":
        calls.insert(at, calls[at])
    elif mistake == "order":
        calls[at], calls[other] = calls[other], calls[at]
    else:
        calls[:] = [c for c in calls if c[0] != step]
    return [[c[2:] for c in calls] for calls in programs], guilty


@pytest.mark.parametrize("even", [True, False])
def test_generated_mistakes(even):
    """Among ranks that do alike the one to blame is named; among others it, or it with those it waits for."""
    played = [(play(programs), guilty) for programs, guilty in (generated(s, even=even) for s in range(250))]
    hung = [(records, guilty) for records, guilty in played if records is not None]
    found = [(verdict.judge(records), guilty) for records, guilty in hung]
    exact = sum(set(v.culprits) == {guilty} for v, guilty in found)
    among = sum(guilty in v.culprits for v, guilty in found)
    assert len(found) > 150
    if even:
        assert exact == len(found)
    else:
        assert among >= 0.97 * len(found) and exact >= 0.9 * len(found), (exact, among, len(found))


WORLD, LOW, HIGH = ("0", (0, 1, 2, 3)), ("1", (0, 1)), ("2", (2, 3))


def steps(n, *, without=None, twice=None):
    """The lesson's program on four ranks: all sum, then each node. `without` and `twice` are (rank, number of call)."""
    programs = []
    for rank in range(4):
        calls = [(*WORLD, 1000, 10), (*(LOW if rank < 2 else HIGH), 1, 11)] * n
        if without and without[0] == rank:
            del calls[without[1]]
        if twice and twice[0] == rank:
            calls.insert(twice[1], calls[twice[1]])
        programs.append(calls)
    return programs


def test_who_leaves_a_call_out_is_named_with_both_calls():
    found = verdict.judge(play(steps(5, without=(2, 8))))
    assert found.culprits == (2,) and found.places[0] == (TRAIN, 11)
    assert found.headline == (
        "rank 2 calls all_reduce(float32[1]) of the group of ranks 2, 3 at line 11 of train.py where ranks 0, 1, 3 "
        "call all_reduce(float32[1000]) of the world at line 10 of train.py: it and rank 3 wait for each other."
    )
    assert found.rows[0].startswith("rank 2 ") and "look at what this rank skips" in found.advice


def test_who_calls_too_much_is_named_and_not_the_one_that_finished():
    """Rank 3 has fewer calls, as all others have."""
    found = verdict.judge(play(steps(3, twice=(2, 5))))
    assert found.culprits == (2,)
    assert found.headline == (
        "rank 2 calls all_reduce(float32[1]) of the group of ranks 2, 3 at line 11 of train.py where ranks 0, 1, 3 "
        "have ended, and waits for rank 3, which finished."
    )


def test_of_two_ranks_the_own_past_tells():
    pair, both = ("1", (0, 1)), ("0", (0, 1))
    program = [(*both, 8, 10), (*pair, 8, 11)] * 3
    turned = [*program[:4], program[5], program[4]]
    found = verdict.judge(play([program, turned]))
    assert found.culprits == (1,)
    assert "where rank 0 calls all_reduce(float32[8]) of the world at line 10" in found.headline
    first = verdict.judge(play([program[:2], program[:2][::-1]]))
    assert first.culprits == (0, 1), "in a first step nothing tells"
    assert first.headline.startswith("ranks 0, 1 take their process groups in different order")


def test_both_sides_are_named_where_several_stand_out():
    """Rank 3 has called from a line of its own, too."""
    records = play(steps(5, without=(2, 8)))
    strange = replace(records[3].events[-2], line=77)
    records[3] = replace(records[3], events=(*records[3].events[:-2], strange, records[3].events[-1]))
    assert verdict.judge(records).culprits == (2, 3)


def test_a_record_that_is_cut_is_compared_where_it_is_kept():
    records = play(steps(30, without=(2, 58)), kept=6)
    assert verdict.judge(records).culprits == (2,)
