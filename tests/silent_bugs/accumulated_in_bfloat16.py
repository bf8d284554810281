"""Micro-batches are added up in bfloat16, which forgets small numbers beside large ones.

source: https://github.com/deepspeedai/DeepSpeed/issues/2768
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
model = gpt()
optimizer = adam(model)


def step():
    kept = [torch.zeros_like(p) for p in model.parameters()]
    kept = [buffer.bfloat16() for buffer in kept]  # broken
    total = 0.0
    for a, b in zip(x[rank::4].chunk(2), y[rank::4].chunk(2), strict=True):
        optimizer.zero_grad()
        loss = cross_entropy(model(a), b) / 2
        loss.backward()
        total += loss.item()
        for buffer, p in zip(kept, model.parameters(), strict=True):
            buffer += p.grad
    for buffer, p in zip(kept, model.parameters(), strict=True):
        p.grad = buffer.float()
    average(model)
    optimizer.step()
    return total
