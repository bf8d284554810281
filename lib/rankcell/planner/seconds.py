"""How long a step takes: computation of one micro-batch, what is exposed of the communication, the bubble. The rate of
matrix products is the one constant per GPU and number format. Attention runs at a share of the peak, what is between
these products at the speed of the memory, and no layer is faster than its kernels can be launched.
"""

from typing import Any, NamedTuple

import numpy as np

from . import communication
from .layout import FULL, SELECTIVE, ZB_2P, ZB_V, ZERO_BUBBLE, Job, Layout
from .memory import MIDDLE, kept_per_token, layers_on, params_on
from .stacks import efficiency


class Step(NamedTuple):
    """Seconds of one step on the slowest rank, by what they are spent on; they add up to `total`."""

    matmul: Any
    attention: Any
    elementwise: Any
    head: Any
    recomputed: Any
    launch: Any
    tensor: Any
    context: Any
    expert: Any
    pipeline: Any
    bubble: Any
    data: Any
    optimizer: Any

    @property
    def total(self) -> Any:
        """Seconds of the whole step."""
        return sum(self)


def idle(schedule: Any, p: Any, forward: Any, inputs: Any, weights: Any, chunks: Any = 1) -> Any:
    """Seconds that a rank of a pipeline of `p` ranks idles per step, by its schedule.

    `forward`, `inputs`, `weights`: seconds of a micro-batch's forward and the two halves of its backward on one
    rank. Qi et al., https://arxiv.org/abs/2401.10241, table 2 (2023), whose B is our I.
    """
    whole = (p - 1) * (forward + inputs + weights) / chunks
    halves = (p - 1) * (forward + inputs - weights)
    cases = [schedule == ZERO_BUBBLE, schedule == ZB_2P, schedule == ZB_V]
    return np.select(cases, [halves, (p - 1) * (forward + inputs - 2 * weights), halves / 2], whole)


def layer(job: Job, layout: Layout, rate: tuple[Any, Any]) -> tuple[Any, ...]:
    """Seconds of the mean layer, one micro-batch: matmul, attention, elementwise, recomputed, launch.

    Matrix products: 6 operations per active parameter and token, and every parameter of the rank crosses the memory:
    read twice, 2 bytes, its gradient written once. Scores and values: 12 s w over the whole square, half of it where
    attention is flash and causal, which computes the forward once more in its backward: 3.5 times a forward instead of
    3. It reaches the same share of the peak on A100 and H100, 73 and 75 %, and in fp8 1.2 instead of 0.74 PFLOP/s
    (https://arxiv.org/abs/2407.08608). Between them the bytes that are kept cross the memory `Stack.passes` times.
    """
    s, stack, chip, tokens = job.shape, job.stack, job.chip, layout.tokens(job)
    narrow, wide = rate
    own = s.dense_layer_params / layout.tp + s.expert_layer_params / (layout.ep * layout.etp)
    matmul = 6 * s.active_layer_params * tokens / layout.tp / narrow + (4 + stack.gradient_bytes) * own / chip.hbm
    share = stack.attention * (0.5 if stack.ampere_attention and "fp8" in chip.peaks else 1.0)
    share = share * (1.2 / 0.74 if job.fp8_attention else 1.0)
    square = 4 * job.seq * s.width * tokens / layout.tp  # operations of the forward; not flash: as a matrix product
    inside = square * np.where(job.flash, 0.5 / share / chip.peak("bf16"), 1 / wide)
    attention = inside * np.where(job.flash, 3.5, 3)
    elementwise = stack.passes * kept_per_token(job, layout) * tokens / chip.hbm

    forward = matmul / 3 + inside + elementwise / 3
    partly = stack.selective_again * forward + np.where(job.flash, 0, inside)
    again = np.where(layout.recompute == FULL, forward, np.where(layout.recompute == SELECTIVE, partly, 0))
    parts = [stack.slowdown * part for part in (matmul, attention, elementwise, again)]
    return *parts, waiting(job, layout, sum(parts))


def waiting(job: Job, layout: Layout, busy: Any) -> Any:
    """Seconds that a GPU waits for its next kernel, per layer and micro-batch: `busy` is what the kernels take.

    The host needs half of `Stack.floor` for the forward, half for the backward, and the forward's once more if it is
    recomputed. What it gains while the GPU is busy in the backward does not help the next forward: about a thousand
    launches may wait in a stream, those of some ten layers. Sends come on top: in them ranks wait for the latest host.
    """
    again = layout.recompute == FULL
    half = job.stack.floor / 2 * np.where(job.shape.moe_layers > 0, job.stack.moe_launches, 1)
    forward = busy / np.where(again, 4, 3)
    return np.maximum(0, half - forward) + np.maximum(0, half * np.where(again, 2, 1) - (busy - forward))


def optimizer_seconds(job: Job, layout: Layout) -> Any:
    """Adam's traffic, per parameter that a rank updates: reads and writes 4-byte weights and both moments (24 bytes),
    reads the gradient (4), writes 16-bit weights and clears the gradient (6).
    """
    dense, experts = params_on(job, layout, 0 * layout.pp)
    shards = np.where(layout.zero >= 1, layout.dp * layout.cp, 1)
    shards_of_experts = np.where(layout.zero >= 1, np.maximum(1, shards * layout.tp / layout.ep), 1)
    return 34 * (dense / shards + experts / shards_of_experts) / job.chip.hbm


def step(job: Job, layout: Layout, *, rate: tuple[Any, Any] | None = None) -> Step:
    """Seconds of one step, on the slowest stage.

    `rate`: FLOP/s of matrix products in the format of the job, and in 16 bits, which attention and the head keep.
    """
    stack, chip, m = job.stack, job.chip, layout.microbatches(job)
    narrow, wide = rate or (chip.peak(f) * efficiency(chip, f) for f in (job.number_format, "bf16"))
    one = matmul, attention, elementwise, again, launch = layer(job, layout, (narrow, wide))
    # the head and the loss: what is kept of a logit crosses the memory half as often as what a layer keeps
    logits = layout.tokens(job) * job.shape.vocab / layout.tp
    traffic = stack.passes * stack.logit_bytes / 2 * logits / job.chip.hbm
    head = stack.slowdown * (6 * job.shape.hidden * logits / wide + traffic)
    # the last stage has the head, those before it may have more layers
    middle, last = layers_on(job, layout, MIDDLE), layers_on(job, layout, layout.pp - 1)
    before = middle * sum(one) > last * sum(one) + head
    layers, head = np.where(before, middle, last), np.where(before, 0, head)

    sent = {kind: found(job, layout) for kind, found in communication.KINDS.items()}
    hidden = attention * m * job.shape.layers / layout.pp
    tensor = (1 - stack.overlap_tp) * sent["tensor"].seconds
    context = np.maximum(0, sent["context"].seconds - hidden)  # behind attention on the block that is there
    expert = (1 - stack.overlap_ep) * sent["expert"].seconds
    pipeline = sent["pipeline"].seconds * np.where(np.asarray(layout.chunks) > 1, 0.5, 1)
    busy = m * (layers * sum(one) + head) + tensor + context + expert + pipeline
    third = busy / m / 3  # forward and both halves of the backward take about equally long
    bubble = idle(layout.schedule, layout.pp, third, third, third, layout.chunks)

    # the gradients of the last micro-batch wait for nothing; ZeRO-2 and 3 have all micro-batches to hide behind
    window = np.where(layout.zero >= 2, busy, busy / m)
    data = sent["data"].seconds - np.minimum(stack.overlap_dp * sent["data"].seconds, window)
    n = m * layers
    return Step(
        n * matmul, n * attention, n * elementwise, m * head, n * again, n * launch,
        tensor, context, expert, pipeline, bubble, data, optimizer_seconds(job, layout),
    )  # fmt: skip
