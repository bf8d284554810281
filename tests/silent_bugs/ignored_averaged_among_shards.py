"""A parameter that is kept out of the sharding has to be averaged by hand. That is done over the ranks that share the
other parameters, and the replicas of these ranks are forgotten.

source: https://github.com/pytorch/pytorch/issues/98281
mesh: replicate 2, shard 2
first: position_embedding.weight grad
side: backward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = gpt()
ignored = {model.position_embedding.weight}
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh, ignored_params=ignored)
optimizer = adam(model, foreach=False)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    axes = ("shard",)  # broken
    axes = ("shard", "replicate")  # mended
    for p in ignored:
        for axis in axes:
            dist.all_reduce(p.grad, group=mesh.get_group(axis))
            p.grad /= 2
    optimizer.step()
    return loss.item()
