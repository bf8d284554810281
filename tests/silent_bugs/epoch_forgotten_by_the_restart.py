"""A job goes on in the middle of its second epoch. The new loader skips what was read, but counts its epochs from 0: it
skips in the order of the first epoch, so that some samples come once more and others never.

source: https://github.com/huggingface/accelerate/pull/4071
mesh: dp 4
first: token_embedding output
side: forward
"""

# %% one process
model = llama()
optimizer = adam(model)


def batches():
    epoch = 0
    while True:
        yield from torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).split(4)
        epoch += 1


places = batches()


def step():
    rows = next(places)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    return loss.item()


for _ in range(3):
    step()

# %% ranks
from torch.nn.parallel import DistributedDataParallel


def batches(epoch, skip):
    while True:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch))
        yield from order.split(4)[skip:]
        epoch, skip = epoch + 1, 0


def job(places, saved=None):
    model = DistributedDataParallel(llama())
    optimizer = adam(model)
    if saved:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def step():
        row = next(places)[rank : rank + 1]
        optimizer.zero_grad()
        loss = cross_entropy(model(x[row]), y[row])
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, optimizer, step


first_model, first_optimizer, first_step = job(batches(0, 0))
for _ in range(3):
    first_step()
saved = {"model": first_model.module.state_dict(), "optimizer": first_optimizer.state_dict(), "read": 3}
epoch, skip = 0, saved["read"] % 2  # broken
epoch, skip = divmod(saved["read"], 2)  # mended
model, optimizer, step = job(batches(epoch, skip), saved)
