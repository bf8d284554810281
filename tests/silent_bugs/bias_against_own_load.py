"""Experts with many tokens get a smaller bias in the choice, those with few a larger one. The tokens are counted on
each rank for itself, and DDP gives the bias of rank 0 to all.

source: https://github.com/pytorch/torchtitan/pull/1114
mesh: dp 4
steps: 2
first: experts output
side: forward
"""

# %% one process
from rankcell.models import initialise


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, 32, 16, generator=generator(0, "up")) / 6)
        self.down = nn.Parameter(torch.randn(8, 16, 32, generator=generator(0, "down")) / 4)
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, h):
        shares = self.router(h).sigmoid()
        chosen = F.one_hot((shares + self.bias).argmax(-1), 8)
        self.load = chosen.sum((0, 1)).float()
        hidden = torch.relu(torch.einsum("bsd,edh->bseh", h, self.up))
        return torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, shares * chosen)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.experts = nn.Embedding(49, 32), nn.LayerNorm(32), Experts()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.norm(self.embed(tokens))
        return self.head(h + self.experts(h))


model = Net()
for layer in (model.embed, model.head, model.experts.router):
    initialise(layer)
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    load = model.experts.load
    model.experts.bias += 0.2 * torch.sign(load.mean() - load)
    return loss.item()


# %% ranks
from torch.nn.parallel import DistributedDataParallel

from rankcell.models import initialise


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, 32, 16, generator=generator(0, "up")) / 6)
        self.down = nn.Parameter(torch.randn(8, 16, 32, generator=generator(0, "down")) / 4)
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, h):
        shares = self.router(h).sigmoid()
        chosen = F.one_hot((shares + self.bias).argmax(-1), 8)
        self.load = chosen.sum((0, 1)).float()
        hidden = torch.relu(torch.einsum("bsd,edh->bseh", h, self.up))
        return torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, shares * chosen)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.experts = nn.Embedding(49, 32), nn.LayerNorm(32), Experts()
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.norm(self.embed(tokens))
        return self.head(h + self.experts(h))


model = Net()
for layer in (model.embed, model.head, model.experts.router):
    initialise(layer)
model = DistributedDataParallel(model)
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[2 * rank : 2 * rank + 2]), y[2 * rank : 2 * rank + 2])
    loss.backward()
    optimizer.step()
    load = model.module.experts.load
    dist.all_reduce(load)  # mended
    model.module.experts.bias += 0.2 * torch.sign(load.mean() - load)
    return loss.item()
