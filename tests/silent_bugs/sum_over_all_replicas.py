"""A layer is built with the group of all ranks where it should have that of its own model: replicas are mixed.

source: https://github.com/NVIDIA/Megatron-LM/issues/7452
mesh: dp 2, tp 2
first: blocks.1.mlp.down output
side: forward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from rankcell.parallel.tensor import Group
from rankcell.parallel.transformer import tensor_parallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp = mesh.get_local_rank("dp")
model = tensor_parallel(gpt(), mesh.get_group("tp"))
model.blocks[1].mlp.down.group = Group()  # broken
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model(x.chunk(2)[dp], y.chunk(2)[dp])
    loss.backward()
    average(model, mesh.get_group("dp"))
    optimizer.step()
    return loss.item()
