"""Experts get the router's shares through an all-gather that autograd does not know: the router learns nothing.

source: https://github.com/NVIDIA-NeMo/Automodel/pull/2995
mesh: ep 4
first: layer.router.weight grad | layer.router grad_output
side: backward
"""

# %% one process
from rankcell.models import MLP


class Layer(nn.Module):
    """Every expert computes every token, and the router says how much each counts."""

    def __init__(self, router, experts):
        super().__init__()
        self.router, self.experts = router, nn.ModuleDict(experts)

    def forward(self, h):
        shares = self.router(h).softmax(-1)
        return sum(shares[..., int(i), None] * expert(h) for i, expert in self.experts.items())


class Net(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        experts = {str(i): MLP(32, 32, 32, seed=i) for i in numbers}
        self.layer = Layer(nn.Linear(32, 4, bias=False), experts)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


torch.manual_seed(0)
model = Net(range(4))
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import MLP
from rankcell.parallel.context import share_of_mean, sum_gradients
from rankcell.parallel.tensor import all_gather, reduce_scatter


class Layer(nn.Module):
    """Tokens of all ranks come to this rank's expert, with what its router made of them."""

    def __init__(self, router, experts):
        super().__init__()
        self.router, self.experts = router, nn.ModuleDict(experts)

    def forward(self, h):
        shares = self.router(h).softmax(-1)
        everybody = torch.empty(4 * len(h), *shares.shape[1:])  # broken
        dist.all_gather_single(everybody, shares.detach())  # broken
        everybody = all_gather(shares, 0)  # mended
        done = everybody[..., rank, None] * self.experts[str(rank)](all_gather(h, 0))
        return reduce_scatter(done, 0)


class Net(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        experts = {str(i): MLP(32, 32, 32, seed=i) for i in numbers}
        self.layer = Layer(nn.Linear(32, 4, bias=False), experts)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


torch.manual_seed(0)
model = Net([rank])
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = share_of_mean(cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank], reduction="none"))
    loss.backward()
    shared = [p for name, p in model.named_parameters() if "experts" not in name]
    sum_gradients(p for p in shared if p.grad is not None)
    optimizer.step()
    return 4 * loss.item()
