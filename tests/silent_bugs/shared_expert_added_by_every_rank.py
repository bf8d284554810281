"""Every rank holds the shared expert whole and adds it to what its own experts give, before the sum over ranks: the
shared expert counts four times.

source: https://github.com/lightseekorg/tokenspeed/pull/1713
mesh: ep 4
first: layer output
side: forward
"""

# %% one process
from rankcell.models import MLP, initialise


class SharedMoE(nn.Module):
    def __init__(self, dim=32, n=4):
        super().__init__()
        self.router = nn.Linear(dim, n, bias=False)
        self.experts = nn.ModuleList(MLP(dim, 48, dim, activation="gelu") for _ in range(n))
        self.shared = MLP(dim, 32, dim, activation="gelu")

    def forward(self, h):
        best = self.router(h).softmax(-1).topk(2, -1)
        gates = torch.zeros(*h.shape[:-1], 4).scatter(-1, best.indices, best.values)
        routed = sum(gates[..., e, None] * expert(h) for e, expert in enumerate(self.experts))
        return routed + self.shared(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.layer = SharedMoE()
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import MLP, initialise
from rankcell.parallel.tensor import copy_to_group, reduce_from_group


class SharedMoE(nn.Module):
    def __init__(self, dim=32, n=4):
        super().__init__()
        self.router = nn.Linear(dim, n, bias=False)
        self.experts = nn.ModuleDict({str(e): MLP(dim, 48, dim, activation="gelu") for e in range(n)})
        self.shared = MLP(dim, 32, dim, activation="gelu")

    def keep_mine(self):
        self.experts = nn.ModuleDict({str(rank): self.experts[str(rank)]})

    def forward(self, h):
        best = self.router(h).softmax(-1).topk(2, -1)
        gates = torch.zeros(*h.shape[:-1], 4).scatter(-1, best.indices, best.values)
        mine = copy_to_group(gates)[..., rank, None] * self.experts[str(rank)](copy_to_group(h))
        return reduce_from_group(mine + self.shared(h))  # broken
        return reduce_from_group(mine) + self.shared(h)  # mended


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.layer = SharedMoE()
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
model.layer.keep_mine()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
