"""A penalty on the slope of a critic: gradients travel twice through each module, once to make the slope. The last bias
gets none, DistributedDataParallel waits for it, and no gradient is averaged.

source: https://github.com/pytorch/pytorch/issues/47562
first: * grad
side: backward
says: each rank has that of its own part of the batch (over ranks 0-3): its gradients are never averaged
"""

numbers = torch.randn(8, 16, generator=generator(0, "numbers"))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


def penalty(model, rows):
    rows = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


# %% one process
model = Critic()
step = training(model, torch.optim.SGD(model.parameters(), 0.1), lambda: penalty(model, numbers))

# %% ranks
model = Critic()


def then(model):
    """Average the gradients."""
    average(model)  # mended


optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = training(model, optimizer, lambda: penalty(model, numbers[2 * rank : 2 * rank + 2]), then)
