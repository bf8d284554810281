"""Rotary positions are stretched as soon as a sequence is longer than those of the pre-training (dynamic NTK). The
length is read off a shape that is not that of the sequence: here each rank has a quarter of it, and none stretches.

source: https://github.com/ml-explore/mlx-lm/pull/1553
mesh: cp 4
first: attention.output output
side: forward
"""

# %% one process
from rankcell.models import initialise, rotate


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.output = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, h):
        stretch = max(1.0, 4 * h.shape[1] / 4 - 3)
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(t, torch.arange(8), base=100 * stretch ** (8 / 6)) for t in (q, k))
        mixed = F.scaled_dot_product_attention(4 * q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(49, 32), nn.LayerNorm(32)
        self.attention, self.head = Attention(), nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.attention(self.norm(h)))


model = initialise(Net())
step = training(model, adam(model, 1e-2), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise, rotate
from rankcell.parallel.tensor import all_gather

mine = torch.arange(2 * rank, 2 * rank + 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.output = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, h):
        length = h.shape[1]  # broken
        length = h.shape[1] * dist.get_world_size()  # mended
        stretch = max(1.0, 4 * length / 4 - 3)
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(t, mine, base=100 * stretch ** (8 / 6)) for t in (q, k))
        k, v = (all_gather(t, 2) for t in (k, v))
        seen = mine[:, None] >= torch.arange(8)
        mixed = F.scaled_dot_product_attention(4 * q, k, v, attn_mask=seen)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(49, 32), nn.LayerNorm(32)
        self.attention, self.head = Attention(), nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.attention(self.norm(h)))


model = initialise(Net())
optimizer = adam(model, 1e-2)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[:, mine]), y[:, mine])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
