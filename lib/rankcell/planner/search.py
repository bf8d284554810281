"""All ways to lay a job out over its GPUs: which are possible, which fit, which is fastest, and why not the others.

Everything is computed for all layouts at once, as arrays.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import memory, seconds
from .layout import RECOMPUTE, SELECTIVE, Job, Layout
from .memory import StageMemory
from .seconds import Step

# Why a layout is rejected, in the order in which it is asked. Each is a whole sentence about one layout.
REASONS = (
    "tensor parallelism {tp} does not divide the {heads} heads of attention or the {kv} heads of keys",
    "tensor parallelism {tp} is wider than the {node} GPUs that NVLink joins",
    "{pp} pipeline stages of {chunks} chunks are more than the {layers} layers",
    "{pp} stages of {chunks} chunks do not divide the {layers} layers",
    "expert parallelism {ep} does not divide the {experts} experts, or the {dp} x {cp} ranks it is taken from",
    "the batch of {batch:g} sequences is not a multiple of {dp} data-parallel ranks x {micro_batch} sequences",
    "{m:g} micro-batches are not a multiple of the {pp} stages, which an interleaved pipeline asks for",
    "it needs {need:.0f} GB and a rank has {have:.0f} GB",
)


@dataclass(frozen=True)
class Candidate:
    """One possible layout: seconds of its step by part, bytes of its fullest stage by part, the rate."""

    layout: Layout
    step: Step
    memory: StageMemory
    tokens_per_s_per_gpu: float
    mfu: float

    @property
    def why(self) -> str:
        """What the time goes to besides the model's own operations, largest first."""
        own = ("matmul", "attention", "head")
        parts = {k: float(v) for k, v in self.step._asdict().items() if k not in own}
        total = float(self.step.total)
        large = sorted(((v / total, k) for k, v in parts.items() if v > 0.015 * total), reverse=True)
        return ", ".join(f"{k} {share:.0%}" for share, k in large[:4]) or "nothing but the model's operations"


@dataclass(frozen=True)
class SearchResult:
    """What a search found: all layouts, by how much each is possible, and the best of them."""

    job: Job
    layouts: Layout
    rate: np.ndarray  # tokens/s/GPU; nan for rejected layouts
    need: np.ndarray  # bytes on the fullest rank; nan where a layout is rejected for another reason
    verdict: np.ndarray  # index into REASONS, -1 for a possible layout

    def __len__(self) -> int:
        return len(self.verdict)

    @cached_property
    def order(self) -> np.ndarray:
        """Indices of the possible layouts, fastest first.

        Of those within half a percent the one with fewer kinds of parallelism, then the one that needs less memory.
        """
        possible = np.flatnonzero(self.verdict < 0)
        layouts = self.layouts.at(possible)
        kinds = np.sum([getattr(layouts, d) > 1 for d in ("tp", "pp", "cp", "ep")], axis=0)
        steps = np.floor(np.log(self.rate[possible]) / 0.005)
        return possible[np.lexsort((self.need[possible], kinds, -steps))]

    def best(self, count: int = 5) -> list[Candidate]:
        """The fastest possible layouts: of each way to cut the model, (tp, pp, ep), the first in `order`."""
        chosen: dict[tuple[int, ...], int] = {}
        degrees = np.stack([getattr(self.layouts, d) for d in ("tp", "pp", "ep")], axis=1)
        for index in self.order:
            chosen.setdefault(tuple(degrees[index].tolist()), int(index))
            if len(chosen) == count:
                break
        return [self.choice(index) for index in chosen.values()]

    def choice(self, index: int) -> Candidate:
        """The layout at `index`, in full."""
        layout = self.layouts.at(index)
        step = Step(*(float(part) for part in seconds.step(self.job, layout)))
        stages = [memory.on_stage(self.job, layout, s) for s in range(int(layout.pp))]
        fullest = max(stages, key=lambda m: float(m.total))
        rate = float(self.rate[index])
        whole, mfu = StageMemory(*(float(part) for part in fullest)), float(seconds.mfu(self.job, rate))
        return Candidate(layout, step, whole, rate, mfu)

    def reason(self, index: int) -> str:
        """Why the layout at `index` is rejected, as a sentence; "" for a possible one."""
        if self.verdict[index] < 0:
            return ""
        layout, shape = self.layouts.at(index), self.job.shape
        return REASONS[self.verdict[index]].format(
            tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp, ep=layout.ep, chunks=layout.chunks,
            micro_batch=layout.micro_batch, m=float(layout.microbatches(self.job)), heads=shape.heads,
            kv=shape.kv_heads, layers=shape.layers, experts=shape.experts, batch=self.job.batch,
            node=self.job.chip.node, need=self.need[index] / 1e9, have=memory.limit(self.job) / 1e9,
        )  # fmt: skip

    def counts(self) -> dict[int, int]:
        """How many layouts each of REASONS rejects, by its number; only of those that reject any."""
        numbers, counts = np.unique(self.verdict[self.verdict >= 0], return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def divisors(n: int) -> list[int]:
    """All divisors of n, smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


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
    choices = np.meshgrid((1, 2, 4, 8), range(4), range(len(RECOMPUTE)), (1, 2, 4))
    rest = np.array(choices).reshape(4, -1)
    tp, pp, dp, cp, ep = np.repeat(columns, rest.shape[1], axis=1)
    micro, zero, policy, woven = np.tile(rest, columns.shape[1])
    flash = bool(job.flash)
    keep = (woven == 1) | (pp > 1)
    keep &= (zero <= 1) & (pp > 1) | (pp == 1) & ((zero == 1) | (dp * cp > 1))
    keep &= (policy != SELECTIVE) | np.array(not flash)
    found = Layout(tp, pp, dp, cp, ep, 1, woven, micro, zero, policy, job.stack.sequence_parallel)
    return found.at(keep)


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
    verdict = np.full(len(among.tp), -1)
    for k in reversed(range(len(wrong))):
        verdict[wrong[k]] = k
    need, rate = np.full(len(verdict), np.nan), np.full(len(verdict), np.nan)
    left = np.flatnonzero(verdict < 0)  # only what is possible is worth computing
    need[left] = memory.fullest(job, among.at(left))
    verdict[left[need[left] > memory.limit(job)]] = len(REASONS) - 1
    left = np.flatnonzero(verdict < 0)
    possible = among.at(left)
    rate[left] = seconds.tokens_per_second_per_gpu(job, possible, seconds.step(job, possible).total)
    return SearchResult(job, among, rate, need, verdict)
