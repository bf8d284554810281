"""Each parameter has an owner that gets its gradient and updates it; the norm counts the gradients of others, too,
which are still those of this rank.

source: https://github.com/karpathy/llm.c/pull/524
mesh: dp 4
first: *.weight parameter
side: update
says: not made of `.grad`
"""

# %% one process
model = gpt()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-3)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return loss.item()


# %% ranks
model = gpt()
parameters = list(model.parameters())
masters = [nn.Parameter(p.detach().clone()) for p in parameters[rank::4]]
optimizer = torch.optim.AdamW(masters, 1e-3, eps=1e-3)
mine, targets = x[rank::4], y[rank::4]


def step():
    model.zero_grad()
    loss = cross_entropy(model(mine), targets)
    loss.backward()
    for i, p in enumerate(parameters):
        total = p.grad / 4
        dist.reduce(total, i % 4)
        p.grad = total if i % 4 == rank else p.grad
    square = sum(p.grad.square().sum() for p in parameters)  # broken
    square = sum(p.grad.square().sum() for p in parameters[rank::4])  # mended
    dist.all_reduce(square)  # mended
    for master, p in zip(masters, parameters[rank::4], strict=True):
        master.grad = p.grad * (0.3 / square.sqrt()).clamp(max=1)
    optimizer.step()
    with torch.no_grad():
        for i, p in enumerate(parameters):
            p.copy_(masters[i // 4] if i % 4 == rank else p)
            dist.broadcast(p, i % 4)
    return loss.item()
