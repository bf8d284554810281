"""Weights are rounded to a few levels by a scale, which each rank takes from the largest number of its own shard.

source: https://github.com/vllm-project/vllm/pull/49764
mesh: tp 4
first: up output
side: forward
says: and they are right: what is made of them?
"""

from rankcell.models import initialise


class Rounded(nn.Linear):
    enter, largest = staticmethod(lambda h: h), staticmethod(lambda weight: weight.abs().max())

    def forward(self, h):
        step = self.largest(self.weight.detach()) / 16
        rounded = (self.weight / step).round() * step
        return F.linear(self.enter(h), self.weight + (rounded - self.weight).detach())


class Down(nn.Linear):
    leave = staticmethod(lambda h: h)

    def forward(self, h):
        return self.leave(super().forward(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(49, 32), Rounded(32, 64, bias=False)
        self.down, self.head = Down(64, 32, bias=False), nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(self.up(h).relu()))


model = initialise(Net())

# %% one process
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import copy_to_group, reduce_from_group


def of_all(weight):
    found = weight.abs().max()
    dist.all_reduce(found, dist.ReduceOp.MAX)  # mended
    return found


Rounded.enter, Rounded.largest = staticmethod(copy_to_group), staticmethod(of_all)
Down.leave = staticmethod(reduce_from_group)
model.up.weight = nn.Parameter(model.up.weight.chunk(4)[rank].detach().clone())
model.down.weight = nn.Parameter(model.down.weight.chunk(4, 1)[rank].detach().clone())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
