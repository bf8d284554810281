"""Gradients of micro-batches are added up, and their losses are means that nobody divides by the number of them.

source: https://github.com/verl-project/verl/pull/3332
mesh: dp 4
first: head.weight grad
side: backward
says: by what is it divided? Each rank has 2 micro-batches.
"""

# %% ranks
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x[rank::4].chunk(2), y[rank::4].chunk(2), strict=True):
        loss = cross_entropy(model(a), b)
        loss = loss / 2  # mended
        loss.backward()
        total += loss.item()
    average(model)
    optimizer.step()
    return total
