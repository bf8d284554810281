"""Token 3 is padding and does not learn, and row 3 of each rank's part of the vocabulary does not learn either.

source: https://github.com/pytorch/torchtitan/pull/4637
mesh: tp 4
first: embed.weight grad
side: backward
"""

# %% one process
from rankcell.models import MLP

tokens, targets = x % 48, y % 48


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32, padding_idx=3)
        self.mlp = MLP(32, 64, 32)
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.mlp(h))


torch.manual_seed(0)
model = Net()
step = training(model, adam(model), lambda: cross_entropy(model(tokens), targets, ignore_index=3))

# %% ranks
from rankcell.models import MLP

tokens, targets = x % 48, y % 48


class PartOfEmbedding(nn.Module):
    """The vectors of 12 tokens of 48; the others come from the other ranks."""

    def __init__(self, dense):
        super().__init__()
        self.start, self.padding = 12 * rank, dense.padding_idx
        here = 0 <= self.padding - self.start < 12
        self.padding = self.padding - self.start if here else None  # mended
        self.weight = nn.Parameter(dense.weight.detach()[self.start : self.start + 12].clone())

    def forward(self, tokens):
        local = tokens - self.start
        absent = (local < 0) | (local >= 12)
        found = F.embedding(local.masked_fill(absent, 0), self.weight, padding_idx=self.padding)
        return Sum.apply(found.masked_fill(absent[..., None], 0))


class Sum(torch.autograd.Function):
    """The sum over the ranks, which all go on with alike."""

    @staticmethod
    def forward(_, mine):
        total = mine.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_, grad):
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32, padding_idx=3)
        self.mlp = MLP(32, 64, 32)
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.mlp(h))


torch.manual_seed(0)
model = Net()
model.embed = PartOfEmbedding(model.embed)
step = training(model, adam(model), lambda: cross_entropy(model(tokens), targets, ignore_index=3))
