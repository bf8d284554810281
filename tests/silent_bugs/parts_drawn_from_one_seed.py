"""Every rank draws its part of a weight, some columns of it, from the same seed: all parts are equal.

source: https://github.com/modelscope/ms-swift/pull/7944
mesh: tp 4
first: down.weight parameter
side: start
says: they hold the same numbers, where each should have its own part
"""


# %% one process
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 49)

    def forward(self, t):
        h = self.embed(t)
        return self.head(h + self.down(F.gelu(self.up(h))))


torch.manual_seed(0)
model = Net()
for p in (model.up.weight, model.down.weight):
    nn.init.normal_(p, std=0.1)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 49)

    def forward(self, t):
        h = self.embed(t)
        return self.head(h + self.down(F.gelu(self.up(h))))


torch.manual_seed(0)
model = Net()
for p in (model.up.weight, model.down.weight):
    nn.init.normal_(p, std=0.1)
model.up, model.down = ColumnParallelLinear.from_linear(model.up), RowParallelLinear.from_linear(model.down)
torch.manual_seed(1)
nn.init.normal_(model.down.weight, std=0.1)  # broken
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
