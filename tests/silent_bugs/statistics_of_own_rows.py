"""A batch norm under data parallelism uses mean and variance of this rank's samples.

source: https://github.com/pytorch/pytorch/issues/2584
mesh: dp 4
first: norm output
side: forward
"""

# %% one process


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 32)
        self.norm = nn.BatchNorm1d(32)
        self.down = nn.Linear(32, 3)

    def forward(self, samples):
        return self.down(torch.relu(self.norm(self.up(samples))))


from rankcell.models import regression

samples, wanted = regression(32)
torch.manual_seed(0)
model = Net()
step = training(model, adam(model), lambda: F.mse_loss(model(samples), wanted))

# %% ranks
import torch.distributed.nn.functional as differentiable

from rankcell.models import regression


class Norm(nn.BatchNorm1d):
    def forward(self, h):
        mean, square = h.mean(0), h.square().mean(0)
        mean, square = (differentiable.all_reduce(t) / 4 for t in (mean, square))  # mended
        return (h - mean) / (square - mean**2 + self.eps).sqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 32)
        self.norm = Norm(32)
        self.down = nn.Linear(32, 3)

    def forward(self, samples):
        return self.down(torch.relu(self.norm(self.up(samples))))


samples, wanted = (t[rank::4] for t in regression(32))
torch.manual_seed(0)
model = Net()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = F.mse_loss(model(samples), wanted)
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
