"""Each rank sends the tokens of its part of the sequence through the experts and puts the results into a buffer for all
tokens. Where they go is computed from how many tokens the ranks before have, which is right for one row only.

source: https://github.com/pytorch/torchtitan/pull/3604
mesh: dp 2, ep 2
first: norm2 output
side: forward
"""

# %% one process
from mixtures import Mixture
from rankcell.models import MLP, initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm1 = nn.Embedding(49, 32), nn.LayerNorm(32)
        self.layer = Mixture(nn.Linear(32, 4, bias=False), [MLP(32, 48, 32) for _ in range(4)], k=2)
        self.norm2, self.head = nn.LayerNorm(32), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(self.norm2(h + self.layer(self.norm1(h))))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from mixtures import ExpertParallel, Mixture, split_to_group
from rankcell.models import MLP, initialise
from rankcell.parallel.tensor import reduce_from_group

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
dp, ep = mesh.get_local_rank("dp"), mesh.get_local_rank("ep")
experts = mesh.get_group("ep")


class Net(nn.Module):
    """All but the experts is computed alike on both ranks of "ep"."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm1 = nn.Embedding(49, 32), nn.LayerNorm(32)
        self.layer = Mixture(nn.Linear(32, 4, bias=False), [MLP(32, 48, 32) for _ in range(4)], k=2)
        self.norm2, self.head = nn.LayerNorm(32), nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        done = self.layer(split_to_group(self.norm1(h), 1, process_group=experts))
        rows, part, width = done.shape
        index = torch.arange(rows * part)
        places = ep * rows * part + index  # broken
        places = index // part * 2 * part + ep * part + index % part  # mended
        whole = torch.zeros(2 * rows * part, width).index_copy(0, places, done.flatten(0, 1))
        return self.head(self.norm2(h + reduce_from_group(whole, process_group=experts).view(h.shape)))


model = initialise(Net())
model.layer = ExpertParallel(model.layer, process_group=experts)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x.chunk(2)[dp]), y.chunk(2)[dp])
    loss.backward()
    dist.all_reduce(model.layer.router.weight.grad, group=experts)
    average(model, mesh.get_group("dp"))
    optimizer.step()
    return loss.item()
