"""The sum over ranks runs before the last micro-batch is added, so that each rank adds its own to it.

source: https://github.com/deepspeedai/DeepSpeed/pull/7985
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    total = 0.0
    for i, (a, b) in enumerate(zip(x[rank::4].chunk(2), y[rank::4].chunk(2), strict=True)):
        if i == 1:  # broken
            average(model)  # broken
        loss = cross_entropy(model(a), b) / 2
        loss.backward()
        total += loss.item()
    average(model)  # mended
    optimizer.step()
    return total
