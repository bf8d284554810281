"""Stages take their layers from the end, and each counts as if all had as many as itself: two layers are on none.

source: https://github.com/ml-explore/mlx-lm/issues/1688
mesh: pp 4
first: layers.4 output
side: forward
says: one process calls `layers.2`, `layers.3` before it, and no rank does
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(49, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 49)

    def forward(self, h):
        h = self.embed(h)
        for layer in self.layers:
            h = h + layer(h).tanh()
        return self.head(h)


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise

order = [3, 2, 1, 0]
layers = {3: [0], 2: [1], 1: [4, 5], 0: []}[rank]  # broken
layers = {3: [0], 2: [1], 1: [2, 3], 0: [4, 5]}[rank]  # mended


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        if rank == 3:
            self.embed = nn.Embedding(49, 32)
        self.layers = nn.ModuleDict({str(number): nn.Linear(32, 32) for number in layers})
        if rank == 0:
            self.head = nn.Linear(32, 49)

    def forward(self, h):
        h = self.embed(h) if rank == 3 else h
        for layer in self.layers.values():
            h = h + layer(h).tanh()
        return self.head(h) if rank == 0 else h


model = initialise(Stage())
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    loss = through(model, order, x, y)
    optimizer.step()
    return loss
