"""Six rows do not divide among four ranks, and the sampler evens them out by giving the first two rows twice.

source: https://github.com/pytorch/pytorch/issues/25162
mesh: dp 4
first: token_embedding output
side: forward
"""

# %% one process
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x[:6]), y[:6]))

# %% ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

model = DistributedDataParallel(gpt())
optimizer = adam(model)
rows = list(DistributedSampler(range(6), 4, rank, shuffle=False))
rows = [row for turn, row in enumerate(rows) if 4 * turn + rank < 6]  # mended


def step():
    optimizer.zero_grad()
    targets = torch.tensor(y[rows].numel())
    dist.all_reduce(targets)
    loss = 4 * cross_entropy(model(x[rows]), y[rows], reduction="sum") / targets
    loss.backward()
    optimizer.step()
    return loss.item()
