"""Stages are made ready anew whenever the sequence length changes, and that forgets the gradients found so far.

source: https://github.com/NVIDIA-NeMo/Automodel/pull/3530
mesh: pp 4
first: head.weight grad
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
    return cross_entropy(logits, targets) / 2


def step():
    optimizer.zero_grad()
    losses = []
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        model.zero_grad()  # broken
        losses.append(through(model, [0, 1, 2, 3], a, b, loss))
    optimizer.step()
    return None if losses[0] is None else sum(losses)
