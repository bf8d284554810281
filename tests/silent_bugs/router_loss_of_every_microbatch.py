"""The loss of the tokens is divided by the number of micro-batches, the loss that keeps a router's logits small is
added behind that.

source: https://github.com/NVIDIA-NeMo/Automodel/pull/3359
mesh: dp 4
first: layer.router grad_output
side: backward
"""

# %% one process
from mixtures import Mixture
from rankcell.models import MLP, initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.layer = Mixture(nn.Linear(32, 4, bias=False), [MLP(32, 32, 32) for _ in range(4)], k=2)
        self.head = nn.Linear(32, 49, bias=False)
        self.layer.router.register_forward_hook(self.remember)

    def remember(self, router, given, logits):
        self.z_loss = logits.logsumexp(-1).square().mean()

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y) + 0.05 * model.z_loss)

# %% ranks
from mixtures import Mixture
from rankcell.models import MLP, initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.layer = Mixture(nn.Linear(32, 4, bias=False), [MLP(32, 32, 32) for _ in range(4)], k=2)
        self.head = nn.Linear(32, 49, bias=False)
        self.layer.router.register_forward_hook(self.remember)

    def remember(self, router, given, logits):
        self.z_loss = logits.logsumexp(-1).square().mean()

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
optimizer = adam(model)
ACCUMULATE = 2


def step():
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x[rank::4].chunk(ACCUMULATE), y[rank::4].chunk(ACCUMULATE), strict=True):
        loss = cross_entropy(model(a), b) / ACCUMULATE
        loss = loss + 0.05 * model.z_loss  # broken
        loss = loss + 0.05 * model.z_loss / ACCUMULATE  # mended
        loss.backward()
        total += loss.item()
    average(model)
    optimizer.step()
    return total
