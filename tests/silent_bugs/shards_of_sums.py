"""A switch turns off the division by the number of ranks for a loss over all tokens; another setup kept its local mean.

source: https://github.com/pytorch/torchtitan/issues/2318
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
model = gpt()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    for p in model.parameters():  # a reduce-scatter, and the all-gather of what each rank makes of its part
        flat = F.pad(p.grad.flatten(), (0, -p.numel() % 4))
        part = torch.empty(len(flat) // 4)
        dist.reduce_scatter_single(part, flat)
        part /= 4  # mended
        dist.all_gather_single(flat, part)
        p.grad.copy_(flat[: p.numel()].view_as(p))
    optimizer.step()
    return loss.item()
