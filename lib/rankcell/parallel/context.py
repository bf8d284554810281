"""Context parallelism: every rank holds a part of each sequence, and attention runs over all of it.

`ring_attention` passes blocks of keys and values round the ranks and joins what they give with the online
softmax; `all_to_all_attention` swaps a split by positions for a split by heads. Both take and return tensors
of one rank's positions, and both have a backward; keys and values may have fewer heads. `ContextParallel`
runs a GPT or Llama of `rankcell.models` on them.

What it does not do: it knows causal attention only; it uses no fused kernel for the blocks of the ring, sends
keys and values to ranks that will not look at them, and has no dropout on the attention weights. All ranks
need equally many positions, and must start from equal parameters: nothing is broadcast.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .. import models
from ..models import repeat_heads, rotate
from . import group

LAYOUTS = ("contiguous", "zigzag")


# Who holds which positions


def pieces(rank: int, world_size: int, *, layout: str = "zigzag") -> tuple[int, ...]:
    """Which equal pieces of the sequence a rank holds, in the order in which it holds them.

    pieces(1, 4, layout="contiguous")  # (1,) of 4 pieces
    pieces(1, 4, layout="zigzag")      # (1, 6) of 8: an early one and the late one that balances it
    """
    _check_layout(layout)
    return (rank,) if layout == "contiguous" else (rank, 2 * world_size - 1 - rank)


def positions(length: int, rank: int, world_size: int, *, layout: str = "zigzag") -> Tensor:
    """The positions of the sequence that a rank holds, `(length / world_size,)` int64.

    positions(8, 1, 2)  # tensor([2, 3, 4, 5])

    Raises:
        ValueError: the pieces of the layout do not divide `length`.
    """
    size = length // _count(length, world_size, layout)
    return torch.cat(
        [torch.arange(p * size, (p + 1) * size) for p in pieces(rank, world_size, layout=layout)]
    )


def split(x: Tensor, world_size: int, *, dim: int = -1, layout: str = "zigzag") -> list[Tensor]:
    """The parts of a sequence by rank, cut along `dim`. A rank takes its own: `split(x, 4)[rank]`.

    Raises:
        ValueError: the pieces of the layout do not divide the length.
    """
    cut = x.chunk(_count(x.shape[dim], world_size, layout), dim)
    return [
        torch.cat([cut[p] for p in pieces(rank, world_size, layout=layout)], dim)
        for rank in range(world_size)
    ]


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"There is no layout {layout!r}. Choose one of {', '.join(LAYOUTS)}.")


def _count(length: int, world_size: int, layout: str) -> int:
    """How many pieces the whole sequence has."""
    count = world_size * len(pieces(0, world_size, layout=layout))
    if length % count or not length:
        raise ValueError(
            f"A sequence of {length} positions cannot be cut into {count} equal pieces, as the {layout} "
            f"layout needs on {world_size} ranks. Pad it to {max(1, -(-length // count)) * count}."
        )
    return count


# What one block of keys does to one block of queries


def _scores(query: Tensor, key: Tensor, triangle: bool) -> Tensor:
    """`(..., queries, keys)`; with `triangle` query i sees the keys up to i of its own piece."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if not triangle:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -math.inf)


class OnlineSoftmax:
    """Attention of some queries over keys that come block by block: what has been seen, in three tensors.

    For each query: the largest score so far, the sum of exp(score - largest), and the sum of the values with
    the same factors. From https://arxiv.org/abs/1805.02867 (2018), section 3, with the values added as in
    https://arxiv.org/abs/2112.05682 (2021).
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_sum_exp: Tensor,
    correction: Tensor,
    *,
    triangle: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block of keys adds to the gradients of query, key and value.

    `grad` is that of the output, and `correction` is sum(grad * output) over d_head, `(..., queries, 1)`: the
    derivative of softmax subtracts the mean of the incoming gradients, and that mean over *all* keys is known
    from the output. From https://arxiv.org/abs/2205.14135 (FlashAttention, 2022), appendix B.2.
    """
    weights = torch.exp(_scores(query, key, triangle) - log_sum_exp)  # final ones: no rescaling here
    grad_scores = weights * (grad @ value.transpose(-2, -1) - correction) / math.sqrt(query.shape[-1])
    return grad_scores @ key, grad_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad


# The ring


class _Ring:
    """This rank's two neighbours in a process group, and messages to the next from the one before."""

    def __init__(self, process_group: dist.ProcessGroup | None, layout: str) -> None:
        self.group, self.layout = process_group or dist.group.WORLD, layout
        self.rank, self.world_size = _place(self.group)
        self.next, self.previous = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        self.n_pieces = len(pieces(0, self.world_size, layout=layout))

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
        return x.chunk(self.n_pieces, -2)

    def pairs(self, step: int) -> list[tuple[int, int, bool]]:
        """Which of this rank's pieces of queries sees which piece of the keys that it holds after so many
        steps, and whether only its triangle.

        Pieces are whole stretches of the sequence, so a pair is seen in full, not at all, or, where both are
        the same piece, in its triangle.
        """
        source = (self.rank - step) % self.world_size
        mine, theirs = (pieces(r, self.world_size, layout=self.layout) for r in (self.rank, source))
        return [(i, j, a == b) for i, a in enumerate(mine) for j, b in enumerate(theirs) if b <= a]


class _RingAttention(torch.autograd.Function):
    """The two directions of `ring_attention`; saves the output and one number per query, no weights.

    Queries are `(..., kv_heads, heads / kv_heads, positions, d_head)`, and keys and values have a 1 in that
    place: each of their heads meets all queries that it serves.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)  # 16-bit sums would be too coarse
        state = [OnlineSoftmax(part.to(exact)) for part in ring.cut(query)]
        block = torch.stack([key, value])  # one message: (2, ..., keys, d_head)
        for step in range(ring.world_size):
            if step < ring.world_size - 1:
                coming, wait = ring.start(block)  # the next block travels while this one is used
            keys, values = map(ring.cut, block.to(exact).unbind())
            for i, j, triangle in ring.pairs(step):
                state[i].add(keys[j], values[j], triangle=triangle)
            if step < ring.world_size - 1:
                wait()
                block = coming
        output = torch.cat([s.output() for s in state], -2)
        log_sum_exp = torch.cat([s.log_sum_exp() for s in state], -2)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.ring = ring
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        ring, exact, grad = ctx.ring, output.dtype, grad.to(output.dtype)
        correction = (grad * output).sum(-1, keepdim=True)
        rows = [ring.cut(t) for t in (query.to(exact), grad, log_sum_exp, correction)]
        grad_query = torch.zeros_like(output)
        block = torch.stack([key, value])
        so_far, wait_sum = torch.zeros_like(block, dtype=exact), lambda: None
        for step in range(ring.world_size):
            if step < ring.world_size - 1:
                coming, wait = ring.start(block)
            keys, values = map(ring.cut, block.to(exact).unbind())
            here = torch.zeros_like(so_far)  # what this rank adds to the block's gradients
            here_key, here_value = map(ring.cut, here.unbind())
            for i, j, triangle in ring.pairs(step):
                q, g, lse, c = (part[i] for part in rows)
                parts = block_backward(q, keys[j], values[j], g, lse, c, triangle=triangle)
                places = ring.cut(grad_query)[i], here_key[j], here_value[j]
                for place, part in zip(places, parts, strict=True):
                    place += part.sum_to_size(place.shape)  # over the query heads that a key served
            wait_sum()  # the sum of the ranks before, which came while this rank computed
            # one step behind its block; the last one brings it home
            so_far, wait_sum = ring.start(here + so_far)
            if step < ring.world_size - 1:
                wait()
                block = coming
        wait_sum()
        grad_key, grad_value = so_far.to(key.dtype).unbind()
        return grad_query.to(query.dtype), grad_key, grad_value, None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str = "zigzag",
    documents: None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over all ranks' positions: `(batch, heads, length / W, d_head)`.

    Keys and values go round the ring of the group in W - 1 steps, and each block is used while the next one
    travels. In the backward they go round again, with their gradients one step behind. No rank ever holds
    more than two blocks, and scores of one block's size. With fewer key/value heads the blocks are smaller.

    Args:
        query, key, value: this rank's positions, in the order of `positions`; of one dtype. Key and value may
            have fewer heads than the query, each for as many query heads in a row.
        layout: "zigzag" gives ranks equal work; "contiguous" gives the last rank the most.
        documents: only `all_to_all_attention` knows them.

    Raises:
        ValueError: the shapes do not fit, the local length is odd under zigzag, or there is no such layout.
    """
    if documents is not None:
        raise ValueError("The ring knows no documents in a sequence. Use the all-to-all.")
    _check_shapes(query, key, value)
    ring = _Ring(process_group, layout)
    _count(query.shape[-2] * ring.world_size, ring.world_size, layout)
    grouped = query.unflatten(-3, (key.shape[-3], -1))  # (..., kv_heads, heads / kv_heads, positions, d_head)
    return _RingAttention.apply(grouped, key.unsqueeze(-3), value.unsqueeze(-3), ring).flatten(-4, -3)


# Heads against positions


class _Swap(torch.autograd.Function):
    """An all-to-all that cuts one dim into W parts, one for each rank, and joins along another.

    Its backward is the all-to-all that goes back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.how = cut, join, group
        send = torch.stack(x.chunk(dist.get_world_size(group), cut))  # (W, ...): part r is for rank r
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=group)
        return torch.cat(received.unbind(), join)  # part r came from rank r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cut, join, group = ctx.how
        return _Swap.apply(grad, join, cut, group), None, None, None


def all_to_all_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str = "zigzag",
    documents: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The same result as `ring_attention`, by two all-to-alls: each rank computes W-th of the heads in full.

    If there are fewer key/value heads than ranks, they are sent to several of them. With `documents`,
    `(batch, length / W)` whole numbers, only positions with the same number see each other. From
    https://arxiv.org/abs/2309.14509 (DeepSpeed Ulysses, 2023).

    Raises:
        ValueError: the ranks cannot share the heads, the shapes do not fit, or the layout does not.
    """
    _check_shapes(query, key, value)
    process_group = process_group or dist.group.WORLD
    _, world_size = _place(process_group)
    n_heads, n_kv_heads, length = query.shape[-3], key.shape[-3], query.shape[-2] * world_size
    _count(length, world_size, layout)
    if n_heads % world_size:
        raise ValueError(
            f"{n_heads} heads cannot be shared by {world_size} ranks, and the all-to-all shares heads. "
            f"Use ring_attention, or a number of ranks that divides {n_heads}."
        )
    if n_kv_heads % world_size and world_size % n_kv_heads:
        raise ValueError(
            f"{n_kv_heads} key/value heads cannot be shared by {world_size} ranks: neither number divides "
            f"the other, and the all-to-all shares heads. Use ring_attention, or another number of ranks."
        )
    if n_kv_heads < world_size:  # one for each rank
        key, value = (repeat_heads(t, world_size) for t in (key, value))
    order = torch.cat([positions(length, r, world_size, layout=layout) for r in range(world_size)])
    order = order.to(query.device)
    by_rank = [t.unflatten(-3, (world_size, -1)) for t in (query, key, value)]  # (..., W, heads / W, ...)
    mine = [t.shape[-3] for t in by_rank]
    together = torch.cat(by_rank, -3).flatten(-4, -3)  # one all-to-all for the three
    whole = _Swap.apply(together, query.dim() - 3, query.dim() - 2, process_group)  # my heads, all positions
    parts = whole.index_select(-2, order.argsort()).split(mine, -3)
    query, key, value = (parts[0], *(repeat_heads(t, mine[0]) for t in parts[1:]))
    if documents is None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        of_ranks = [torch.empty_like(documents) for _ in range(world_size)]
        dist.all_gather(of_ranks, documents.contiguous(), group=process_group)
        numbers = torch.cat(of_ranks, -1).index_select(-1, order.argsort())  # (..., length)
        seen = (numbers[..., :, None] == numbers[..., None, :])[..., None, :, :].tril()
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    return _Swap.apply(output.index_select(-2, order), query.dim() - 2, query.dim() - 3, process_group)


def bytes_sent(method: str, block: int, world_size: int, *, kv_block: int | None = None) -> dict[str, float]:
    """Bytes that each rank sends in one attention, "forward" and "backward", if nothing is sent in vain.

    `block` is the bytes of one rank's queries: batch * heads * length / W * d_head * bytes per number.
    `kv_block` is that of its keys, and of its values, by default the same; with fewer key/value heads it is
    smaller; where an all-to-all has fewer of those than ranks, give the bytes of one head per rank. The
    gradients of the ring travel in the dtype they are summed in; the formula is for float32 and float64,
    where that is the dtype of the keys.

        bytes_sent("ring", 100, 4)               # {"forward": 600, "backward": 1400}
        bytes_sent("ring", 100, 4, kv_block=25)  # {"forward": 150, "backward": 350}
        bytes_sent("all_to_all", 100, 4)         # {"forward": 300.0, "backward": 300.0}
    """
    kv_block = block if kv_block is None else kv_block
    if method == "ring":  # K and V: W - 1 steps. Backward: again, and their gradients W steps
        steps = world_size - 1
        home = world_size if world_size > 1 else 0
        return {"forward": 2 * kv_block * steps, "backward": 2 * kv_block * (steps + home)}
    if method == "all_to_all":  # Q, K, V and the output, all but the part that stays
        once = 2 * (block + kv_block) * (world_size - 1) / world_size
        return {"forward": once, "backward": once}
    raise ValueError(f"There is no method {method!r}. Choose ring or all_to_all.")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    same = query.dim() >= 3 and key.shape == value.shape
    same = same and key.shape[:-3] == query.shape[:-3] and key.shape[-2:] == query.shape[-2:]
    if not same or query.shape[-3] % key.shape[-3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(
            f"Query, key and value need one shape, (batch, heads, length / W, d_head), but key and value may "
            f"have fewer heads whose number divides that of the query; they have {shapes}."
        )


def _place(process_group: dist.ProcessGroup) -> tuple[int, int]:
    """This rank's number in the group, and the group's size."""
    return group.place(process_group, "this context parallelism", use="call it")


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
        dense: an attention of `rankcell.models`.
        attend: `ring_attention` or `all_to_all_attention` with its options filled in but for `documents`.
        positions: gives the positions of a rank that holds so many of them, for an attention that rotates.
    """

    def __init__(
        self,
        dense: models.Attention,
        attend: Callable[..., Tensor],
        positions: Callable[[int], Tensor],
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
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.rope_base is not None:  # before they travel: each rank knows its own positions
            places = self.positions(x.shape[-2]).to(x.device)
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
        module: a GPT or Llama of `rankcell.models`.
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
        methods = {"ring": ring_attention, "all_to_all": all_to_all_attention}
        if method not in methods:
            raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(methods)}.")
        _check_layout(layout)
        self.module, self.layout = module, layout
        self.process_group = process_group or dist.group.WORLD
        self.rank, self.world_size = rank, world_size = _place(self.process_group)
        attend = partial(methods[method], layout=layout, process_group=self.process_group)

        def places(local_length: int) -> Tensor:
            return positions(local_length * world_size, rank, world_size, layout=layout)

        for block in module.blocks:
            block.attention = ContextAttention(block.attention, attend, places)

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of a whole sequence that every rank has."""
        return split(x, self.world_size, dim=dim, layout=self.layout)[self.rank]

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits `(batch, length / W, vocab)` of this rank's tokens `(batch, length / W)`.

        With `documents`, of the same shape, a position sees its own document only: see `ring_attention`.
        """
        length = tokens.shape[-1] * self.world_size
        if length > self.module.context:
            raise ValueError(
                f"{length} tokens on all ranks are more than the context of {self.module.context}. "
                f"Cut the sequence."
            )
        where = positions(length, self.rank, self.world_size, layout=self.layout).to(tokens.device)
        x = self.module.embed(tokens, where)
        for block in self.module.blocks:
            x = block(x, documents=documents)
        return self.module.unembed(x)

    def share_of_mean(self, losses: Tensor) -> Tensor:
        """This rank's share of the mean loss of all ranks' tokens; the shares add up to it."""
        return share_of_mean(losses, process_group=self.process_group)

    def finish_gradient_synchronization(self) -> None:
        """After backward: every rank has the gradients of the whole mean loss."""
        sum_gradients(self.module.parameters(), process_group=self.process_group)
