"""A layer is cut by features over ranks that have different positions: what is gathered belongs to other positions.

source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5900
mesh: tp 4
first: up output
side: forward
says: each rank has its own features of its own rows only, and 75% of it is on no rank
"""


# %% one process
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down, self.head = (
            nn.Embedding(49, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 49),
        )

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.down(self.up(h)))


torch.manual_seed(0)
model = Net()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import gather_from_group


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down, self.head = (
            nn.Embedding(49, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 49),
        )

    def forward(self, tokens):
        h = self.embed(tokens)
        inner = self.up(h)
        inner = gather_from_group(inner)  # broken
        return self.head(h + self.down(inner))


torch.manual_seed(0)
model = Net()
model.up.weight = nn.Parameter(model.up.weight.detach().chunk(4)[rank].clone())  # broken
model.up.bias = nn.Parameter(model.up.bias.detach().chunk(4)[rank].clone())  # broken
optimizer = adam(model)
tokens, targets = x.chunk(4, 1)[rank], y.chunk(4, 1)[rank]
divided = {}
divided = {model.up.weight, model.up.bias}  # broken


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), targets)
    loss.backward()
    for p in model.parameters():
        if p not in divided:
            dist.all_reduce(p.grad)
            p.grad /= 4
    optimizer.step()
    return loss.item()
