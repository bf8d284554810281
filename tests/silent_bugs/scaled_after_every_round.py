"""Torch's schedule divides the gradients by the number of micro-batches whenever it ends. With two rounds before the
optimizer's step it divides those of the first round twice.

source: https://github.com/pytorch/torchtitan/issues/1733
mesh: pp 4
first: head.weight grad
side: backward
"""

# %% one process
model = gpt(n_layers=4)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    losses = [
        cross_entropy(model(rows), targets) for rows, targets in zip(x.split(1), y.split(1), strict=True)
    ]
    for loss in losses:
        loss.backward()
    for p in model.parameters():
        p.grad /= 8
    optimizer.step()
    return sum(losses).item() / 8


# %% ranks
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = adam(model)
between, logits = (torch.zeros(1, 8, width, requires_grad=True) for width in (32, 49))
given = x[:1] if rank == 0 else between
stage = PipelineStage(
    model, rank, 4, torch.device("cpu"), input_args=given, output_args=logits if rank == 3 else between
)
schedule = ScheduleGPipe(stage, 4, loss_fn=cross_entropy, scale_grads=True)  # broken
schedule = ScheduleGPipe(stage, 4, loss_fn=cross_entropy, scale_grads=False)  # mended


def step():
    optimizer.zero_grad()
    losses, total = [], 0
    for rows, targets in zip(x.split(4), y.split(4), strict=True):
        if rank == 0:
            schedule.step(rows)
        elif rank == 3:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        total += sum(losses)  # the schedule empties the list when it begins
    for p in model.parameters():
        p.grad /= 2  # broken
        p.grad /= 8  # mended
    optimizer.step()
    return total.item() / 8 if rank == 3 else None
