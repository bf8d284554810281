"""The projection after attention takes this rank's heads and nobody adds up what the ranks found.

source: https://github.com/FlashML-org/FreeToken/pull/429
mesh: tp 4
first: blocks.0.attention.output output
side: forward
"""

# %% ranks
from rankcell.parallel.tensor import reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
output = model.blocks[0].attention.output


def forward(h):
    h = F.linear(h, output.weight)
    h = reduce_from_group(h)  # mended
    return h + output.bias


output.forward = forward
step = training(model, adam(model), lambda: model(x, y))
