"""The loader serves the first and the last stage, so the stages between do not know where a document ends.

source: https://github.com/NVIDIA/Megatron-LM/issues/752
mesh: pp 4
first: blocks.1.attention.dropout output
side: forward
"""

# %% one process
documents = (torch.arange(8) >= torch.arange(8)[:, None] % 5 + 2).long()  # two in each row
model = gpt(n_layers=4)
step = training(model, adam(model), lambda: cross_entropy(model(x, documents=documents), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

documents = (torch.arange(8) >= torch.arange(8)[:, None] % 5 + 2).long()  # two in each row
if rank in (1, 2):  # broken
    documents = None  # broken
model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = through(lambda given: model(given, documents=documents), [0, 1, 2, 3], x, y)
    optimizer.step()
    return loss
