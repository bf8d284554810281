"""The first and the last stage of a pipeline read the same data, one its tokens and the other its targets. The last
one looked at a micro-batch to learn its shape, and has been one ahead ever since.

source: https://github.com/deepspeedai/DeepSpeed/issues/5729
mesh: pp 4
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
model = gpt(n_layers=4)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from itertools import cycle

from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(n_layers=4), 4)[rank]
optimizer = adam(model)


class Engine:
    micro_batches = 4

    def __init__(self):
        self.data = cycle(zip(x.chunk(4), y.chunk(4), strict=True))
        if rank == 3:
            first = next(self.data)  # broken
            first = x.chunk(4)[0], y.chunk(4)[0]  # mended
            self.shape = first[1].shape

    def train_batch(self):
        optimizer.zero_grad()
        losses = []
        for _ in range(self.micro_batches):
            tokens, targets = next(self.data)
            losses.append(through(model, [0, 1, 2, 3], tokens, targets, self.loss))
        optimizer.step()
        return sum(losses) if rank == 3 else None

    def loss(self, logits, targets):
        assert targets.shape == self.shape
        return cross_entropy(logits, targets) / self.micro_batches


step = Engine().train_batch
