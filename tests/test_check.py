"""Each verdict right, and wrong with its message sentence by sentence."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rankcell import check
from rankcell.against import Row
from rankcell.results import Event, RankResult, Run

NAN = math.nan


def message(call, *args, **kwargs) -> str:
    with pytest.raises(AssertionError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_a_verdict_is_frozen_and_shows_as_text_and_html():
    verdict = check.that(True, "1 < 2 & 3")
    assert repr(verdict) == "✓ 1 < 2 & 3"
    assert "✓ 1 &lt; 2 &amp; 3</div>" in verdict._repr_html_()
    assert "background:rgba(0,158,115,.12);color:inherit" in verdict._repr_html_()
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.text = "other"


def test_that():
    assert check.that(torch.tensor(True), "it holds").text == "it holds"
    assert message(check.that, 1 > 2, "one exceeds two") == "This does not hold: one exceeds two."


def test_every():
    both = check.every(check.that(True, "a < b"), check.close_to(2, 2))
    assert repr(both) == "✓ a < b\n✓ as expected: 2"
    assert "✓ a &lt; b<br>✓ as expected: 2</div>" in both._repr_html_()


def test_every_says_once_what_holds_several_times():
    both = check.every(*[check.close_to([1 / 3, 2.0], [1 / 3, 2.0])] * 4, check.that(True, "a < b"))
    assert repr(both) == "✓ 2 numbers as expected: [0.3333, 2] (4 times)\n✓ a < b"


def test_close_to_a_number():
    assert repr(check.close_to(6, 6.0)) == "✓ as expected: 6"
    assert repr(check.close_to(1.5, 1.4, atol=0.2)) == "✓ as expected: 1.5 (largest difference 0.1)"
    assert message(check.close_to, 3, 4) == (
        "Expected 4, got 3. The difference is 1. Allowed: 1e-06 of the expected number."
    )
    assert message(check.close_to, NAN, 4, atol=1).startswith("Expected 4, got nan. One of them is NaN.")
    assert message(check.close_to, math.inf, 4).startswith("Expected 4, got inf. The difference is inf.")


def test_close_to_names_the_worst_entry():
    actual, expected = torch.ones(2, 2), torch.tensor([[1.0, 1.5], [1.0, 3.0]])
    assert message(check.close_to, actual, expected, atol=0.1) == (
        "2 of 4 numbers differ. The largest difference is at [1, 1]: expected 3, got 1. The difference is 2. "
        "Allowed: 0.1 + 1e-06 of the expected number."
    )


def test_untouched_parts_are_nan_on_both_sides():
    assert repr(check.close_to([1.0, NAN], [1.0, NAN])) == "✓ 2 numbers as expected: [1, nan]"
    assert message(check.close_to, [1.0, NAN], [1.0, 2.0], rtol=0) == (
        "1 of 2 numbers differs. The largest difference is at [1]: expected 2, got nan. One of them is NaN. "
        "Allowed: 0."
    )


def test_infinities_are_equal_to_themselves_only():
    check.close_to([math.inf, -math.inf], [math.inf, -math.inf])
    assert "expected inf, got -inf" in message(check.close_to, [1, -math.inf], [1, math.inf])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_every_dtype_compares(dtype):
    check.close_to(torch.ones(3, dtype=dtype), [1, 1, 1])


def test_large_integers_print_in_full():
    assert repr(check.close_to(16777220, 16777220)) == "✓ as expected: 16,777,220"


def test_shapes_and_entries_must_agree():
    assert (
        message(check.close_to, torch.ones(2), torch.ones(3)) == "The shapes differ: expected (3,), got (2,)."
    )
    assert message(check.close_to, 1, [1, 2]) == "The shapes differ: expected (2,), got a single number."
    assert message(check.close_to, {"w": 1, "c": 1}, {"w": 1, "b": 1}) == (
        "The entries differ: missing ['b']; not expected ['c']."
    )


def test_equals_dense_names_the_parameter():
    dense = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(3)}
    parallel = {name: t.clone() for name, t in dense.items()}
    assert repr(check.equals_dense(parallel, dense)) == (
        "✓ 9 numbers equal those of one process (largest difference 0, allowed 1e-06)"
    )
    parallel["0.weight"][1, 2] = 0.5
    assert message(check.equals_dense, parallel, dense) == (
        "1 of 9 numbers differs. The largest difference is at ['0.weight'][1, 2]: one process has 0, "
        "the parallel run has 0.5. The difference is 0.5. Allowed: 1e-06."
    )
    assert "at [1][0]" in message(
        check.equals_dense, [torch.ones(2), torch.ones(1)], [torch.ones(2), torch.zeros(1)]
    )


def test_same_on_all_ranks_takes_a_list():
    assert repr(check.same_on_all_ranks([torch.ones(2)] * 4)) == "✓ ranks 0-3 hold the same: [1, 1]"
    assert (
        repr(check.same_on_all_ranks([[torch.ones(1), NAN]] * 2)) == "✓ ranks 0, 1 hold the same: [[1], nan]"
    )
    assert message(check.same_on_all_ranks, [1, 1, 2]) == (
        "Rank 2 does not hold what rank 0 holds. Rank 0 has 1, rank 2 has 2. The difference is 1. Allowed: 0."
    )
    assert message(check.same_on_all_ranks, ["a", "b"]) == (
        "Rank 1 does not hold what rank 0 holds. The values differ: rank 0 has 'a', rank 1 has 'b'."
    )
    assert (
        message(check.same_on_all_ranks, [1])
        == "Only 1 value came: nothing to compare. Give one value per rank."
    )


def test_same_on_all_ranks_takes_a_run_and_names_its_ranks():
    def run(*values):
        ranks = [
            RankResult(r, state="skipped") if v is None else RankResult(r, value=v)
            for r, v in enumerate(values)
        ]
        return Run("x", tuple(ranks))

    assert repr(check.same_on_all_ranks(run(None, 5, 5))) == "✓ ranks 1, 2 hold the same: 5"
    assert message(check.same_on_all_ranks, run(None, 5, 6)).startswith(
        "Rank 2 does not hold what rank 1 holds."
    )


def test_bytes_match():
    assert repr(check.bytes_match(1_572_876, 1.5 * 2**20)) == (
        "✓ 1,572,876 bytes measured, 1,572,864 by the formula: 1.000 of it (allowed ± 5%)"
    )
    assert message(check.bytes_match, 100, 200, rtol=0.1) == (
        "Expected 200 bytes, measured 100: 0.500 times as many. "
        "The difference is 100 bytes, allowed are 20 (10%)."
    )
    assert "measured nan" in message(check.bytes_match, NAN, 200)


def test_overlap_above():
    assert repr(check.overlap_above(0.91, 0.8)) == (
        "✓ 91% of the communication is hidden behind computing (at least 80% asked)"
    )
    assert message(check.overlap_above, 0.5, 0.8) == (
        "Expected at least 80% of the communication hidden behind computing, got 50%."
    )
    assert "got nan%" in message(check.overlap_above, NAN, 0.8)


def test_long_values_are_cut():
    assert repr(check.close_to(np.arange(1000), np.arange(1000))).endswith(
        "[0, 1, 2, 3, 4, 5, 6, 7, … 992 more]"
    )


def cut(whole, dim):
    return list(whole.tensor_split(4, dim))


def test_sharded():
    whole = torch.arange(14.0).view(7, 2)
    verdict = check.sharded(cut(whole, 0), whole, 0, name="rows")
    assert verdict.text == "rows: each rank has its part, along dim 0 (largest difference 0)"
    verdict = check.sharded([whole] * 3, whole, name="y")
    assert verdict.text == "y: all ranks have what one process has (largest difference 0)"


def test_sharded_says_who_has_what_else():
    whole = torch.arange(14.0).view(7, 2)
    rows = cut(whole, 0)
    assert message(check.sharded, [rows[0], None, rows[2], None], whole, 0, name="rows") == (
        "rows: there is none on ranks 1, 3."
    )
    assert message(check.sharded, cut(whole, 1), whole, 0, name="rows", why="mind the dim") == (
        "rows: rank 0 has (7, 1), its part of the dense tensor is (2, 2). Mind the dim."
    )
    rows[2] = rows[2] + 0.5
    assert message(check.sharded, rows, whole, 0, name="rows") == (
        "rows: rank 2 is off by 0.5 from its part of the dense tensor; allowed is 1e-10."
    )
    assert message(check.sharded, [whole, whole * NAN], whole, name="y", why="add it up") == (
        "y: rank 1 is off by nan from all of the dense tensor; allowed is 1e-10. Add it up."
    )
    assert "rank 0 has (2, 2)" in message(check.sharded, rows, whole, name="y")  # parts are not the whole
    assert check.sharded([whole + 0.5], whole, name="y", atol=0.6)
    for off in (0.5, -0.5):
        assert "rank 0 is off by 0.5" in message(check.sharded, [whole + off], whole, name="y")


def of_calls(*by_rank):
    return Run(
        "",
        tuple(
            RankResult(r, events=tuple(Event(r, op, 0.0, 1.0) for op in ops)) for r, ops in enumerate(by_rank)
        ),
    )


def test_calls():
    run = of_calls(["all_reduce", "send"], ["all_reduce", "send"])
    assert check.calls(run, ["all_reduce", "send"]).text == "every rank sent all_reduce, send"
    assert check.calls(of_calls([], []), [], what="backward").text == "backward: every rank sent nothing"
    computed = Run("", (RankResult(0, events=(Event(0, "forward", 0.0, 1.0, kind="compute"),)),))
    assert check.calls(computed, []).text == "every rank sent nothing"


def test_calls_says_who_made_which():
    run = of_calls(["all_reduce"], ["all_reduce", "send"])
    assert message(check.calls, run, ["all_reduce"], what="forward", why="one is enough") == (
        "forward: expected all_reduce on every rank; rank 1 sent all_reduce, send. One is enough."
    )
    assert message(check.calls, run, []) == "expected nothing on every rank; rank 0 sent all_reduce."
    assert message(check.calls, Run("", ()), []) == "no rank ran, so there is nothing to compare."


@pytest.mark.parametrize(
    ("kind", "held", "missing"),
    [
        ("grad", "multiple", "a division"),
        ("grad", "its own on each", "some weights in the average"),
        ("grad_output", "partial sum", "an all-reduce in the backward"),
        ("grad", "partial sum", "an all-reduce after the backward"),
    ],
)
def test_diagnosed(kind, held, missing):
    first = Row("up", kind, 0, "in some way", "none", (0, 1))
    said = {"kind": kind, "held": held, "missing": missing}
    assert check.diagnosed(first, held, said).text.count("\n") == 2
    others = {"kind": "output", "held": "parts", "missing": "an all-reduce in the forward"}
    for name, other in others.items():
        assert repr(other) in message(check.diagnosed, first, held, said | {name: other})
    assert message(check.diagnosed, first, held, {}).endswith("is of the kind None.")


def test_diagnosed_knows_four_cases_only():
    with pytest.raises(
        ValueError, match="No case of lesson 15 begins with a `output` that the ranks hold as 'parts'"
    ):
        check.diagnosed(Row("up", "output", 0, "in some way", "none", (0, 1)), "parts", {})


def test_numbers_with_a_name_say_what_they_are():
    assert str(check.close_to([256, 128], [256, 128], name="bytes sent")) == "✓ bytes sent: [256, 128]"
    held = check.equals_dense(torch.ones(3), torch.ones(3), name="the weights")
    assert str(held).startswith("✓ the weights: 3 numbers equal those of one process")
    assert str(check.equals_dense(1.0, 1.0)).startswith("✓ 1 number equals that of one process")
    for wrong, sentence in (
        (
            [256, 127],
            "bytes sent: 1 of 2 numbers differs. The largest difference is at [1]: expected 128, got 127.",
        ),
        ([256], "bytes sent: The shapes differ: expected (2,), got (1,)."),
        ({"a": 1}, "bytes sent: Expected [256, 128], got {'a': 1}."),
        (["a", "b"], "bytes sent: Expected [256, 128], got ['a', 'b']."),
    ):
        with pytest.raises(check.CheckFailed) as caught:
            check.close_to(wrong, [256, 128], name="bytes sent")
        assert str(caught.value).startswith(sentence), str(caught.value)
    with pytest.raises(check.CheckFailed, match=r"^the weights: The shapes differ: one process has"):
        check.equals_dense(torch.ones(2), torch.ones(3), name="the weights")


def test_a_large_number_is_told_with_its_thousands():
    assert str(check.close_to(186_966.3, 186_966.3, name="hours")) == "✓ hours: 186,966"
    assert str(check.close_to(98_765, 98_765)) == "✓ as expected: 98765"
    assert str(check.close_to([186_966, 1], [186_966, 1], name="hours")) == "✓ hours: [186966, 1]"


def test_tensors_of_one_number_are_numbers():
    threes = [torch.tensor(3, dtype=torch.int64), torch.tensor(3.0, dtype=torch.bfloat16)]
    assert str(check.close_to(threes, [3, 3])) == "✓ 2 numbers as expected: [3, 3]"
    assert "expected 4, got 3" in message(check.close_to, threes, [3, 4])
    check.close_to([3, 3], threes)
