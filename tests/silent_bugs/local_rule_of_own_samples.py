"""Weights learn by a local rule in the forward, without a gradient: each rank changes them by its own samples.

source: https://github.com/iCog-Labs-Dev/PC-Transformers/pull/135
mesh: dp 4
first: local parameter
side: update
says: its change without a gradient is wrong
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(49, 32), nn.Linear(32, 49)
        self.local = nn.Parameter(torch.zeros(32, 32), requires_grad=False)
        self.agree = lambda change: None

    def forward(self, tokens):
        h = self.embed(tokens)
        out = self.head(h + h.detach() @ self.local)
        with torch.no_grad():
            change = 0.01 * h.flatten(0, 1).T @ h.flatten(0, 1) / h[..., 0].numel()
            self.agree(change)
            self.local += change
        return out


torch.manual_seed(0)
model = Net()

# %% one process
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
model.agree = lambda change: dist.all_reduce(change.div_(4))  # mended
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
