"""Two replicas of a sharded model add up micro-batches and meet once, with the last of them. What came before is added
after they have met, and stays in its replica.

source: https://github.com/pytorch/pytorch/pull/125484
mesh: replicate 2, shard 2
first: head.weight grad
side: backward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = gpt()
for block in model.blocks:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    total, earlier = 0, {}
    for i in range(2):
        loss = cross_entropy(model(x[2 * rank + i, None]), y[2 * rank + i, None]) / 2
        loss.backward()
        total += loss.item()
        if i == 0:  # broken
            earlier = {p: p.grad for p in model.parameters()}  # broken
            optimizer.zero_grad()  # broken
    for parameter in model.parameters():
        own = parameter.grad.to_local()
        dist.all_reduce(own, group=mesh.get_group("replicate"))
        own /= 2
        if parameter in earlier:
            parameter.grad += earlier[parameter]
    optimizer.step()
    return total
