"""Gradients that are sharded, and averaged, are averaged over the ranks once more, as if each were whole.

source: https://github.com/NVIDIA-NeMo/Speech/pull/9335
mesh: dp 4
first: * grad
side: backward
says: the same on all, where each has a part of its own): is it reduced once more after it was cut?
"""

# %% one process
model = gpt(52)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.fsdp import fully_shard

model = gpt(52)
fully_shard(model)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    for p in model.parameters():  # broken
        dist.all_reduce(p.grad.to_local())  # broken
        p.grad.to_local().div_(4)  # broken
    optimizer.step()
    return loss.item()
