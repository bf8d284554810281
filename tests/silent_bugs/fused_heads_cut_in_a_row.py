"""Queries, keys and values stand one below the other in a fused weight of grouped-query attention, and a plain cut of
its rows gives a rank others than the heads that it takes them for.

source: https://github.com/alibaba/ChatLearn/pull/277
mesh: tp 4
first: output output
side: forward
"""

# %% one process
from rankcell.models import causal_attention, initialise


class Fused(nn.Module):
    """Attention of 8 query heads and 4 key/value heads of 8 features; the first layer has all three."""

    def __init__(self, heads=8, kv_heads=4):
        super().__init__()
        self.sizes = [8 * heads, 8 * kv_heads, 8 * kv_heads]
        self.embed = nn.Embedding(49, 64)
        self.qkv = nn.Linear(64, sum(self.sizes), bias=False)
        self.output = nn.Linear(self.sizes[0], 64, bias=False)
        self.head = nn.Linear(64, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        parts = self.qkv(h).split(self.sizes, -1)
        query, key, value = (p.unflatten(-1, (-1, 8)).transpose(1, 2) for p in parts)
        mixed = causal_attention(query, key, value, nn.Identity())
        return self.head(h + self.output(mixed.transpose(1, 2).flatten(2)))


model = initialise(Fused())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import causal_attention, initialise
from rankcell.parallel.tensor import copy_to_group, reduce_from_group


class Output(nn.Linear):
    def forward(self, h):
        return reduce_from_group(super().forward(h))


class Fused(nn.Module):
    def __init__(self, heads=8, kv_heads=4):
        super().__init__()
        self.sizes = [8 * heads, 8 * kv_heads, 8 * kv_heads]
        self.embed = nn.Embedding(49, 64)
        self.qkv = nn.Linear(64, sum(self.sizes), bias=False)
        self.output = Output(self.sizes[0], 64, bias=False)
        self.head = nn.Linear(64, 49, bias=False)

    def cut(self):
        """Keep the part of this rank."""
        mine = self.qkv.weight.chunk(4)[rank]  # broken
        mine = torch.cat([part.chunk(4)[rank] for part in self.qkv.weight.split(self.sizes)])  # mended
        self.qkv.weight = nn.Parameter(mine.detach().clone())
        self.output.weight = nn.Parameter(self.output.weight.chunk(4, 1)[rank].detach().clone())
        self.sizes = [size // 4 for size in self.sizes]
        return self

    def forward(self, tokens):
        h = self.embed(tokens)
        parts = self.qkv(copy_to_group(h)).split(self.sizes, -1)
        query, key, value = (p.unflatten(-1, (-1, 8)).transpose(1, 2) for p in parts)
        mixed = causal_attention(query, key, value, nn.Identity())
        return self.head(h + self.output(mixed.transpose(1, 2).flatten(2)))


model = initialise(Fused()).cut()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
