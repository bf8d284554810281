"""Context parallelism: a GPT or Llama on sequences that ranks share, over the attentions of `parallel.attention`.

What it does not do: it broadcasts nothing, so ranks must start from equal parameters.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import models
from ..models import rotate
from . import group
from .attention import (
    LAYOUTS,
    OnlineSoftmax,
    all_to_all_attention,
    block_backward,
    bytes_sent,
    check_layout,
    pieces,
    place,
    positions,
    ring_attention,
    split,
)  # fmt: skip

__all__ = [
    "LAYOUTS", "ContextAttention", "ContextParallel", "OnlineSoftmax", "all_to_all_attention", "block_backward",
    "bytes_sent", "pieces", "positions", "ring_attention", "share_of_mean", "split", "sum_gradients",
]  # fmt: skip

# Losses and gradients


def share_of_mean(losses: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's share of the mean of all ranks' `losses`: their sum, over how many there are on all ranks.

    The shares of all ranks *add up* to the mean, and so do their gradients. It stays right where ranks have
    different numbers of losses, for example where some tokens do not count. Sends one number.
    """
    count = torch.tensor(float(losses.numel()), dtype=torch.float64, device=losses.device)
    dist.all_reduce(count, group=process_group)
    return losses.sum() / count.to(losses.dtype)


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[nn.Parameter], *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Replace the gradients of parameters that every rank of the group holds by their sum over the group.

    One all-reduce per dtype. A parameter that this rank did not use counts as zero; all ranks must give the
    same parameters.
    """
    trained = list(dict.fromkeys(p for p in parameters if p.requires_grad))  # a tied weight once
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    group.all_reduce_together([p.grad for p in trained if p.grad is not None], process_group)


# A model


class ContextAttention(nn.Module):
    """The layers of a dense attention (`query`, `key`, `value`, `output`), attending over all ranks.

    `(batch, length / W, d_model)` -> the same shape. The layers are the very ones of `dense`, under the same
    names.

    Args:
        attend: `ring_attention` or `all_to_all_attention` with its options filled in but for `documents`.
        positions: gives the positions of a rank that holds so many of them, for an attention that rotates.
    """

    def __init__(
        self,
        dense: models.Attention,
        attend: Callable[..., Tensor],
        positions: Callable[[int], Tensor] | None,
    ) -> None:
        super().__init__()
        if dense.dropout.p:
            raise ValueError(
                f"The attention has dropout {dense.dropout.p} on its weights, which no rank holds together. "
                f"Build the model with dropout=0."
            )
        self.query, self.key, self.value, self.output = dense.query, dense.key, dense.value, dense.output
        self.d_head, self.rope_base = dense.d_head, dense.rope_base
        self.attend, self.positions = attend, positions

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """What the dense attention computes for this rank's positions."""
        layers = self.query, self.key, self.value
        query, key, value = (f(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for f in layers)
        if self.rope_base is not None and self.positions is not None:
            places = self.positions(x.shape[-2]).to(x.device)  # before they travel: each rank knows its own
            query, key = (rotate(t, places, base=self.rope_base) for t in (query, key))
        mixed = self.attend(query, key, value, documents=documents)
        return self.output(mixed.transpose(1, 2).flatten(2))


class ContextParallel(nn.Module):
    """A GPT or Llama on sequences that are shared by the ranks of a group; every rank holds all parameters.

        model = ContextParallel(gpt)
        logits = model(model.split(tokens))            # this rank's positions only
        losses = F.cross_entropy(logits.flatten(0, 1), model.split(targets).flatten(), reduction="none")
        model.share_of_mean(losses).backward()
        model.finish_gradient_synchronization()        # sums the gradients over the group
        optimizer.step()

    Everything but attention treats each position on its own, so only attention communicates in the forward.
    The attentions in `module.blocks` are replaced, their layers are kept: names and weights stay.

    Args:
        method: "ring" or "all_to_all".
        layout: "zigzag" or "contiguous".
    """

    def __init__(
        self,
        module: models.Decoder,
        *,
        method: str = "ring",
        layout: str = "zigzag",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        methods: dict[str, Callable[..., Tensor]] = {
            "ring": ring_attention,
            "all_to_all": all_to_all_attention,
        }
        if method not in methods:
            raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(methods)}.")
        check_layout(layout)
        self.module, self.layout = module, layout
        self.process_group = process_group or dist.group.WORLD
        self.rank, self.world_size = place(self.process_group)
        attend = partial(methods[method], layout=layout, process_group=self.process_group)
        for block in module.blocks:
            block.attention = ContextAttention(block.attention, attend, self.positions)

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of a whole sequence that every rank has."""
        return split(x, self.world_size, dim=dim, layout=self.layout)[self.rank]

    def positions(self, local_length: int) -> Tensor:
        """The positions of the whole sequence that this rank holds, if each rank has so many."""
        return positions(local_length * self.world_size, self.rank, self.world_size, layout=self.layout)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits `(batch, length / W, vocab)` of this rank's tokens `(batch, length / W)`.

        With `documents`, of the same shape, a position sees its own document only.
        """
        length = tokens.shape[-1] * self.world_size
        if length > self.module.context:
            raise ValueError(
                f"{length} tokens on all ranks are more than the context of {self.module.context}. "
                f"Cut the sequence."
            )
        x = self.module.embed(tokens, self.positions(tokens.shape[-1]).to(tokens.device))
        for block in self.module.blocks:
            x = block(x, documents=documents)
        return self.module.unembed(x)

    def share_of_mean(self, losses: Tensor) -> Tensor:
        """This rank's share of the mean loss of all ranks' tokens; the shares add up to it."""
        return share_of_mean(losses, process_group=self.process_group)

    def finish_gradient_synchronization(self) -> None:
        """After backward: every rank has the gradients of the whole mean loss."""
        sum_gradients(self.module.parameters(), process_group=self.process_group)
