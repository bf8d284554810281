"""Gradients are summed over the ranks, so each divides its loss by their number; the term of the loss on the weights
themselves stands outside of that, and counts four times.

source: https://github.com/tensorflow/models/pull/6195
first: * grad
side: backward
says: gradients are off by 0.06 times their own weights: does a term of the loss on the weights themselves (L2) count
"""


def decay(model):
    return 0.01 * sum((p**2).sum() for p in model.parameters() if p.dim() > 1)


# %% one process
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x), y) + decay(model))

# %% ranks
model = gpt()
mine = slice(2 * rank, 2 * rank + 2)


def loss():
    return cross_entropy(model(x[mine]), y[mine]) / 4 + decay(model)  # broken
    return (cross_entropy(model(x[mine]), y[mine]) + decay(model)) / 4  # mended


def summed(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


step = training(model, adam(model), loss, summed)
