"""Each stage of a pipeline multiplies by the loss scale what comes back, and only the last one should.

source: https://github.com/deepspeedai/DeepSpeed/pull/8154
mesh: pp 4
first: blocks.2.mlp.down.bias grad
side: backward
says: each stage on the way back: 8 times it on rank 2, 64 times it on rank 1, 512 times it on rank 0
"""

# %% one process
model = gpt(n_layers=4)
step = training(model, torch.optim.SGD(model.parameters(), 1e-4), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = torch.optim.SGD(model.parameters(), 1e-4)


def stage(given):
    output = model(given)
    scales = True  # broken
    scales = rank == 3  # mended
    if scales:
        output.register_hook(lambda grad: 8 * grad)
    return output


def step():
    optimizer.zero_grad()
    loss = through(stage, [0, 1, 2, 3], x, y)
    for p in model.parameters():
        p.grad /= 8
    optimizer.step()
    return loss
