"""A sequence is gathered in two hops, inside each node and then across. Its gradient is scattered in two hops in the
same order, where the last gather has to be undone first: ranks 1 and 2 get each other's part.

source: https://github.com/vllm-project/vllm-ascend/pull/11921
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

node = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
rail = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        for group in (node, rail):
            parts = [torch.empty_like(h) for _ in range(2)]
            dist.all_gather(parts, h.contiguous(), group=group)
            h = torch.cat(parts, 1)
        return h

    @staticmethod
    def backward(ctx, grad):
        order = (node, rail)  # broken
        order = (rail, node)  # mended
        for group in order:
            halves = [half.contiguous() for half in grad.chunk(2, 1)]
            grad = torch.empty_like(halves[0])
            dist.reduce_scatter(grad, halves, group=group)
        return grad


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
