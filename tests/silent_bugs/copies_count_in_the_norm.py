"""The norm for clipping adds up the squares of all ranks, and what every rank has counts once for each of them.

source: https://github.com/pytorch/pytorch/pull/88955
mesh: tp 4
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
from rankcell.parallel.tensor import sharded_dims
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
optimizer = adam(model)
divided = sharded_dims(model)


def step():
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    square = torch.zeros(())
    for name, p in model.named_parameters():
        times = 1
        times = 1 if divided[name] is not None or rank == 0 else 0  # mended
        square += times * p.grad.square().sum()
    dist.all_reduce(square)
    for p in model.parameters():
        p.grad *= (0.1 / square.sqrt()).clamp(max=1)
    optimizer.step()
    return loss.item()
