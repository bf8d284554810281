"""The model shifts the labels of a rank's own part, so that the last position of each part has none.

source: https://github.com/huggingface/transformers/pull/48570
mesh: cp 4
first: the model output | head grad_output
side: forward
says: (position 1 of a rank's 2)
"""

from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(49, 32), nn.Linear(32, 32), nn.Linear(32, 49)

    def forward(self, tokens, labels):
        return cross_entropy(self.head(self.up(self.embed(tokens)).relu()), labels, reduction="sum") / 56


def shifted(labels):
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


model = initialise(Net())

# %% one process
step = training(model, adam(model), lambda: model(x, shifted(x)))

# %% ranks
labels = shifted(x).chunk(4, 1)[rank]
labels = shifted(x.chunk(4, 1)[rank])  # broken


def step():
    optimizer.zero_grad()
    loss = model(x.chunk(4, 1)[rank], labels)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    return loss.item()


optimizer = adam(model)
