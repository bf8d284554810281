"""Bytes that a GPU holds while it trains: parameters, gradients, optimizer, activations, logits, workspace. ZeRO:
Rajbhandari et al., https://arxiv.org/abs/1910.02054, section 3 (2019). Activations: Korthikanti et al.,
https://arxiv.org/abs/2205.05198, table 2 (2022), generalised to grouped queries, gated MLPs and experts.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .layout import FULL, GPIPE, NONE, SELECTIVE, ZB_2P, Job, Layout

MIDDLE = -1  # a stage that is neither the first nor the last


class StageMemory(NamedTuple):
    """Bytes on one rank at the fullest moment, by what they are for."""

    weights: Any
    gradients: Any
    optimizer: Any
    activations: Any
    logits: Any
    workspace: Any

    @property
    def states(self) -> Any:
        """Bytes that stay from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> Any:
        """Bytes altogether."""
        return self.states + self.activations + self.logits + self.workspace


def kept_per_token(
    job: Job, layout: Layout, *, recompute: Any = NONE, masks: Any = False, norm_copies: Any = 0, product_bytes: Any = 2
) -> Any:
    """Bytes that the forward of one mean layer keeps, per token of the micro-batch, on one rank.

    Divided by tp: queries, keys, values, what attention gives, the inside of the MLP, and the square of attention (5
    bytes an element: softmax, dropout and its mask) unless attention is flash or its inside is recomputed. Divided with
    sequence parallelism only: the inputs of both norms and of both halves, and `masks` of dropout. `norm_copies`:
    further 16-bit copies around the norms. `product_bytes`: bytes per element of what matrix products keep; 1 in fp8.
    """
    s, shard, p = job.shape, layout.shard(), product_bytes
    between = 2 * (2 + p) * s.hidden + 2 * s.hidden * masks + 2 * norm_copies * s.hidden
    # queries, keys, values, and the input of the projection
    attention = 2 * (s.width + 2 * s.kv_width) + p * s.width
    share = s.moe_layers / s.layers
    inner = (1 - share) * s.ffn + share * (s.top_k * s.expert_ffn + s.shared_ffn)
    # without a gate: the input of the nonlinearity and what it gives; with one: two inputs and their product
    mlp = inner * np.where(s.gated, 4 + p, 2 + p)
    # the copy of a token at each of its experts, and its answer
    routed = share * s.top_k * (p + 2) * s.hidden
    square = np.where(np.logical_or(job.flash, recompute != NONE), 0, 5 * s.heads * (job.seq / layout.cp))
    kept = between / shard + (attention + mlp + square) / layout.tp + routed
    return np.where(recompute == FULL, 2 * s.hidden / shard, kept)


def in_flight(job: Job, layout: Layout, stage: Any) -> Any:
    """How many micro-batches' activations of its share of the layers stage `stage` holds at most.

    1F1B: p - s of them. Interleaved: 1 + (p-1)/(p v) times p on the first (Korthikanti et al., section 4.2.3).
    GPipe: all. Zero bubble with twice the memory: 2 (p - s) - 1 (Qi et al., table 2). Never more than there are.
    """
    p, v, m = layout.pp, layout.chunks, layout.microbatches(job)
    plain = p - stage
    woven = (2 * (p - stage - 1) + (v - 1) * p + 1) / v
    held = np.where(np.asarray(v) > 1, woven, plain)
    held = np.where(layout.schedule == ZB_2P, 2 * plain - 1, held)
    return np.where(layout.schedule == GPIPE, m, np.minimum(held, m))


def layers_on(job: Job, layout: Layout, stage: Any) -> Any:
    """How many layers a stage has, by the stack's way to cut (`Stack.split`), rounded up; MIDDLE is neither end.

    "by work": the last stage has as many fewer as the head has operations. "short ends": the first and the last stage
    have one layer fewer, for the embedding and the head.
    """
    s, p, split = job.shape, layout.pp, job.stack.split
    is_last = np.asarray(stage == p - 1)
    is_end = np.logical_or(is_last, np.asarray(stage) == 0)
    if split == "by work":
        head = s.embedding_params / s.active_layer_params
        last = np.clip(np.round((s.layers + head) / p - head), 0, s.layers)
        cut = np.where(is_last, last, np.ceil((s.layers - last) / np.maximum(1, p - 1)))
    elif split == "short ends":
        cut = np.ceil((s.layers + 2) / p) - np.where(np.logical_or(is_end, np.asarray(p) == 2), 1, 0)
    else:
        cut = np.ceil(s.layers / p)
    return np.where(np.asarray(p) > 1, cut, s.layers)


def params_on(job: Job, layout: Layout, stage: Any) -> tuple[Any, Any]:
    """Parameters on one rank of a stage: what data parallelism replicates, and the experts."""
    s = job.shape
    first, last = stage == 0, stage == layout.pp - 1
    both = np.logical_and(first, last)
    tables = np.where(both, 2 - 1 * s.tied, 1 * np.logical_or(first, last)) * s.embedding_params
    layers = layers_on(job, layout, stage)
    dense = (layers * s.dense_layer_params + tables) / layout.tp
    experts = layers * s.expert_layer_params / (layout.ep * layout.etp)
    return dense, experts


def on_stage(job: Job, layout: Layout, stage: Any) -> StageMemory:
    """What a rank of pipeline stage `stage` holds at most, from 0."""
    stack, z = job.stack, layout.zero
    dense, experts = params_on(job, layout, stage)
    ranks = layout.dp * layout.cp
    ranks_of_experts = np.maximum(1, ranks * layout.tp / (layout.ep * layout.etp))

    def spread(nbytes: Any, from_stage: int) -> Any:
        sharded = dense / ranks + experts / ranks_of_experts
        return nbytes * np.where(z >= from_stage, sharded, dense + experts)

    whole = layers_on(job, layout, stage)
    gathered = np.where(z >= 3, 2 * (dense + experts) * np.minimum(1, 3 / np.maximum(1, whole)), 0)
    weights = np.where(z >= 3, 0, stack.weight_bytes) * (dense + experts) + gathered
    optimizer = spread(stack.optimizer_bytes, 1)
    gradients = spread(np.where(z >= 3, 4, stack.gradient_bytes), 2)
    tokens, held = layout.tokens(job), in_flight(job, layout, stage)
    how = {"masks": stack.masks, "norm_copies": stack.norm_copies}
    narrow = job.number_format in ("fp8", "fp4")
    kept = partial(kept_per_token, job, layout, product_bytes=1 if narrow else 2, **how)
    layer = kept(recompute=layout.recompute)
    gathered_whole = np.logical_and(layout.recompute != FULL, np.asarray(layout.tp) > 1)
    layer = layer + stack.kept_whole * job.shape.hidden * gathered_whole
    layer = layer * np.where(layout.recompute == SELECTIVE, stack.selective_kept, 1)
    again = np.where(layout.recompute == FULL, kept(recompute=NONE), 0)  # the one layer that is being computed again
    activations = tokens * (whole * held * layer + again)
    logits = (stage == layout.pp - 1) * stack.logit_bytes * tokens * job.shape.vocab / layout.tp
    return StageMemory(weights, gradients, optimizer, activations, logits, stack.workspace + 0 * tokens)


def fullest(job: Job, layout: Layout) -> Any:
    """Bytes on the rank that holds most: one of the first two stages, which hold most activations, or of the last."""
    stages = (0 * layout.pp, np.minimum(1, layout.pp - 1), layout.pp - 1)
    return np.maximum.reduce([on_stage(job, layout, s).total for s in stages])


def limit(job: Job) -> Any:
    """Bytes that torch can hand out on the GPU: the driver, NCCL and the allocator's gaps take the `headroom`."""
    return job.chip.memory_bytes * (1 - job.stack.headroom)
