"""Keys and values are gathered from all ranks, and in the backward each rank keeps what it found for its own.

source: https://github.com/NVIDIA/Megatron-LM/issues/1464
mesh: cp 4
first: blocks.1.attention.key grad_output | blocks.1.attention.value grad_output
side: backward
says: does what later positions send back arrive?
"""

# %% ranks
from rankcell.parallel.context import ContextParallel
from rankcell.parallel.tensor import all_gather, gather_from_group

model = ContextParallel(gpt(), layout="contiguous")


def attend(query, key, value, documents=None):
    keys, values = gather_from_group(key, -2), gather_from_group(value, -2)  # broken
    keys, values = all_gather(key, -2), all_gather(value, -2)  # mended
    length = query.shape[-2]
    last = rank * length + torch.arange(length)
    hidden = torch.arange(keys.shape[-2])[None, :] > last[:, None]
    scores = query @ keys.transpose(-2, -1) / query.shape[-1] ** 0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values


for block in model.module.blocks:
    block.attention.attend = attend
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model.share_of_mean(cross_entropy(model(model.split(x)), model.split(y), reduction="none"))
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
