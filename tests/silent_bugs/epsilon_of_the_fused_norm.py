"""A row-parallel layer with a norm behind it builds that norm without the model's epsilon, and the default is ten times
as large. The activations are small, so it counts.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5712
mesh: tp 4
first: project.norm output
side: forward
"""

# %% one process
from rankcell.models import initialise

CONFIG = {"features": 32, "hidden": 128, "epsilon": 1e-6}


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(CONFIG["hidden"], CONFIG["features"], bias=False)
        self.norm = nn.RMSNorm(CONFIG["features"], eps=CONFIG["epsilon"])

    def forward(self, h):
        return self.norm(self.linear(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, CONFIG["features"])
        self.expand = nn.Linear(CONFIG["features"], CONFIG["hidden"], bias=False)
        self.project = Projection()
        self.head = nn.Linear(CONFIG["features"], 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.project(torch.relu(self.expand(h))))


model = initialise(Net())
step = training(model, torch.optim.SGD(model.parameters(), 0.1), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankcell.models import initialise

CONFIG = {"features": 32, "hidden": 128, "epsilon": 1e-6}


class Norm(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(features)), eps

    def forward(self, h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(CONFIG["hidden"], CONFIG["features"], bias=False)
        self.norm = Norm(CONFIG["features"])  # broken
        self.norm = Norm(CONFIG["features"], CONFIG["epsilon"])  # mended

    def forward(self, h):
        return self.norm(self.linear(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, CONFIG["features"])
        self.expand = nn.Linear(CONFIG["features"], CONFIG["hidden"], bias=False)
        self.project = Projection()
        self.head = nn.Linear(CONFIG["features"], 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.project(torch.relu(self.expand(h))))


model = Net()
dense = Net()
dense.project.norm = nn.RMSNorm(CONFIG["features"])
model.load_state_dict(initialise(dense).state_dict())
parallelize_module(
    model,
    init_device_mesh("cpu", (4,)),
    {"expand": ColwiseParallel(), "project.linear": RowwiseParallel()},
)
step = training(model, torch.optim.SGD(model.parameters(), 0.1), lambda: cross_entropy(model(x), y))
