"""Without a pipeline the loss is divided by the number of tokens before the backward, with one only where it is shown.

source: https://github.com/pytorch/torchtitan/issues/2972
mesh: pp 4
first: head.weight grad | head grad_output
side: backward
"""

# %% one process
model = gpt(n_layers=4)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = adam(model)


def loss(logits, targets):
    total = cross_entropy(logits, targets, reduction="sum")
    total = total / y.numel()  # mended
    return total


def step():
    optimizer.zero_grad()
    losses = [through(model, [0, 1, 2, 3], a, b, loss) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    optimizer.step()
    return None if losses[0] is None else sum(losses)
