"""The first stage of a pipeline embeds, the last one has the same weight as its head, and their gradients stay apart.

source: https://github.com/uw-syfi/piper/issues/13
mesh: pp 4
first: token_embedding.weight grad | head.weight grad
side: backward
"""

# %% one process
model = gpt(tied=True, n_layers=4)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(tied=True, n_layers=4), 4)[rank]
optimizer = adam(model)
ends = dist.new_group([0, 3])


def step():
    optimizer.zero_grad()
    loss = through(model, [0, 1, 2, 3], x, y)
    if rank in (0, 3):  # mended
        tied = model.token_embedding.weight if rank == 0 else model.head.weight  # mended
        dist.all_reduce(tied.grad, group=ends)  # mended
    optimizer.step()
    return loss
