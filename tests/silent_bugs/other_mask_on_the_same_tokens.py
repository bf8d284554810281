"""After the sum of a tensor-parallel layer all ranks hold the same, and a dropout seeded by rank makes them differ.

source: https://github.com/PaddlePaddle/Paddle/pull/36228
mesh: tp 4
first: dropout output
side: forward
"""

# %% one process
model = gpt(dropout=0.2)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(dropout=0.2))
torch.manual_seed(rank)  # broken
torch.manual_seed(0)  # mended
step = training(model, adam(model), lambda: model(x, y))
