"""A loss scaler looks for an overflow in the gradients that its own rank updates (ZeRO-1). The rank that has it skips
its update and lowers its scale; the others update their parameters, and go on with the old scale.

source: https://github.com/facebookresearch/fairscale/issues/180
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% one process
scale = 5.1e5
model = gpt()
optimizer = adam(model)


def step():
    global scale
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    (scale * loss).backward()
    if not all(p.grad.half().isfinite().all() for p in model.parameters()):
        scale /= 4
        return loss.item()
    for p in model.parameters():
        p.grad /= scale
    optimizer.step()
    return loss.item()


# %% ranks
scale = 5.1e5
model = gpt()
parameters = list(model.parameters())
mine = parameters[rank::4]
optimizer = torch.optim.AdamW(mine, 1e-3)


def step():
    global scale
    model.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    (scale * loss).backward()
    average(model)
    overflow = torch.tensor([float(any(not p.grad.half().isfinite().all() for p in mine))])
    dist.all_reduce(overflow, op=dist.ReduceOp.MAX)  # mended
    if overflow:
        scale /= 4
    else:
        for p in mine:
            p.grad /= scale
        optimizer.step()
    for i, p in enumerate(parameters):
        dist.broadcast(p.detach(), i % 4)
    return loss.item()
