"""Adam's moments, saved by three ranks with padding at each part's end, are put together with it for four ranks.

source: https://github.com/deepspeedai/DeepSpeed/pull/5105
mesh: dp 4
first: blocks.0.mlp.* parameter | blocks.1.* parameter | norm.* parameter | head.weight parameter
side: update
"""

# %% one process
model = gpt()
optimizer = adam(model)
step = training(model, optimizer, lambda: cross_entropy(model(x), y))
for _ in range(3):
    step()  # up to the checkpoint

# %% ranks
model = gpt()
every = adam(model)
before = training(model, every, lambda: cross_entropy(model(x), y))
for _ in range(3):
    before()  # up to the checkpoint, here without the other ranks

parameters = list(model.parameters())
n = sum(p.numel() for p in parameters)
length = -(-n // 3)


def saved(key):
    """What each of the three ranks wrote of a moment: its part, and zeros up to a multiple of 512."""
    flat = torch.cat([every.state[p][key].flatten() for p in parameters])
    return [F.pad(part, (0, -len(part) % 512)) for part in flat.split(length)]


def loaded(key):
    """A moment for every parameter."""
    parts = saved(key)
    parts = [part[: n - i * length][:length] for i, part in enumerate(parts)]  # mended
    whole = torch.cat(parts)[:n]
    split = whole.split([p.numel() for p in parameters])
    return [values.view_as(p) for values, p in zip(split, parameters, strict=True)]


moments, squares = loaded("exp_avg"), loaded("exp_avg_sq")
optimizer = torch.optim.AdamW(parameters[rank::4], 1e-3)
for i in range(rank, len(parameters), 4):
    optimizer.state[parameters[i]] = {
        "step": torch.tensor(3.0),
        "exp_avg": moments[i].clone(),
        "exp_avg_sq": squares[i].clone(),
    }


def step():
    model.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    average(model)
    optimizer.step()
    for i, p in enumerate(parameters):
        dist.broadcast(p.detach(), i % 4)
    return loss.item()
