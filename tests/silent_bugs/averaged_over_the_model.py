"""Gradients are averaged over the ranks that share a model, which hold other parts of it, and not over its replicas.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5243
mesh: dp 2, tp 2
first: head.weight grad
side: backward
"""

# %% one process
model = gpt(48)
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y % 48))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from rankcell.parallel.transformer import tensor_parallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp = mesh.get_local_rank("dp")
model = tensor_parallel(gpt(48), mesh.get_group("tp"))
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model((x % 48).chunk(2)[dp], (y % 48).chunk(2)[dp])
    loss.backward()
    average(model, mesh.get_group("tp"))  # broken
    average(model, mesh.get_group("dp"))  # mended
    optimizer.step()
    return loss.item()
