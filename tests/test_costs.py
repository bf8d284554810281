"""Formulas against closed forms and against schedules counted message by message."""

import math

import pytest

from rankcell import costs
from rankcell.costs import Link

MIB = 2**20
LINK = Link(alpha=50e-6, beta=1e-9)
NS = (2, 4, 8, 64)


def test_a_message():
    assert LINK.send(0) == 50e-6
    assert LINK.send(1_000_000) == pytest.approx(1.05e-3)
    assert LINK.bandwidth == pytest.approx(1e9)
    assert LINK.half_size == pytest.approx(50_000)
    assert LINK.half_size / LINK.send(LINK.half_size) == pytest.approx(LINK.bandwidth / 2)
    alpha, beta = LINK
    assert (alpha, beta) == (50e-6, 1e-9)


def test_a_link_without_bytes_has_no_end():
    assert Link(1e-6, 0.0).bandwidth == math.inf
    assert Link(1e-6, 0.0).half_size == math.inf


@pytest.mark.parametrize("n", NS)
def test_ring(n):
    s = 3 * MIB
    assert costs.ring_reduce_scatter(s, n, LINK) == pytest.approx((n - 1) * 50e-6 + (n - 1) / n * s * 1e-9)
    assert costs.ring_all_gather(s, n, LINK) == costs.ring_reduce_scatter(s, n, LINK)
    assert costs.ring_all_reduce(s, n, LINK) == pytest.approx(
        2 * (n - 1) * 50e-6 + 2 * (n - 1) / n * s * 1e-9
    )


@pytest.mark.parametrize(("n", "steps"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (64, 6)])
def test_tree(n, steps):
    assert costs.tree_broadcast(MIB, n, LINK) == pytest.approx(steps * LINK.send(MIB))
    assert costs.tree_all_reduce(MIB, n, LINK) == pytest.approx(2 * steps * LINK.send(MIB))


@pytest.mark.parametrize("n", NS)
def test_halving_and_doubling_step_by_step(n):
    parts = [MIB / 2**k for k in range(1, n.bit_length())]  # half, quarter, ..., one n-th
    assert costs.halving_reduce_scatter(MIB, n, LINK) == pytest.approx(sum(map(LINK.send, parts)))
    assert costs.doubling_all_gather(MIB, n, LINK) == pytest.approx(sum(map(LINK.send, reversed(parts))))
    assert costs.doubling_all_reduce(MIB, n, LINK) == pytest.approx(len(parts) * LINK.send(MIB))
    assert costs.halving_doubling_all_reduce(MIB, n, LINK) == pytest.approx(2 * sum(map(LINK.send, parts)))


@pytest.mark.parametrize(
    "f", [costs.doubling_all_reduce, costs.doubling_all_gather, costs.halving_reduce_scatter]
)
def test_doubling_needs_a_power_of_two(f):
    with pytest.raises(ValueError, match=r"need 2, 4, 8, \.\.\. ranks, not 6"):
        f(MIB, 6, LINK)


def test_one_rank_costs_nothing():
    for f in (
        costs.ring_all_reduce, costs.ring_all_gather, costs.ring_reduce_scatter, costs.tree_all_reduce,
        costs.tree_broadcast, costs.halving_doubling_all_reduce, costs.doubling_all_reduce,
    ):  # fmt: skip
        assert f(MIB, 1, LINK) == 0
    assert costs.flat_all_reduce(MIB, 1, 1, LINK, LINK) == 0
    assert costs.hierarchical_all_reduce(MIB, 1, 1, LINK, LINK) == 0


@pytest.mark.parametrize("n", NS)
def test_latency_and_bandwidth_terms(n):
    """Ring and halving/doubling move the same bytes; trees and doubling take the fewest steps."""
    free, wide = Link(0.0, 1e-9), Link(1e-6, 0.0)
    assert costs.ring_all_reduce(MIB, n, free) == pytest.approx(
        costs.halving_doubling_all_reduce(MIB, n, free)
    )
    assert costs.ring_all_reduce(MIB, n, free) <= costs.tree_all_reduce(MIB, n, free)
    assert costs.tree_all_reduce(MIB, n, wide) == costs.halving_doubling_all_reduce(MIB, n, wide)
    assert costs.tree_all_reduce(MIB, n, wide) <= costs.ring_all_reduce(MIB, n, wide)


def test_ring_and_tree_cross_where_the_algebra_says():
    n, steps = 8, 3
    size = LINK.half_size * (n - 1 - steps) / (steps - (n - 1) / n)
    assert costs.ring_all_reduce(size, n, LINK) == pytest.approx(costs.tree_all_reduce(size, n, LINK))
    assert costs.ring_all_reduce(size * 2, n, LINK) < costs.tree_all_reduce(size * 2, n, LINK)
    assert costs.ring_all_reduce(size / 2, n, LINK) > costs.tree_all_reduce(size / 2, n, LINK)


INSIDE, ACROSS = Link(5e-6, 1 / 400e9), Link(20e-6, 1 / 50e9)


def test_flat_is_as_slow_as_its_slowest_link():
    s = 64 * MIB
    assert costs.flat_all_reduce(s, 8, 4, INSIDE, ACROSS) == pytest.approx(
        costs.ring_all_reduce(s, 32, ACROSS)
    )
    assert costs.flat_all_reduce(s, 8, 1, INSIDE, ACROSS) == pytest.approx(
        costs.ring_all_reduce(s, 8, INSIDE)
    )
    assert costs.flat_all_reduce(s, 1, 4, INSIDE, ACROSS) == pytest.approx(
        costs.ring_all_reduce(s, 4, ACROSS)
    )


def test_hierarchical_in_its_three_phases():
    s, p, m = 64 * MIB, 8, 4
    inside = 2 * (p - 1) * (5e-6 + s / p / 400e9)
    one_link = 2 * (m - 1) * (20e-6 + s / m / 50e9)  # the local ranks together move the whole array
    own_links = 2 * (m - 1) * (20e-6 + s / p / m / 50e9)
    assert costs.hierarchical_all_reduce(s, p, m, INSIDE, ACROSS) == pytest.approx(inside + one_link)
    assert costs.hierarchical_all_reduce(s, p, m, INSIDE, ACROSS, links=p) == pytest.approx(
        inside + own_links
    )


def test_hierarchical_of_one_node_or_one_rank_per_node_is_a_ring():
    s = 64 * MIB
    assert costs.hierarchical_all_reduce(s, 8, 1, INSIDE, ACROSS) == pytest.approx(
        costs.ring_all_reduce(s, 8, INSIDE)
    )
    assert costs.hierarchical_all_reduce(s, 1, 4, INSIDE, ACROSS) == pytest.approx(
        costs.ring_all_reduce(s, 4, ACROSS)
    )


def test_fit_finds_the_line():
    sizes = [64 * 4**k for k in range(11)]
    alpha, beta = costs.fit(sizes, [LINK.send(s) for s in sizes])
    assert alpha == pytest.approx(50e-6, rel=1e-9)
    assert beta == pytest.approx(1e-9, rel=1e-9)


def test_fit_weighs_errors_by_the_time_they_are_part_of():
    sizes = [64, 1024, 64 * MIB]
    seconds = [LINK.send(s) for s in sizes]
    seconds[2] *= 1.1  # 6.7 ms: more than a hundred times alpha
    assert costs.fit(sizes, seconds).alpha == pytest.approx(50e-6, rel=0.01)


def test_fit_is_never_negative():
    assert costs.fit([1, 2], [1.0, 3.0]) == Link(0.0, pytest.approx((1 + 2 / 3) / (1 + 4 / 9)))  # fitted anew
    assert costs.fit([1, 2], [3.0, 1.0]) == Link(pytest.approx((1 / 3 + 1) / (1 / 9 + 1)), 0.0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([1], [1.0], "got 1 different sizes and 1 times"),
        ([8, 8], [1.0, 2.0], "got 1 different sizes and 2 times"),
        ([1, 2, 3], [1.0, 2.0], "got 3 different sizes and 2 times"),
        ([1, 2], [1.0, 0.0], "above 0 s; got 0"),
    ],
)
def test_fit_says_what_is_missing(sizes, seconds, message):
    with pytest.raises(ValueError, match=message):
        costs.fit(sizes, seconds)


def test_bandwidths_are_those_of_nccl_tests():
    assert costs.algbw(8e9, 2.0) == 4e9
    assert costs.busbw("all_reduce", 8e9, 2.0, 4) == 6e9
    for op in ("reduce_scatter", "all_gather", "all_to_all"):
        assert costs.busbw(op, 8e9, 2.0, 4) == 3e9
    for op in ("broadcast", "reduce", "send"):
        assert costs.busbw(op, 8e9, 2.0, 4) == 4e9


@pytest.mark.parametrize("n", NS)
def test_a_perfect_ring_reaches_the_bandwidth_of_its_links(n):
    free = Link(0.0, 1e-9)
    assert costs.busbw("all_reduce", MIB, costs.ring_all_reduce(MIB, n, free), n) == pytest.approx(1e9)
    assert costs.busbw("all_gather", MIB, costs.ring_all_gather(MIB, n, free), n) == pytest.approx(1e9)


def test_bytes_sent():
    per_rank = {
        "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "broadcast": 0.75,
        "reduce": 0.75, "scatter": 0.1875, "gather": 0.1875, "send": 0.25, "barrier": 0.0,
    }  # fmt: skip
    assert {op: costs.bytes_sent(op, MIB, 4) / MIB for op in per_rank} == per_rank


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: costs.busbw("allreduce", 1, 1, 4), "no formula for 'allreduce'. There are: all_reduce, "),
        (lambda: costs.bytes_sent("all_reduce", 1, 0), "at least one rank, not 0"),
        (lambda: costs.ring_all_reduce(1, 0, LINK), "at least one rank, not 0"),
        (lambda: costs.halving_doubling_all_reduce(1, 6, LINK), "2, 4, 8, ... ranks, not 6"),
        (
            lambda: costs.hierarchical_all_reduce(1, 4, 2, LINK, LINK, links=5),
            "A node of 4 ranks shares 1 to 4 links, not 5",
        ),
    ],
)
def test_what_has_no_formula(call, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        call()
