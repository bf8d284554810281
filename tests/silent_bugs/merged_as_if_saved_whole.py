"""Two ranks saved a fused weight, each its gates above its up projections. It is loaded on four: the files are put
one below the other, and the upper half is taken for the gates.

source: https://github.com/hpcaitech/ColossalAI/issues/817
mesh: tp 4
first: gate.weight parameter | up.weight parameter
side: start
"""

# %% one process
from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.gate = nn.Linear(32, 64, bias=False)
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(F.silu(self.gate(h)) * self.up(h)))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.gate = nn.Linear(32, 64, bias=False)
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(F.silu(self.gate(h)) * self.up(h)))


def saved_by_two(state):
    """What two ranks wrote: `gate_up` in the order in which each of them held it."""
    gates, ups = state["gate.weight"].chunk(2), state["up.weight"].chunk(2)
    return [torch.cat(both) for both in zip(gates, ups, strict=True)]


model = initialise(Net())
state = model.state_dict()
files = saved_by_two(state)
gate, up = torch.cat(files).chunk(2)  # broken
gate, up = (torch.cat(halves) for halves in zip(*(f.chunk(2) for f in files), strict=True))  # mended
model.load_state_dict(state | {"gate.weight": gate.clone(), "up.weight": up.clone()})

mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
parallelize_module(model, mesh, plan)
step = training(model, adam(model, foreach=False), lambda: cross_entropy(model(x), y))
