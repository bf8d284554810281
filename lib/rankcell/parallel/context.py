"""Context parallelism: causal attention over a sequence of which every rank holds a part, and a model on it.

The ring has no fused kernel and sends blocks to ranks that will not look at them. All ranks need equally many
positions, and must start from equal parameters.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import models
from ..models import repeat_heads, rotate
from . import group


def pieces(rank: int, world_size: int, *, layout: str = "zigzag") -> tuple[int, ...]:
    """Which equal pieces of the sequence a rank holds, in the order in which it holds them.

    Rank 1 of 4 holds piece 1 of 4 if they are contiguous; zigzag, 1 and 6 of 8: an early one, a late one for balance.
    """
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"There is no layout {layout!r}. Choose one of contiguous, zigzag.")
    return (rank,) if layout == "contiguous" else (rank, 2 * world_size - 1 - rank)


def positions(length: int, rank: int, world_size: int, *, layout: str = "zigzag") -> Tensor:
    """The positions of the sequence that a rank holds, `(length / world_size,)`; 2, 3, 4, 5 if (8, 1, 2) is given."""
    size, mine = length // _count(length, world_size, layout), pieces(rank, world_size, layout=layout)
    return torch.cat([torch.arange(p * size, (p + 1) * size) for p in mine])


def split(x: Tensor, world_size: int, *, dim: int = -1, layout: str = "zigzag") -> list[Tensor]:
    """The parts of a sequence by rank, cut along `dim`. A rank takes its own: `split(x, 4)[rank]`."""
    cut = x.chunk(_count(x.shape[dim], world_size, layout), dim)
    held = [pieces(rank, world_size, layout=layout) for rank in range(world_size)]
    return [torch.cat([cut[p] for p in mine], dim) for mine in held]


def _count(length: int, world_size: int, layout: str) -> int:
    """How many pieces the whole sequence has."""
    count = world_size * len(pieces(0, world_size, layout=layout))
    if length % count or not length:
        why = f"as the {layout} layout needs on {world_size} ranks. Pad it to {max(1, -(-length // count)) * count}."
        raise ValueError(f"A sequence of {length} positions cannot be cut into {count} equal pieces, {why}")
    return count


def _scores(query: Tensor, key: Tensor, triangle: bool) -> Tensor:
    """`(..., queries, keys)`; with `triangle` query i sees the keys up to i of its own piece."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if not triangle:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -math.inf)


class OnlineSoftmax:
    """Attention of some queries over keys that come block by block: what has been seen, in three tensors.

    For each query: the largest score so far, the sum of exp(score - largest), and the sum of the values with the same
    factors. https://arxiv.org/abs/1805.02867 (2018), section 3; https://arxiv.org/abs/2112.05682 (2021).
    """

    def __init__(self, query: Tensor) -> None:
        self.query = query  # (..., queries, d_head)
        self.largest = torch.full_like(query[..., :1], -math.inf)
        self.sum = torch.zeros_like(query[..., :1])
        self.values = torch.zeros_like(query)

    def add(self, key: Tensor, value: Tensor, *, triangle: bool = False) -> None:
        """See one more block: `(..., keys, d_head)` each."""
        scores = _scores(self.query, key, triangle)
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        old = torch.exp(self.largest - largest)  # what was summed had another largest score: rescale it
        weights = torch.exp(scores - largest)
        self.sum = self.sum * old + weights.sum(-1, keepdim=True)
        self.values = self.values * old + weights @ value
        self.largest = largest

    def output(self) -> Tensor:
        """The attention over all blocks seen, `(..., queries, d_head)`."""
        return self.values / self.sum

    def log_sum_exp(self) -> Tensor:
        """log of the sum of exp(score), `(..., queries, 1)`: with it the backward has every weight again."""
        return self.largest + torch.log(self.sum)


def block_backward(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, log_sum_exp: Tensor, correction: Tensor, *, triangle: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block of keys adds to the gradients of query, key and value.

    `grad` is that of the output, and `correction` is sum(grad * output) over d_head: the derivative of softmax
    subtracts the mean of the incoming gradients, and that mean over *all* keys is known from the output. From
    https://arxiv.org/abs/2205.14135 (FlashAttention, 2022), appendix B.2.
    """
    weights = torch.exp(_scores(query, key, triangle) - log_sum_exp)  # final ones: no rescaling here
    grad_scores = weights * (grad @ value.transpose(-2, -1) - correction) / math.sqrt(query.shape[-1])
    return grad_scores @ key, grad_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad


class _Ring:
    """This rank's two neighbours in a process group, and messages to the next from the one before."""

    def __init__(self, process_group: dist.ProcessGroup | None, layout: str) -> None:
        self.group, self.layout = process_group or dist.group.WORLD, layout
        self.rank, self.world_size = group.place(self.group, "this context parallelism", use="call it")
        self.next, self.previous = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size

    def start(self, sent: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Send a tensor on and receive its like, at once: where it will be, and what to call before use."""
        if self.world_size == 1:
            return sent, lambda: None
        received = torch.empty_like(sent)
        operations = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.next),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=self.previous),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            for work in works:
                work.wait()
            operations.clear()  # until here the sent tensor must stay alive and unchanged

        return received, wait

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """`(..., positions, d_head)` by pieces of the sequence."""
        return x.chunk(len(pieces(0, self.world_size, layout=self.layout)), -2)

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[list[tuple[int, int, bool]], Tensor]]:
        """The keys and values of one rank after the other, `(2, ..., keys, d_head)`, this one's first; the next ones
        travel while these are used. With them, which of this rank's pieces of queries sees which piece of these keys,
        and whether only its triangle: that is so where both are the same piece.
        """
        mine, block = pieces(self.rank, self.world_size, layout=self.layout), torch.stack([key, value])
        for step in range(self.world_size):
            coming, wait = self.start(block) if step < self.world_size - 1 else (block, lambda: None)
            theirs = pieces((self.rank - step) % self.world_size, self.world_size, layout=self.layout)
            yield [(i, j, a == b) for i, a in enumerate(mine) for j, b in enumerate(theirs) if b <= a], block
            wait()
            block = coming


class _RingAttention(torch.autograd.Function):
    """The two directions of `ring_attention`; saves the output and one number per query, no weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> Tensor:
        state = [OnlineSoftmax(part) for part in ring.cut(query)]
        for pairs, block in ring.blocks(key, value):
            keys, values = map(ring.cut, block.unbind())
            for i, j, triangle in pairs:
                state[i].add(keys[j], values[j], triangle=triangle)
        output = torch.cat([s.output() for s in state], -2)
        log_sum_exp = torch.cat([s.log_sum_exp() for s in state], -2)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        ring, correction = ctx.ring, (grad * output).sum(-1, keepdim=True)
        rows = [ring.cut(t) for t in (query, grad, log_sum_exp, correction)]
        grad_query = torch.zeros_like(query)
        so_far, wait = torch.zeros_like(torch.stack([key, value])), lambda: None
        for pairs, block in ring.blocks(key, value):
            keys, values = map(ring.cut, block.unbind())
            here = torch.zeros_like(block)  # what this rank adds to the block's gradients
            here_key, here_value = map(ring.cut, here.unbind())
            for i, j, triangle in pairs:
                q, g, lse, c = (part[i] for part in rows)
                parts = block_backward(q, keys[j], values[j], g, lse, c, triangle=triangle)
                places = ring.cut(grad_query)[i], here_key[j], here_value[j]
                for place, part in zip(places, parts, strict=True):
                    place += part
            wait()  # for the sum of the ranks before, which came while this rank computed
            so_far, wait = ring.start(here + so_far)  # one step behind its block; the last one brings it home
        wait()
        return grad_query, *so_far.unbind(), None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str = "zigzag",
    documents: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over all ranks' positions: `(batch, heads, length / W, d_head)` each.

    Keys and values go round the ring of the group in W - 1 steps, and each block is used while the next one travels. In
    the backward they go round again, with their gradients one step behind. No rank ever holds more than two blocks, and
    scores of one block's size. Positions stand in the order of `positions`. Layout "zigzag" gives ranks equal work,
    "contiguous" the last one the most.
    """
    if documents is not None:
        raise ValueError("The ring knows no documents in a sequence. Give one document in each.")
    if not query.shape == key.shape == value.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        needed = "one shape, (batch, heads, length / W, d_head)"
        raise ValueError(f"Query, key and value need {needed}; they have {shapes}.")
    ring = _Ring(process_group, layout)
    _count(query.shape[-2] * ring.world_size, ring.world_size, layout)
    return _RingAttention.apply(query, key, value, ring)


def share_of_mean(losses: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's share of the mean of all ranks' `losses`: their sum, over how many there are on all ranks.

    The shares *add up* to the mean, and so do their gradients, also where ranks have different numbers of losses.
    """
    count = torch.tensor(float(losses.numel()), dtype=torch.float64, device=losses.device)
    dist.all_reduce(count, group=process_group)
    return losses.sum() / count.to(losses.dtype)


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], *, process_group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of parameters that every rank of the group holds; of an unused one it counts as zero."""
    trained = list(dict.fromkeys(p for p in parameters if p.requires_grad))  # a tied weight once
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    group.all_reduce_together([p.grad for p in trained if p.grad is not None], process_group)


class ContextAttention(nn.Module):
    """The layers of a dense attention (`query`, `key`, `value`, `output`), attending over all ranks.

    `(batch, length / W, d_model)` -> the same shape. `attend` is `ring_attention` with its options filled in, or the
    like; `positions` gives the positions of a rank that holds so many, for an attention that rotates.
    """

    def __init__(
        self, dense: models.Attention, attend: Callable[..., Tensor], positions: Callable[[int], Tensor] | None
    ) -> None:
        super().__init__()
        if dense.dropout.p:
            raise ValueError("No rank holds all weights of attention. Build the model with dropout=0.")
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
        key, value = (repeat_heads(t, query.shape[1]) for t in (key, value))
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

    Everything but attention treats each position on its own, so only attention communicates in the forward. The
    attentions in `module.blocks` are replaced, their layers are kept. `layout` is "zigzag" or "contiguous".
    """

    def __init__(
        self, module: models.Decoder, *, layout: str = "zigzag", process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.module, self.layout = module, layout
        self.process_group = process_group or dist.group.WORLD
        self.rank, self.world_size = group.place(self.process_group, "this context parallelism", use="call it")
        attend = partial(ring_attention, layout=layout, process_group=self.process_group)
        for block in module.blocks:
            block.attention = ContextAttention(block.attention, attend, self.positions)

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of a whole sequence that every rank has."""
        return split(x, self.world_size, dim=dim, layout=self.layout)[self.rank]

    def positions(self, local_length: int) -> Tensor:
        """The positions of the whole sequence that this rank holds, if each rank has so many."""
        return positions(local_length * self.world_size, self.rank, self.world_size, layout=self.layout)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits `(batch, length / W, vocab)` of this rank's tokens; a position sees its own document only."""
        length = tokens.shape[-1] * self.world_size
        if length > self.module.context:
            raise ValueError(f"{length} tokens on all ranks are more than the context of {self.module.context}.")
        x = self.module.embed(tokens, self.positions(tokens.shape[-1]).to(tokens.device))
        for block in self.module.blocks:
            x = block(x, documents=documents)
        return self.module.unembed(x)

    def share_of_mean(self, losses: Tensor) -> Tensor:
        """As the function, over this model's ranks."""
        return share_of_mean(losses, process_group=self.process_group)

    def finish_gradient_synchronization(self) -> None:
        """After backward: every rank has the gradients of the whole mean loss."""
        sum_gradients(self.module.parameters(), process_group=self.process_group)
