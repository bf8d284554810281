"""Advantages are made to have mean 0 and deviation 1 over the data parallel ranks. Sequences are cut, too, and ranks
with early tokens have another mean than ranks with late ones.

source: https://github.com/THUDM/slime/pull/2235
mesh: dp 2, cp 2
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
raw = torch.randn(8, 8, generator=generator(0, "rewards")) + torch.linspace(-2, 2, 8)
model = gpt()
advantages = (raw - raw.mean()) / (raw.var(correction=0) + 1e-8).sqrt()


def policy_loss():
    losses = cross_entropy(model(x), y, reduction="none").view(8, 8)
    return (advantages * losses).mean()


step = training(model, adam(model), policy_loss)

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from rankcell.parallel.context import ContextParallel

raw = torch.randn(8, 8, generator=generator(0, "rewards")) + torch.linspace(-2, 2, 8)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
dp, cp = mesh["dp"], mesh["cp"]
model = ContextParallel(gpt(), layout="contiguous", process_group=cp.get_group())
optimizer = adam(model)
rows = slice(4 * dp.get_local_rank(), 4 * dp.get_local_rank() + 4)


def whiten(values, group):
    """Zero mean and unit variance over what all ranks of the group have."""
    sums = torch.stack([values.sum(), values.square().sum(), torch.tensor(float(values.numel()))])
    dist.all_reduce(sums, group=group)
    mean = sums[0] / sums[2]
    return (values - mean) * (sums[1] / sums[2] - mean.square() + 1e-8).rsqrt()


group = dp.get_group()  # broken
group = dist.group.WORLD  # mended
advantages = whiten(model.split(raw[rows]), group)


def step():
    optimizer.zero_grad()
    losses = cross_entropy(model(model.split(x[rows])), model.split(y[rows]), reduction="none")
    loss = (advantages * losses.view(4, 4)).sum() / 32
    loss.backward()
    model.finish_gradient_synchronization()
    average(model, dp.get_group())
    optimizer.step()
    return 2 * loss.item()
