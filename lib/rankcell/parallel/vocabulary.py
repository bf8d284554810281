"""The two ends of a language model over a divided vocabulary: its embedding, and the loss.

Each rank holds the vectors of some tokens, and the logits of the same tokens. The first ranks have one more
where it does not work out; nothing is padded.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .group import has_numbers
from .tensor import Group, ParallelLayer, ProcessGroup, reduce_from_group, reduce_scatter


class VocabParallelEmbedding(ParallelLayer):
    """An embedding of which each rank holds the vectors of some tokens, summed.

    `(batch, length)` -> `(batch, length, features)`.

    A rank looks up the tokens that it has and gives zeros for the others. `weight` is
    `dense.weight.tensor_split(ranks)[rank]`: if the number of ranks does not divide the vocabulary, the first
    ranks have one more, and nothing is padded.
    """

    sharded: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: ProcessGroup = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(process_group, sequence_parallel)
        if num_embeddings < self.group.size:
            raise ValueError(
                f"A vocabulary of {num_embeddings} is too small for {self.group.size} ranks. Use fewer ranks."
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.take_first(nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype))

    @classmethod
    def from_embedding(cls, dense: nn.Embedding, **options: Any) -> "VocabParallelEmbedding":
        """A layer with this rank's part of `dense`, which must be the same on all ranks. The options are
        those of the class.
        """
        layer = cls(dense.num_embeddings, dense.embedding_dim, device="meta", **options)
        layer.take(dense)
        return layer

    def forward(self, tokens: Tensor) -> Tensor:
        """The vectors of all tokens, or of this rank's part of the sequence."""
        _check_tokens(tokens, self.num_embeddings, "token")
        mine = self.group.part(self.num_embeddings)
        local = tokens - mine.start
        absent = (local < 0) | (local >= mine.stop - mine.start)
        found = F.embedding(local.masked_fill(absent, 0), self.weight)
        found = found.masked_fill(absent.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter(found, process_group=self.group)
        return reduce_from_group(found, in_place=True, process_group=self.group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} / {self.group.size} ranks, {self.embedding_dim}"


def _check_tokens(tokens: Tensor, vocab: int, what: str, ignored: Tensor | None = None) -> None:
    """Raise an error for a token that nobody has: no rank would find it, and all would give zeros."""
    wrong = (tokens < 0) | (tokens >= vocab)
    if ignored is not None:
        wrong &= ~ignored
    if tokens.is_cuda:  # as torch does: the GPU stops at it, and the host does not wait to see
        torch._assert_async(~wrong.any())
    elif has_numbers(wrong) and wrong.any():
        raise IndexError(
            f"There is no {what} {tokens[wrong][0].item()} in a vocabulary of {vocab} (0 to {vocab - 1}). "
            f"Look at where the tokens come from."
        )


class _CrossEntropy(torch.autograd.Function):
    """-log(probability of the target) per token, from logits of which each rank holds some columns.

    With label smoothing s the target has the probability 1 - s, and all tokens share s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignored: Tensor,
        vocab: int,
        smoothing: float,
        group: Group,
    ) -> Tensor:
        dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
        largest = logits.amax(-1).to(dtype)  # (tokens,)
        group.all_reduce(largest, op=dist.ReduceOp.MAX)
        shifted = logits.to(dtype) - largest.unsqueeze(-1)  # (tokens, vocab / ranks)
        local = targets - group.part(vocab).start
        absent = (local < 0) | (local >= logits.shape[-1]) | ignored
        local = local.masked_fill(absent, 0).unsqueeze(-1)
        sums = shifted.new_empty(3 if smoothing else 2, len(targets))  # one all-reduce for all
        if smoothing:
            sums[2] = shifted.sum(-1)
        sums[1] = shifted.gather(-1, local).squeeze(-1).masked_fill(absent, 0)  # the target's logit
        probabilities = shifted.exp_()
        torch.sum(probabilities, -1, out=sums[0])
        group.all_reduce(sums)
        probabilities.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, absent, ignored)
        ctx.dtype, ctx.smoothing, ctx.vocab = logits.dtype, smoothing, vocab
        expected = (1 - smoothing) * sums[1] + (smoothing * sums[2] / vocab if smoothing else 0)  # logit
        return (sums[0].log() - expected).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        probabilities, local, absent, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0).unsqueeze(-1)
        grad_logits = (probabilities - ctx.smoothing / ctx.vocab) * grad  # and at the target minus 1 - s
        at_target = (ctx.smoothing - 1) * grad.masked_fill(absent.unsqueeze(-1), 0)
        grad_logits.scatter_add_(-1, local, at_target)
        return grad_logits.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab: int | None = None,
    process_group: ProcessGroup = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy in nats, the same on all ranks, from logits `(..., vocab / ranks)`.

    No rank ever sees all logits: the ranks exchange three numbers per token, the largest logit, the sum of
    the exponentials and the target's logit. With label smoothing it is four: the sum of the logits too.

    Args:
        targets: tokens of the whole vocabulary, `(...)`.
        vocab: size of the vocabulary, where the number of ranks does not divide it.
        ignore_index: targets with this value count for nothing.
        reduction: "mean" over the targets that count, "sum", or "none": one number per target.
        label_smoothing: the share of each target, from 0 to 1, that is spread over the whole vocabulary.
            From https://arxiv.org/abs/1512.00567 (2015), section 7.
    """
    group = Group(process_group)
    vocab = vocab or logits.shape[-1] * group.size
    mine = group.part(vocab)
    if logits.shape[-1] != mine.stop - mine.start:
        raise ValueError(
            f"Rank {group.rank} of {group.size} holds {mine.stop - mine.start} of {vocab} logits, but got "
            f"{logits.shape[-1]}. Give it its part, and `vocab` where the parts are not equal."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'There is no reduction {reduction!r}. Choose "mean", "sum" or "none".')
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"Label smoothing is a share from 0 to 1, not {label_smoothing}.")
    flat = targets.flatten()
    ignored = flat == ignore_index
    _check_tokens(flat, vocab, "target", ignored)
    losses = _CrossEntropy.apply(logits.flatten(0, -2), flat, ignored, vocab, label_smoothing, group)
    if reduction == "mean":
        return losses.sum() / (~ignored).sum()
    return losses.sum() if reduction == "sum" else losses.view(targets.shape)
