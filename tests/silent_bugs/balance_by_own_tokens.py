"""Gradients are divided by all tokens at the end. The loss that keeps experts in balance is multiplied by the tokens of
this rank before, which has a quarter of them.

source: https://github.com/NVIDIA/Megatron-LM/pull/5047
mesh: ep 4
first: layer.router grad_output
side: backward
says: a loss of the router's own
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
step = training(
    model, adam(model), lambda: cross_entropy(model(x), y) + 0.1 * model.layer.routing.balance_loss
)

# %% ranks
from mixtures import ExpertParallel, Mixture, shared_parameters
from rankcell.models import MLP, initialise
from rankcell.parallel.context import sum_gradients


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
model.layer = ExpertParallel(model.layer)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    mine = slice(2 * rank, 2 * rank + 2)
    losses = cross_entropy(
        model(x[:, mine]), y[:, mine], reduction="sum"
    )  # not divided: that comes at the end
    local_tokens = y[:, mine].numel()
    scale = local_tokens  # broken
    scale = local_tokens * dist.get_world_size()  # mended
    (losses + 0.1 * model.layer.routing.balance_loss * scale).backward()
    sum_gradients(shared_parameters(model))
    tokens = torch.tensor(float(local_tokens))
    dist.all_reduce(tokens)
    for p in model.parameters():
        p.grad /= tokens
    optimizer.step()
    return losses.item() / local_tokens
