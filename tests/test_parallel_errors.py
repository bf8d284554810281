"""What the strategies refuse, and what they say: a line of Python on four ranks `->` the sentences."""

import pytest

import rankcell

pytestmark = pytest.mark.slow

PRELUDE = """
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from rankcell import models, schedules
from rankcell.parallel import context, experts, tensor as tp
from rankcell.parallel.context import ContextParallel, positions, ring_attention, split
from rankcell.parallel.ddp import DDP
from mixtures import ExpertParallel, Mixture, split_to_group
from rankcell.parallel.experts import route
from rankcell.parallel.pipeline import Pipeline, split_gpt
from rankcell.parallel.transformer import tensor_parallel
from rankcell.parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy as entropy

trio, p, ones, zero = dist.new_group([0, 1, 2]), nn.Parameter(torch.ones(4, 4)), torch.ones, torch.tensor([0])
heads, z, tokens = ones(1, 3, 3, 2), ones(1, 12, 2, 2), ones(4, 4).long()
def gpt(**options): return models.GPT(9, 8, context=8, n_layers=4, **options)
def wrapped():
    module = nn.Sequential(nn.Embedding(2, 3), nn.Linear(3, 3))
    module.forward = lambda x: module[1](checkpoint(module[1], module[0](x), use_reentrant=True))
    model = DDP(module, 0)
    model(zero).sum().backward()
def pipe(stages=None, plan=schedules.gpipe(4, 4), between=(4, 8)):
    return Pipeline(split_gpt(gpt(), 4) if stages is None else stages, plan, models.cross_entropy, between=between)
def mixture(n): return Mixture(nn.Linear(4, n), [nn.Linear(4, 4) for _ in range(n)])
"""

# A line that ends in a backslash goes on.
ERRORS = r"""
tp.Group(trio) if rank > 2 else 1 / 0 -> Rank 3 is not in the process group of this layer. Only its members build it.
DDP(nn.Linear(1, 1), process_group=trio) if rank > 2 else 1 / 0 -> of DDP. Only its members wrap the module.
ring_attention(z, z, z, process_group=trio) if rank > 2 else 1 / 0 -> of this context parallelism. Only its members call
ExpertParallel(mixture(4), process_group=trio) if rank > 2 else 1 / 0 -> of these experts. Only its members call them.

wrapped() -> A gradient was complete twice in one backward. Checkpoint with use_reentrant=False.

tp.ColumnParallelLinear.from_linear(nn.Linear(4, 5)) -> 5 (output features of a column-parallel layer) cannot be \
shared evenly by 4 ranks. Choose a multiple of 4, or a group whose size divides 5.
tp.RowParallelLinear.from_linear(nn.Linear(5, 4)) -> 5 (input features of a row-parallel layer) cannot be shared evenly
tensor_parallel(models.GPT(9, 12, n_heads=3)) -> 3 (attention heads) cannot be shared evenly
tensor_parallel(gpt(), sequence_parallel=True)(tokens[:, :3]) -> 3 (tokens of a sequence) cannot be shared evenly
split_to_group(ones(3, 5), 1) -> 5 (dim 1 of a tensor of shape (3, 5)) cannot be shared evenly
tp.reduce_scatter(ones(3, 5), 0) -> 3 (dim 0 of a tensor of shape (3, 5)) cannot be shared evenly
tensor_parallel(gpt())(zero.repeat(1, 9)) -> 9 tokens are more than the context of 8. Cut the sequence.
tensor_parallel(models.Attention(24, 12, n_kv_heads=3)) -> 3 key/value heads cannot be shared by 4 ranks: neither \
divides the other.
tp.RowParallelLinear.from_linear(nn.Linear(8, 4))(ones(1, 8)) -> This row-parallel layer expects 2 input features on \
each of 4 ranks and got 8. Give it the output of a column-parallel layer.
entropy(ones(1, 4), zero - 1, vocab=16) -> There is no target -1 in a vocabulary of 16 (0 to 15). Look at where
entropy(ones(1, 4), zero, vocab=17) -> Rank 0 of 4 holds 5 of 17 logits, but got 4. Give it its part.
VocabParallelEmbedding(nn.Embedding(3, 5)) -> A vocabulary of 3 is too small for 4 ranks.
VocabParallelEmbedding(nn.Embedding(7, 5))(zero + 7) -> There is no token 7 in a vocabulary of 7 (0 to 6).
tensor_parallel(gpt(seed=rank)) -> The ranks of this group hold different models: 50 of 68 parameters differ, first \
token_embedding.weight. Build it from the same seed on all ranks, or broadcast it first.
tensor_parallel(nn.Conv1d(2, 2, 1).to('meta')) -> tensor_parallel knows GPT and Llama of rankcell.models, their \
blocks, attention and MLPs, not Conv1d. Build it from ColumnParallelLinear and RowParallelLinear.

ring_attention(heads, heads, heads) -> A sequence of 12 positions cannot be cut into 8 equal pieces, as the zigzag \
layout needs on 4 ranks. Pad it to 16.
split(ones(2, 10), 4, layout="contiguous") -> 10 positions cannot be cut into 4 equal pieces, as the contiguous
positions(0, 0, 4, layout="contiguous") -> A sequence of 0 positions cannot be cut into 4 equal pieces, as the \
contiguous layout needs on 4 ranks. Pad it to 4.
ring_attention(heads, heads[:, :2], heads) -> Query, key and value need one shape, (batch, heads, length / W, d_head); \
they have (1, 3, 3, 2), (1, 2, 3, 2),
ring_attention(z, z, z, documents=ones(1, 2)) -> The ring knows no documents in a sequence. Give one document in each.
ContextParallel(gpt(), layout="spiral").split(tokens) -> There is no layout 'spiral'. Choose one of contiguous, zigzag.
ContextParallel(gpt())(tokens) -> 16 tokens on all ranks are more than the context of 8.
ContextParallel(gpt(dropout=0.1)) -> No rank holds all weights of attention. Build the model with dropout=0.

pipe(plan=schedules.gpipe(2, 4)) -> The schedule is for 2 ranks, and the process group has 4. Make one of them fit the
pipe(split_gpt(gpt(), 4)[:3]) -> The schedule has 4 stages, and 3 modules came.
pipe(plan=schedules.zero_bubble(4, 4)) -> zero bubble has backwards in halves. Give a schedule with whole ones (B).
pipe().step(tokens[:3], tokens[:3]) -> 3 inputs and 3 targets cannot be cut into 4 micro-batches.
split_gpt(gpt(), 5) -> 4 blocks cannot be cut into 5 stages. Choose from 1 to 4.
torch.no_grad()(pipe().step)(tokens, tokens) -> `step` finds gradients, and they are switched off here. Leave \
torch.no_grad.
pipe(between=(4, 7)).step(tokens, tokens) if rank == 0 else 1 / 0 -> 0F0 computed torch.float32 (1, 4, 8), and stage 1 \
expects torch.float32 (1, 4, 7). Make `between` say what the stages do.

route(ones(3, 4), 5, alone=True) -> A token cannot choose 5 of 4 experts. Choose k from 1 to 4.
route(ones(3, 4), 0, alone=True) -> A token cannot choose 0 of 4 experts. Choose k from 1 to 4.
route(ones(3, 4), 1, capacity_factor=0.0, alone=True) -> A capacity factor of 0 lets no token in. Give one above 0.
ExpertParallel(mixture(6)) -> 6 experts cannot be shared equally by 4 ranks.
"""


def test_errors_say_what_to_do(four):
    four.run(PRELUDE)
    for line in ERRORS.replace("\\\n", "").split("\n"):
        if line:
            source, message = line.split(" -> ")
            with pytest.raises(rankcell.RankError) as caught:
                four.run(source)
            said = " | ".join(r.error.message for r in caught.value.run.failed if r.error)
            assert message in said, source
