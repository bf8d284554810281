"""Two groups of ranks hold the same experts. The average over data parallel ranks passes experts by, for inside of a
group each is on one rank only, and nobody averages them over the groups: copies of an expert go their own ways.

source: https://github.com/facebookresearch/fairseq/issues/4220
mesh: edp 2, ep 2
first: layer.experts.* grad
side: backward
"""

# %% one process
from mixtures import Mixture
from rankcell.models import MLP, initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.layer = Mixture(nn.Linear(32, 4, bias=False), [MLP(32, 32, 32) for _ in range(4)], k=2)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from mixtures import ExpertParallel, Mixture
from rankcell.models import MLP, initialise

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.layer = Mixture(nn.Linear(32, 4, bias=False), [MLP(32, 32, 32) for _ in range(4)], k=2)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
model.layer = ExpertParallel(model.layer, process_group=mesh["ep"].get_group())
for p in model.layer.experts.parameters():
    p.expert = True
optimizer = adam(model)


def all_reduce_grads():
    for p in model.parameters():
        if getattr(p, "expert", False):
            p.grad /= 2  # the tokens of two ranks came here
            dist.all_reduce(p.grad, group=mesh["edp"].get_group())  # mended
            p.grad /= 2  # mended
        else:
            dist.all_reduce(p.grad)
            p.grad /= 4


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank])
    loss.backward()
    all_reduce_grads()
    optimizer.step()
    return loss.item()
