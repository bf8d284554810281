"""Sharded weights stay whole from one micro-batch to the next, so that they are gathered once, and nothing frees them
after the last one either. The model shows whole weights, which have no gradient to clip; the optimizer moves the
shards, and the next step computes with the old weights.

source: https://github.com/Robbyant/lingbot-vla/pull/50
mesh: fsdp 4
steps: 2
loss: stays
first: * parameter
side: update
says: no update reached them
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
model = gpt()
for block in model.blocks:
    fully_shard(block, mesh=mesh, reshard_after_forward=False)
fully_shard(model, mesh=mesh)
optimizer = adam(model)
model.set_reshard_after_backward(False)


def step():
    optimizer.zero_grad()
    total = 0
    for i in range(2):
        model.set_reshard_after_backward(i == 1)  # mended
        loss = cross_entropy(model(x[2 * rank + i, None]), y[2 * rank + i, None]) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total
