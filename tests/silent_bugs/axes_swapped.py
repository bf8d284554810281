"""Ranks 0 and 2 share a model, and the loader gives the same rows to ranks 0 and 1.

source: https://github.com/tunib-ai/oslo/pull/95
first: token_embedding output
side: forward
"""

# %% ranks
from torch.distributed.device_mesh import DeviceMesh

from rankcell.parallel.transformer import tensor_parallel

places = torch.arange(4).view(2, 2)
places = places.T  # broken
mesh = DeviceMesh("cpu", places, mesh_dim_names=("dp", "tp"))
model = tensor_parallel(gpt(), mesh.get_group("tp"))
optimizer = adam(model)
mine, targets = x.chunk(2)[rank // 2], y.chunk(2)[rank // 2]


def step():
    optimizer.zero_grad()
    loss = model(mine, targets)
    loss.backward()
    average(model, mesh.get_group("dp"))
    optimizer.step()
    return loss.item()
