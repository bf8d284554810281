"""A norm over all heads of queries stands behind a column-parallel layer and uses the features that its rank has.

source: https://github.com/axonn-ai/yalis/pull/36
mesh: tp 4
first: norm output
side: forward
says: its rows are multiples
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up = nn.Linear(32, 64, bias=False)
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.down = nn.Linear(64, 49, bias=False)

    def forward(self, tokens):
        return self.down(torch.relu(self.norm(self.up(self.embed(tokens)))))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
import torch.distributed.nn.functional as differentiable

from rankcell.models import initialise
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Norm(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.weight = nn.Parameter(dense.weight.detach().chunk(4)[rank].clone())

    def forward(self, h):
        square = h.square().mean(-1, keepdim=True)
        square = differentiable.all_reduce(square) / 4  # mended
        return h / (square + 1e-6).sqrt() * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up = nn.Linear(32, 64, bias=False)
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.down = nn.Linear(64, 49, bias=False)

    def forward(self, tokens):
        return self.down(torch.relu(self.norm(self.up(self.embed(tokens)))))


model = initialise(Net())
model.up = ColumnParallelLinear.from_linear(model.up)
model.norm = Norm(model.norm)
model.down = RowParallelLinear.from_linear(model.down)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
