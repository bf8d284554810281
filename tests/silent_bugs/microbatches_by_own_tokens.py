"""Each micro-batch divides by the tokens of its own that count, and the next one has fewer of them.

source: https://github.com/huggingface/trl/pull/7249
mesh: dp 4
first: head grad_output
side: backward
"""

# %% one process
y[4:, 2:] = -100
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
y[4:, 2:] = -100
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    mine, targets = x[rank::4], y[rank::4]
    total = 0.0
    for i in range(2):
        logits = model(mine[i : i + 1])
        loss = cross_entropy(logits, targets[i : i + 1]) / 2  # broken
        loss = cross_entropy(logits, targets[i : i + 1], reduction="sum") / (targets != -100).sum()  # mended
        loss.backward()
        total += loss.item()
    average(model)
    optimizer.step()
    return total
