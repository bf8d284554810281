"""Each stage of a pipeline draws its weights from the same seed: all stages begin as copies of one another.

source: https://github.com/pytorch/pytorch/issues/139304
mesh: pp 4
first: blocks.1.attention.query.weight parameter
side: start
"""

# %% one process
model = gpt(n_layers=4)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

whole = gpt(n_layers=4)
first = whole.blocks[0].state_dict()
model = split_gpt(whole, 4)[rank]
for block in model.blocks:  # broken
    block.load_state_dict(first)  # broken
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = through(model, [0, 1, 2, 3], x, y)
    optimizer.step()
    return loss
