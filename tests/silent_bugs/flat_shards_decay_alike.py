"""Weight decay is for matrices, told by their number of dims; a flat shard of one has a single dim like a bias.

source: https://github.com/mlfoundations/open_clip/pull/358
mesh: dp 4
first: token_embedding.weight parameter
side: update
"""

# %% one process
model = gpt()
matrices = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": matrices}, {"params": others, "weight_decay": 0.0}], 1e-3, weight_decay=0.1
)
step = training(model, optimizer, lambda: cross_entropy(model(x), y))

# %% ranks
model = gpt()
whole = [p for p in model.parameters() if p.numel() % 4 == 0]
shards = [nn.Parameter(p.detach().flatten().chunk(4)[rank].clone()) for p in whole]
matrices = [s for s, p in zip(shards, whole, strict=True) if s.ndim > 1]  # broken
matrices = [s for s, p in zip(shards, whole, strict=True) if p.ndim > 1]  # mended
others = [s for s in shards if not any(s is m for m in matrices)]
groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW([g for g in groups if g["params"]], 1e-3, weight_decay=0.1)


def step():
    model.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    average(model)
    for shard, p in zip(shards, whole, strict=True):
        shard.grad = p.grad.flatten().chunk(4)[rank]
    with torch.no_grad():
        optimizer.step()
        for shard, p in zip(shards, whole, strict=True):
            dist.all_gather_single(p.view(-1), shard.detach())
    return loss.item()
