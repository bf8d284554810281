"""The first loss on the validation data is wanted before training, and the optimizer is made after it. That forward
leaves the rest of the model, outside of the blocks, whole: the optimizer takes whole parameters, which the first
backward puts aside for the shards. Only the blocks learn.

source: https://github.com/pytorch/pytorch/issues/149205
mesh: fsdp 4
first: token_embedding.weight parameter | position_embedding.weight parameter | norm.* parameter | head.weight parameter
side: update
says: no update reached them
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
model = gpt()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = adam(model)  # mended
with torch.no_grad():
    cross_entropy(model(x[rank::4]), y[rank::4])
optimizer = adam(model)  # broken


def step():
    model.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    optimizer.step()
    return loss.item()
