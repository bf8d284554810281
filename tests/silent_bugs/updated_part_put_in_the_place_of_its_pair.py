"""ZeRO: a rank puts the part that it has updated where its pair of ranks has it, and sends what stands at its own.

source: https://github.com/deepspeedai/DeepSpeed/pull/2058
mesh: dp 4
first: blocks.0.* parameter
side: update
says: hold the weights before the step: is what it made put back where it was?
"""

# %% ranks
model = gpt()
count = sum(p.numel() for p in model.parameters())


def flat(tensors):
    numbers = torch.cat([t.detach().flatten() for t in tensors])
    return F.pad(numbers, (0, -len(numbers) % 4))


master = flat(model.parameters()).chunk(4)[rank].clone()
optimizer = torch.optim.AdamW([master], 1e-3)


def step():
    model.zero_grad()
    loss = cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank])
    loss.backward()
    average(model)
    master.grad = flat(p.grad for p in model.parameters()).chunk(4)[rank].clone()
    optimizer.step()
    parts = [part.clone() for part in flat(model.parameters()).chunk(4)]
    parts[rank // 2] = master  # broken
    parts[rank] = master  # mended
    sent = parts[rank].clone()
    dist.all_gather(parts, sent)
    sizes = [p.numel() for p in model.parameters()]
    for p, new in zip(model.parameters(), torch.cat(parts)[:count].split(sizes), strict=True):
        p.data.copy_(new.view_as(p))
    return loss.item()
