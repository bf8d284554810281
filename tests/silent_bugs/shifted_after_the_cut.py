"""The tokens are cut into pieces for the ranks first, and each rank moves its own by one for the targets: the last
token of a piece should predict the first of the next piece, which is elsewhere.

source: https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449
mesh: cp 4
first: head grad_output | the model grad_output
side: backward
says: the other rows are 1.25 times what they should be: it counts fewer
"""

# %% one process
tokens = torch.cat([x, y], 1)
targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
model = gpt(context=16)
step = training(
    model, torch.optim.SGD(model.parameters(), 0.2), lambda: cross_entropy(model(tokens), targets)
)

# %% ranks
from rankcell.parallel.context import ContextParallel

tokens = torch.cat([x, y], 1)
model = ContextParallel(gpt(context=16), layout="contiguous")
optimizer = torch.optim.SGD(model.parameters(), 0.2)
mine = model.split(tokens)
targets = F.pad(mine[:, 1:], (0, 1), value=-100)  # broken
targets = model.split(F.pad(tokens[:, 1:], (0, 1), value=-100))  # mended


def step():
    optimizer.zero_grad()
    losses = cross_entropy(model(mine), targets, reduction="none")
    loss = model.share_of_mean(losses[targets.flatten() != -100])
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
