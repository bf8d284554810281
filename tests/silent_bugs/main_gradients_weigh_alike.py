"""Gradients of means over own texts are added up in a buffer of their own, all alike, though ranks have more or fewer
texts.

source: https://github.com/verl-project/verl/pull/6049
mesh: dp 4
first: the model grad_output | head grad_output
side: backward
says: the losses of ranks 0-3 do not count alike
"""

# %% ranks
model = gpt()
parameters = list(model.parameters())
masters = [nn.Parameter(p.detach().clone()) for p in parameters]
optimizer = adam(nn.ParameterList(masters))
texts, targets = (t.split([3, 1, 2, 2])[rank] for t in (x, y))


def step():
    model.zero_grad()
    loss = cross_entropy(model(texts), targets)
    loss.backward()
    share = len(texts) / 8
    share = 1 / 4  # broken
    for master, p in zip(masters, parameters, strict=True):
        master.grad = p.grad * share
        dist.all_reduce(master.grad)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, parameters, strict=True):
            p.copy_(master)
    return loss.item()
