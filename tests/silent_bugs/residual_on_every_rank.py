"""Every rank adds the residual to its part of a sum.

source: https://github.com/Wenyueh/MinivLLM/issues/80
mesh: tp 4
first: block output
side: forward
says: what is too much in it is 3 times what `first` gives
"""

# %% one process
from rankcell.models import initialise


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, h):
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.block, self.head = (
            nn.Embedding(49, 32),
            nn.Linear(32, 32),
            Block(),
            nn.Linear(32, 49),
        )

    def forward(self, t):
        return self.head(self.block(self.first(self.embed(t))))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear, reduce_from_group


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, h):
        part = self.down(F.gelu(self.up(self.norm(h))))
        return reduce_from_group(h + part)  # broken
        return h + reduce_from_group(part)  # mended


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.block, self.head = (
            nn.Embedding(49, 32),
            nn.Linear(32, 32),
            Block(),
            nn.Linear(32, 49),
        )

    def forward(self, t):
        return self.head(self.block(self.first(self.embed(t))))


model = initialise(Net())
model.block.up = ColumnParallelLinear.from_linear(model.block.up)
model.block.down.weight = nn.Parameter(model.block.down.weight.detach().chunk(4, 1)[rank].clone())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
