"""Each rank has two chunks of the positions, and makes the angles of the second as if it were the end of the sequence.

source: https://github.com/verl-project/verl/pull/6267
mesh: cp 4
first: out output
side: forward
says: all before it does but `angles`, of which 3 of 8 rows are on no rank
"""

from rankcell.models import initialise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.angles, self.embed = nn.Identity(), nn.Embedding(49, 32)
        self.norm, self.up, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 49)

    def forward(self, tokens, places):
        angles = self.angles(places[:, None] * 2.0 ** -torch.arange(32))
        return self.out(self.up(self.norm(self.embed(tokens))) * angles.cos())


# %% one process
model = initialise(Net())
step = training(model, adam(model), lambda: cross_entropy(model(x, torch.arange(8)), y))

# %% ranks
model = initialise(Net())
optimizer = adam(model)
mine = [rank, 7 - rank]
places = torch.tensor([rank, 7])  # broken
places = torch.tensor(mine)  # mended


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[:, mine], places), y[:, mine])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
