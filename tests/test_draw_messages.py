"""The steps of ring and tree all-reduce, from hand-written messages: states, arrows, order, errors."""

import re

import pytest

from rankcell.draw import messages
from rankcell.results import Event, Watched


def message(source, target, at, before, after, part, into):
    """A send and its receive: `before` and `after` are the arrays of the two at the call and after it."""
    common = {
        "group": "0",
        "ranks": (0, 1),
        "seq": int(at) + 1,
        "dtype": "float32",
        "shape": (part[1] - part[0],),
    }
    sent = Watched(before[source], after[source], part)
    came = Watched(before[target], after[target], into)
    return [
        Event(source, "send", at, at + 0.5, peer=target, watched=sent, **common),
        Event(target, "recv", at, at + 0.5, peer=source, watched=came, **common),
    ]


START = {0: (1.0, 2.0), 1: (10.0, 20.0)}
SUMMED = {0: (11.0, 22.0), 1: (10.0, 20.0)}
DONE = {0: (11.0, 22.0), 1: (11.0, 22.0)}
TREE = message(1, 0, 0.0, START, SUMMED, (0, 2), None) + message(0, 1, 1.0, SUMMED, DONE, (0, 2), (0, 2))


def test_one_picture_per_step_and_one_before():
    frames = messages.steps(TREE)
    assert frames.labels == ("before", "1 of 2", "2 of 2") and frames.still == 1
    assert len({re.search(r'viewBox="[^"]+"', f.svg)[0] for f in frames.figures}) == 1
    assert len(frames._repr_html_()) < 100_000


def test_the_text_says_who_sends_what_and_what_comes_of_it():
    first = repr(messages.steps(TREE).figures[1])
    assert re.search(r"rank 0: 1 2 +sends nothing +=> 11 22", first)
    assert re.search(r"rank 1: 10 20 +10 20 -> rank 0 +=> 10 20", first)
    assert "Step 1 of 2: 1 message of 2 numbers" in first


def test_sums_have_stripes_of_all_ranks_and_copies_take_them_along():
    _, first, second = messages.steps(TREE).figures
    assert first.svg.count('fill="url(#s0-1)"') == 2  # rank 0 after the step
    assert second.svg.count('fill="url(#s0-1)"') == 6  # rank 0 before, both after


def test_messages_that_could_travel_together_are_one_step():
    both = message(0, 1, 0.0, START, START, (0, 1), (0, 1)) + message(1, 0, 0.1, START, START, (1, 2), (1, 2))
    assert messages.steps(both).labels == ("before", "1 of 1")


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(ValueError, match="holds no send that was received"):
        messages.steps([])
    bare = [Event(e.rank, e.op, e.start, e.end, group="0", peer=e.peer, seq=e.seq) for e in TREE]
    with pytest.raises(ValueError, match="No array was watched"):
        messages.steps(bare)
    long = {0: (1.0,) * 9, 1: (1.0,) * 9}
    with pytest.raises(ValueError, match="9 numbers, a picture has room for 8"):
        messages.steps(message(0, 1, 0.0, long, long, (0, 1), (0, 1)))


def test_a_run_is_drawn_from_its_own_messages(four):
    source = """
from rankcell import watch
x = torch.full((4,), 10.0**rank)
with watch(x):
    if rank == 0: dist.send(x[2:], 3)
    if rank == 3:
        came = torch.empty(2)
        dist.recv(came, 0)
        x[2:] += came
"""
    run = four.run(source)
    (event,) = run.ranks[3].events
    assert event.watched == Watched((1000.0,) * 4, (1000.0, 1000.0, 1001.0, 1001.0))
    assert run.ranks[0].events[0].watched.part == (2, 4)
    assert "rank 3: 1000 1000 1001 1001" in messages.steps(run).figures[1].alt


def test_only_a_short_array_is_watched(four):
    from rankcell import RankError

    with pytest.raises(RankError, match="an array of 65 numbers is too long to watch: 64 at most"):
        four.run("from rankcell import watch\nwith watch(torch.zeros(65)): pass")
