"""Gradients are put into one flat buffer before they are summed, in the order in which a rank listed them: it takes
them from a set of names, which every process orders otherwise. What is added belongs to different parameters.

source: https://github.com/deepspeedai/DeepSpeed/issues/2343
mesh: dp 4
first: blocks.* grad
side: backward
says: is right: do the ranks take the two in another order?
"""

# %% ranks
model = gpt()
optimizer = adam(model)
parameters = sorted(model.named_parameters())
if rank == 1:  # broken
    swapped = {"blocks.0": "blocks.1", "blocks.1": "blocks.0"}  # broken
    parameters.sort(key=lambda p: swapped.get(p[0][:8], p[0][:8]) + p[0][8:])  # broken


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    flat = torch.cat([p.grad.flatten() for _, p in parameters])
    dist.all_reduce(flat)
    for (_, p), part in zip(parameters, flat.split([p.numel() for _, p in parameters]), strict=True):
        p.grad = part.view_as(p) / 4
    optimizer.step()
    return loss.item()
