"""Each rank clips its own gradient, by its own norm, and the average is taken of what is left.

source: https://github.com/mindspore-lab/mindcv/issues/603
mesh: dp 4
first: head.weight grad
side: backward
says: is that before the gradients of all ranks are averaged
"""


# %% one process
def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x), y), clip)


# %% ranks
def averaged(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # broken
    average(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # mended


model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x[rank::4]), y[rank::4]), averaged)
