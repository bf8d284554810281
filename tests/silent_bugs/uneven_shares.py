"""The last batch has 7 samples for 4 ranks, and DDP gives the mean of one sample as much weight as that of two.

source: https://github.com/pytorch/pytorch/issues/67253
mesh: dp 4
first: head.weight grad | head grad_output
side: backward
"""

# %% one process
x, y = x[:7], y[:7]
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.nn.parallel import DistributedDataParallel

mine, targets = x[:7][rank::4], y[:7][rank::4]
model = DistributedDataParallel(gpt())
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(mine), targets)
    loss = loss * len(mine) * 4 / 7  # mended
    loss.backward()
    optimizer.step()
    return loss.item()
