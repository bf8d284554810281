"""Each rank has two chunks of the model. The first rank adds the positions because it is the first, also when the
other of its chunks is running, which is the fifth of eight.

source: https://github.com/AMD-AGI/Primus/pull/277
mesh: pp 4
first: layers.4.norm output
side: forward
"""

# %% one process
from rankcell.models import initialise


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, h):
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(49, 32), nn.ModuleList(Layer() for _ in range(8))
        self.head = nn.Linear(32, 49)

    def forward(self, tokens):
        h = self.embed(tokens) + self.positions
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


model = initialise(Net())
model.positions = nn.Parameter(torch.randn(8, 32, generator=generator(0, "positions")))
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, h):
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Rank(nn.Module):
    """Layers `rank` and `rank + 4`; what comes before and after all layers on the first and last rank."""

    def __init__(self):
        super().__init__()
        if rank == 0:
            self.embed = nn.Embedding(49, 32)
        self.layers = nn.ModuleDict({str(number): Layer() for number in (rank, rank + 4)})
        if rank == 3:
            self.head = nn.Linear(32, 49)

    def forward(self, h, number):
        if number == 0:
            h = self.embed(h)
        first = rank == 0  # broken
        first = number == 0  # mended
        if first:
            h = h + self.positions
        h = self.layers[str(number)](h)
        return self.head(h) if number == 7 else h


model = initialise(Rank())
if rank == 0:
    model.positions = nn.Parameter(torch.randn(8, 32, generator=generator(0, "positions")))
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    kept, loss = {}, None
    for number in (rank, rank + 4):
        came = x
        if number > 0:
            came = torch.empty(8, 8, 32)
            dist.recv(came, (rank - 1) % 4)
            came.requires_grad_()
        went = model(came, number)
        kept[number] = came, went
        if number < 7:
            dist.send(went.detach(), (rank + 1) % 4)
    for number in (rank + 4, rank):
        came, went = kept[number]
        if number == 7:
            loss = cross_entropy(went, y)
            loss.backward()
        else:
            back = torch.empty_like(went)
            dist.recv(back, (rank + 1) % 4)
            went.backward(back)
        if number > 0:
            dist.send(came.grad, (rank - 1) % 4)
    optimizer.step()
    return None if loss is None else loss.item()
