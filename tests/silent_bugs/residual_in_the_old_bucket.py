"""Every second number of a gradient is sent, and what was not sent is added to the next gradient. It is remembered by
bucket, and after the first step DDP puts the parameters into the bucket in another order: the size is the same.

source: https://github.com/pytorch/pytorch/pull/49418
mesh: dp 4
steps: 2
first: head.weight grad
side: backward
"""

# %% one process
model = gpt()
optimizer = adam(model, 3e-3)
rest = {p: torch.zeros_like(p) for p in model.parameters()}
done = 0


def step():
    global done
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    for p, r in rest.items():
        whole = p.grad + r
        is_sent = ((torch.arange(p.numel()) + done) % 2 == 0).view_as(p)
        p.grad = whole * is_sent
        rest[p] = whole - p.grad
    done += 1
    optimizer.step()
    return loss.item()


# %% ranks
from torch.nn.parallel import DistributedDataParallel


class Memory:
    def __init__(self):
        self.done, self.rests = 0, {}


def every_second(memory, bucket):
    flat = bucket.buffer()
    sent = torch.zeros_like(flat)
    parameters, gradients = bucket.parameters(), bucket.gradients()
    if bucket.index() in memory.rests and memory.rests[bucket.index()].shape == flat.shape:  # broken
        flat += memory.rests[bucket.index()]  # broken
    for p, g in zip(parameters, gradients, strict=True):
        if p in memory.rests:  # mended
            g += memory.rests[p]  # mended
        is_sent = ((torch.arange(g.numel()) + memory.done) % 2 == 0).view_as(g)
        start = g.storage_offset() - flat.storage_offset()
        sent[start : start + g.numel()] = (g * is_sent).flatten()
        memory.rests[p] = g * ~is_sent  # mended
    memory.rests[bucket.index()] = flat - sent  # broken
    if bucket.is_last():
        memory.done += 1
    done = dist.all_reduce(sent, async_op=True).get_future()
    return done.then(lambda future: future.value()[0] / 4)


model = DistributedDataParallel(gpt())
model.register_comm_hook(Memory(), every_second)
optimizer = adam(model, 3e-3)
step = training(model, optimizer, lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
