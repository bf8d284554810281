"""A student is pulled towards its own moving average. Only the main process moves the average, as it does where the
average is for samples and checkpoints alone; the other ranks are pulled back to where they began.

source: https://github.com/lucidrains/ema-pytorch/issues/9
mesh: dp 4
steps: 2
first: average.up output
side: forward
"""

# %% one process
from rankcell.models import MLP

points = torch.randn(16, 6, generator=generator(0, "points"))
wanted = torch.sin(points[:, :3] * 2)


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = MLP(6, 16, 3, activation="gelu")
        self.average = MLP(6, 16, 3, activation="gelu").requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for slow, fast in zip(self.average.parameters(), self.online.parameters(), strict=True):
            slow.lerp_(fast, 0.5)

    def forward(self, batch):
        self.update()
        return self.average(batch), self.online(batch)


model = Averaged()
optimizer = torch.optim.SGD(model.online.parameters(), 0.2)


def step():
    optimizer.zero_grad()
    slow, fast = model(points)
    loss = F.mse_loss(fast, wanted) + F.mse_loss(fast, slow)
    loss.backward()
    optimizer.step()
    return loss.item()


# %% ranks
from rankcell.models import MLP

points = torch.randn(16, 6, generator=generator(0, "points"))[rank::4]
wanted = torch.sin(points[:, :3] * 2)


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = MLP(6, 16, 3, activation="gelu")
        self.average = MLP(6, 16, 3, activation="gelu").requires_grad_(False)

    @torch.no_grad()
    def update(self):
        if dist.get_rank() != 0:  # broken
            return  # broken
        for slow, fast in zip(self.average.parameters(), self.online.parameters(), strict=True):
            slow.lerp_(fast, 0.5)

    def forward(self, batch):
        self.update()
        return self.average(batch), self.online(batch)


model = Averaged()
optimizer = torch.optim.SGD(model.online.parameters(), 0.2)


def step():
    optimizer.zero_grad()
    slow, fast = model(points)
    loss = F.mse_loss(fast, wanted) + F.mse_loss(fast, slow)
    loss.backward()
    average(model.online)
    optimizer.step()
    return loss.item()
