"""Muon makes the update of a matrix orthogonal. Each rank has some rows or columns of it and makes those orthogonal, so
the update depends on how many ranks there are.

source: https://github.com/deepspeedai/DeepSpeed/issues/8437
mesh: tp 4
first: blocks.*.attention.*.weight parameter | blocks.*.mlp.*.weight parameter
side: update
"""

# %% one process


class Muon(torch.optim.Optimizer):
    """Orthogonal updates for the matrices of the blocks, plain momentum for all else."""

    def __init__(self, model, lr=0.02, momentum=0.9):
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
        super().__init__([{"params": matrices, "muon": True}, {"params": rest, "muon": False}], {"lr": lr})
        self.momentum = momentum

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(self.momentum).add_(p.grad)
                p.sub_(group["lr"] * (self.orthogonal(mean) if group["muon"] else mean))

    def orthogonal(self, m):
        m = m / m.norm()
        for _ in range(5):
            m = 1.5 * m - 0.5 * m @ m.T @ m
        return m


model = gpt()
step = training(model, Muon(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import sharded_dims
from rankcell.parallel.transformer import tensor_parallel


class Muon(torch.optim.Optimizer):
    """Orthogonal updates for the matrices of the blocks, plain momentum for all else."""

    def __init__(self, model, lr=0.02, momentum=0.9):
        self.dims = {p: sharded_dims(model)[name] for name, p in model.named_parameters()}
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
        super().__init__([{"params": matrices, "muon": True}, {"params": rest, "muon": False}], {"lr": lr})
        self.momentum = momentum

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(self.momentum).add_(p.grad)
                if not group["muon"]:
                    p.sub_(group["lr"] * mean)
                    continue
                p.sub_(group["lr"] * self.orthogonal(mean))  # broken
                parts = [torch.empty_like(p) for _ in range(4)]  # mended
                dist.all_gather(parts, mean)  # mended
                whole = self.orthogonal(torch.cat(parts, self.dims[p]))  # mended
                p.sub_(group["lr"] * whole.chunk(4, self.dims[p])[rank])  # mended

    def orthogonal(self, m):
        m = m / m.norm()
        for _ in range(5):
            m = 1.5 * m - 0.5 * m @ m.T @ m
        return m


model = tensor_parallel(gpt())
step = training(model, Muon(model), lambda: model(x, y))
