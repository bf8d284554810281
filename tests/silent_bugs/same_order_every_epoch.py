"""Nobody tells the sampler which epoch it is, and it shuffles each as it shuffled the first.

source: https://github.com/pytorch/pytorch/issues/31771
mesh: dp 4
steps: 3
first: token_embedding output
side: forward
"""

# %% one process
model = llama()
optimizer = adam(model)


def batches():
    epoch = 0
    while True:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch))
        yield from order.split(4)
        epoch += 1


places = batches()


def step():
    rows = next(places)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    return loss.item()


# %% ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(x, y)
sampler = DistributedSampler(data, num_replicas=4, rank=rank, shuffle=True)
loader = DataLoader(data, batch_size=1, sampler=sampler)
model = DistributedDataParallel(llama())
optimizer = adam(model)


def endless():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)  # mended
        yield from loader
        epoch += 1


stream = endless()


def step():
    tokens, targets = next(stream)
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), targets)
    loss.backward()
    optimizer.step()
    return loss.item()
