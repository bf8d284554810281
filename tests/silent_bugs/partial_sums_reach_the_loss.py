"""The head multiplies each rank's part of the features, and the loss takes the partial products for logits.

source: https://github.com/pytorch/torchtitan/pull/2106
mesh: tp 4
first: head output
side: forward
"""

# %% ranks
from rankcell.parallel.tensor import copy_to_group, reduce_from_group

model = gpt()
head = model.head
head.weight = nn.Parameter(head.weight.detach().chunk(4, 1)[rank].clone())


def forward(h):
    part = F.linear(copy_to_group(h).chunk(4, -1)[rank], head.weight)
    return part  # broken
    return reduce_from_group(part)  # mended


head.forward = forward
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
