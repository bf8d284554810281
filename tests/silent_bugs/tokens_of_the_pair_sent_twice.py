"""Two ranks of a tensor-parallel pair hold the same tokens, and both send all of them to the experts. An expert has
room for a share of all tokens, and copies push tokens out that would have found a place.

source: https://github.com/deepspeedai/DeepSpeed/pull/2074
mesh: dp 2, tp 2
first: layer.experts.* output | layer output
side: forward
"""

# %% one process
from mixtures import Mixture
from rankcell.models import MLP, initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        router = nn.Linear(32, 4, bias=False)
        self.layer = Mixture(router, [MLP(32, 32, 32) for _ in range(4)], k=1, capacity_factor=0.7)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))


model = initialise(Net())
nn.init.normal_(model.embed.weight, generator=generator(1, "embed"))
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from mixtures import ExpertParallel, Mixture, split_to_group
from rankcell.models import MLP, initialise
from rankcell.parallel.tensor import gather_from_group

pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
pair, replica = pairs[rank // 2], replicas[rank % 2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        router = nn.Linear(32, 4, bias=False)
        self.layer = Mixture(router, [MLP(32, 32, 32) for _ in range(4)], k=1, capacity_factor=0.7)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        given = h
        given = split_to_group(given, 0, process_group=pair)  # mended
        routed = self.layer(given)
        routed = gather_from_group(routed, 0, process_group=pair)  # mended
        return self.head(h + routed)


model = initialise(Net())
nn.init.normal_(model.embed.weight, generator=generator(1, "embed"))
model.layer = ExpertParallel(model.layer)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x.chunk(2)[rank // 2]), y.chunk(2)[rank // 2])
    loss.backward()
    copies = 2  # broken
    copies = 1  # mended
    for name, p in model.named_parameters():
        if "experts" in name:  # tokens of both replicas came here
            if p.grad is not None:
                p.grad /= 2 * copies
        elif "router" in name:  # each rank routed other tokens
            dist.all_reduce(p.grad)
            p.grad /= 2 * copies
        else:
            dist.all_reduce(p.grad, group=replica)
            p.grad /= 2
    optimizer.step()
    return loss.item()
