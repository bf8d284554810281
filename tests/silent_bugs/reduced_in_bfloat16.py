"""Gradients are rounded to bfloat16 for their sum over ranks: smaller messages, and 8 bits of each number.

source: https://github.com/pytorch/pytorch/issues/106395
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    for p in model.parameters():
        flat = p.grad.float()
        flat = p.grad.bfloat16()  # broken
        dist.all_reduce(flat)
        p.grad.copy_(flat / 4)
    optimizer.step()
    return loss.item()
