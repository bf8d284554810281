"""Formulas against closed forms and against schedules counted message by message."""

import math

import pytest

from rankcell import costs
from rankcell.costs import Link

MIB = 2**20
LINK = Link(alpha=50e-6, beta=1e-9)
INSIDE, ACROSS = Link(5e-6, 1 / 400e9), Link(20e-6, 1 / 50e9)


def test_a_message():
    assert LINK.send(0) == 50e-6 and LINK.send(1_000_000) == pytest.approx(1.05e-3)
    assert LINK.bandwidth == pytest.approx(1e9) and Link(1e-6, 0.0).bandwidth == math.inf


@pytest.mark.parametrize(("n", "doublings"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (64, 6)])
def test_rings_and_trees(n, doublings):
    s = 3 * MIB
    half = (n - 1) * 50e-6 + (n - 1) / n * s * 1e-9
    assert costs.ring_all_reduce(s, n, LINK) == pytest.approx(2 * half)
    assert costs.tree_all_reduce(s, n, LINK) == pytest.approx(2 * doublings * LINK.send(s))


def test_hierarchical_over_nodes():
    s, p, m = 64 * MIB, 8, 4
    alone = {
        (p, 1): costs.ring_all_reduce(s, p, INSIDE),
        (1, m): costs.ring_all_reduce(s, m, ACROSS),
        (1, 1): 0,
    }
    for (ranks, nodes), seconds in alone.items():
        assert costs.hierarchical_all_reduce(s, ranks, nodes, INSIDE, ACROSS) == pytest.approx(seconds)
    inside = 2 * (p - 1) * (5e-6 + s / p / 400e9)
    for links, rate in ((1, 50e9 / p), (2, 50e9 / 4), (p, 50e9)):  # the local ranks share them
        across = 2 * (m - 1) * (20e-6 + s / p / m / rate)
        found = costs.hierarchical_all_reduce(s, p, m, INSIDE, ACROSS, links=links)
        assert found == pytest.approx(inside + across)


def test_fit_finds_the_line_by_relative_errors():
    sizes = [64 * 4**k for k in range(11)]
    seconds = [LINK.send(s) for s in sizes]
    assert costs.fit(sizes, seconds) == pytest.approx(LINK, rel=1e-9)
    seconds[-1] *= 1.1  # 6.7 ms: more than a hundred times alpha
    assert costs.fit(sizes, seconds).alpha == pytest.approx(50e-6, rel=0.01)
    # nothing negative: what is left is fitted anew
    assert costs.fit([1, 2], [1.0, 3.0]) == Link(0.0, pytest.approx((1 + 2 / 3) / (1 + 4 / 9)))
    assert costs.fit([1, 2], [3.0, 1.0]) == Link(pytest.approx((1 / 3 + 1) / (1 / 9 + 1)), 0.0)


def test_bandwidths_and_bytes_as_nccl_tests_counts_them():
    assert costs.algbw(8e9, 2.0) == 4e9
    bus = {"all_reduce": 6e9, **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), 3e9)}
    bus |= dict.fromkeys(("broadcast", "reduce", "send"), 4e9)
    assert {op: costs.busbw(op, 8e9, 2.0, 4) for op in bus} == bus
    per_rank = {
        "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "broadcast": 0.75,
        "reduce": 0.75, "scatter": 0.1875, "gather": 0.1875, "send": 0.25, "barrier": 0.0,
    }  # fmt: skip
    assert {op: costs.bytes_sent(op, MIB, 4) / MIB for op in per_rank} == per_rank


@pytest.mark.parametrize(
    ("call", "message"),
    [(lambda: costs.fit([1], [1.0]), "got 1 different sizes and 1 times"),
     (lambda: costs.fit([8, 8], [1.0, 2.0]), "got 1 different sizes and 2 times"),
     (lambda: costs.fit([1, 2, 3], [1.0, 2.0]), "got 3 different sizes and 2 times"),
     (lambda: costs.fit([1, 2], [1.0, 0.0]), "2 times, the least of them 0 s"),
     (lambda: costs.busbw("allreduce", 1, 1, 4), "no formula for 'allreduce'. There are: all_reduce, "),
     (lambda: costs.bytes_sent("all_reduce", 1, 0), "at least one rank, not 0")],
)  # fmt: skip
def test_what_has_no_answer_says_why(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
