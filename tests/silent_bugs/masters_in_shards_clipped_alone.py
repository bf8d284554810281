"""Each rank keeps master weights of its shard of every parameter, and clips their gradients by the norm of its shards.

source: https://github.com/sgl-project/SpecForge/pull/663
mesh: dp 4
first: * grad
side: backward
says: does each clip by its own norm
"""


def total(norm):
    return norm


class Masters:
    """AdamW on master copies: each rank keeps the rows of one shard of every parameter."""

    def __init__(self, model, rank, size):
        self.parameters, self.shard = list(model.parameters()), lambda t: t.chunk(size)[rank]
        self.masters = [self.shard(p.detach()).clone().requires_grad_() for p in self.parameters]
        self.inside = torch.optim.SGD(self.masters, 0.1)

    def step(self):
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad = self.shard(p.grad).clone()
        norm = torch.stack([(master.grad**2).sum() for master in self.masters]).sum()
        norm = total(norm)
        for master in self.masters:
            master.grad *= 0.1 / norm.sqrt()
        self.inside.step()
        for master, p in zip(self.masters, self.parameters, strict=True):
            self.shard(p.data).copy_(master.detach())
            self.hand_on(p)

    def hand_on(self, p):
        """For one process nothing."""

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


model = gpt(52)

# %% one process
optimizer = Masters(model, 0, 1)
step = training(model, optimizer, lambda: cross_entropy(model(x), y))


# %% ranks
def total(norm):
    dist.all_reduce(norm)  # mended
    return norm


def hand_on(self, p):
    for owner, part in enumerate(p.data.chunk(4)):
        dist.broadcast(part, owner)


Masters.hand_on, optimizer = hand_on, Masters(model, rank, 4)

step = training(model, optimizer, lambda: cross_entropy(model(x[rank::4]), y[rank::4]), average)
