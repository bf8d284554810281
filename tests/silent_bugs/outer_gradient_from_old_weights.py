"""DiLoCo measures how far a round has moved the weights, and from the second on still from where the first began.

Rounds are one step of gradient descent long, so that one process can do the same.

source: https://github.com/meta-pytorch/torchft/pull/238
mesh: dp 4
steps: 2
first: head.weight grad
side: backward
"""

# %% one process
model = gpt()
outer = torch.optim.SGD(model.parameters(), 0.14, momentum=0.9, nesterov=True)


def step():
    outer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.grad *= 1.0  # the learning rate of the inner step
    outer.step()
    return loss.item()


# %% ranks
class DiLoCo:
    """An outer optimizer whose gradient is what the inner steps of all workers have done to the weights."""

    def __init__(self, model):
        self.model = model
        self.outer = torch.optim.SGD(model.parameters(), 0.14, momentum=0.9, nesterov=True)
        self.keep()

    def keep(self):
        self.begun = [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def synchronise(self):
        for begun, p in zip(self.begun, self.model.parameters(), strict=True):
            p.grad = begun - p
            dist.all_reduce(p.grad)
            p.grad /= 4
            p.copy_(begun)
        self.outer.step()
        self.keep()  # mended


model = gpt()
diloco = DiLoCo(model)


def step():
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p -= 1.0 * gradient
    diloco.synchronise()
    return loss.item()
