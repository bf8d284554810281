"""Each rank adds the bias of a row-parallel layer before the all-reduce, which adds it up four times.

source: https://github.com/Wenyueh/MinivLLM/issues/80
mesh: tp 4
first: blocks.0.mlp.down output
side: forward
"""

# %% ranks
from rankcell.parallel.tensor import reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
down = model.blocks[0].mlp.down


def forward(h):
    return reduce_from_group(F.linear(h, down.weight, down.bias))  # broken
    return reduce_from_group(F.linear(h, down.weight)) + down.bias  # mended


down.forward = forward
step = training(model, adam(model), lambda: model(x, y))
