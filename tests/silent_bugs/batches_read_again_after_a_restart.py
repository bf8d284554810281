"""A loader saves how many batches it gave. When the state is loaded a batch is taken off for each other rank, as if one
process had read for all of them; but each rank has read its own, and now reads some of them again.

source: https://github.com/huggingface/accelerate/issues/3938
mesh: dp 4
first: token_embedding output
side: forward
"""

# %% one process
model = llama()
optimizer = adam(model)
places = iter([*range(0, 8, 4)] * 8)


def step():
    first = next(places)
    optimizer.zero_grad()
    loss = cross_entropy(model(x[first : first + 4]), y[first : first + 4])
    loss.backward()
    optimizer.step()
    return loss.item()


for _ in range(4):
    step()

# %% ranks
from itertools import count

from torch.nn.parallel import DistributedDataParallel


class Loader:
    """Batches of one row on each rank; two batches are an epoch."""

    given = 0

    def __iter__(self):
        for k in count(self.given):
            self.given = k + 1
            row = k % 2 * 4 + rank
            yield x[row : row + 1], y[row : row + 1]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]
        self.given -= dist.get_world_size() - 1  # broken


def job(loader, saved=None):
    model = DistributedDataParallel(llama())
    optimizer = adam(model)
    if saved:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
    stream = iter(loader)

    def step():
        tokens, targets = next(stream)
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, optimizer, step


loader = Loader()
first_model, first_optimizer, first_step = job(loader)
for _ in range(4):
    first_step()
saved = {"model": first_model.module.state_dict(), "optimizer": first_optimizer.state_dict()}
saved["data"] = loader.state_dict()
model, optimizer, step = job(Loader(), saved)
