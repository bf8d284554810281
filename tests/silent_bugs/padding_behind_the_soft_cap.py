"""Ranks with fewer words pad their logits with -inf to the longest part, before the soft cap: tanh makes a finite
number of it, and words that do not exist get a share of every probability.

source: https://github.com/unslothai/unsloth/pull/10616
mesh: tp 4
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
model = gpt()
step = training(model, adam(model), lambda: cross_entropy(model(x).tanh(), y))

# %% ranks
from rankcell.parallel.tensor import reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
model.unembed = lambda h: model.head(model.norm(h))  # logits of this rank's words: 13, 12, 12 and 12 of 49
start = [0, 13, 25, 37][rank]


def pad(logits):
    return F.pad(logits, (0, 13 - logits.shape[-1]), value=-torch.inf)


def loss():
    logits = model(x)
    logits = pad(logits).tanh()  # broken
    logits = pad(logits.tanh())  # mended
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    total = reduce_from_group((logits - top).exp().sum(-1))
    words = torch.arange(start, start + 13)
    here = (words == y[..., None]) & (torch.arange(13) < len(model.head.weight))
    target = reduce_from_group(logits.masked_fill(~here, 0).sum(-1))
    return (total.log() + top[..., 0] - target).mean()


step = training(model, adam(model), loss)
