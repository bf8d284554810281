"""The two ends of a language model over a divided vocabulary: its embedding, and the loss. Each rank holds the vectors
of some tokens, and the logits of the same tokens; the first ranks have one more where it does not work out. The loss
has no label smoothing and no tokens to ignore.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .tensor import Group, ParallelLayer, ProcessGroup, reduce_from_group, reduce_scatter


class VocabParallelEmbedding(ParallelLayer):
    """An embedding of which each rank holds the vectors of some tokens, and gives zeros for the others; their sum.

    `(batch, length)` -> `(batch, length, features)`, or with `sequence_parallel` this rank's part of the length.
    `weight` is `dense.weight.tensor_split(ranks)[rank]`.
    """

    sharded: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self, dense: nn.Embedding, process_group: ProcessGroup = None, **options: Any) -> None:
        super().__init__(dense, process_group, **options)
        self.num_embeddings = dense.num_embeddings
        if self.num_embeddings < self.group.size:
            raise ValueError(f"A vocabulary of {self.num_embeddings} is too small for {self.group.size} ranks.")

    def forward(self, tokens: Tensor) -> Tensor:
        places, absent = _find(tokens, self.group, self.num_embeddings, "token")
        found = F.embedding(places, self.weight).masked_fill(absent.unsqueeze(-1), 0)
        send = reduce_scatter if self.sequence_parallel else reduce_from_group
        return send(found, process_group=self.group)


def _find(tokens: Tensor, group: Group, vocab: int, what: str) -> tuple[Tensor, Tensor]:
    """Where in this rank's part of the vocabulary each token is, 0 where it is another rank's, and where that is so.

    Raises an error for a token that nobody has: no rank would find it, and all would give zeros.
    """
    wrong = (tokens < 0) | (tokens >= vocab)
    if wrong.any():
        missing = f"There is no {what} {tokens[wrong][0].item()} in a vocabulary of {vocab} (0 to {vocab - 1})."
        raise IndexError(f"{missing} Look at where the tokens come from.")
    mine = group.part(vocab)
    absent = (tokens < mine.start) | (tokens >= mine.stop)
    return (tokens - mine.start).masked_fill(absent, 0), absent


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, vocab: int, process_group: ProcessGroup = None
) -> Tensor:
    """The mean cross-entropy in nats, the same on all ranks, from logits `(..., vocab / ranks)`.

    No rank ever sees all logits: the ranks exchange three numbers per token, the largest logit, the sum of the
    exponentials and the target's logit.
    """
    group = Group(process_group)
    mine = group.part(vocab)
    if logits.shape[-1] != mine.stop - mine.start:
        held = f"Rank {group.rank} of {group.size} holds {mine.stop - mine.start} of {vocab} logits"
        raise ValueError(f"{held}, but got {logits.shape[-1]}. Give it its part.")
    places, absent = _find(targets, group, vocab, "target")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.detach().amax(-1)  # taken off, so that no exponential overflows
    group.all_reduce(largest, op=dist.ReduceOp.MAX)
    shifted = logits - largest.unsqueeze(-1)  # (..., vocab / ranks)
    target = shifted.gather(-1, places.unsqueeze(-1)).squeeze(-1).masked_fill(absent, 0)
    both = torch.stack([shifted.exp().sum(-1), target])  # one all-reduce for both
    sums, target = reduce_from_group(both, process_group=group)
    return (sums.log() - target).mean()
