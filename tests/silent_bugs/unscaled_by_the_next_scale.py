"""After two good steps the loss scale doubles, and the gradients of the second are divided by the doubled one.

source: https://github.com/deepspeedai/DeepSpeed/pull/8588
mesh: dp 4
steps: 2
first: head.weight grad
side: backward
"""

# %% one process
scale, good = 4.0, 0
model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step():
    global scale, good
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    (scale * loss).backward()
    for p in model.parameters():
        p.grad /= scale
    optimizer.step()
    good += 1
    if good % 2 == 0:
        scale *= 2
    return loss.item()


# %% ranks
class LossScale:
    """A factor for the loss that doubles after every two steps without an overflow."""

    def __init__(self, value):
        self.value, self.good = value, 0

    def update(self, overflow):
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value /= 2
        elif self.good % 2 == 0:
            self.value *= 2


def overflowed(parameters):
    """Whether a gradient of any rank is infinite or not a number."""
    found = torch.tensor([float(not all(p.grad.isfinite().all() for p in parameters))])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scale = LossScale(4.0)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    (scale.value * loss).backward()
    average(model)
    overflow, used = overflowed(list(model.parameters())), scale.value
    scale.update(overflow)
    used = scale.value  # broken
    if not overflow:
        torch._foreach_div_([p.grad for p in model.parameters()], used)
        optimizer.step()
    return loss.item()
