"""The loss that balances the experts counts the tokens of all replicas and adds up the probabilities of this one's:
that is a share of it, and the shares are then averaged as if each were the whole.

source: https://github.com/NVIDIA/Megatron-LM/pull/3769
mesh: dp 4
first: layer.router grad_output
side: backward
"""

# %% one process
from rankcell.models import MLP, initialise


class Mixture(nn.Module):
    """Two of four experts for each token, and a loss that is smallest where all are used alike."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(MLP(32, 48, 32, activation="gelu") for _ in range(4))

    def forward(self, h):
        probabilities = self.router(h).softmax(-1)
        weights, chosen = probabilities.topk(2, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, weights)
        count = torch.bincount(chosen.flatten(), minlength=4)
        self.balance = 4 * (count / count.sum() * probabilities.mean((0, 1))).sum()
        return sum(weights[..., i, None] * expert(h) for i, expert in enumerate(self.experts))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm1, self.layer = nn.Embedding(49, 32), nn.LayerNorm(32), Mixture()
        self.norm2, self.head = nn.LayerNorm(32), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm2(h + self.layer(self.norm1(h))))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y) + 0.1 * model.layer.balance)

# %% ranks
from torch.nn.parallel import DistributedDataParallel

from rankcell.models import MLP, initialise


class Mixture(nn.Module):
    """Two of four experts for each token, and a loss that is smallest where all are used alike."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(MLP(32, 48, 32, activation="gelu") for _ in range(4))

    def forward(self, h):
        probabilities = self.router(h).softmax(-1)
        weights, chosen = probabilities.topk(2, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, weights)
        count = torch.bincount(chosen.flatten(), minlength=4)
        dist.all_reduce(count)  # how the tokens of all replicas chose
        tokens = count.sum() / 2
        self.balance = 4 * (count / count.sum() * probabilities.sum((0, 1)) / tokens).sum()
        self.balance = dist.get_world_size() * self.balance  # mended
        return sum(weights[..., i, None] * expert(h) for i, expert in enumerate(self.experts))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm1, self.layer = nn.Embedding(49, 32), nn.LayerNorm(32), Mixture()
        self.norm2, self.head = nn.LayerNorm(32), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm2(h + self.layer(self.norm1(h))))


model = DistributedDataParallel(initialise(Net()))
mine, targets = x.chunk(4)[rank], y.chunk(4)[rank]
step = training(
    model, adam(model), lambda: cross_entropy(model(mine), targets) + 0.1 * model.module.layer.balance
)
