"""Experts: which of several MLPs each token uses, and on which ranks they are. Lesson 18 sends the tokens there."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from . import group


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one rank go. T tokens, k choices each, E experts, W ranks."""

    experts: Tensor  # (T, k) the experts that each token chose, best first
    weights: Tensor  # (T, k) what their outputs are multiplied by
    kept: Tensor  # (T, k) False where the expert was full: that choice adds nothing to the token's output
    load: Tensor  # (E,) how many choices fell on each expert, of all ranks' tokens, dropped ones included
    counts: Tensor  # (W, E) how many rows each rank sends to each expert, dropped ones left out
    balance_loss: Tensor  # this rank's share of the load-balance loss; the shares of all ranks add up to it

    @property
    def dropped(self) -> int:
        """How many choices of this rank's tokens were dropped."""
        return int((~self.kept).sum())


def route(
    logits: Tensor,
    k: int = 1,
    *,
    capacity_factor: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> Routing:
    """Where this rank's tokens go, from the router's `logits`, `(T, E)`: to the k most probable experts.

    Of equal probabilities the lower expert wins. With k = 1 the weight is the probability itself: through it the router
    learns. With more, the k weights are made to sum to 1. The ranks tell each other k * E counts, so that all know who
    sends how much and what is full. An expert takes `capacity_factor` times its fair share (None: all) and drops what
    comes last: all first choices come before all second choices, and within them tokens in the order of the ranks.
    `alone` needs no process group.
    """
    n_experts = logits.shape[1]
    if not 1 <= k <= n_experts:
        raise ValueError(f"A token cannot choose {k} of {n_experts} experts. Choose k from 1 to {n_experts}.")
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(f"A capacity factor of {capacity_factor:g} lets no token in. Give one above 0.")
    probabilities = logits.softmax(-1)
    experts = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = probabilities.gather(1, experts)
    if k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    picked = torch.stack([experts[:, j, None] == torch.arange(n_experts, device=logits.device) for j in range(k)])
    mine = picked.sum(1)  # (k, E) how many of this rank's tokens have the expert as choice j
    if alone:
        rank, everyone = 0, mine[None]
    else:
        rank, world_size = group.place(process_group, "these experts", use="call them")
        everyone = torch.empty(world_size, *mine.shape, dtype=mine.dtype, device=mine.device)
        dist.all_gather_single(everyone.view(-1, n_experts), mine, group=process_group)
    queue = everyone.transpose(0, 1).flatten(0, 1)  # (k * W, E) in the order in which experts fill up
    before = (queue.cumsum(0) - queue).view(k, -1, n_experts)  # (k, W, E) how many stand before these
    load = everyone.sum((0, 1))
    limit = int(load.sum())  # none
    if capacity_factor is not None:
        # https://arxiv.org/abs/2101.03961, equation 3, rounded up: times the fair share of the choices
        limit = math.ceil(capacity_factor * k * int(everyone[:, 0].sum()) / n_experts)
    place = before[:, rank, None] + picked.cumsum(1) - 1  # (k, T, E)
    kept = (place.gather(2, experts.T[..., None])[..., 0] < limit).T
    counts = torch.minimum((limit - before).clamp(min=0), everyone.transpose(0, 1)).sum(0)
    # E * sum over experts of f * P, which is 1 where all experts are used alike. f is the share of all k choices that
    # fell on the expert, a constant; P is its mean probability; both over the tokens of all ranks. Equations 4 to 6
    # of the same paper (Switch Transformer, 2021), without its factor alpha.
    n_tokens = (load.sum() / k).clamp(min=1).to(probabilities)
    f = load.to(probabilities) / (k * n_tokens)
    balance_loss = n_experts * (f * probabilities.sum(0) / n_tokens).sum()
    return Routing(experts, weights, kept, load, counts, balance_loss)
