"""Experts get the tokens and the router's shares of all ranks with `full_tensor()`. Its backward believes that every
rank found the same gradient and cuts out a part, where each rank has its own expert's and they should be added up.

source: https://github.com/NVIDIA-NeMo/Automodel/pull/1260
mesh: ep 4
first: layer.router grad_output
side: backward
"""

# %% one process
from rankcell.models import MLP, initialise


class Experts(nn.Module):
    """Two experts of four for each token; every expert computes all, and counts where it was chosen."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleDict({str(i): MLP(32, 48, 32, activation="gelu") for i in range(4)})

    def forward(self, h):
        top = self.router(h).topk(2, -1)
        shares = torch.zeros(*h.shape[:-1], 4).scatter(-1, top.indices, top.values.softmax(-1))
        return sum(shares[..., int(i), None] * expert(h) for i, expert in self.experts.items())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm1 = nn.Embedding(49, 32), nn.LayerNorm(32)
        self.layer, self.norm2, self.head = Experts(), nn.LayerNorm(32), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm2(h + self.layer(self.norm1(h))))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from rankcell.models import MLP, initialise

mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))


class Experts(nn.Module):
    """Two experts of four for each token; the tokens of all ranks come to the one that this rank has."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleDict({str(i): MLP(32, 48, 32, activation="gelu") for i in range(4)})

    def everybodys(self, mine):
        whole = DTensor.from_local(mine, mesh, [Shard(0)])
        return whole.full_tensor()  # broken
        return whole.full_tensor(grad_placements=[Partial()])  # mended

    def forward(self, h):
        top = self.router(h).topk(2, -1)
        shares = torch.zeros(*h.shape[:-1], 4).scatter(-1, top.indices, top.values.softmax(-1))
        h, shares = self.everybodys(h), self.everybodys(shares)
        done = shares[..., rank, None] * self.experts[str(rank)](h)
        return DTensor.from_local(done, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm1 = nn.Embedding(49, 32), nn.LayerNorm(32)
        self.layer, self.norm2, self.head = Experts(), nn.LayerNorm(32), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm2(h + self.layer(self.norm1(h))))


model = initialise(Net())
for other in {"0", "1", "2", "3"} - {str(rank)}:
    del model.layer.experts[other]
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank], reduction="sum") / y.numel()
    loss.backward()
    for name, p in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(p.grad)
    optimizer.step()
    return 4 * loss.item()
