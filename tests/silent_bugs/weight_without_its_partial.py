"""A norm is computed on the tokens of this rank, with the weight as a plain tensor. Without a word about its gradient,
what comes back is taken to be the same on all ranks, and the tokens of the others never count.

source: https://github.com/pytorch/torchtitan/pull/2532
mesh: tp 4
first: norm.weight grad
side: backward
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(49, 32), nn.Linear(32, 32)
        self.norm, self.head = nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(F.gelu(self.up(self.embed(tokens)))))


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from rankcell.models import initialise

mesh = init_device_mesh("cpu", (4,))


class FusedNorm(nn.RMSNorm):
    def forward(self, h):
        weight = self.weight.to_local()  # broken
        weight = self.weight.to_local(grad_placements=[Partial()])  # mended
        return DTensor.from_local(F.rms_norm(h.to_local(), (32,), weight, self.eps), mesh, [Shard(1)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(49, 32), nn.Linear(32, 32)
        self.norm, self.head = FusedNorm(32, eps=1e-5), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(F.gelu(self.up(self.embed(tokens)))))


model = distribute_module(initialise(Net()), mesh)
optimizer = adam(model, 3e-3)
tokens = distribute_tensor(x, mesh, [Shard(1)])


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens).full_tensor(), y)
    loss.backward()
    for p in model.parameters():
        p.grad = p.grad.redistribute(placements=[Replicate()])
    optimizer.step()
    return loss.item()
