"""A communication hook sends gradients as integers, and every rank has chosen a scale of its own for them.

source: https://github.com/Azure/MS-AMP/issues/111
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
from torch.nn.parallel import DistributedDataParallel

LEVELS = 2**28  # four of them still fit into 32 bits


def quantised(_, bucket):
    """The mean of a bucket over the ranks; what travels is 32-bit integers."""
    flat = bucket.buffer().double()
    largest = flat.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # mended
    levels = (flat / largest * LEVELS).round().int()
    future = dist.all_reduce(levels, async_op=True).get_future()
    return future.then(lambda done: (done.value()[0] * (largest / LEVELS / 4)).float())


model = DistributedDataParallel(gpt())
model.register_comm_hook(None, quantised)
step = training(model, adam(model), lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
