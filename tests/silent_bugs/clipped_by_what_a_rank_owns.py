"""Each rank steps on the parameters that it owns, and clips by the norm of their gradients alone.

source: https://github.com/huggingface/transformers/issues/9168
first: * grad
side: backward
says: does each clip by its own norm
"""

# %% one process
model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step():
    optimizer.zero_grad()
    value = cross_entropy(model(x), y)
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return value.item()


# %% ranks
model = gpt()
mine = slice(rank * 2, rank * 2 + 2)
owners = {p: n % world_size for n, p in enumerate(model.parameters())}
owned = [p for p, owner in owners.items() if owner == rank]
optimizer = torch.optim.SGD(owned, 0.1)


def step():
    model.zero_grad()
    value = cross_entropy(model(x[mine]), y[mine])
    value.backward()
    for p, owner in owners.items():
        dist.reduce(p.grad, owner)
        p.grad = p.grad / world_size if owner == rank else None
    squares = sum(p.grad.pow(2).sum() for p in owned)
    dist.all_reduce(squares)  # mended
    for p in owned:
        p.grad *= min(1.0, 0.1 / squares.sqrt().item())
    optimizer.step()
    for p, owner in owners.items():
        dist.broadcast(p.data, owner)
    return value.item()
