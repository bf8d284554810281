"""An optimizer that shards its state hands the learning rate alone on to the one inside, which keeps its momentum.

source: https://github.com/facebookresearch/fairscale/issues/66
mesh: dp 4
first: * parameter
side: update
says: its optimizer has another `momentum` on rank
"""

# %% one process
model = gpt()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
step = training(model, optimizer, lambda: cross_entropy(model(x), y))
step()
optimizer.param_groups[0]["momentum"] = 0.95


# %% ranks
class Sharded(torch.optim.Optimizer):
    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)
        self.owners = {p: n % 4 for n, p in enumerate(self.param_groups[0]["params"])}
        self.inside = torch.optim.SGD([p for p, owner in self.owners.items() if owner == rank], **settings)

    def step(self):
        for key in ("lr", "momentum"):  # mended
            self.inside.param_groups[0][key] = self.param_groups[0][key]  # mended
        self.inside.step()
        for p, owner in self.owners.items():
            dist.broadcast(p.data, owner)


model = gpt()
optimizer = Sharded(model.parameters(), lr=0.05, momentum=0.5)

step = training(model, optimizer, lambda: cross_entropy(model(x[rank::4]), y[rank::4]), average)
step()
optimizer.param_groups[0]["momentum"] = 0.95
