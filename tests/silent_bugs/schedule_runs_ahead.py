"""The schedule takes a step for each of the four ranks, as if it counted batches, and was made for steps of training.

source: https://github.com/huggingface/accelerate/issues/1398
mesh: dp 4
steps: 2
first: * parameter
side: update
"""

# %% one process
model = llama()
optimizer = adam(model, 3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
update = training(model, optimizer, lambda: cross_entropy(model(x), y))


def step():
    loss = update()
    schedule.step()
    return loss


# %% ranks
from rankcell.parallel.ddp import DDP


class Prepared:
    """A schedule for data parallelism."""

    def __init__(self, schedule):
        self.schedule = schedule

    def step(self):
        turns = dist.get_world_size()  # broken
        turns = 1  # mended
        for _ in range(turns):
            self.schedule.step()


model = DDP(llama())
optimizer = adam(model, 3e-3)
schedule = Prepared(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12))
update = training(model, optimizer, lambda: cross_entropy(model(x[rank::4]), y[rank::4]))


def step():
    loss = update()
    schedule.step()
    return loss
