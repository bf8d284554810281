"""All ways to lay a job out over its GPUs: which are possible, which fit, which is fastest, and why not the others."""

from typing import NamedTuple

import numpy as np

from . import memory, seconds
from .layout import FULL, NONE, SELECTIVE, Job, Layout

# Why a layout is rejected, in the order in which it is asked
REASONS = (
    "tensor parallelism does not divide the heads of attention or those of keys",
    "tensor parallelism is wider than the GPUs that NVLink joins",
    "the stages, times their chunks, are more than the layers",
    "the stages, times their chunks, do not divide the layers",
    "expert parallelism does not divide the experts, or the ranks it is taken from",
    "the batch is not a multiple of the data-parallel ranks' micro-batches",
    "the micro-batches are not a multiple of the stages, which an interleaved pipeline asks for",
    "it needs more memory than a rank has",
)


class SearchResult(NamedTuple):
    """What a search found: all layouts, by how much each is possible, and the best of them."""

    layouts: Layout
    rate: np.ndarray  # tokens/s/GPU; nan for rejected layouts
    need: np.ndarray  # bytes on the fullest rank; nan where a layout is rejected for another reason
    verdict: np.ndarray  # index into REASONS, -1 for a possible layout

    def best(self, count: int = 5) -> list[tuple[float, Layout]]:
        """The fastest possible layouts, with their tokens/s/GPU: of each way to cut the model, (tp, pp, ep), one.

        Of those within half a percent the one with fewer kinds of parallelism, then the one that needs less memory.
        """
        possible = np.flatnonzero(self.verdict < 0)
        layouts, rate = self.layouts.at(possible), self.rate[possible]
        kinds = np.sum([getattr(layouts, d) > 1 for d in ("tp", "pp", "cp", "ep")], axis=0)
        chosen: dict[tuple[int, ...], int] = {}
        for k in np.lexsort((self.need[possible], kinds, -np.floor(np.log(rate) / 0.005))):
            chosen.setdefault((layouts.tp[k], layouts.pp[k], layouts.ep[k]), k)
        return [(float(rate[k]), layouts.at(k)) for k in list(chosen.values())[:count]]


def divisors(n: int) -> list[int]:
    """All divisors of n, smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(job: Job) -> Layout:
    """Every combination of degrees whose product is the number of GPUs, possible or not, as arrays.

    Left out: chunks without a pipeline, ZeRO without data parallelism, ZeRO 2 and 3 with a pipeline (they would gather
    in every micro-batch).
    """
    n, expert = int(job.n_gpus), bool(job.shape.experts)
    degrees = [
        (tp, pp, n // (tp * pp * cp), cp, ep)
        for tp in divisors(n)
        for pp in divisors(n // tp)
        for cp in divisors(n // (tp * pp)) if cp <= 16
        for ep in (divisors(n // (tp * pp)) if expert else [1])
    ]  # fmt: skip
    columns = np.array(degrees).T
    rest = np.array(np.meshgrid((1, 2, 4, 8), range(4), (NONE, SELECTIVE, FULL), (1, 2, 4))).reshape(4, -1)
    tp, pp, dp, cp, ep = np.repeat(columns, rest.shape[1], axis=1)
    micro, zero, policy, woven = np.tile(rest, columns.shape[1])
    keep = (woven == 1) | (pp > 1)
    keep &= (zero <= 1) & (pp > 1) | (pp == 1) & ((zero == 1) | (dp * cp > 1))
    keep &= (policy != SELECTIVE) | (not job.flash)
    return Layout(tp, pp, dp, cp, ep, 1, woven, micro, zero, policy, job.stack.sequence_parallel).at(keep)


def search(job: Job, among: Layout | None = None) -> SearchResult:
    """All layouts of `among` (by default of `layouts(job)`) judged and timed."""
    among = layouts(job) if among is None else among
    s, m = job.shape, job.batch / (among.dp * among.micro_batch)
    heads = s.heads % among.tp != 0
    keys = np.maximum(s.kv_heads, among.tp) % np.minimum(s.kv_heads, among.tp) != 0
    cut = among.pp * among.chunks
    taken = (max(1, s.experts) % among.ep != 0) | (among.dp * among.cp * among.tp % among.ep != 0)
    wrong = (
        heads | keys,
        among.tp > job.chip.node,
        cut > s.layers,
        (s.layers % cut != 0) & (among.chunks > 1),
        (among.ep > 1) & taken,
        (m < 1) | (np.floor(m) != m),
        (among.chunks > 1) & (m % among.pp != 0),
    )
    verdict = np.select(wrong, range(len(wrong)), -1)  # the first that holds
    need, rate = np.full(len(verdict), np.nan), np.full(len(verdict), np.nan)
    left = np.flatnonzero(verdict < 0)  # only what is possible is worth computing
    need[left] = memory.fullest(job, among.at(left))
    verdict[left[need[left] > memory.limit(job)]] = len(REASONS) - 1
    left = np.flatnonzero(verdict < 0)
    rate[left] = job.batch * job.seq / job.n_gpus / seconds.step(job, among.at(left)).total
    return SearchResult(among, rate, need, verdict)
