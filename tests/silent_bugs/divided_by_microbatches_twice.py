"""Each micro-batch counts by its share of all tokens already, and the schedule divides by their number once more.

source: https://github.com/areal-project/AReaL/pull/1273
mesh: pp 4
first: head.weight grad
side: backward
says: 1/4 of the dense gradient on rank 3: a mean where a sum is meant
"""

# %% one process
model = gpt(n_layers=4)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):

        def loss(output, targets):
            share = cross_entropy(output, targets) * targets.numel() / y.numel()
            return share / 4  # broken
            return share  # mended

        total += through(model, [0, 1, 2, 3], a, b, loss) or 0.0
    optimizer.step()
    return total if rank == 3 else None
