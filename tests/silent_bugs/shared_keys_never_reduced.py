"""All query heads share one key head, which every rank holds; each has the gradient of its own query heads only.

source: https://github.com/bigcode-project/Megatron-LM/pull/12
mesh: tp 4
first: blocks.1.attention.key.weight grad
side: backward
"""

# %% one process
model = llama(n_kv_heads=1)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(llama(n_kv_heads=1))
for block in model.blocks:
    key = block.attention.key
    key.own = lambda key=key: (key.weight[key.outputs], None)  # broken
step = training(model, adam(model), lambda: model(x, y))
