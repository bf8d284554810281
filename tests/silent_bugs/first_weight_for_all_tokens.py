"""A head that computes the losses of the tokens itself has a backward of its own. It expects one number from above,
for a mean, and where tokens have different weights it multiplies all of them by the first one's.

source: https://github.com/linkedin/Liger-Kernel/pull/1298
mesh: dp 4
first: norm grad_output
side: backward
says: do all of them count alike?
"""

# %% one process
from rankcell.models import initialise

weights = 1 + 2 * torch.rand(8, 8, generator=generator(0, "weights"))


class Head(nn.Linear):
    def forward(self, h, targets):
        return cross_entropy(super().forward(h), targets, reduction="none").view_as(targets)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(49, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head = Head(32, 49, bias=False)

    def forward(self, tokens, targets):
        h = self.embed(tokens)
        return self.head(self.norm(h + F.gelu(self.up(h))), targets)


model = initialise(Net())
step = training(model, adam(model, 3e-3), lambda: (model(x, y) * weights).sum() / weights.sum())

# %% ranks
from torch.nn.parallel import DistributedDataParallel

from rankcell.models import initialise

weights = 1 + 2 * torch.rand(8, 8, generator=generator(0, "weights"))
total, weights = weights.sum(), weights[rank::4]


class FusedLoss(torch.autograd.Function):
    """The losses of all tokens; the logits are not kept."""

    @staticmethod
    def forward(ctx, h, weight, targets):
        ctx.save_for_backward(h, weight, targets)
        return F.cross_entropy(h @ weight.T, targets, reduction="none")

    @staticmethod
    def backward(ctx, grad):
        h, weight, targets = ctx.saved_tensors
        d_logits = (h @ weight.T).softmax(-1)
        d_logits[torch.arange(len(targets)), targets] -= 1
        d_logits *= grad[0]  # broken
        d_logits *= grad[:, None]  # mended
        return d_logits @ weight, d_logits.T @ h, None


class Head(nn.Linear):
    def forward(self, h, targets):
        return FusedLoss.apply(h.flatten(0, 1), self.weight, targets.flatten()).view_as(targets)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(49, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head = Head(32, 49, bias=False)

    def forward(self, tokens, targets):
        h = self.embed(tokens)
        return self.head(self.norm(h + F.gelu(self.up(h))), targets)


model = initialise(Net())
parallel = DistributedDataParallel(model)
optimizer = adam(model, 3e-3)
step = training(
    model,
    optimizer,
    lambda: (parallel(x[rank::4], y[rank::4]) * weights).sum() / total * dist.get_world_size(),
)
