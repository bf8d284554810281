"""Every rank holds the router and sends other tokens through it, and its gradients stay where they are.

source: https://github.com/pytorch/torchtitan/issues/2387
mesh: ep 4
first: layer.router.weight grad
side: backward
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
from rankcell.parallel.context import share_of_mean, sum_gradients


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
    loss = share_of_mean(cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank], reduction="none"))
    loss.backward()
    shared = list(shared_parameters(model))
    shared = [p for p in shared if p is not model.layer.router.weight]  # broken
    sum_gradients(shared)
    optimizer.step()
    return 4 * loss.item()
