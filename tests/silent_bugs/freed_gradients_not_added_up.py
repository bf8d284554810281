"""A rank keeps its part of the summed gradient and frees the whole one after each backward. Each micro-batch puts its
part in the place of the one before: only the last one counts.

source: https://github.com/allenai/open-instruct/pull/1498
mesh: dp 4
first: *.weight parameter | *.bias parameter
side: update
says: every micro-batch
"""

# %% ranks
model = gpt()
parameters = list(model.parameters())
whole = torch.cat([p.detach().flatten() for p in parameters])
size = -(-len(whole) // 4)
part = nn.Parameter(F.pad(whole, (0, 4 * size - len(whole)))[rank * size : (rank + 1) * size].clone())
optimizer = torch.optim.AdamW([part], 1e-3)


def backward(loss):
    loss.backward()
    flat = F.pad(torch.cat([p.grad.flatten() for p in parameters]), (0, 4 * size - len(whole)))
    dist.all_reduce(flat)
    mine = flat[rank * size : (rank + 1) * size] / 4
    part.grad = mine if part.grad is None else part.grad + mine  # mended
    part.grad = mine  # broken
    model.zero_grad()


def step():
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x[rank::4].chunk(2), y[rank::4].chunk(2), strict=True):
        loss = cross_entropy(model(a), b) / 2
        backward(loss)
        total += loss.item()
    optimizer.step()
    parts = [torch.empty_like(part) for _ in range(4)]
    dist.all_gather(parts, part.detach())
    with torch.no_grad():
        for p, new in zip(
            parameters, torch.cat(parts)[: len(whole)].split([p.numel() for p in parameters]), strict=True
        ):
            p.copy_(new.view_as(p))
    return total
