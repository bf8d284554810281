"""A checkpoint pairs neighbouring numbers for rotary positions, the model halves of a head, so queries and keys are
permuted at load. The loader cuts first and permutes this rank's rows as if they were all heads.

source: https://github.com/huggingface/transformers/pull/48519
mesh: tp 4
first: blocks.0.attention.query.weight parameter
side: start
"""

# %% one process


def halves(weight, heads):
    """From pairs of neighbours to halves, in every head."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


model = llama(n_kv_heads=4)
for block in model.blocks:
    for layer in (block.attention.query, block.attention.key):
        layer.weight.data = halves(layer.weight.data, 4).contiguous()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.transformer import tensor_parallel


def halves(weight, heads):
    """From pairs of neighbours to halves, in every head."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


model = tensor_parallel(llama(n_kv_heads=4))
file = llama(n_kv_heads=4).state_dict()
own = model.state_dict()
for name, weight in file.items():
    if name.endswith(("query.weight", "key.weight")):
        weight = halves(weight.chunk(4)[rank], 4)  # broken
        weight = halves(weight, 4).chunk(4)[rank]  # mended
        own[name].copy_(weight)
step = training(model, adam(model), lambda: model(x, y))
