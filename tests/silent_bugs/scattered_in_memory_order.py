"""The gradient of a sequence that was gathered is reduced and scattered by a call that cuts memory into four. In memory
the batch comes first and the sequence second, so each rank gets two sequences for a quarter of all.

source: https://github.com/EleutherAI/gpt-neox/pull/1260
mesh: tp 4
first: norm grad_output
side: backward
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(49, 32), nn.LayerNorm(32), nn.Linear(32, 49)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import RowParallelLinear


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        parts = [torch.empty_like(h) for _ in range(4)]
        dist.all_gather(parts, h.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[0], grad.shape[1] // 4, grad.shape[2])
        grad = grad.contiguous()  # broken
        grad = torch.cat(grad.chunk(4, 1))  # mended
        dist.reduce_scatter_single(own.view(-1), grad.view(-1))
        return own


class Up(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().chunk(4)[rank].clone())

    def forward(self, h):
        return F.linear(GatherSequence.apply(h), self.weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(49, 32), nn.LayerNorm(32), nn.Linear(32, 49)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


model = initialise(Net())
model.up = Up(model.up.weight)
model.down = RowParallelLinear.from_linear(model.down, sequence_parallel=True)
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    tokens, targets = (t[:, 2 * rank : 2 * rank + 2] for t in (x, y))
    loss = cross_entropy(model(tokens), targets) / 4
    loss.backward()
    for part in (model.embed, model.norm, model.head):
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return 4 * loss.item()
