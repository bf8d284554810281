"""Gradients are averaged over data and context parallel ranks, and the loss is scaled up by the first of the two only.

source: https://github.com/NovaSky-AI/SkyRL/pull/1420
mesh: dp 2, cp 2
first: head.weight grad
side: backward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from rankcell.parallel.context import ContextParallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
dp, cp = mesh.get_local_rank("dp"), mesh.get_group("cp")
model = ContextParallel(gpt(), process_group=cp)
optimizer = adam(model)
mine, targets = (model.split(t.chunk(2)[dp]) for t in (x, y))


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(mine), targets, reduction="sum") / y.numel()
    factor = mesh.size(0)  # broken
    factor = mesh.size()  # mended
    (factor * loss).backward()
    average(model)
    optimizer.step()
    return 4 * loss.item()
