"""The sum of a row-parallel layer is `all_reduce` of `torch.distributed.nn`, whose backward adds up the gradients of
all ranks, which are copies: what flows back through it is four times what flows past it.

source: https://github.com/InternLM/xtuner/pull/1004
mesh: tp 4
first: blocks.1.mlp.activation grad_output
side: backward
"""

# %% ranks
import torch.distributed.nn.functional as dist_nn

from rankcell.parallel.tensor import reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
down = model.blocks[1].mlp.down


def forward(h):
    part = F.linear(h, down.weight)
    return dist_nn.all_reduce(part) + down.bias  # broken
    return reduce_from_group(part) + down.bias  # mended


down.forward = forward
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
