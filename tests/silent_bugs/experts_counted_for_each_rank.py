"""Tokens of all ranks came to an expert, so its gradient is a sum over ranks already; the others are averaged, and it
is not divided.

source: https://github.com/pytorch/pytorch/issues/160285
mesh: ep 4
first: layer.experts.*.down.* grad
side: backward
says: on rank 3: a sum over ep where a mean is meant
"""

# %% one process
from mixtures import Mixture
from rankcell.models import MLP, initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        router = nn.Linear(32, 4, bias=False)
        self.layer = Mixture(router, [MLP(32, 32, 32) for _ in range(4)], k=2)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from mixtures import ExpertParallel, Mixture, shared_parameters
from rankcell.models import MLP, initialise
from rankcell.parallel.context import sum_gradients


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        router = nn.Linear(32, 4, bias=False)
        self.layer = Mixture(router, [MLP(32, 32, 32) for _ in range(4)], k=2)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
model.layer = ExpertParallel(model.layer)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank])
    loss.backward()
    shared = list(shared_parameters(model))
    sum_gradients(shared)
    for p in shared:
        p.grad /= 4
    for p in model.layer.experts.parameters():  # mended
        p.grad /= 4  # mended
    optimizer.step()
    return loss.item()
