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
flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
optimizer = torch.optim.AdamW([flat], 1e-3)
texts, targets = (t.split([3, 1, 2, 2])[rank] for t in (x, y))


def step():
    model.zero_grad()
    loss = cross_entropy(model(texts), targets)
    loss.backward()
    share = len(texts) / 8
    share = 1 / 4  # broken
    flat.grad = torch.cat([p.grad.flatten() for p in parameters]) * share
    dist.all_reduce(flat.grad)
    optimizer.step()
    with torch.no_grad():
        for p, new in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.copy_(new.view_as(p))
    return loss.item()
