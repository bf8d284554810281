"""Gradients are averaged over data parallel ranks in two halves, a reduce-scatter and an all-gather. The ends of the
pipeline, which share a weight, add theirs up in between: one end's is an average by then, the other's is not.

source: https://github.com/NVIDIA/Megatron-LM/issues/844
mesh: pp 2, dp 2
first: token_embedding.weight grad | head.weight grad
side: backward
"""

# %% one process
model = gpt(tied=True)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

pp, dp = divmod(rank, 2)
stages = [[0, 2], [1, 3]]
replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][pp]
ends = [dist.new_group(ranks) for ranks in stages][dp]

model = split_gpt(gpt(tied=True), 2)[pp]
tied = model.token_embedding.weight if pp == 0 else model.head.weight
optimizer = adam(model)
parameters = list(model.parameters())
buffer = torch.zeros(sum(p.numel() for p in parameters))  # all gradients of the stage in a row
for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
    p.grad = part.view_as(p)


def add_up_the_ends():
    dist.all_reduce(tied.grad, group=ends)


def step():
    buffer.zero_()
    loss = through(model, stages[dp], x.chunk(2)[dp], y.chunk(2)[dp])
    add_up_the_ends()  # mended
    buffer.div_(2)
    mine = buffer.chunk(2)[dp]
    dist.reduce_scatter_single(mine, buffer.clone(), group=replicas)
    add_up_the_ends()  # broken
    dist.all_gather_single(buffer, mine.clone(), group=replicas)
    optimizer.step()
    return loss
