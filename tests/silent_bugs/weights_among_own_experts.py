"""A token's weights for its best two experts add up to one. Each rank has two of eight experts, strikes out the others
and only then lets the weights add up to one, so a token whose experts live apart counts both in full.

source: https://github.com/vllm-project/vllm/pull/2090
mesh: ep 4
first: moe output
side: forward
"""

# %% one process
from rankcell.models import initialise


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, h):
        weights, chosen = self.router(h).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        dense = torch.zeros(*h.shape[:-1], 8).scatter(-1, chosen, weights)
        return sum(dense[..., [e]] * F.gelu(expert(h)) for e, expert in enumerate(self.experts))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.moe = nn.Embedding(49, 32), nn.LayerNorm(32), Experts()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.moe(self.norm(h)))


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import copy_to_group, reduce_from_group


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleDict({str(e): nn.Linear(32, 32) for e in (2 * rank, 2 * rank + 1)})

    def forward(self, h):
        weights, chosen = copy_to_group(self.router(h)).softmax(-1).topk(2)
        local = chosen // 2 == rank
        weights = weights / weights.sum(-1, keepdim=True)  # mended
        weights = weights * local
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)  # broken
        dense = torch.zeros(*h.shape[:-1], 8).scatter(-1, chosen, weights)
        h = copy_to_group(h)
        return reduce_from_group(
            sum(dense[..., [int(e)]] * F.gelu(expert(h)) for e, expert in self.experts.items())
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.moe = nn.Embedding(49, 32), nn.LayerNorm(32), Experts()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.moe(self.norm(h)))


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))
