"""Two replicas of a sharded model: the mesh that reaches `fully_shard` is cut down to the axis of the shards, and the
gradients of the other replica never come.

source: https://github.com/NVIDIA-NeMo/Automodel/pull/3135
mesh: replicate 2, shard 2
first: head.weight grad
side: backward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
over = mesh["shard"]  # broken
over = mesh["replicate", "shard"]  # mended
model = gpt()
for block in model.blocks:
    fully_shard(block, mesh=over)
fully_shard(model, mesh=over)
step = training(model, adam(model), lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
