"""An actor's loss is divided by the number of tokens that count in the whole batch, the critic's by those of this
micro-batch, and the micro-batches of all ranks are added up.

source: https://github.com/verl-project/verl/pull/6957
mesh: dp 4
first: value grad_output | the model grad_output
side: backward
"""

# %% one process
from rankcell.models import initialise

mask = (torch.arange(8) >= torch.tensor([0, 3, 1, 4, 2, 5, 3, 6])[:, None]).float()
returns = torch.randn(8, 8, generator=generator(0, "returns"))


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(49, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head, self.value = nn.Linear(32, 49), nn.Linear(32, 1)

    def forward(self, tokens):
        h = self.norm(torch.tanh(self.up(self.embed(tokens))))
        return self.head(h), self.value(h)


model = initialise(ActorCritic())


def loss():
    logits, values = model(x)
    policy = F.cross_entropy(logits.mT, y, reduction="none")
    value = (values[..., 0] - returns) ** 2 / 2
    return ((policy + value) * mask).sum() / mask.sum()


step = training(model, adam(model, 3e-3), loss)

# %% ranks
from rankcell.models import initialise

mask = (torch.arange(8) >= torch.tensor([0, 3, 1, 4, 2, 5, 3, 6])[:, None]).float()
returns = torch.randn(8, 8, generator=generator(0, "returns"))


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(49, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head, self.value = nn.Linear(32, 49), nn.Linear(32, 1)

    def forward(self, tokens):
        h = self.norm(torch.tanh(self.up(self.embed(tokens))))
        return self.head(h), self.value(h)


model = initialise(ActorCritic())
optimizer = adam(model, 3e-3)


def step():
    optimizer.zero_grad()
    count = mask[2 * rank : 2 * rank + 2].sum()
    dist.all_reduce(count)
    total = torch.zeros(())
    for row in (2 * rank, 2 * rank + 1):
        logits, values = model(x[row, None])
        policy = F.cross_entropy(logits.mT, y[row, None], reduction="none")
        value = (values[..., 0] - returns[row, None]) ** 2 / 2
        counts = mask[row, None]
        value_loss = (value * counts).sum() / counts.sum()  # broken
        value_loss = (value * counts).sum() / count  # mended
        loss = (policy * counts).sum() / count + value_loss
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    dist.all_reduce(total)
    return total.item()
