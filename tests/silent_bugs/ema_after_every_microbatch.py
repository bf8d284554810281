"""A teacher is the moving average of the student. With gradient accumulation it moves after every micro-batch, also
after those without an update, so it is ahead of its decay and not the same for all micro-batches of a step.

source: https://github.com/SWivid/F5-TTS/issues/631
mesh: dp 4
steps: 2
first: teacher.up output
side: forward
"""

# %% one process
from rankcell.models import MLP

clean = torch.randn(16, 6, generator=generator(0, "clean"))
noisy = clean + torch.randn(16, 6, generator=generator(0, "noise")) / 4
labels = torch.tanh(clean[:, :3] * 2)


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = MLP(6, 32, 3), MLP(6, 32, 3).requires_grad_(False)

    def forward(self, a, b):
        return self.student(a), self.teacher(b)

    @torch.no_grad()
    def follow(self, decay=0.6):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.mul_(decay).add_(new, alpha=1 - decay)


model = MeanTeacher()
optimizer = torch.optim.AdamW(model.student.parameters(), 1e-2)


def step():
    optimizer.zero_grad()
    answers, wanted = model(noisy, clean)
    loss = F.mse_loss(answers, labels) + F.mse_loss(answers, wanted)
    loss.backward()
    optimizer.step()
    model.follow()
    return loss.item()


# %% ranks
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel

from rankcell.models import MLP

clean = torch.randn(16, 6, generator=generator(0, "clean"))
noisy = clean + torch.randn(16, 6, generator=generator(0, "noise")) / 4
labels = torch.tanh(clean[:, :3] * 2)
micro_batches = [[t.chunk(4)[rank].chunk(2)[i] for t in (noisy, clean, labels)] for i in range(2)]


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = MLP(6, 32, 3), MLP(6, 32, 3).requires_grad_(False)

    def forward(self, a, b):
        return self.student(a), self.teacher(b)

    @torch.no_grad()
    def follow(self, decay=0.6):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.mul_(decay).add_(new, alpha=1 - decay)


model = DistributedDataParallel(MeanTeacher())
optimizer = torch.optim.AdamW(model.module.student.parameters(), 1e-2)


def step():
    total = 0
    for i, (a, b, c) in enumerate(micro_batches):
        is_last = i == 1
        with nullcontext() if is_last else model.no_sync():
            answers, wanted = model(a, b)
            loss = (F.mse_loss(answers, c) + F.mse_loss(answers, wanted)) / 2
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        model.module.follow()  # broken
        if is_last:  # mended
            model.module.follow()  # mended
        total += loss.item()
    return total
