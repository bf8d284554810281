"""The loop calls the module inside of DDP, whose own forward would have made ready for the average.

source: https://github.com/pytorch/pytorch/pull/20282
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(gpt())
called = model.module  # broken
called = model  # mended
step = training(model, adam(model), lambda: cross_entropy(called(x[rank::4]), y[rank::4]))
