"""A stage of a pipeline keeps one gradient of its input, and sends it after the backward of two micro-batches.

source: https://github.com/pytorch/pytorch/issues/139404
mesh: pp 4
first: 2 grad_output
side: backward
says: on rank 2 what comes back in call 1 belongs to call 2
"""

from rankcell.models import initialise

inputs, targets = (torch.randn(8, 16, generator=generator(0, name)) for name in "xy")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, h):
        return h + self.down(self.up(h).tanh())


model = initialise(nn.Sequential(*(Block() for _ in range(4))))
optimizer = adam(model)

# %% one process
step = training(model, optimizer, lambda: F.mse_loss(model(inputs), targets))

# %% ranks
for n in range(4):
    if n != rank:
        del model._modules[str(n)]
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    given, made, back, loss = [], [], [], None
    for micro in range(2):
        given.append(inputs.chunk(2)[micro].clone())
        if rank:
            dist.recv(given[micro].requires_grad_(False), rank - 1)
        made.append(model(given[micro].requires_grad_()))
        if rank < 3:
            dist.send(made[micro].detach(), rank + 1)
    for micro in range(2):
        if rank < 3:
            dist.recv(gradient := torch.empty(4, 16), rank + 1)
            made[micro].backward(gradient)
        else:
            loss = F.mse_loss(made[micro], targets.chunk(2)[micro]) / 2
            loss.backward()
        back.append(given[micro].grad)
    for micro in range(2):
        sent = back[micro]
        sent = back[-1] if rank == 3 else sent  # broken
        if rank:
            dist.send(sent, rank - 1)
    optimizer.step()
    return loss and loss.item()
