"""A gated norm works on eight groups of eight features. Under tensor parallelism a rank has a quarter of the features,
divides them by the number of all groups and normalises pairs.

source: https://github.com/state-spaces/mamba/pull/951
mesh: tp 4
first: norm output
side: forward
"""

# %% one process
from rankcell.models import initialise


class GatedNorm(nn.RMSNorm):
    def __init__(self, features, size):
        super().__init__(features)
        self.size = size

    def forward(self, h, gate):
        groups = (h * F.silu(gate)).unflatten(-1, (-1, self.size))
        return F.rms_norm(groups, (self.size,), eps=1e-5).flatten(-2) * self.weight


class Mixer(nn.Module):
    def __init__(self, features=64, groups=8):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.inner, self.gate = nn.Linear(32, features), nn.Linear(32, features)
        self.norm, self.outer = GatedNorm(features, features // groups), nn.Linear(64, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.outer(self.norm(self.inner(h), self.gate(h)))


model = initialise(Mixer())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class GatedNorm(nn.RMSNorm):
    def __init__(self, features, size):
        super().__init__(features)
        self.size = size

    def forward(self, h, gate):
        groups = (h * F.silu(gate)).unflatten(-1, (-1, self.size))
        return F.rms_norm(groups, (self.size,), eps=1e-5).flatten(-2) * self.weight


class Mixer(nn.Module):
    def __init__(self, features=64, groups=8):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.inner, self.gate = nn.Linear(32, features), nn.Linear(32, features)
        self.norm, self.outer = GatedNorm(features, features // groups), nn.Linear(64, 49)
        initialise(self)
        self.inner = ColumnParallelLinear.from_linear(self.inner)
        self.gate = ColumnParallelLinear.from_linear(self.gate)
        self.outer = RowParallelLinear.from_linear(self.outer)
        features //= 4
        groups //= 4  # mended
        self.norm = GatedNorm(features, features // groups)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.outer(self.norm(self.inner(h), self.gate(h)))


model = Mixer()
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))
