"""Every rank attends to its own keys and gives with it the logarithm of the sum of its exponentials. The results are
joined with powers of 2, and the logarithms are natural ones.

source: https://github.com/sgl-project/sglang/issues/33064
mesh: cp 4
first: blocks.0.attention.output output
side: forward
"""

# %% ranks
from rankcell.parallel.context import ContextParallel
from rankcell.parallel.tensor import all_gather, reduce_scatter


def attend(query, key, value, documents=None):
    query = all_gather(query, -2)  # of all ranks; keys and values stay where they are
    length = key.shape[-2]
    places = rank * length + torch.arange(length)
    hidden = places[None, :] > torch.arange(query.shape[-2])[:, None]
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(hidden, -1e9)
    sums = all_gather(scores.logsumexp(-1)[None], 0)  # (ranks, batch, heads, length)
    share = torch.exp2(sums[rank]) / torch.exp2(sums).sum(0)  # broken
    share = torch.exp(sums[rank]) / torch.exp(sums).sum(0)  # mended
    return reduce_scatter(share[..., None] * (scores.softmax(-1) @ value), -2)


model = ContextParallel(gpt(), layout="contiguous")
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
