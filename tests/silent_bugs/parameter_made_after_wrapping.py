"""A head made anew after DDP wrapped the model is none of the parameters that DDP watches.

source: https://github.com/pytorch/pytorch/issues/12603
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% ranks
from torch.nn.parallel import DistributedDataParallel

from rankcell.models import initialise

model = gpt()
model.head = initialise(nn.Linear(32, 49, bias=False), prefix="head.")  # mended
model = DistributedDataParallel(model, find_unused_parameters=True)
inside = model.module
inside.head = initialise(nn.Linear(32, 49, bias=False), prefix="head.")  # broken
with torch.no_grad():
    inside.head.weight.copy_(gpt().head.weight)
step = training(model, adam(model), lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
