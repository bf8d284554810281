"""What communication costs by the latency-bandwidth model: a message of S bytes takes alpha + beta * S. Sends and
collectives as formulas in seconds; the line through measured times; algorithm and bus bandwidth as nccl-tests defines
them. S (`nbytes`) is always the whole array: what a rank holds before a reduce-scatter or all-reduce and after an
all-gather. The model knows no contention, no time to add numbers, no protocols, and no cores that ranks share.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# From https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, section Summary, 2026-02.
# n ranks -> bus bandwidth over algorithm bandwidth.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send"), lambda n: 1.0),
}
# Bytes that a rank sends, mean over the ranks, over the whole array: every byte crosses as rarely as it can.
_SENT: dict[str, Callable[[int], float]] = {
    **_BUS,
    **dict.fromkeys(("broadcast", "reduce"), lambda n: (n - 1) / n),
    **dict.fromkeys(("scatter", "gather"), lambda n: (n - 1) / n**2),
    "send": lambda n: 1 / n,
    "barrier": lambda n: 0.0,
}


class Link(NamedTuple):
    """A way from rank to rank: `alpha` seconds per message, `beta` seconds per byte.

    R. W. Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994.

    >>> Link(alpha=50e-6, beta=1e-9).send(1_000_000)  # 50 us + 1 MB at 1 GB/s
    0.00105
    """

    alpha: float
    beta: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a very long message reaches."""
        return 1 / self.beta if self.beta else math.inf

    def send(self, nbytes: float) -> float:
        """Seconds for one message of `nbytes`."""
        return self.alpha + self.beta * nbytes


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link whose line alpha + beta * size is nearest to measured times, none of it negative.

    Least squares of the relative error, so that 100 us at 64 B count as much as 100 ms at 64 MiB.
    """
    s, t = np.array(sizes, dtype=float), np.array(seconds, dtype=float)
    if len(s) != len(t) or len(set(sizes)) < 2 or not (t > 0).all():
        got = f"{len(set(sizes))} different sizes and {len(t)} times, the least of them {min(seconds):g} s"
        raise ValueError(f"A line needs at least two different sizes, each with a time above 0 s; got {got}.")
    beta, alpha = (float(x) for x in np.polyfit(s, t, 1, w=1 / t))
    if alpha < 0:
        return Link(0.0, float(sum(s / t) / sum((s / t) ** 2)))
    return Link(alpha, beta) if beta >= 0 else Link(float(sum(1 / t) / sum(1 / t**2)), 0.0)


def algbw(nbytes: float, seconds: float) -> float:
    """Algorithm bandwidth, bytes per second: S / t with S the whole array."""
    return nbytes / seconds


def busbw(op: str, nbytes: float, seconds: float, n: int) -> float:
    """Bus bandwidth on `n` ranks, bytes per second: comparable with the speed of a link, whatever `n` is.

    >>> busbw("all_reduce", 4e9, 1.0, 4) / 1e9  # 2 * (4 - 1) / 4 = 1.5 times the algorithm bandwidth
    6.0
    """
    return algbw(nbytes, seconds) * _factor(_BUS, op, n)


def bytes_sent(op: str, nbytes: float, n: int) -> float:
    """Bytes that each of `n` ranks sends, mean over the ranks, if no byte crosses more often than needed.

    For a send, one of the ranks sends `nbytes`.
    """
    return nbytes * _factor(_SENT, op, n)


def _factor(table: dict[str, Callable[[int], float]], op: str, n: int) -> float:
    if op not in table:
        raise ValueError(f"There is no formula for {op!r}. There are: {', '.join(table)}.")
    if n < 1:
        raise ValueError(f"A group has at least one rank, not {n}.")
    return table[op](n)


# P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009,
# https://doi.org/10.1016/j.jpdc.2008.09.002: no all-reduce moves fewer bytes per rank.
def ring_all_reduce(nbytes: float, n: int, link: Link) -> float:
    """Seconds for a ring reduce-scatter and then a ring all-gather, n - 1 steps each: 2 (n-1) alpha + 2 (n-1)/n beta S.

    In each step every rank passes on one n-th of the array.
    """
    return 2 * (n - 1) * link.send(nbytes / n)


# R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, 2005,
# https://doi.org/10.1177/1094342005051521, without the time to add numbers.
def tree_all_reduce(nbytes: float, n: int, link: Link) -> float:
    """Seconds for a sum up a binomial tree and a broadcast down: 2 log2 n (alpha + beta S).

    In each of the steps every rank that has the array sends all of it.
    """
    return 2 * (n - 1).bit_length() * link.send(nbytes)


def hierarchical_all_reduce(
    nbytes: float, per_node: int, nodes: int, inside: Link, across: Link, *, links: int = 1
) -> float:
    """Seconds for a reduce-scatter inside each node, an all-reduce of each part across, an all-gather inside.

    All local ranks go across at the same time: they share the `links` links of speed `across` of their node (one
    network card per GPU: `links=per_node`).
    """
    shared = Link(across.alpha, across.beta * per_node / links)
    return ring_all_reduce(nbytes, per_node, inside) + ring_all_reduce(nbytes / per_node, nodes, shared)
