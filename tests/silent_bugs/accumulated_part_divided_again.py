"""Gradients are summed over ranks as they come and added up in buffers of their own. The division by the number of
ranks hits the buffer, which holds the micro-batches before, and not what has just come.

source: https://github.com/NVIDIA/Megatron-LM/pull/3023
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
model = gpt()
sums = {}


def reduce(parameter):
    fresh = parameter.grad
    dist.all_reduce(fresh)
    before = sums.get(parameter)
    if before is None:
        before = torch.zeros_like(fresh)
    before = before / 4  # broken
    fresh = fresh / 4  # mended
    sums[parameter] = before + fresh
    parameter.grad = None


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(reduce)
optimizer = adam(model)


def step():
    sums.clear()
    total = 0
    for row in (2 * rank, 2 * rank + 1):
        loss = cross_entropy(model(x[row, None]), y[row, None]) / 2
        loss.backward()
        total += loss.item()
    for parameter, whole in sums.items():
        parameter.grad = whole
    optimizer.step()
    optimizer.zero_grad()
    return total
