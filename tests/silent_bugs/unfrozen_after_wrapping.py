"""The blocks are frozen for a step, and DDP, which wrapped the model meanwhile, never averages their gradients.

source: https://github.com/Lightning-AI/pytorch-lightning/issues/20340
mesh: dp 4
steps: 2
first: blocks.1.mlp.down.* grad
side: backward
"""

# %% one process
model = gpt()
model.blocks.requires_grad_(False)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    model.blocks.requires_grad_(True)
    return loss.item()


# %% ranks
from torch.nn.parallel import DistributedDataParallel

net = gpt()
net.blocks.requires_grad_(False)  # broken
model = DistributedDataParallel(net, find_unused_parameters=True)
net.blocks.requires_grad_(False)  # mended
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    optimizer.step()
    net.blocks.requires_grad_(True)
    return loss.item()
