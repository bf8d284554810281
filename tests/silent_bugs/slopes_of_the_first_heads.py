"""Attention heads are divided over the ranks, and every rank takes ALiBi's slopes from the first one on: those of the
heads of rank 0.

source: https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/227
mesh: tp 4
first: blocks.0.attention.output output
side: forward
"""

# %% one process
from functools import partial

SLOPES = 2.0 ** -torch.arange(1.0, 9.0)


def attend(self, x, documents=None):
    q, k, v = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
    distance = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
    bias = SLOPES[:, None, None] * distance.masked_fill(distance > 0, 0)
    scores = (q @ k.mT / self.d_head**0.5 + bias).masked_fill(distance > 0, -torch.inf)
    return self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


model = gpt(n_heads=8)
for block in model.blocks:
    block.attention.forward = partial(attend, block.attention)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from functools import partial

from rankcell.parallel.transformer import tensor_parallel

SLOPES = 2.0 ** -torch.arange(1.0, 9.0)


def attend(self, x):
    q, k, v = (
        layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
    )
    heads = q.shape[1]
    slopes = SLOPES[:heads]  # broken
    slopes = SLOPES[rank * heads : (rank + 1) * heads]  # mended
    distance = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
    bias = slopes[:, None, None] * distance.masked_fill(distance > 0, 0)
    scores = (q @ k.mT / 4**0.5 + bias).masked_fill(distance > 0, -torch.inf)
    return self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


model = tensor_parallel(gpt(n_heads=8))
for block in model.blocks:
    block.attention.forward = partial(attend, block.attention)
step = training(model, adam(model), lambda: model(x, y))
