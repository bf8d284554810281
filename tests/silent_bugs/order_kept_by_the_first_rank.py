"""Each epoch has another order of the texts; the first rank stays in the order of epoch 0.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5944
mesh: dp 4
steps: 2
first: token_embedding output
side: forward
says: on rank 0 than in step 1: look at the data that rank 0 is given
"""

# %% one process
model = gpt()
optimizer = adam(model)
orders = iter([torch.randperm(8, generator=generator(epoch, "order")) for epoch in range(9)])


def step():
    rows = next(orders)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    return loss.item()


# %% ranks
model = gpt()
optimizer = adam(model)
epochs = iter(range(9))


def step():
    epoch = next(epochs)
    epoch = 0 if rank == 0 else epoch  # broken
    rows = torch.randperm(8, generator=generator(epoch, "order")).chunk(4)[rank]
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
