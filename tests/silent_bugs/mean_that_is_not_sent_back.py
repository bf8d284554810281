"""A layer subtracts the mean over the samples of all ranks. Its sum over ranks passes gradients on as they are, which
is right where all ranks go on with the same, and here each goes on with samples of its own.

source: https://github.com/Dao-AILab/flash-attention/issues/1244
mesh: dp 4
first: features grad_output | features.down grad_output
side: backward
"""

# %% one process
from rankcell.models import MLP, initialise


class Center(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.features = MLP(32, 48, 32, activation="gelu", bias=False)
        self.center = Center()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        return self.head(torch.tanh(self.center(self.features(self.embed(tokens)))))


model = initialise(Net())
nn.init.normal_(model.embed.weight, generator=generator(1, "embed"))
step = training(model, adam(model), lambda: cross_entropy(model(x), x))

# %% ranks
from torch.nn.parallel import DistributedDataParallel

from rankcell.models import MLP, initialise


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        h = h.clone()
        dist.all_reduce(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)  # mended
        return grad


class Center(nn.Module):
    def forward(self, h):
        return h - AllReduce.apply(h.sum(0)) / (4 * len(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.features = MLP(32, 48, 32, activation="gelu", bias=False)
        self.center = Center()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        return self.head(torch.tanh(self.center(self.features(self.embed(tokens)))))


model = initialise(Net())
nn.init.normal_(model.embed.weight, generator=generator(1, "embed"))
model = DistributedDataParallel(model)
step = training(model, adam(model), lambda: cross_entropy(model(x[rank::4]), x[rank::4]))
