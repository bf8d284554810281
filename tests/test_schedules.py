"""Schedules by arithmetic: every action once and in order, bubbles and peaks by formula, clear refusals."""

from itertools import pairwise

import pytest
from torch.distributed.pipelining import schedules as theirs

from rankcell import schedules as s

SIZES = [(p, m) for p in range(1, 6) for m in (*range(1, p + 2), 2 * p, 2 * p + 1, 3 * p - 1)]
MAKERS = {
    "naive": s.naive, "GPipe": s.gpipe, "1F1B": s.one_f_one_b, "interleaved": s.interleaved,
    "zero bubble": s.zero_bubble,
}  # fmt: skip
EVERY = [(name, p, m, ()) for name in MAKERS if name != "interleaved" for p, m in SIZES]
EVERY += [("interleaved", p, m, (v,)) for p, m in SIZES for v in (1, 2, 3)]


def test_an_action_is_written_as_torch_writes_it():
    for text in ("0F0", "12B3", "1I0", "7W11"):
        assert str(s.Action.parse(text)) == text == str(theirs._Action.from_str(text))
    for text in ("", "F", "1F", "F0", "1X0", "1F0F", "-1F0", "aF0"):
        assert s.Action.parse(text) is None


def test_every_action_comes_after_what_it_needs():
    for name, p, m, options in EVERY:
        plan = MAKERS[name](p, m, *options)
        when, events = s.rounds(plan), s.predict(plan, forward=1.0, backward=2.5, send=0.25)
        found = dict(s.actions_of(events))
        chunks = options[0] if options else 1
        halves = {(a.stage, a.microbatch) for a in found if a.kind == "I"}
        assert len(found) == len(when) == 2 * p * chunks * m + len(halves)
        sizes = (plan.n_ranks, plan.n_stages, plan.n_microbatches, plan.chunks)
        assert sizes == (p, p * chunks, m, chunks)
        for action, event in found.items():
            assert event.rank == action.stage % p and event.predicted
            for before in plan.needs(action):
                far = before.stage % p != event.rank
                assert found[before].end + (0.25 if far else 0.0) <= event.start + 1e-9
                assert when[before] < when[action]
        for rank in range(p):
            mine = sorted((e for e in events if e.rank == rank), key=lambda e: e.start)
            assert [e.op for e in mine] == [str(a) for a in plan.actions[rank]]
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))


def test_bubbles_and_peaks_are_those_of_the_formulas():
    for p, m in SIZES:
        for make in (s.gpipe, s.one_f_one_b):
            events = s.predict(make(p, m), forward=1.0, backward=2.0)
            assert s.idle_share(events) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
            assert s.length(events) - 3 * m == pytest.approx(3 * (p - 1))
        assert s.idle_share(s.predict(s.naive(p, m))) == pytest.approx(1 - 1 / p)
        assert s.peak_in_flight(s.naive(p, m)) == [1] * p and s.peak_in_flight(s.gpipe(p, m)) == [m] * p
        assert s.peak_in_flight(s.one_f_one_b(p, m)) == [min(m, p - r) for r in range(p)]
        assert s.peak_in_flight(s.zero_bubble(p, m)) == [min(m, p)] * p  # an I frees nothing, its W does
        if m < p:
            continue
        for v in (2, 3):  # also where p does not divide m
            events = s.predict(s.interleaved(p, m, v), forward=1 / v, backward=2 / v)
            assert s.idle_share(events) == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
        if m % p == 0:
            peaks = [min(2 * m, 2 * (p - 1 - r) + p + 1) for r in range(p)]
            assert s.peak_in_flight(s.interleaved(p, m, 2)) == peaks
        # (p-1)(F+B-W) in the letters of table 2 of the paper, where B is the input half
        events = s.predict(s.zero_bubble(p, m), forward=1.0, backward=1.9, weight=0.9)
        assert s.length(events) - m * 2.9 == pytest.approx((p - 1) * 1.1)


def test_schedules_equal_those_of_torch():
    for name, make in MAKERS.items():
        for p, m in ((1, 1), (2, 4), (3, 4), (4, 8), (4, 13)):
            plan = make(p, m)
            texts = [[str(a) for a in actions] for actions in plan.actions]
            lists = {rank: [theirs._Action.from_str(a) for a in mine] for rank, mine in enumerate(texts)}
            theirs._validate_schedule(lists, p, plan.n_stages, m)
            for rank, mine in enumerate(texts):
                if name == "interleaved" and m % p == 0:
                    warmup = min(2 * (p - 1 - rank) + p, 2 * m)
                    forward = lambda step, r=rank, p=p: (step // p % 2) * p + r
                    backward = lambda step, r=rank, w=warmup, p=p: (1 - (step - w) // p % 2) * p + r
                    turns = (warmup, 2 * m - warmup, warmup)
                    found = theirs._get_1f1b_rank_ops(2, p, *turns, rank, forward, backward)
                    assert mine == [str(a) for a in found if a is not None]


STUCK = """The schedule never ends:
  rank 0 is at 0B0 and waits for 1B0
  rank 1 is at 1F1 and waits for 0F1"""


def by_hand(*lists):
    return s.schedule("mine", [map(s.Action.parse, texts.split()) for texts in lists])


@pytest.mark.parametrize(
    ("lists", "says"),
    [(("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"), STUCK), (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "1B1 is missing."),
     (("0F0 0B0 0B0", "1F0 1B0"), "0B0 comes twice."), (("0F0 0B0", "1F0 1I0"), "1W0 is missing.")],
)  # fmt: skip
def test_what_cannot_train_is_refused(lists, says):
    with pytest.raises(s.ScheduleError) as error:
        s.rounds(by_hand(*lists))
    assert str(error.value) == says and repr(by_hand(*lists)).startswith("mine: 2 ranks")


def test_a_mix_of_whole_and_halved_backwards_runs():
    plan = by_hand("0F0 0F1 0B0 0I1 0W1", "1F0 1F1 1I0 1B1 1W0")
    events = {str(a): e for a, e in s.actions_of(s.predict(plan))}
    assert events["0B0"].start == events["1I0"].end
    empty = s.schedule("none", [[], []])
    assert (empty.n_ranks, empty.n_stages, empty.chunks) == (2, 0, 0)


def test_events_that_are_no_actions_are_refused():
    with pytest.raises(ValueError, match="None of these events is an action"):
        s.idle_share([])
