"""Only one of two heads is used in this phase. All ranks must reduce the same gradients, so one that is missing is
made of zeros, and for an optimizer with weight decay zeros are not the same as none: the idle head shrinks.

source: https://github.com/pytorch/pytorch/issues/28294
mesh: dp 4
first: heads.code.* parameter
side: update
"""

# %% one process
from rankcell.models import MLP, initialise


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.body = MLP(32, 64, 32, activation="gelu")
        self.heads = nn.ModuleDict({"text": nn.Linear(32, 49), "code": nn.Linear(32, 49)})

    def forward(self, tokens, task):
        h = self.embed(tokens)
        return self.heads[task](h + self.body(h))


model = initialise(TwoHeads())
optimizer = adam(model, lr=3e-3, weight_decay=0.5)
step = training(model, optimizer, lambda: cross_entropy(model(x, "text"), y))

# %% ranks
from rankcell.models import MLP, initialise


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.body = MLP(32, 64, 32, activation="gelu")
        self.heads = nn.ModuleDict({"text": nn.Linear(32, 49), "code": nn.Linear(32, 49)})

    def forward(self, tokens, task):
        h = self.embed(tokens)
        return self.heads[task](h + self.body(h))


model = initialise(TwoHeads())
optimizer = adam(model, lr=3e-3, weight_decay=0.5)


def sync_gradients(parameters):
    """One flat all-reduce."""
    found = []
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # broken
            continue  # mended
        found.append(p.grad)
    flat = torch.cat([g.flatten() for g in found])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, part in zip(found, flat.split([g.numel() for g in found]), strict=True):
        g.copy_(part.view_as(g))


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = cross_entropy(model(x[rank::4], "text"), y[rank::4])
    loss.backward()
    sync_gradients(model.parameters())
    optimizer.step()
    return loss.item()
