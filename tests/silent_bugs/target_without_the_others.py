"""The rank that has the target's logit computes its log-probability, and a plain all-reduce tells the others the number
but takes no gradient back: they learn nothing from the target.

source: https://github.com/modelscope/ms-swift/pull/9947
mesh: tp 4
first: head grad_output
side: backward
"""

# %% one process
model = gpt(48)
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y % 48))

# %% ranks
from rankcell.parallel.tensor import reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(48))
targets = y.flatten() % 48


def loss(h, _):
    logits = model.head(model.norm(h)).flatten(0, 1)  # (tokens, 12)
    total = reduce_from_group(logits.exp().sum(-1))
    mine = targets // 12 == rank
    found = logits.gather(-1, (targets % 12)[:, None])[:, 0]
    own = (found - total.log()) * mine  # broken
    everybody = own.detach().clone()  # broken
    dist.all_reduce(everybody)  # broken
    return -(own + (everybody - own).detach()).mean()  # broken
    return (total.log() - reduce_from_group(found * mine)).mean()  # mended


model.loss = loss
step = training(model, adam(model), lambda: model(x % 48, y))
