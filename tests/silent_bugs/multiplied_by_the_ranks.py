"""The loss is multiplied by the number of ranks to undo an average that it was never divided for.

source: https://github.com/NVIDIA-NeMo/Automodel/issues/3846
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
from torch.distributed.fsdp import fully_shard

model = gpt()
fully_shard(model)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    (loss * world_size).backward()  # broken
    loss.backward()  # mended
    optimizer.step()
    return loss.item()
