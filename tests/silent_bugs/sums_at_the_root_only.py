"""The loss is a sum over the tokens of all ranks, so gradients are to be added and not averaged. The factor is set on
the root of the sharded model and holds for the parameters of the root; the blocks average.

source: https://github.com/pytorch/pytorch/pull/129286
mesh: dp 4
first: blocks.1.* grad
side: backward
"""

# %% ranks
from torch.distributed.fsdp import FSDPModule, fully_shard

model = gpt()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
units = [module for module in model.modules() if isinstance(module, FSDPModule)]
for unit in units:
    unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it adds
model.set_gradient_divide_factor(1.0)  # broken
for unit in units:  # mended
    unit.set_gradient_divide_factor(1.0)  # mended
step = training(
    model, adam(model), lambda: cross_entropy(model(x[rank::4]), y[rank::4], reduction="sum") / y.numel()
)
