"""Gradients are sent as thin matrices, and what that loses is added to the next gradient. The loss is computed from
the gradient alone, without what was left over before: what is not sent the second time is gone. All of it is linear,
so the mean of the ranks' left-overs is that of one process.

source: https://github.com/ooples/AiDotNet/pull/911
mesh: dp 4
steps: 3
first: head.weight grad
side: backward
"""

# %% one process
model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.15)
left_over, count = {}, 0


def compress():
    global count
    count += 1
    for name, p in model.named_parameters():
        if p.ndim == 2:
            basis = torch.randn(p.shape[1], 12, generator=generator(0, name, count))
            basis = torch.linalg.qr(basis)[0]
            full = p.grad + left_over.get(name, 0)
            sent = full @ basis @ basis.T
            left_over[name] = full - sent
            p.grad = sent


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    compress()
    optimizer.step()
    return loss.item()


# %% ranks
model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.15)
left_over, count = {}, 0


def compress():
    global count
    count += 1
    for name, p in model.named_parameters():
        if p.ndim == 2:
            basis = torch.randn(p.shape[1], 12, generator=generator(0, name, count))
            basis = torch.linalg.qr(basis)[0]
            full = p.grad + left_over.get(name, 0)
            thin = full @ basis
            dist.all_reduce(thin)
            sent = thin / 4 @ basis.T
            left_over[name] = p.grad - sent  # broken
            left_over[name] = full - sent  # mended
            p.grad = sent
        else:
            dist.all_reduce(p.grad)
            p.grad /= 4


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    compress()
    optimizer.step()
    return loss.item()
