"""A stage receives every micro-batch in the same buffer. When the backwards begin, it holds the last one, and norms
find the gradients of the others from it.

source: https://github.com/deepspeedai/DeepSpeed/issues/2800
mesh: pp 4
first: blocks.2 grad_output | blocks.2.dropout grad_output | blocks.2.mlp grad_output | blocks.2.mlp.down grad_output
side: backward
"""

# %% one process
model = gpt(n_layers=4)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    losses = [
        cross_entropy(model(rows), targets) / 4 for rows, targets in zip(x.split(2), y.split(2), strict=True)
    ]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return sum(losses).item()


# %% ranks
from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = adam(model)
buffer = torch.empty(2, 8, 32)


def receive(source):
    h = buffer  # broken
    h = torch.empty(2, 8, 32)  # mended
    dist.recv(h, source)
    return h.detach().requires_grad_()


def step():
    """All forwards and then all backwards."""
    optimizer.zero_grad()
    kept, losses = [], []
    for rows in x.split(2):
        given = rows if rank == 0 else receive(rank - 1)
        kept.append((given, model(given)))
        if rank < 3:
            dist.send(kept[-1][1].detach(), rank + 1)
    for (given, output), targets in zip(kept, y.split(2), strict=True):
        if rank == 3:
            losses.append(cross_entropy(output, targets) / 4)
            losses[-1].backward()
        else:
            grad = torch.empty(2, 8, 32)
            dist.recv(grad, rank + 1)
            output.backward(grad)
        if rank > 0:
            dist.send(given.grad, rank - 1)
    optimizer.step()
    return sum(losses).item() if rank == 3 else None
