"""Schedules by arithmetic: every action once and in order, bubbles and peaks by formula, clear refusals."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from rankcell.schedules import (
    SCHEDULES,
    V_SCHEDULES,
    Action,
    ScheduleError,
    actions_of,
    bubble_fraction,
    bubble_overhead,
    forward_only,
    gpipe,
    idle_seconds,
    idle_share,
    interleaved,
    length,
    message_seconds,
    naive,
    needs,
    one_f_one_b,
    peak_in_flight,
    predict,
    rounds,
    schedule,
    validate,
    zb_v,
    zero_bubble,
)

SIZES = [(p, m) for p in range(1, 7) for m in (*range(1, p + 2), 2 * p, 2 * p + 1, 3 * p - 1, 3 * p + 2)]
EVERY = [
    *((name, p, m, ()) for name in SCHEDULES if name != "interleaved" for p, m in SIZES),
    *(("interleaved", p, m, (v,)) for p, m in SIZES for v in (1, 2, 3, 4)),
    *((name, p, m, ()) for name in V_SCHEDULES for p, m in SIZES),
]


def home(name, stage, p):
    """The rank on which a stage lives."""
    return min(stage, 2 * p - 1 - stage) if name in V_SCHEDULES else stage % p


def test_an_action_is_written_as_torch_writes_it():
    from torch.distributed.pipelining.schedules import _Action

    for text in ("0F0", "12B3", "1I0", "7W11"):
        assert str(Action.parse(text)) == text == str(_Action.from_str(text))
    for text in ("", "F", "1F", "F0", "1X0", "1F0F", "-1F0", "aF0"):
        with pytest.raises(ValueError, match=r"is no action\. Write stage, kind and micro-batch"):
            Action.parse(text)


def test_every_schedule_runs_and_keeps_the_order_of_what_each_action_needs():
    for name, p, m, options in EVERY:
        plan = {**SCHEDULES, **V_SCHEDULES}[name](p, m, *options)
        when = rounds(plan)
        events = predict(plan, forward=1.0, backward=2.5, send=0.25)
        found = {action: event for action, event in actions_of(events)}
        stages = p * (2 if name in V_SCHEDULES else options[0] if options else 1)
        halves = {(a.stage, a.microbatch) for a in found if a.kind == "I"}
        assert len(found) == len(when) == 2 * stages * m + len(halves)
        assert (plan.n_ranks, plan.n_stages, plan.n_microbatches) == (p, stages, m)
        for action, event in found.items():
            assert event.rank == home(name, action.stage, p) and event.predicted
            split = (action.stage + 1, action.microbatch) in halves
            for before in needs(action, stages, split=split):
                far = home(name, before.stage, p) != event.rank
                assert found[before].end + (0.25 if far else 0.0) <= event.start + 1e-9
                assert when[before] < when[action]
        for rank in range(p):
            mine = sorted((e for e in events if e.rank == rank), key=lambda e: e.start)
            assert [e.op for e in mine] == [str(a) for a in plan.actions[rank]]
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))


def test_the_bubble_is_that_of_the_formulas():
    for p, m in SIZES:
        for make in (gpipe, one_f_one_b):
            events = predict(make(p, m), forward=1.0, backward=2.0)
            assert idle_share(events) == pytest.approx(bubble_fraction(p, m), abs=1e-12)
            assert length(events) - 3 * m == pytest.approx(idle_seconds("1F1B", p))
            busy = 3.0 * m * p
            idle = p * length(events) - busy
            assert idle / busy == pytest.approx(bubble_overhead(p, m))
        assert idle_share(predict(naive(p, m))) == pytest.approx(1 - 1 / p)
        for v in (2, 3, 4):
            if m >= p:  # also where p does not divide m
                events = predict(interleaved(p, m, v), forward=1 / v, backward=2 / v)
                assert idle_share(events) == pytest.approx(bubble_fraction(p, m, v), abs=1e-12)
        if m >= p:
            for forward, backward in ((1.0, 2.0), (1.0, 1.5)):
                events = predict(zero_bubble(p, m), forward=forward, backward=backward)
                idle = length(events) - m * (forward + backward)
                assert idle == pytest.approx(idle_seconds("zero bubble", p, forward, backward))


def test_a_v_idles_only_until_the_first_forward_and_after_the_last_gradient():
    for name, make in V_SCHEDULES.items():
        for p in range(1, 9):
            for m in (2 * p, 2 * p + 1, 5 * p):
                plan = make(p, m)  # a chunk takes 1 forward, 1 for I and 1 for W: a rank 2, 2 and 2
                events = predict(plan, forward=1.0, backward=2.0)
                assert length(events) - 2 * 3 * m == idle_seconds(name, p, 2.0, 4.0) == p - 1
                assert idle_share(events) == pytest.approx((p - 1) / (6 * m + p - 1))
                most = 2 * p if name == "ZB-V" else 2 * p + 1
                assert set(peak_in_flight(plan)) <= {most - 1, most} and max(peak_in_flight(plan)) == most
            assert max(peak_in_flight(make(p, 1))) == 2  # one micro-batch is on both ways at the last rank
    plan = zb_v(4, 8)
    for rank, actions in enumerate(plan.actions):  # and a rank's own time is without a gap
        mine = sorted((e for e in predict(plan) if e.rank == rank), key=lambda e: e.start)
        assert mine[0].start == rank and mine[-1].end == rank + 6 * 8 == rank + len(actions)


def test_torch_accepts_the_schedules_and_has_the_same_lists_in_a_v():
    from torch.distributed.pipelining import schedules as theirs

    for name, make in {**SCHEDULES, **V_SCHEDULES}.items():
        for p, m in ((1, 1), (2, 4), (3, 4), (4, 8), (4, 13)):
            plan = make(p, m)
            lists = {
                rank: [theirs._Action.from_str(str(a)) for a in actions]
                for rank, actions in enumerate(plan.actions)
            }
            theirs._validate_schedule(lists, p, plan.n_stages, m)
            if name not in V_SCHEDULES:
                continue
            kind = {"ZB-V": theirs.ScheduleZBVZeroBubble, "DualPipeV": theirs.ScheduleDualPipeV}[name]
            maker = SimpleNamespace(pp_group_size=p, _n_microbatches=m, _num_stages=2 * p, num_stages=2 * p)
            for rank, actions in enumerate(plan.actions if m >= 2 * p else ()):
                found = [a for a in kind._calculate_single_rank_operations(maker, rank) if a is not None]
                found = [str(part) for a in found for part in (a.sub_actions or [a])]
                # of gradients that nobody waits for, ours has the oldest first
                order = lambda texts: [t for t in texts if "W" not in t]
                assert order(found) == order([str(a) for a in actions])
                assert sorted(found) == sorted(str(a) for a in actions)


def test_zero_bubble_against_table_2_of_its_paper():
    """(p-1)(F+B-W) in the paper's letters, where B is the input half."""
    events = predict(zero_bubble(4, 12), forward=1.0, backward=1.0 + 0.9, weight=0.9)
    assert length(events) - 12 * 2.9 == pytest.approx(3 * (1.0 + 1.0 - 0.9))


def test_published_bubbles():
    # the column m = 24 and 64 of facts on 1.5B, p = 8: https://arxiv.org/abs/2401.10241, table 5, by formula
    assert bubble_fraction(8, 24) == pytest.approx(0.2258, abs=1e-4)
    assert bubble_fraction(8, 64) == pytest.approx(0.0986, abs=1e-4)
    assert bubble_fraction(32, 96) == pytest.approx(0.2441, abs=1e-4)


def test_how_many_micro_batches_are_held():
    for p, m in SIZES:
        assert peak_in_flight(naive(p, m)) == [1] * p
        assert peak_in_flight(gpipe(p, m)) == [m] * p
        assert peak_in_flight(one_f_one_b(p, m)) == [min(m, p - r) for r in range(p)]
        assert peak_in_flight(zero_bubble(p, m)) == [min(m, p)] * p  # an I frees nothing, its W does
        if m >= p and m % p == 0:
            peaks = peak_in_flight(interleaved(p, m, 2))
            assert peaks == [min(2 * m, 2 * (p - 1 - r) + p + 1) for r in range(p)]


def test_same_lists_as_torch_where_both_have_one():
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    for p, m in ((2, 4), (4, 8), (4, 12)):
        for rank, mine in enumerate(interleaved(p, m, 2).actions):
            forward = lambda step, r=rank, p=p: (step // p % 2) * p + r
            warmup = min(2 * (p - 1 - rank) + p, 2 * m)
            backward = lambda step, r=rank, w=warmup, p=p: (1 - (step - w) // p % 2) * p + r
            steady = 2 * m - warmup
            theirs = _get_1f1b_rank_ops(2, p, warmup, steady, warmup, rank, forward, backward)
            assert [str(a) for a in mine] == [str(a) for a in theirs if a is not None]


def test_a_schedule_shows_as_a_grid():
    assert repr(one_f_one_b(2, 2)).splitlines() == [
        "1F1B: 2 ranks, 2 micro-batches",
        "rank 0  0F0 0F1 .   0B0 .   0B1",
        "rank 1  .   1F0 1B0 1F1 1B1",
    ]
    assert repr(zero_bubble(2, 1)).splitlines()[1:] == [
        "rank 0  0F0 .   .   0I0 0W0",
        "rank 1  .   1F0 1I0 1W0",
    ]


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([["0F0", "0B0"], ["1F0"]], ["1B0 is missing."]),
        ([["0F0", "0I0"], ["1F0", "1B0"]], ["0W0 is missing."]),
        ([["0F0", "0W0"], ["1F0", "1B0"]], ["0I0 is missing."]),
        ([["0F0", "0F0", "0B0"], ["1F0", "1B0"]], ["0F0 comes twice.", "rank 0  >0F0< >0F0< 0B0"]),
        ([["0F0"], ["0B0"]], ["0B0 is on rank 1, but stage 0 lives on rank 0.", "rank 1  >0B0<"]),
        ([["0F0", "0B0", "0I0", "0W0"]], ["Stage 0 has two backwards of micro-batch 0: 0B0 is 0I0 and 0W0"]),
        ([[]], ["The schedule is empty."]),
        (
            [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]],
            [
                "The schedule never ends:",
                "  rank 0 is at 0B0 and waits for 1B0 of rank 1",
                "  rank 1 is at 1F1 and waits for 0F1 of rank 0",
                "rank 0  0F0   >0B0< 0F1   0B1",
                "rank 1  >1F1< 1F0   1B0   1B1",
                "Move what the others wait for before what cannot start yet.",
            ],
        ),
        ([["0B0", "0F0"]], ["  rank 0 is at 0B0 and waits for 0F0 of rank 0"]),
    ],
)
def test_a_wrong_schedule_is_refused_with_the_wrong_action_marked(lists, said):
    plan = schedule("mine", lists)
    with pytest.raises(ScheduleError) as error:
        validate(plan)
    lines = str(error.value).splitlines()
    for line in said:
        assert any(found.startswith(line) for found in lines), (line, lines)
    assert "mine" in repr(plan)  # it can still be shown


def test_a_mix_of_whole_and_halved_backwards_runs():
    plan = schedule("mix", [["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1F1", "1I0", "1B1", "1W0"]])
    assert validate(plan) is plan
    events = {str(a): e for a, e in actions_of(predict(plan))}
    assert events["0B0"].start == events["1I0"].end


def test_a_measured_step_can_be_planned_again_from_its_own_times():
    for plan in (gpipe(3, 4), one_f_one_b(4, 6), interleaved(2, 5, 2), zero_bubble(3, 5)):
        events = predict(plan, forward=1.0, backward=1.7, send=0.125)
        assert message_seconds(plan, events) == pytest.approx(0.125)
        assert predict(plan, send=0.125, measured=events) == events
    assert message_seconds(gpipe(1, 3), predict(gpipe(1, 3))) == 0.0


def test_one_slow_message_is_not_taken_for_all():
    plan = one_f_one_b(4, 6)
    late = [
        replace(e, start=e.start + 3, end=e.end + 3) if e.op == "0B5" else e  # the last action of the step
        for e in predict(plan, send=0.125)
    ]
    assert message_seconds(plan, late) == pytest.approx(0.125)


def test_chunks_are_the_stages_of_a_rank():
    assert [interleaved(3, 6, v).chunks for v in (1, 2, 4)] == [1, 2, 4]
    assert one_f_one_b(4, 8).chunks == 1 and zb_v(4, 8).chunks == 2
    assert schedule("uneven", [["0F0", "2F0"], ["1F0"]]).chunks == 2  # the rank that has most


def test_a_schedule_of_nothing_has_no_stages():
    empty = schedule("none", [[], []])
    assert (empty.n_ranks, empty.n_stages, empty.n_microbatches, empty.chunks) == (2, 0, 0, 0)
    assert not empty.trains and not empty.splits_backward


def test_bad_numbers():
    with pytest.raises(ValueError, match="A pipeline of 0 ranks with 4 micro-batches and 1 chunks cannot be"):
        gpipe(0, 4)
    with pytest.raises(ValueError, match="Times cannot be negative"):
        predict(gpipe(2, 2), backward=-1.0)
    with pytest.raises(ValueError, match="None of these events is an action"):
        idle_share([])
    with pytest.raises(ValueError, match="There is no closed form for 'naive'"):
        idle_seconds("naive", 4)


def test_forward_only_is_an_evaluation_with_the_stages_in_their_places():
    for make, p, m, options in ((one_f_one_b, 4, 8, ()), (interleaved, 2, 5, (3,)), (zero_bubble, 4, 4, ())):
        plan = make(p, m, *options)
        evaluation = validate(forward_only(plan))
        assert not evaluation.trains and plan.trains and peak_in_flight(evaluation) == [0] * p
        homes = [{a.stage for a in rank} for rank in plan.actions]
        assert [{a.stage for a in rank} for rank in evaluation.actions] == homes
        assert len(rounds(evaluation)) == plan.n_stages * m
        assert rounds(forward_only(plan, 2)).keys() == {a for a in rounds(evaluation) if a.microbatch < 2}
    # the first micro-batch passes the other p - 1 stages, and nothing else is waited for
    assert length(predict(forward_only(one_f_one_b(4, 8)))) == 8 + 4 - 1
    assert length(predict(forward_only(interleaved(4, 8, 2)))) == 2 * 8 + 4 - 1
    with pytest.raises(ScheduleError, match="0B1 is missing"):  # some backwards are not enough
        validate(schedule("mine", [["0F0", "0F1", "0B0"]]))
