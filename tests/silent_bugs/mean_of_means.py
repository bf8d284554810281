"""Ranks have different numbers of tokens that count, and the mean of their means is not the mean of all tokens.

source: https://github.com/ml-explore/mlx-lm/pull/1413
mesh: dp 4
first: head.weight grad | head grad_output
side: backward
"""

# %% one process
for row in range(8):
    y[row, 1 + row :] = -100  # padding
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
for row in range(8):
    y[row, 1 + row :] = -100
mine, targets = x.chunk(4)[rank], y.chunk(4)[rank]
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    total = cross_entropy(model(mine), targets, reduction="sum")
    count = (targets != -100).sum().float()
    dist.all_reduce(count)  # mended
    count /= 4  # mended
    (total / count).backward()
    average(model)
    optimizer.step()
    return (total / count).item()
