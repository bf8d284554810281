"""A fused weight has gates and decays in turn; cut as if all gates stood above all decays, a rank gets two pieces. What
it computes of them lies in what one process has, and is used for other heads.

source: https://github.com/vllm-project/vllm/pull/36242
mesh: tp 4
first: out output
side: forward
says: `gates`, just before, is cut in 2 pieces (rank 0 has 0, 1, 8, 9 of 16): is what uses it cut alike?
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.gates = nn.Linear(32, 16, bias=False)  # two gates and two decays, for two heads each time
        self.values = nn.Linear(32, 32, bias=False)
        self.out = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        gate, decay = (t.flatten(-2) for t in self.gates(h).unflatten(-1, (-1, 2, 2)).unbind(-2))
        values = self.values(h).unflatten(-1, (-1, 4))
        mixed = (gate.sigmoid()[..., None] * values - decay.exp()[..., None]).cumsum(1)
        return self.head(h + self.out(mixed.flatten(-2)))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import copy_to_group, reduce_from_group


class Out(nn.Linear):
    def forward(self, h):
        return reduce_from_group(super().forward(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.gates = nn.Linear(32, 16, bias=False)
        self.values = nn.Linear(32, 32, bias=False)
        self.out = Out(32, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)

    def cut(self):
        whole = self.gates.weight
        mine = torch.cat([part.chunk(4)[rank] for part in whole.chunk(2)])  # broken
        mine = whole.chunk(4)[rank]  # mended
        self.gates.weight = nn.Parameter(mine.detach().clone())
        self.values.weight = nn.Parameter(self.values.weight.chunk(4)[rank].detach().clone())
        self.out.weight = nn.Parameter(self.out.weight.chunk(4, 1)[rank].detach().clone())
        return self

    def forward(self, tokens):
        h = self.embed(tokens)
        copied = copy_to_group(h)
        gate, decay = (t.flatten(-2) for t in self.gates(copied).unflatten(-1, (-1, 2, 2)).unbind(-2))
        values = self.values(copied).unflatten(-1, (-1, 4))
        mixed = (gate.sigmoid()[..., None] * values - decay.exp()[..., None]).cumsum(1)
        return self.head(h + self.out(mixed.flatten(-2)))


model = initialise(Net()).cut()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
