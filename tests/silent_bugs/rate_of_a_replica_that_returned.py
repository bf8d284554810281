"""A replica comes back and takes the state of another one, whose optimizer's part was put together early: the moments
in it are the living ones, the learning rate is an old number. The gradients agree, and the replica drifts away.

source: https://github.com/pytorch/torchtitan/pull/4598
mesh: dp 4
first: * parameter
side: update
"""

# %% one process
model = gpt()
optimizer = adam(model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 + done)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


for _ in range(3):
    step()

# %% ranks
from torch.nn.parallel import DistributedDataParallel


def begin(model):
    optimizer = adam(model)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 + done)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


model = DistributedDataParallel(gpt())
optimizer, scheduler = begin(model)
step()
kept = optimizer.state_dict()
step()
step()
kept = optimizer.state_dict()  # mended
states = [kept, scheduler.state_dict()]
dist.broadcast_object_list(states, src=0)
if rank == 3:  # a new process, whose weights have come from rank 0
    optimizer, scheduler = begin(model)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
