"""Each rank has a stretch of the sequence, and the weights of its tokens are cut as if ranks had two pieces each, one
from the front and one from the back: the answer's weights fall on tokens of the question.

source: https://github.com/modelscope/ms-swift/pull/10071
mesh: cp 4
first: head grad_output | the model grad_output
side: backward
"""

# %% one process
weights = torch.tensor([0.0, 0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 2.0]).expand(8, 8)
model = gpt()


def loss():
    losses = cross_entropy(model(x), y, reduction="none").view(8, 8)
    return (weights * losses).sum() / weights.sum()


step = training(model, adam(model), loss)

# %% ranks
from rankcell.parallel import context

weights = torch.tensor([0.0, 0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 2.0]).expand(8, 8)
model = context.ContextParallel(gpt(), layout="contiguous")
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    batch = {"tokens": model.split(x), "targets": model.split(y)}
    batch["weights"] = context.split(weights, 4, layout="zigzag")[rank]  # broken
    batch["weights"] = model.split(weights)  # mended
    losses = cross_entropy(model(batch["tokens"]), batch["targets"], reduction="none")
    loss = (batch["weights"] * losses.view(8, 2)).sum() / weights.sum()
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
