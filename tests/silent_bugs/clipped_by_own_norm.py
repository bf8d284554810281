"""Each rank holds a part of every gradient and clips it by the norm of that part.

source: https://github.com/pytorch/pytorch/issues/72548
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
from torch.distributed.fsdp import fully_shard

model = gpt()
fully_shard(model)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    parts = [p.grad.to_local() for p in model.parameters()]
    square = sum(part.square().sum() for part in parts)
    dist.all_reduce(square)  # mended
    for part in parts:
        part *= (0.1 / square.sqrt()).clamp(max=1)
    optimizer.step()
    return loss.item()
