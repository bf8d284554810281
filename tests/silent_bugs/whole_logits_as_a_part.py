"""The logits are gathered before a loss that takes them for this rank's part of the vocabulary: it grows by log(4).

source: https://github.com/NVIDIA/Megatron-LM/issues/7452
mesh: tp 4
first: head grad_output
side: backward
"""

# %% one process
model = gpt(48)
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y % 48))

# %% ranks
from rankcell.parallel.tensor import gather_from_group, reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(48))
targets = y.flatten() % 48


def loss(h, _):
    logits = model.head(model.norm(h))
    logits = gather_from_group(logits)  # broken
    logits = logits.flatten(0, 1)
    width = logits.shape[-1]
    total = reduce_from_group(logits.exp().sum(-1))
    mine = targets // width == rank
    found = logits.gather(-1, (targets % width)[:, None])[:, 0] * mine
    return (total.log() - reduce_from_group(found)).mean()


model.loss = loss
step = training(model, adam(model), lambda: model(x % 48, y))
