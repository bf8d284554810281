"""Every rank draws weights of its own, and the teacher is copied from them before rank 0's reach the others' student.

source: https://github.com/facebookresearch/unbiased-teacher/issues/31
mesh: dp 4
first: teacher.* parameter
side: start
"""

# %% one process
import copy


class Pair(nn.Module):
    """A student, and a teacher that is a moving average of it."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, tokens):
        return self.student(tokens), self.teacher(tokens)


student = gpt()
model = Pair(student, copy.deepcopy(student))
optimizer = adam(student)


def step():
    optimizer.zero_grad()
    logits, target = model(x)
    loss = cross_entropy(logits, y) + F.mse_loss(logits, target)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(model.teacher.parameters(), student.parameters(), strict=True):
            old.lerp_(new, 0.1)
    return loss.item()


# %% ranks
import copy


class Pair(nn.Module):
    """A student, and a teacher that is a moving average of it."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, tokens):
        return self.student(tokens), self.teacher(tokens)


student = gpt(seed=rank)
teacher = copy.deepcopy(student)  # broken
for p in student.parameters():
    dist.broadcast(p.detach(), 0)
teacher = copy.deepcopy(student)  # mended
model = Pair(student, teacher)
optimizer = adam(student)


def step():
    optimizer.zero_grad()
    logits, target = model(x[rank::4])
    loss = cross_entropy(logits, y[rank::4]) + F.mse_loss(logits, target)
    loss.backward()
    average(student)
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(model.teacher.parameters(), student.parameters(), strict=True):
            old.lerp_(new, 0.1)
    return loss.item()
