"""Each rank compares its questions with all ranks' answers, and counts the right ones from 0 as if it were the first.

source: https://github.com/huggingface/sentence-transformers/pull/3442
mesh: dp 4
first: answer grad_output | answer.project grad_output
side: backward
"""


# %% one process
class Tower(nn.Module):
    """A vector for a text: the mean of its tokens' vectors, projected."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.project = nn.Linear(32, 16)

    def forward(self, tokens):
        return self.project(self.embed(tokens).mean(1))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.question, self.answer = Tower(), Tower()

    def forward(self, questions, answers):
        return self.question(questions), self.answer(answers)


torch.manual_seed(0)
model = TwoTowers()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    questions, answers = (F.normalize(v, dim=-1) for v in model(x, y))
    loss = F.cross_entropy(questions @ answers.T / 0.2, torch.arange(8))
    loss.backward()
    optimizer.step()
    return loss.item()


# %% ranks
from rankcell.parallel.tensor import all_gather


class Tower(nn.Module):
    """A vector for a text: the mean of its tokens' vectors, projected."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.project = nn.Linear(32, 16)

    def forward(self, tokens):
        return self.project(self.embed(tokens).mean(1))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.question, self.answer = Tower(), Tower()

    def forward(self, questions, answers):
        return self.question(questions), self.answer(answers)


torch.manual_seed(0)
model = TwoTowers()
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    questions, answers = (F.normalize(v, dim=-1) for v in model(x.chunk(4)[rank], y.chunk(4)[rank]))
    labels = torch.arange(2)
    labels += 2 * rank  # mended
    loss = F.cross_entropy(questions @ all_gather(answers, 0).T / 0.2, labels)
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
