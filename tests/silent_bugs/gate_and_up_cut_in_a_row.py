"""A fused weight has the gate above the up projection; cut like a plain one, some ranks get gates only.

source: https://github.com/sgl-project/sglang/pull/34529
mesh: tp 4
first: down output
side: forward
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 64)
        self.gate_up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        gate, up = self.gate_up(h).chunk(2, -1)
        return self.head(h + self.down(F.silu(gate) * up))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import initialise
from rankcell.parallel.tensor import copy_to_group, reduce_from_group


class Down(nn.Linear):
    def forward(self, h):
        return reduce_from_group(super().forward(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 64)
        self.gate_up = nn.Linear(64, 256, bias=False)
        self.down = Down(128, 64, bias=False)
        self.head = nn.Linear(64, 49, bias=False)

    def cut(self):
        mine = self.gate_up.weight.chunk(4)[rank]  # broken
        mine = torch.cat([part.chunk(4)[rank] for part in self.gate_up.weight.chunk(2)])  # mended
        self.gate_up.weight = nn.Parameter(mine.detach().clone())
        self.down.weight = nn.Parameter(self.down.weight.chunk(4, 1)[rank].detach().clone())
        return self

    def forward(self, tokens):
        h = self.embed(tokens)
        gate, up = self.gate_up(copy_to_group(h)).chunk(2, -1)
        return self.head(h + self.down(F.silu(gate) * up))


model = initialise(Net()).cut()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))
