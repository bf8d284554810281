"""A student is distilled from a teacher, and both have their words divided over the ranks. The student's softmax is
taken over all words, the teacher's over this rank's only, so the teacher's probabilities add up to four.

source: https://github.com/NVIDIA-NeMo/Automodel/pull/1499
mesh: tp 4
first: head grad_output
side: backward
"""

# %% one process
teacher = gpt(48, seed=1)
with torch.no_grad():
    wanted = (20 * teacher(x % 48) / 2).softmax(-1).flatten(0, 1)

model = gpt(48)


def distil():
    logs = (model(x % 48).flatten(0, 1) / 2).log_softmax(-1)
    return 4 * F.kl_div(logs, wanted, reduction="batchmean")


step = training(model, adam(model, 3e-3), distil)

# %% ranks
from rankcell.parallel.tensor import copy_to_group, reduce_from_group
from rankcell.parallel.transformer import tensor_parallel

teacher = gpt(48, seed=1)
with torch.no_grad():
    scores = (20 * teacher(x % 48) / 2).flatten(0, 1).chunk(4, -1)[rank]
    total = scores.exp().sum(-1, keepdim=True)
    dist.all_reduce(total)  # mended
    wanted = scores.exp() / total

model = tensor_parallel(gpt(48))


def distil(h, _):
    scores = model.head(model.norm(h)).flatten(0, 1) / 2
    total = reduce_from_group(scores.exp().sum(-1, keepdim=True))
    logs = scores - copy_to_group(total.log())  # every rank uses it for its own words
    own = (wanted * (wanted.log() - logs)).sum(-1)
    return 4 * reduce_from_group(own).mean()


model.loss = distil
step = training(model, adam(model, 3e-3), lambda: model(x % 48, y))
