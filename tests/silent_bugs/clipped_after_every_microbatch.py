"""Gradients are clipped after each micro-batch instead of once before the update: what came first is cut again and
again, and the last micro-batch has the say.

source: https://github.com/facebookresearch/lingua/pull/59
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% one process
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.item()


# %% ranks
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(gpt())
optimizer = adam(model)
mine = list(zip(x[rank::4].split(1), y[rank::4].split(1), strict=True))


def step():
    optimizer.zero_grad()
    running = 0.0
    for tokens, targets in mine:
        loss = cross_entropy(model(tokens), targets) / len(mine)
        loss.backward()  # averages over the ranks each time
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # broken
        running += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # mended
    optimizer.step()
    return running
