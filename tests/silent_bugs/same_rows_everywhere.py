"""The sampler does not know its rank, and all ranks train on the same rows.

source: https://github.com/k2-fsa/icefall/issues/1616
mesh: dp 4
first: token_embedding output
side: forward
"""

# %% ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

place = 0  # broken
place = rank  # mended
mine = list(DistributedSampler(range(8), num_replicas=4, rank=place, shuffle=False))
model = DistributedDataParallel(gpt())
step = training(model, adam(model), lambda: cross_entropy(model(x[mine]), y[mine]))
