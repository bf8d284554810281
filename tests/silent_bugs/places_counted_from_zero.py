"""An expert takes so many tokens of the batch, in order, and drops the rest. Each data parallel rank counts the places
from zero against the capacity for all ranks, so that nothing is ever dropped.

source: https://github.com/deepseek-ai/DeepSeek-V2/issues/48
mesh: dp 4
first: moe output
side: forward
"""

# %% one process
from rankcell.models import initialise


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, h):
        probabilities = self.router(h).softmax(-1)
        taken = F.one_hot(probabilities.argmax(-1), 4)
        place = taken.flatten(0, 1).cumsum(0).view_as(taken)
        weights = probabilities * taken * (place <= 12)
        return sum(weights[..., [e]] * expert(h) for e, expert in enumerate(self.experts))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.moe = nn.Embedding(49, 32), nn.LayerNorm(32), Experts()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.moe(self.norm(h)))


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, h):
        probabilities = self.router(h).softmax(-1)
        taken = F.one_hot(probabilities.argmax(-1), 4)
        place = taken.flatten(0, 1).cumsum(0).view_as(taken)
        counts = [torch.empty(4, dtype=torch.long) for _ in range(4)]  # mended
        dist.all_gather(counts, taken.sum((0, 1)))  # mended
        place = place + sum(counts[:rank])  # mended
        weights = probabilities * taken * (place <= 12)
        return sum(weights[..., [e]] * expert(h) for e, expert in enumerate(self.experts))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.moe = nn.Embedding(49, 32), nn.LayerNorm(32), Experts()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.moe(self.norm(h)))


model = initialise(Net())
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    rows = slice(2 * rank, 2 * rank + 2)
    loss = cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
