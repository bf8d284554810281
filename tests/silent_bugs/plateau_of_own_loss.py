"""The learning rate is halved when the loss has not fallen, and every rank asks its own loss: soon ranks make steps of
different lengths with the same gradients.

source: https://github.com/lucidrains/DALLE-pytorch/issues/268
mesh: dp 4
steps: 4
first: * parameter
side: update
"""

# %% one process
model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
done = 0


def step():
    global done
    rows = slice(0, 4) if done % 2 == 0 else slice(4, 8)
    done += 1
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    scheduler.step(loss.item())
    return loss.item()


# %% ranks
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(gpt())
optimizer = torch.optim.SGD(model.parameters(), 0.2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
done = 0


def step():
    global done
    row = slice(rank, rank + 1) if done % 2 == 0 else slice(4 + rank, 5 + rank)
    done += 1
    optimizer.zero_grad()
    loss = cross_entropy(model(x[row]), y[row])
    loss.backward()
    optimizer.step()
    average_loss = loss.detach().clone()
    dist.all_reduce(average_loss)
    average_loss /= 4
    scheduler.step(loss.item())  # broken
    scheduler.step(average_loss.item())  # mended
    return average_loss.item()
