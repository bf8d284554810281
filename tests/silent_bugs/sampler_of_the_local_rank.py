"""On two nodes the sampler is given the local rank: both nodes train on the same half of the batch.

source: https://github.com/vllm-project/speculators/pull/619
mesh: dp 4
first: token_embedding output
side: forward
says: (ranks 0, 2 hold the same 16, ranks 1, 3 another 16)
"""

# %% ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

place = rank % 2  # broken
place = rank  # mended
mine = list(DistributedSampler(range(8), num_replicas=4, rank=place, shuffle=False))
model = DistributedDataParallel(gpt())
step = training(model, adam(model), lambda: cross_entropy(model(x[mine]), y[mine]))
