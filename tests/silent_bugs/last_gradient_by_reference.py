"""An optimizer remembers the last gradient by reference, and with DDP's views of buckets that memory is used again.

In one process each backward makes new tensors, so the same line is right there.

source: https://github.com/shivram1987/diffGrad/issues/2
mesh: dp 4
steps: 2
first: * parameter
side: update
"""


# %% one process
class DiffGrad(torch.optim.Optimizer):
    """Gradient descent that slows down where the gradient hardly changes, up to half the speed."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].get("last", torch.zeros_like(p))
                p -= group["lr"] * torch.sigmoid((p.grad - last).abs()) * p.grad
                self.state[p]["last"] = p.grad


model = gpt()
step = training(
    model, DiffGrad(model.parameters(), 0.01), lambda: cross_entropy(model(x), y, reduction="sum")
)

# %% ranks
from torch.nn.parallel import DistributedDataParallel


class DiffGrad(torch.optim.Optimizer):
    """Gradient descent that slows down where the gradient hardly changes, up to half the speed."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].get("last", torch.zeros_like(p))
                p -= group["lr"] * torch.sigmoid((p.grad - last).abs()) * p.grad
                self.state[p]["last"] = p.grad  # broken
                self.state[p]["last"] = p.grad.clone()  # mended


model = DistributedDataParallel(gpt(), gradient_as_bucket_view=True)
optimizer = DiffGrad(model.parameters(), 0.01)


def step():
    optimizer.zero_grad(set_to_none=False)
    loss = 4 * cross_entropy(model(x[rank::4]), y[rank::4], reduction="sum")  # DDP takes the mean
    loss.backward()
    optimizer.step()
    return loss.item()
