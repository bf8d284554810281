"""Documents are packed in a row and may not look at each other. The mask is made once for the batch, before the
pipeline cuts that into micro-batches, and all of them get the mask of the first.

source: https://github.com/pytorch/torchtitan/issues/1723
mesh: pp 4
first: blocks.0.attention.dropout output | blocks.0.attention.output output
side: forward
"""

# %% one process
documents = (torch.rand(8, 8, generator=generator(0, "documents")) < 0.4).long().cumsum(1)
model = gpt(n_layers=4)
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x, documents=documents), y))

# %% ranks
from functools import partial

from rankcell.parallel.pipeline import split_gpt

documents = (torch.rand(8, 8, generator=generator(0, "documents")) < 0.4).long().cumsum(1)
model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    losses = []
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        own = documents[:2]  # broken
        own = documents[rows]  # mended
        stage = partial(model, documents=own)
        losses.append(through(stage, [0, 1, 2, 3], x[rows], y[rows], lambda z, t: cross_entropy(z, t) / 4))
    optimizer.step()
    return None if losses[0] is None else sum(losses)
