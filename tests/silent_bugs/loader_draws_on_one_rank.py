"""Only the first rank makes a loader, whose iterator draws from torch's own generator: its dropout differs after that.

source: https://github.com/NVIDIA/Megatron-LM/pull/206
mesh: tp 4
first: dropout output
side: forward
says: drops other numbers on rank 0 than on ranks 1-3
"""

# %% one process
model = gpt(dropout=0.1)
optimizer = adam(model)


def step():
    torch.manual_seed(0)
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


# %% ranks
from torch.utils.data import DataLoader, TensorDataset

from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(dropout=0.1))
optimizer = adam(model)


def step():
    torch.manual_seed(0)
    optimizer.zero_grad()
    both = torch.empty(2, 8, 8, dtype=torch.long)
    if rank == 0:
        generator = None  # broken
        generator = torch.Generator().manual_seed(1)  # mended
        a, b = next(iter(DataLoader(TensorDataset(x, y), batch_size=8, generator=generator)))
        both = torch.stack([a, b])
    dist.broadcast(both, 0)
    loss = model(both[0], both[1])
    loss.backward()
    optimizer.step()
    return loss.item()
