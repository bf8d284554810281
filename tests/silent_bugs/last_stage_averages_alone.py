"""Two pipelines train on other rows, and in one schedule the first stages never reach the line that averages them.

source: https://github.com/huggingface/picotron/pull/5
mesh: dp 2, pp 2
first: blocks.0.mlp.down.* grad
side: backward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from rankcell.parallel.pipeline import split_gpt

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
dp, pp = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
model = split_gpt(gpt(), 2)[pp]
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = through(model, [2 * dp, 2 * dp + 1], x.chunk(2)[dp], y.chunk(2)[dp])
    if pp == 1:  # broken
        average(model, mesh.get_group("dp"))  # broken
    average(model, mesh.get_group("dp"))  # mended
    optimizer.step()
    return loss
