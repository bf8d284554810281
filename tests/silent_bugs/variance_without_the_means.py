"""A batch norm over all ranks takes the mean of their variances, and forgets that their means differ.

source: https://github.com/leggedrobotics/rsl_rl/pull/226
mesh: dp 4
first: norm output
side: forward
"""

# %% one process
from rankcell.models import regression


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 24, bias=False)
        self.norm = nn.BatchNorm1d(24, track_running_stats=False)
        self.out = nn.Linear(24, 3)

    def forward(self, rows):
        return self.out(torch.tanh(self.norm(self.hidden(rows))))


rows, values = regression(32)
torch.manual_seed(0)
model = Net()
step = training(model, torch.optim.SGD(model.parameters(), 0.1), lambda: F.mse_loss(model(rows), values))

# %% ranks
from rankcell.models import regression


class MeanOfRanks(torch.autograd.Function):
    """The mean of a tensor over the ranks; what the ranks then do with it counts for each of them."""

    @staticmethod
    def forward(_, mine):
        total = mine.clone()
        dist.all_reduce(total)
        return total / 4

    @staticmethod
    def backward(_, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total / 4


class BatchNormOfRanks(nn.BatchNorm1d):
    """A BatchNorm1d of the rows of all ranks."""

    def forward(self, rows):
        mean = MeanOfRanks.apply(rows.mean(0))
        variance = rows.var(0, unbiased=False)  # broken
        variance = (rows - mean).square().mean(0)  # mended
        variance = MeanOfRanks.apply(variance)
        return (rows - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 24, bias=False)
        self.norm = BatchNormOfRanks(24, track_running_stats=False)
        self.out = nn.Linear(24, 3)

    def forward(self, rows):
        return self.out(torch.tanh(self.norm(self.hidden(rows))))


rows, values = (whole.chunk(4)[rank] for whole in regression(32))
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step():
    optimizer.zero_grad()
    loss = F.mse_loss(model(rows), values)
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
