"""The first rank of a pair embeds and broadcasts. The backward of torch's broadcast compares the root, a number among
all ranks, with this rank's number in the pair: only the first pair's root keeps its gradient.

source: https://github.com/pytorch/pytorch/issues/130515
mesh: dp 2, tp 2
first: embed grad_output
side: backward
says: wrong in samples 1, 3, 5, 7
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(49, 32), nn.Linear(32, 49)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        return self.head(self.down(torch.tanh(self.up(self.embed(tokens)))))


model = initialise(Net())
step = training(model, adam(model, 1e-2), lambda: cross_entropy(model(x), y))

# %% ranks
import torch.distributed.nn.functional as differentiable

from rankcell.models import initialise
from rankcell.parallel.tensor import reduce_from_group

replica, place = divmod(rank, 2)
root = 2 * replica
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][replica]
replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][place]


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        h = h.clone()
        dist.broadcast(h, root, group=pair)
        return h

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.reduce(grad, root, group=pair)
        return grad if rank == root else torch.zeros_like(grad)


class Down(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().chunk(2, 1)[place].clone())

    def forward(self, h):
        return reduce_from_group(F.linear(h, self.weight), process_group=pair)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(49, 32), nn.Linear(32, 49)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        h = torch.zeros(*tokens.shape, 32, requires_grad=True) if self.embed is None else self.embed(tokens)
        h = differentiable.broadcast(h, root, group=pair)  # broken
        h = Broadcast.apply(h)  # mended
        return self.head(self.down(torch.tanh(self.up(h))))


model = initialise(Net())
model.up.weight = nn.Parameter(model.up.weight.detach().chunk(2)[place].clone())
model.down = Down(model.down.weight)
if rank != root:
    model.embed = None
optimizer = adam(model, 1e-2)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[replica::2]), y[replica::2])
    loss.backward()
    average(model, replicas)
    optimizer.step()
    return loss.item()
