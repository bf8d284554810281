"""The gradients are divided by the number of accumulation steps at the end of each: what the first has left is divided
once more.

source: https://github.com/pytorch/torchtitan/pull/1732
first: * grad
side: backward
says: call 1 counts 0.5 times, call 2 counts 1 times: what becomes of `.grad` from one backward to the next?
"""

# %% ranks
model = gpt()
optimizer = adam(model)


def divide():
    for p in model.parameters():
        p.grad /= 2


def step():
    optimizer.zero_grad()
    for row in range(2 * rank, 2 * rank + 2):
        loss = cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        loss.backward()
        divide()  # broken
    divide()  # mended
    average(model)
    optimizer.step()
    return loss.item()
