"""Each verdict right, and wrong with its message sentence by sentence."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rankcell import check
from rankcell.results import Event, RankResult, Run

NAN, INF = math.nan, math.inf
AT = "1 of 2 numbers differs. The largest difference is at "
WHOLE, MANY = torch.arange(14.0).view(7, 2), np.arange(1000)


def message(call, *args, **kwargs) -> str:
    with pytest.raises(AssertionError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_a_verdict_is_frozen_text_and_html():
    verdict = check.that(torch.tensor(True), "1 < 2 & 3")
    assert repr(verdict) == "✓ 1 < 2 & 3"
    assert "✓ 1 &lt; 2 &amp; 3</div>" in verdict._repr_html_()
    assert "background:rgba(0,158,115,.12);color:inherit" in verdict._repr_html_()
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.text = "other"
    assert message(check.that, 1 > 2, "one exceeds two.") == "This does not hold: one exceeds two."


def test_every_says_once_what_holds_several_times():
    both = check.every(*[check.close_to([1 / 3, 2.0], [1 / 3, 2.0])] * 4, check.that(True, "a < b"))
    assert repr(both) == "✓ 2 numbers as expected: [0.3333, 2] (4 times)\n✓ a < b"
    assert "(4 times)<br>✓ a &lt; b</div>" in both._repr_html_()
    assert check.every(check.close_to(8, 8), check.that(True, "x"), says="few").text == "few"


@pytest.mark.parametrize(
    ("actual", "expected", "options", "said"),
    [
        (6, 6.0, {}, "✓ as expected: 6"),
        (1.5, 1.4, {"atol": 0.2}, "✓ as expected: 1.5 (largest difference 0.1)"),
        (16777220, 16777220, {}, "✓ as expected: 16,777,220"),
        (98_765, 98_765, {}, "✓ as expected: 98765"),
        (186_966.3, 186_966.3, {"name": "hours"}, "✓ hours: 186,966"),
        ([186_966, 1], [186_966, 1], {"name": "hours"}, "✓ hours: [186966, 1]"),
        ([1.0, NAN], [1.0, NAN], {}, "✓ 2 numbers as expected: [1, nan]"),  # nobody wrote there
        ([INF, -INF], [INF, -INF], {}, "✓ 2 numbers as expected: [inf, -inf]"),
        ([torch.tensor(3), torch.tensor(3.0).bfloat16()], [3, 3], {}, "✓ 2 numbers as expected: [3, 3]"),
        (torch.ones(2, dtype=torch.bool), [1, 1], {}, "✓ 2 numbers as expected: "),
        (MANY, MANY, {}, "✓ 1,000 numbers as expected: [0, 1, 2, 3, 4, 5, 6, 7, … 992 more]"),
        (1 + 9e-7, 1, {}, "✓ as expected: 1"),
    ],
)
def test_close_to_says_what_was_expected(actual, expected, options, said):
    assert repr(check.close_to(actual, expected, **options)).startswith(said)


@pytest.mark.parametrize(
    ("actual", "expected", "options", "said"),
    [
        (3, 4, {}, "Expected 4, got 3. The difference is 1. Allowed: 1e-06 of the expected number."),
        (1 + 2e-6, 1, {}, "Expected 1, got 1"),
        (NAN, 4, {"atol": 1}, "Expected 4, got nan. One of them is NaN."),
        (INF, 4, {}, "Expected 4, got inf. The difference is inf."),
        ([1.0, NAN], [1.0, 2.0], {"rtol": 0}, AT + "[1]: expected 2, got nan. "),
        ([1, -INF], [1, INF], {}, AT + "[1]: expected inf, got -inf."),
        (torch.ones(2), torch.ones(3), {}, "The shapes differ: expected (3,), got (2,)."),
        (1, [1, 2], {}, "The shapes differ: expected (2,), got a single number."),
        ({"w": 1, "c": 1}, {"w": 1, "b": 1}, {}, "The entries differ: missing ['b']; not expected ['c']."),
        (
            {},
            {f"w{i}": 1 for i in range(9)},
            {},
            "The entries differ: missing ['w0'], ['w1'], ['w2'] and 6 more.",
        ),
        ({"w": [3, 4]}, {"w": [3, 5]}, {}, AT + "['w'][1]: "),
        ([256], [256, 128], {"name": "sent"}, "sent: The shapes differ: expected (2,), got (1,)."),
        ({"a": 1}, [256, 128], {"name": "sent"}, "sent: Expected [256, 128], got {'a': 1}."),
        (["a", "b"], [256, 128], {"name": "sent"}, "sent: Expected [256, 128], got ['a', 'b']."),
        ([256, 127], [256, 128], {"name": "sent"}, "sent: " + AT + "[1]:"),
        (
            [1, 1],
            [1.5, 3],
            {"atol": 0.1},
            "2 of 2 numbers differ. The largest difference is at [1]: expected 3, ",
        ),
    ],
)
def test_close_to_names_the_worst_number(actual, expected, options, said):
    assert message(check.close_to, actual, expected, **options).startswith(said)


def test_equals_dense_names_the_parameter():
    dense = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(3)}
    parallel = {name: t.clone() for name, t in dense.items()}
    equal = "9 numbers equal those of one process (largest difference 0, allowed 1e-06)"
    assert repr(check.equals_dense(parallel, dense)) == f"✓ {equal}"
    assert repr(check.equals_dense(parallel, dense, name="weights")) == f"✓ weights: {equal}"
    assert str(check.equals_dense(1.0, 1.0)).startswith("✓ 1 number equals that of one process")
    parallel["0.weight"][1, 2] = 0.5
    assert message(check.equals_dense, parallel, dense) == (
        "1 of 9 numbers differs. The largest difference is at ['0.weight'][1, 2]: one process has 0, "
        "the parallel run has 0.5. The difference is 0.5. Allowed: 1e-06."
    )
    assert "at [1][0]" in message(check.equals_dense, [WHOLE, torch.ones(1)], [WHOLE, torch.zeros(1)])
    shapes = message(check.equals_dense, torch.ones(2), torch.ones(3), name="w")
    assert shapes.startswith("w: The shapes differ: one process has")


def of_ranks(**by_field):
    """A Run whose rank r has the r-th of the values given, for each field."""
    ((name, values),) = by_field.items()
    fields = [{"state": "skipped"} if value is None else {name: value} for value in values]
    return Run("x", tuple(RankResult(rank, **each) for rank, each in enumerate(fields)))


def test_same_on_all_ranks_names_the_ranks():
    same = check.same_on_all_ranks
    assert repr(same([torch.ones(2)] * 4)) == "✓ ranks 0-3 hold the same: [1, 1]"
    assert repr(same([[torch.ones(1), NAN]] * 2)) == "✓ ranks 0, 1 hold the same: [[1], nan]"
    assert repr(same([1, 1.5], atol=0.5)) == "✓ ranks 0, 1 hold the same: 1"
    assert repr(same(of_ranks(value=[None, 5, 5]))) == "✓ ranks 1, 2 hold the same: 5"
    assert message(same, of_ranks(value=[None, 5, 6])).startswith("Rank 2 does not hold what rank 1 holds.")
    assert message(same, [1, 1, 2]) == (
        "Rank 2 does not hold what rank 0 holds. Rank 0 has 1, rank 2 has 2. The difference is 1. Allowed: 0."
    )
    assert message(same, ["a", "b"]) == (
        "Rank 1 does not hold what rank 0 holds. The values differ: rank 0 has 'a', rank 1 has 'b'."
    )
    assert message(same, [1]) == "Only 1 value came: nothing to compare. Give one value per rank."


def test_sharded_says_who_has_what_else():
    rows = list(WHOLE.tensor_split(4))
    verdict = check.sharded(rows, WHOLE, 0, name="rows").text
    assert verdict == "rows: each rank has its part, along dim 0 (largest difference 0)"
    assert check.sharded(WHOLE.tensor_split(2, 1), WHOLE, 1, name="columns")
    verdict = check.sharded([WHOLE] * 3, WHOLE, name="y").text
    assert verdict == "y: all ranks have what one process has (largest difference 0)"
    assert check.sharded([WHOLE + 0.5], WHOLE, name="y", atol=0.6)
    columns, off = WHOLE.tensor_split(4, 1), [*rows[:2], rows[2] - 0.5, rows[3]]
    for parts, dim, said in (
        ([rows[0], None, rows[2], None], 0, "there is none on ranks 1, 3."),
        (columns, 0, "rank 0 has (7, 1), its part of the dense tensor is (2, 2). Mind it."),
        (rows, None, "rank 0 has (2, 2), all of the dense tensor is (7, 2). Mind it."),
        (off, 0, "rank 2 is off by 0.5 from its part of the dense tensor; allowed is 1e-10. Mind it."),
        ([WHOLE, WHOLE * NAN], None, "rank 1 is off by nan from all of the dense tensor; allowed is 1e-10."),
    ):
        assert message(check.sharded, parts, WHOLE, dim, name="x", why="mind it").startswith(f"x: {said}")
    assert message(check.sharded, off, WHOLE, 0, name="x").endswith("allowed is 1e-10.")


def test_calls_says_who_made_which():
    def run(*by_rank):
        return of_ranks(events=[tuple(Event(r, op, 0.0, 1.0) for op in ops) for r, ops in enumerate(by_rank)])

    both = ["all_reduce", "send"]
    assert check.calls(run(both, both), both).text == "every rank sent all_reduce, send"
    assert check.calls(run([], []), []).text == "every rank sent nothing"
    computed = of_ranks(events=[(Event(0, "forward", 0.0, 1.0, kind="compute"),)])
    assert check.calls(computed, []).text == "every rank sent nothing"
    more = run(["all_reduce"], ["all_reduce", "send"])
    assert message(check.calls, more, ["all_reduce"], why="one is enough") == (
        "expected all_reduce on every rank; rank 1 sent all_reduce, send. One is enough."
    )
    assert message(check.calls, more, []) == "expected nothing on every rank; rank 0 sent all_reduce."
    assert message(check.calls, Run("", ()), []) == "no rank ran, so there is nothing to compare."
