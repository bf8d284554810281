"""What comes back through the shared expert is summed over the ranks in it, and once more where its region begins.

source: https://github.com/pytorch/pytorch/pull/175867
mesh: tp 4
first: norm grad_output
side: backward
says: all ranks have the same: does a way back to it count twice
"""

from rankcell.models import initialise


class FeedForward(nn.Module):
    enter = staticmethod(lambda h: h)

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, h):
        return self.down(self.up(self.enter(h)).tanh())


class Both(nn.Module):
    enter = leave = staticmethod(lambda h: h)

    def __init__(self):
        super().__init__()
        self.routed, self.shared = FeedForward(), FeedForward()

    def forward(self, h):
        h = self.enter(h)
        return self.leave(self.routed(h) + self.shared(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.both = nn.Embedding(49, 32), nn.LayerNorm(32), Both()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.both(self.norm(h)))


model = initialise(Net())

# %% one process
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import copy_to_group, reduce_from_group

Both.enter, Both.leave = staticmethod(copy_to_group), staticmethod(reduce_from_group)
model.both.shared.enter = copy_to_group  # broken
for part in (model.both.routed, model.both.shared):
    part.up.weight = nn.Parameter(part.up.weight.chunk(4)[rank].detach().clone())
    part.down.weight = nn.Parameter(part.down.weight.chunk(4, 1)[rank].detach().clone())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
