"""Ranks hold other heads, and their dropout draws from the same seed: all heads of a place lose the same weights.

source: https://github.com/awslabs/slapo/issues/21
mesh: tp 4
first: blocks.0.attention.dropout output
side: forward
"""

# %% one process
model = gpt(dropout=0.2)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(dropout=0.2))
torch.manual_seed(0)
for block in model.blocks:  # broken
    block.attention.dropout = nn.Dropout(0.2)  # broken
step = training(model, adam(model), lambda: model(x, y))
