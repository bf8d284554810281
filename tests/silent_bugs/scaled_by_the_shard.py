"""Muon scales its step by the shape of a matrix, and takes that of the part: too much, or too little.

source: https://github.com/InternLM/xtuner/pull/1716
mesh: tp 4
first: blocks.*.attention.output.weight parameter | blocks.*.mlp.up.weight parameter
side: update
"""


# %% one process
def orthogonal(matrix):
    """Newton-Schulz: all singular values of a matrix become about 1."""
    matrix = matrix / matrix.norm()
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, gradient descent for all else."""

    def __init__(self, model):
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        super().__init__([{"params": matrices, "muon": True}, {"params": others, "muon": False}], {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if group["muon"]:
                    p -= 0.01 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * orthogonal(p.grad)
                else:
                    p -= 0.1 * p.grad


model = gpt()
step = training(model, Muon(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.tensor import sharded_dims
from rankcell.parallel.transformer import tensor_parallel


def orthogonal(matrix):
    """Newton-Schulz: all singular values of a matrix become about 1."""
    matrix = matrix / matrix.norm()
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, gathered before; gradient descent for all else."""

    def __init__(self, model):
        self.dims = {p: sharded_dims(model)[name] for name, p in model.named_parameters()}
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        super().__init__([{"params": matrices, "muon": True}, {"params": others, "muon": False}], {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not group["muon"]:
                    p -= 0.1 * p.grad
                    continue
                parts = [torch.empty_like(p) for _ in range(4)]
                dist.all_gather(parts, p.grad.contiguous())
                whole = orthogonal(torch.cat(parts, self.dims[p]))
                rows, columns = p.shape  # broken
                rows, columns = whole.shape  # mended
                p -= 0.01 * max(1, rows / columns) ** 0.5 * whole.chunk(4, self.dims[p])[rank]


model = tensor_parallel(gpt())
step = training(model, Muon(model), lambda: model(x, y))
