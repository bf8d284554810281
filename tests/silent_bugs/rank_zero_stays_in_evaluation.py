"""Before the training rank 0, which writes the log, evaluates once, and leaves the model in evaluation mode. From then
on its tokens know no dropout.

The mask of a batch comes from a generator that everybody has, and a rank takes its rows of it, so the mended version
drops what one process drops.

source: https://github.com/shubhamagarwal92/mmd/issues/14
mesh: dp 4
first: drop output
side: forward
"""

# %% one process
from rankcell.models import MLP, initialise


class Drop(nn.Module):
    """Dropout of a whole batch from which a rank takes its rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.calls = rows, 0

    def forward(self, h):
        if not self.training:
            return h
        self.calls += 1
        kept = torch.rand(8, 8, 32, generator=generator(0, "drop", self.calls)) >= 0.25
        return h * kept[self.rows] / 0.75


class Net(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.drop = Drop(rows)
        self.mlp = MLP(32, 64, 32, activation="gelu")
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.drop(self.embed(tokens))
        return self.head(h + self.mlp(h))


model = initialise(Net(slice(None)))
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import MLP, initialise


class Drop(nn.Module):
    """Dropout of a whole batch from which a rank takes its rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.calls = rows, 0

    def forward(self, h):
        if not self.training:
            return h
        self.calls += 1
        kept = torch.rand(8, 8, 32, generator=generator(0, "drop", self.calls)) >= 0.25
        return h * kept[self.rows] / 0.75


class Net(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.drop = Drop(rows)
        self.mlp = MLP(32, 64, 32, activation="gelu")
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.drop(self.embed(tokens))
        return self.head(h + self.mlp(h))


model = initialise(Net(slice(rank, None, 4)))
optimizer = adam(model)


@torch.no_grad()
def evaluate():
    model.eval()
    found = cross_entropy(model(x[:2]), y[:2]).item()
    model.train()  # mended
    return found


if rank == 0:
    log = {"loss before training": evaluate()}

step = training(model, optimizer, lambda: cross_entropy(model(x[rank::4]), y[rank::4]), average)
