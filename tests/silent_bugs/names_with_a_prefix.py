"""The new head is to learn ten times as fast, and is not found by its name once DDP has put `module.` before it.

source: https://github.com/PotatoTian/TPGM/issues/1
mesh: dp 4
first: head.weight parameter
side: update
"""


# %% one process
def groups(named):
    head, body = [], []
    for name, parameter in named:
        (head if name.startswith("head.") else body).append(parameter)
    return [{"params": head, "lr": 1e-2}, {"params": body, "lr": 1e-3}]


model = gpt()
optimizer = torch.optim.AdamW(groups(model.named_parameters()))
step = training(model, optimizer, lambda: cross_entropy(model(x), y))

# %% ranks
from torch.nn.parallel import DistributedDataParallel


def groups(named):
    head, body = [], []
    for name, parameter in named:
        (head if name.startswith("head.") else body).append(parameter)
    return [{"params": head, "lr": 1e-2}, {"params": body, "lr": 1e-3}]


model = DistributedDataParallel(gpt())
optimizer = torch.optim.AdamW(groups(model.named_parameters()))  # broken
optimizer = torch.optim.AdamW(groups(model.module.named_parameters()))  # mended
step = training(model, optimizer, lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
