"""The codes of a quantiser move towards the mean of the vectors that chose them. Each rank takes its own vectors, and
the codes of rank 0 are sent to all with DDP's buffers: what the others found is lost.

source: https://github.com/espnet/espnet/pull/6284
mesh: dp 4
steps: 2
first: quantiser output
side: forward
"""

# %% one process
data = torch.randn(32, 6, generator=generator(0, "data"))


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4, generator=generator(0, "codes")) / 2)

    def forward(self, z):
        chosen = F.one_hot(torch.cdist(z.detach(), self.codes).argmin(-1), 5).float()
        found = chosen @ self.codes
        counts, sums = chosen.sum(0), chosen.mT @ z.detach()
        means = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), self.codes)
        self.codes = 0.7 * self.codes + 0.3 * means
        return z + (found - z).detach(), (z - found).square().mean()


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantiser, self.decoder = nn.Linear(6, 4), Quantiser(), nn.Linear(4, 6)
        for i, p in enumerate(self.parameters()):
            p.data = torch.randn(p.shape, generator=generator(0, i)) / 3

    def forward(self, data):
        codes, commitment = self.quantiser(self.encoder(data))
        return F.mse_loss(self.decoder(codes), data) + commitment


model = AutoEncoder()
step = training(model, adam(model, 1e-2), lambda: model(data))

# %% ranks
from torch.nn.parallel import DistributedDataParallel

data = torch.randn(32, 6, generator=generator(0, "data"))


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4, generator=generator(0, "codes")) / 2)

    def forward(self, z):
        chosen = F.one_hot(torch.cdist(z.detach(), self.codes).argmin(-1), 5).float()
        found = chosen @ self.codes
        counts, sums = chosen.sum(0), chosen.mT @ z.detach()
        dist.all_reduce(counts)  # mended
        dist.all_reduce(sums)  # mended
        means = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), self.codes)
        self.codes = 0.7 * self.codes + 0.3 * means
        return z + (found - z).detach(), (z - found).square().mean()


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantiser, self.decoder = nn.Linear(6, 4), Quantiser(), nn.Linear(4, 6)
        for i, p in enumerate(self.parameters()):
            p.data = torch.randn(p.shape, generator=generator(0, i)) / 3

    def forward(self, data):
        codes, commitment = self.quantiser(self.encoder(data))
        return F.mse_loss(self.decoder(codes), data) + commitment


model = DistributedDataParallel(AutoEncoder())
step = training(model, adam(model, 1e-2), lambda: model(data.chunk(4)[rank]))
