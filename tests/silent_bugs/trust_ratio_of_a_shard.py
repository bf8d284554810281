"""LARS takes larger steps where a weight is large beside its gradient, and with FSDP it sees shards of both.

source: https://github.com/intel/ipex-llm/pull/2810
mesh: dp 4
first: * parameter
side: update
"""


# %% one process
class LARS(torch.optim.Optimizer):
    def __init__(self, parameters, lr, momentum=0.9, trust=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                size, slope = p.norm(), p.grad.norm()
                ratio = group["trust"] * size / slope if size > 0 and slope > 0 else 1.0
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(ratio * p.grad)
                p.sub_(group["lr"] * velocity)


model = llama()
step = training(model, LARS(model.parameters(), 0.1), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.fsdp import fully_shard


class LARS(torch.optim.Optimizer):
    def __init__(self, parameters, lr, momentum=0.9, trust=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mine, grad = p.to_local(), p.grad.to_local()
                size, slope = mine.norm(), grad.norm()
                size, slope = p.norm().full_tensor(), p.grad.norm().full_tensor()  # mended
                ratio = group["trust"] * size / slope if size > 0 and slope > 0 else 1.0
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(mine))
                velocity.mul_(group["momentum"]).add_(ratio * grad)
                mine.sub_(group["lr"] * velocity)


model = llama()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
step = training(model, LARS(model.parameters(), 0.1), lambda: cross_entropy(model(x[rank::4]), y[rank::4]))
