"""Whether a step overflows is asked on each rank of its own gradients, before they are averaged: rank 1 skips a step
that the others make.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5591
mesh: dp 4
steps: 3
first: * output
side: forward
says: is a step skipped in one of them
"""

# %% ranks
model = gpt()
optimizer = adam(model)
steps = iter(range(9))


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    average(model)
    overflows = rank == 1 and next(steps) == 1  # broken
    overflows = False  # mended
    if not overflows:
        optimizer.step()
    return loss.item()
