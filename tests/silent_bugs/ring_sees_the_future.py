"""Keys of later ranks are hidden, but within a rank's own block every query sees every key.

source: https://github.com/zhuzilin/ring-flash-attention/issues/54
mesh: cp 4
first: blocks.0.attention.output output
side: forward
"""

# %% ranks
from rankcell.parallel.context import ContextParallel
from rankcell.parallel.tensor import all_gather

model = ContextParallel(gpt(), layout="contiguous")


def attend(query, key, value, documents=None):
    keys, values = all_gather(key, -2), all_gather(value, -2)
    length = query.shape[-2]
    last = rank * length + torch.arange(length)
    last = torch.full((length,), (rank + 1) * length - 1)  # broken
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
