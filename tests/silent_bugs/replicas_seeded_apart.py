"""Two groups of ranks shard a model each, begun with seeds of their own: nothing ever makes the replicas equal.

source: https://github.com/allenai/OLMo-core/pull/319
mesh: replica 2, shard 2
first: token_embedding.weight parameter
side: start
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
model = gpt(seed=rank // 2)  # broken
model = gpt()  # mended
fully_shard(model, mesh=mesh)
step = training(model, adam(model), lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
