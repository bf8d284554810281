"""The optimizer is made when the blocks are sharded and the rest of the model is not yet. Sharding it replaces its
parameters, and the optimizer goes on with the old ones, which nobody uses: only the blocks learn.

source: https://github.com/huggingface/accelerate/pull/3394
mesh: fsdp 4
first: token_embedding.weight parameter | position_embedding.weight parameter | norm.* parameter | head.weight parameter
side: update
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
model = gpt()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
optimizer = adam(model)  # broken
fully_shard(model, mesh=mesh)
optimizer = adam(model)  # mended


def step():
    model.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    optimizer.step()
    return loss.item()
