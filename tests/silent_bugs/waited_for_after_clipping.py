"""The average of each gradient is under way, in a copy, as soon as the gradient is there. The loop clips what it finds,
and the optimizer waits for the averages later and puts them over the clipped gradients.

source: https://github.com/horovod/horovod/issues/1099
mesh: dp 4
first: head.weight grad
side: backward
"""

# %% one process
model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.5)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    return loss.item()


# %% ranks


class Distributed:
    """An optimizer whose gradients are averaged while the backward still runs."""

    def __init__(self, optimizer):
        self.optimizer, self.under_way = optimizer, []
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self.send)

    def send(self, p):
        message = p.grad.clone()
        self.under_way.append((dist.all_reduce(message, async_op=True), message, p))

    def synchronize(self):
        for handle, message, p in self.under_way:
            handle.wait()
            p.grad.copy_(message / 4)
        self.under_way.clear()

    def step(self):
        self.synchronize()
        self.optimizer.step()


model = gpt()
optimizer = Distributed(torch.optim.SGD(model.parameters(), 0.5))


def step():
    model.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    optimizer.synchronize()  # mended
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    return loss.item()
