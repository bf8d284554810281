"""`model.train()` before the step wakes the dropout of the teacher too, which is a part of the model that DDP wraps.

The student has no dropout, so all but the broken version is the same in each run.

source: https://github.com/vrvlive/knowlege-distillation/issues/2
mesh: dp 4
first: teacher.dropout output
side: forward
"""


# %% one process
class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = gpt(n_layers=1)
        self.teacher = gpt(seed=1, dropout=0.2).requires_grad_(False).eval()

    def forward(self, tokens):
        with torch.no_grad():
            target = self.teacher(tokens)
        return self.student(tokens), target


def distil(logits, target, labels):
    """Half the labels, half what the teacher says."""
    said = F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True)
    return (cross_entropy(logits, labels) + said.sum(-1).mean()) / 2


model = Distiller()
step = training(model, adam(model.student), lambda: distil(*model(x), y))

# %% ranks
from torch.nn.parallel import DistributedDataParallel


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = gpt(n_layers=1)
        self.teacher = gpt(seed=1, dropout=0.2).requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()  # mended
        return self

    def forward(self, tokens):
        with torch.no_grad():
            target = self.teacher(tokens)
        return self.student(tokens), target


def distil(logits, target, labels):
    """Half the labels, half what the teacher says."""
    said = F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True)
    return (cross_entropy(logits, labels) + said.sum(-1).mean()) / 2


torch.manual_seed(rank)
model = DistributedDataParallel(Distiller())
optimizer = adam(model.module.student)


def step():
    model.train()
    optimizer.zero_grad()
    loss = distil(*model(x[rank::4]), y[rank::4])
    loss.backward()
    optimizer.step()
    return loss.item()
