"""The tensor-parallel twins of the course's models: GPT, Llama, their blocks, attention and MLPs. `tensor_parallel`
turns a dense model into its twin over a group of ranks, from the layers of `parallel.tensor` and `parallel.vocabulary`.
Parts keep their names, so `tensor.full_state_dict` gives back what the dense model has. It knows no documents.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .. import models
from ..models import causal_attention, rotate
from . import tensor
from .tensor import ColumnParallelLinear, Group, ProcessGroup, RowParallelLinear, columns
from .vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy


class ParallelMLP(nn.Module):
    """Two linear layers and an activation, the hidden units divided: one all-reduce forward, one backward."""

    def __init__(self, dense: models.MLP, process_group: ProcessGroup = None, **options: bool) -> None:
        super().__init__()
        self.up = ColumnParallelLinear.from_linear(dense.up, process_group, **options)
        self.activation = copy.deepcopy(dense.activation)
        self.down = RowParallelLinear.from_linear(dense.down, process_group, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class ParallelSwiGLU(nn.Module):
    """The MLP of a Llama, the hidden units divided. Gate and up have the same input, which travels once for both."""

    def __init__(self, dense: models.SwiGLU, process_group: ProcessGroup = None, **options: bool) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear.from_linear(dense.gate, process_group, **options)
        self.up = ColumnParallelLinear.from_linear(dense.up, process_group, **options)
        self.down = RowParallelLinear.from_linear(dense.down, process_group, **options)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = columns(x, [self.gate, self.up])
        return self.down(F.silu(gate) * up)


class ParallelDropout(nn.Module):
    """Dropout whose mask every rank draws for itself: for other heads, or other tokens, another mask.

    Every rank takes equally many of torch's global random numbers. So if all ranks of a group were seeded alike,
    ordinary dropout on what they all hold stays the same.
    """

    def __init__(self, p: float, process_group: ProcessGroup = None) -> None:
        super().__init__()
        self.p, self.group = p, Group(process_group)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        seed = int(torch.randint(1 << 62, (), device="cpu")) + self.group.rank
        random = torch.Generator(x.device).manual_seed(seed)
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=random)
        return x * kept.div_(1 - self.p)


class ParallelAttention(nn.Module):
    """Causal attention, the heads divided: one all-reduce forward, one backward.

    Where there are fewer key/value heads than ranks, several ranks in a row compute the same one: keys and values are
    then held whole by every rank, and their gradients summed.
    """

    def __init__(self, dense: models.Attention, process_group: ProcessGroup = None, **options: bool) -> None:
        super().__init__()
        group = Group(process_group)
        group.check_divides(dense.query.out_features // dense.d_head, "attention heads")
        self.d_head, self.rope_base = dense.d_head, dense.rope_base
        self.query = ColumnParallelLinear.from_linear(dense.query, group, **options)
        n_kv_heads = dense.key.out_features // dense.d_head
        both: Any = dense.key, dense.value
        if n_kv_heads % group.size == 0:
            both = (ColumnParallelLinear.from_linear(f, group, **options) for f in both)
        elif group.size % n_kv_heads == 0:
            head = group.rank * n_kv_heads // group.size  # the one that serves this rank's query heads
            mine = slice(head * self.d_head, (head + 1) * self.d_head)
            both = (tensor.SlicedLinear(f, mine, group, **options) for f in both)
        else:
            shared = f"{n_kv_heads} key/value heads cannot be shared by {group.size} ranks"
            raise ValueError(f"{shared}: neither divides the other.")
        self.key, self.value = both
        self.output = RowParallelLinear.from_linear(dense.output, group, **options)
        self.dropout = ParallelDropout(dense.dropout.p, group)

    def forward(self, x: Tensor) -> Tensor:
        parts = columns(x, [self.query, self.key, self.value])
        query, key, value = (p.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for p in parts)
        if self.rope_base is not None:  # the whole sequence is here, whoever holds what between the layers
            places = torch.arange(query.shape[-2], device=x.device)
            query, key = (rotate(t, places, base=self.rope_base) for t in (query, key))
        mixed = causal_attention(query, key, value, self.dropout)  # (batch, my heads, length, d_head)
        return self.output(mixed.transpose(1, 2).flatten(2))


class ParallelBlock(nn.Module):
    """One layer of the GPT or the Llama: norm, attention, add; norm, MLP, add."""

    def __init__(self, dense: models.Block | models.LlamaBlock, group: Group, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(dense.attention_norm, group, sequence_parallel)
        self.attention = _twin(dense.attention, group, sequence_parallel)
        self.mlp_norm = _norm(dense.mlp_norm, group, sequence_parallel)
        self.mlp = _twin(dense.mlp, group, sequence_parallel)
        self.dropout = _dropout(dense, group, sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def _norm(dense: nn.LayerNorm | nn.RMSNorm, group: Group, sequence_parallel: bool) -> nn.Module:
    return tensor.ReplicatedNorm(dense, group) if sequence_parallel else copy.deepcopy(dense)


def _dropout(dense: nn.Module, group: Group, sequence_parallel: bool) -> nn.Module:
    p = dense.dropout.p if isinstance(dense, models.GPT | models.Block) else 0.0  # a Llama has none
    return ParallelDropout(p, group) if sequence_parallel else nn.Dropout(p)


class ParallelDecoder(nn.Module):
    """A GPT or Llama with everything divided but its norms and positions: tokens -> logits, or a loss.

    `model(tokens)` is the logits `(batch, length, vocab)`, whole on every rank. `model(tokens, targets)` is the mean
    cross-entropy, and no rank ever holds all logits. A pipeline's stage without embedding or head takes and gives on
    what lies between the blocks.
    """

    token_embedding: Any  # None in a stage that does not embed
    position_embedding: Any
    norm: Any
    head: Any

    def __init__(self, dense: models.Decoder, group: Group, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.context, how = dense.context, {"sequence_parallel": sequence_parallel}
        self.token_embedding = VocabParallelEmbedding(dense.token_embedding, self.group, **how)
        self.position_embedding = copy.deepcopy(dense.position_embedding)  # a Llama has none
        self.dropout = _dropout(dense, self.group, sequence_parallel)
        self.blocks = nn.ModuleList(_twin(block, self.group, sequence_parallel) for block in dense.blocks)
        self.norm = _norm(dense.norm, self.group, sequence_parallel)
        self.head = ColumnParallelLinear.from_linear(dense.head, self.group, uneven=True, **how)
        if dense.head.weight is dense.token_embedding.weight:  # the same rows, so still one parameter
            self.head.weight = self.token_embedding.weight

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.token_embedding is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.head is None:
            return x
        return self.unembed(x) if targets is None else self.loss(x, targets)

    def embed(self, tokens: Tensor) -> Tensor:
        """What enters the first block, `(batch, length, d_model)`, or this rank's part of the length."""
        length = tokens.shape[-1]
        if length > self.context:
            raise ValueError(f"{length} tokens are more than the context of {self.context}. Cut the sequence.")
        positions = torch.arange(length, device=tokens.device)
        if self.sequence_parallel:
            self.group.check_divides(length, "tokens of a sequence")
            positions = positions[self.group.part(length)]
        x = self.token_embedding(tokens)
        if self.position_embedding is None:
            return x
        table = self.position_embedding.weight
        if self.sequence_parallel:  # other positions on every rank: the gradient is a sum over ranks
            table = tensor.copy_to_group(table, process_group=self.group)
        return self.dropout(x + F.embedding(positions, table))

    def unembed(self, x: Tensor) -> Tensor:
        """What leaves the last block as logits `(batch, length, vocab)`, whole on every rank."""
        logits = self.head(self.norm(x))
        return tensor.gather_from_group(logits, total=self.head.out_features, process_group=self.group)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """What leaves the last block as mean cross-entropy in nats, the same on all ranks."""
        logits = self.head(self.norm(x))  # (batch, length, vocab / ranks)
        return vocab_parallel_cross_entropy(logits, targets, vocab=self.head.out_features, process_group=self.group)


_TWINS: dict[Any, Any] = {
    models.Decoder: ParallelDecoder,
    models.Block | models.LlamaBlock: ParallelBlock,
    models.Attention: ParallelAttention,
    models.MLP: ParallelMLP,
    models.SwiGLU: ParallelSwiGLU,
}


def tensor_parallel(model: nn.Module, process_group: ProcessGroup = None, *, sequence_parallel: bool = False) -> Any:
    """The twin of `model` in which each rank of a group holds its part.

    `model` is the course's GPT or Llama, one of its blocks, its attention or MLP; it must be the same on all ranks of
    the group, which is checked. Give all ranks the same batches: every gradient is complete after `loss.backward()`.
    With `sequence_parallel` what lies between the layers is divided along the sequence: blocks, attention and MLP take
    and return this rank's part, a whole model takes whole sequences.

    >>> model = tensor_parallel(GPT(49))
    >>> model(tokens, targets).backward()
    """
    group = Group(process_group)
    _check_same(model, group)
    return _twin(model, group, sequence_parallel)


def _twin(model: nn.Module, group: Group, sequence_parallel: bool) -> Any:
    for kind, twin in _TWINS.items():
        if isinstance(model, kind):
            return twin(model, group, sequence_parallel=sequence_parallel)
    known = "GPT and Llama of rankcell.models, their blocks, attention and MLPs"
    how = "Build it from ColumnParallelLinear and RowParallelLinear."
    raise TypeError(f"tensor_parallel knows {known}, not {type(model).__name__}. {how}")


def _check_same(model: nn.Module, group: Group) -> None:
    """Raise an error where ranks hold different weights: parts of different models make no model."""
    named = [(name, p.detach().double().square().sum()) for name, p in model.named_parameters() if not p.is_meta]
    if not named or group.size == 1:
        return
    sums = torch.stack([of for _, of in named])
    highest = torch.stack([sums, -sums])  # the largest and, negated, the smallest
    group.all_reduce(highest, op=dist.ReduceOp.MAX)
    different = highest.sum(0) > 1e-9 * highest[0].clamp_min(1)
    if names := [name for (name, _), differs in zip(named, different.tolist(), strict=True) if differs]:
        found = f"{len(names)} of {len(named)} parameters differ, first {names[0]}"
        how = "Build it from the same seed on all ranks, or broadcast it first."
        raise ValueError(f"The ranks of this group hold different models: {found}. {how}")
