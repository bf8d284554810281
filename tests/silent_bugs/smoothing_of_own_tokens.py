"""Label smoothing over a divided vocabulary takes the mean over the tokens of this rank for that over all of them.

source: https://github.com/NVIDIA/Megatron-LM/issues/737
mesh: tp 4
first: head grad_output
side: backward
"""

# %% one process
model = gpt(48)
y = y % 48
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y, label_smoothing=0.1))

# %% ranks
from rankcell.parallel.tensor import reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(48))
targets = y.flatten() % 48


def loss(h, _):
    logits = model.head(model.norm(h)).flatten(0, 1)  # (tokens, 12)
    total = reduce_from_group(logits.exp().sum(-1))
    mine = targets // 12 == rank
    found = logits.gather(-1, (targets % 12)[:, None])[:, 0] * mine
    mean = logits.mean(-1)
    mean = reduce_from_group(logits.sum(-1)) / 48  # mended
    return (total.log() - 0.9 * reduce_from_group(found) - 0.1 * mean).mean()


model.loss = loss
step = training(model, adam(model), lambda: model(x % 48, y))
