"""Each rank compares its questions with the answers of all ranks, which an all-gather brings as mere numbers: an
answer hears only from the questions of its own rank.

source: https://github.com/OFA-Sys/Chinese-CLIP/issues/54
mesh: dp 4
first: answer grad_output | answer.down grad_output
side: backward
"""

# %% one process
from rankcell.models import MLP, initialise


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(49, 32)
        self.question = MLP(32, 48, 32, activation="gelu")
        self.answer = MLP(32, 48, 32, activation="gelu")


model = initialise(Towers())
nn.init.normal_(model.words.weight, generator=generator(1, "words"))


def contrast():
    questions = F.normalize(model.question(model.words(x).mean(1)), dim=-1)
    answers = F.normalize(model.answer(model.words(y).mean(1)), dim=-1)
    return F.cross_entropy(questions @ answers.T / 0.2, torch.arange(8))


step = training(model, adam(model), contrast)

# %% ranks
from torch.distributed.nn.functional import all_gather

from rankcell.models import MLP, initialise


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(49, 32)
        self.question = MLP(32, 48, 32, activation="gelu")
        self.answer = MLP(32, 48, 32, activation="gelu")


model = initialise(Towers())
nn.init.normal_(model.words.weight, generator=generator(1, "words"))
optimizer = adam(model)


def everyones(answers):
    found = [torch.empty_like(answers) for _ in range(4)]
    dist.all_gather(found, answers.detach())
    found[rank] = answers
    return torch.cat(found)


def contrast(asked, answered):
    questions = F.normalize(model.question(model.words(asked).mean(1)), dim=-1)
    answers = F.normalize(model.answer(model.words(answered).mean(1)), dim=-1)
    candidates = everyones(answers)  # broken
    candidates = torch.cat(all_gather(answers))  # mended
    return F.cross_entropy(questions @ candidates.T / 0.2, 2 * rank + torch.arange(2))


def step():
    optimizer.zero_grad()
    loss = contrast(x.chunk(4)[rank], y.chunk(4)[rank])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
