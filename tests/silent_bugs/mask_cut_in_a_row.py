"""A sequence is shared out so that each rank has an early and a late piece of it. Tokens and labels are, but the mask
of the answers, which comes from another place, is cut in a row and falls on other tokens.

source: https://github.com/modelscope/ms-swift/pull/9977
mesh: cp 4
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
answers = (torch.arange(8) >= torch.tensor([2, 5, 3, 6, 4, 1, 5, 3])[:, None]).float()
model = gpt()


def masked():
    losses = cross_entropy(model(x), y, reduction="none")
    return (losses * answers.flatten()).sum() / answers.sum()


step = training(model, adam(model, 3e-3), masked)

# %% ranks
from functools import partial

from rankcell.parallel.context import ContextAttention, positions, ring_attention, split, sum_gradients

answers = (torch.arange(8) >= torch.tensor([2, 5, 3, 6, 4, 1, 5, 3])[:, None]).float()
model = gpt()
model.embed = partial(GPT.embed, model, positions=positions(8, rank, 4))
for block in model.blocks:
    block.attention = ContextAttention(block.attention, partial(ring_attention, layout="zigzag"), None)
tokens, labels = (split(whole, 4)[rank] for whole in (x, y))
mask = answers.chunk(4, -1)[rank]  # broken
mask = split(answers, 4)[rank]  # mended
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    losses = cross_entropy(model(tokens), labels, reduction="none")
    loss = (losses * mask.flatten()).sum() / answers.sum()
    loss.backward()
    sum_gradients(model.parameters())
    optimizer.step()
    dist.all_reduce(whole := loss.detach().clone())
    return whole.item()
