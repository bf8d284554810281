"""A backward in two halves: first the gradients of all products, then, from these, those of the weights. Where a stage
uses a weight twice, the first use counts twice: by its own product, and through the second one, which depends on it.

source: https://github.com/pytorch/pytorch/issues/180952
mesh: pp 4
first: stages.3.weight grad
side: backward
"""


# %% one process
class Stage(nn.Module):
    """A layer that is used twice; the first stage has the embedding, too, and the last the head."""

    def __init__(self, number):
        super().__init__()
        draw = torch.randn(3, 49, 32, generator=generator(0, f"stage {number}")) / 32**0.5
        self.weight = nn.Parameter(draw[0, :32])
        self.table = nn.Parameter(draw[1]) if number == 0 else None
        self.head = nn.Parameter(draw[2]) if number == 3 else None

    def forward(self, h):
        self.uses = []
        h = h if self.table is None else F.embedding(h, self.table)
        for _ in range(2):
            product = h @ self.weight
            self.uses.append((h, product))
            h = h + product.tanh()
        return h if self.head is None else h @ self.head.T


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage(number) for number in range(4))

    def forward(self, h):
        for stage in self.stages:
            h = stage(h)
        return h


model = Whole()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))


# %% ranks
class Stage(nn.Module):
    """A layer that is used twice; the first stage has the embedding, too, and the last the head."""

    def __init__(self, number):
        super().__init__()
        draw = torch.randn(3, 49, 32, generator=generator(0, f"stage {number}")) / 32**0.5
        self.weight = nn.Parameter(draw[0, :32])
        self.table = nn.Parameter(draw[1]) if number == 0 else None
        self.head = nn.Parameter(draw[2]) if number == 3 else None

    def forward(self, h):
        self.uses = []
        h = h if self.table is None else F.embedding(h, self.table)
        for _ in range(2):
            product = h @ self.weight
            self.uses.append((h, product))
            h = h + product.tanh()
        return h if self.head is None else h @ self.head.T


class Part(nn.Module):
    """The stage of this rank, under its name in the whole."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleDict({str(rank): Stage(rank)})

    def forward(self, h):
        return self.stages[str(rank)](h)


model = Part()
stage = model.stages[str(rank)]
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    given = x
    if rank > 0:
        given = torch.empty(*x.shape, 32)
        dist.recv(given, rank - 1)
        given.requires_grad_()
    output, grad = model(given), None
    if rank < 3:
        dist.send(output.detach(), rank + 1)
        grad = torch.empty_like(output)
        dist.recv(grad, rank + 1)
    else:
        output = cross_entropy(output, y)
    for _, product in stage.uses:
        product.retain_grad()
    output.backward(grad, retain_graph=True)
    if rank > 0:
        dist.send(given.grad, rank - 1)
    products = [product for _, product in stage.uses]
    (stage.weight.grad,) = torch.autograd.grad(products, [stage.weight], [p.grad for p in products])  # broken
    grads = [h.detach().flatten(0, 1).T @ p.grad.flatten(0, 1) for h, p in stage.uses]  # mended
    stage.weight.grad = sum(grads)  # mended
    optimizer.step()
    return output.item() if rank == 3 else None
