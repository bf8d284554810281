"""DDP is told to average in the first of some micro-batches where it should be the last.

source: https://github.com/modelscope/FunASR/pull/3472
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(gpt())
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    total = 0.0
    for i, (a, b) in enumerate(zip(x[rank::4].chunk(2), y[rank::4].chunk(2), strict=True)):
        synchronise = i % 2 == 0  # broken
        synchronise = (i + 1) % 2 == 0  # mended
        with nullcontext() if synchronise else model.no_sync():
            loss = cross_entropy(model(a), b) / 2
            loss.backward()
        total += loss.item()
    optimizer.step()
    return total
