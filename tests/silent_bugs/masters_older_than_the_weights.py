"""The optimizer copied its master weights before the checkpoint was loaded, so its first step brings the old ones back.

source: https://github.com/NVIDIA/Megatron-LM/issues/174
mesh: dp 4
first: * parameter
side: update
"""

# %% one process
model = gpt(seed=5)  # the checkpoint
step = training(model, adam(model), lambda: cross_entropy(model(x), y))


# %% ranks
class MasterAdam:
    """ZeRO-1: each rank updates masters of its own for every fourth parameter, and gives the others the result."""

    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.masters = {i: p.detach().clone() for i, p in enumerate(self.parameters) if i % 4 == rank}
        self.inner = torch.optim.AdamW(self.masters.values(), lr)

    def reload(self):
        for i, master in self.masters.items():
            master.copy_(self.parameters[i].detach())

    @torch.no_grad()
    def step(self):
        for i, master in self.masters.items():
            master.grad = self.parameters[i].grad
        self.inner.step()
        for i, p in enumerate(self.parameters):
            if i in self.masters:
                p.copy_(self.masters[i])
            dist.broadcast(p, i % 4)


checkpoint = gpt(seed=5).state_dict()
model = gpt()
optimizer = MasterAdam(model.parameters(), 1e-3)
model.load_state_dict(checkpoint)
optimizer.reload()  # mended


def step():
    model.zero_grad()
    loss = cross_entropy(model(x[rank::4]), y[rank::4])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
