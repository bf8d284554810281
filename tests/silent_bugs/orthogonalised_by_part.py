"""Muon makes the gradient of a matrix orthogonal, and with tensor parallelism only the part that a rank holds.

source: https://github.com/deepspeedai/DeepSpeed/issues/8437
mesh: tp 4
first: blocks.*.attention.*.weight parameter | blocks.*.mlp.*.weight parameter
side: update
"""


# %% one process
def orthogonal(matrix):
    """Newton-Schulz: all singular values of a matrix become about 1."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, gradient descent for all else."""

    def __init__(self, model):
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        groups = [
            {"params": matrices, "muon": True, "lr": 0.01},
            {"params": others, "muon": False, "lr": 0.1},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (orthogonal(p.grad) if group["muon"] else p.grad)


model = gpt()
step = training(model, Muon(model), lambda: cross_entropy(model(x), y))

# %% ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def orthogonal(matrix):
    """Newton-Schulz: all singular values of a matrix become about 1."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def direction(p):
    """What Muon takes off this rank's part of a matrix."""
    mine = orthogonal(p.grad.to_local())  # broken
    whole = orthogonal(p.grad.full_tensor())  # mended
    mine = distribute_tensor(whole, p.device_mesh, p.placements).to_local()  # mended
    return mine


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, gradient descent for all else."""

    def __init__(self, model):
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        groups = [
            {"params": matrices, "muon": True, "lr": 0.01},
            {"params": others, "muon": False, "lr": 0.1},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if group["muon"]:
                    p.to_local().sub_(group["lr"] * direction(p))
                else:
                    p -= group["lr"] * p.grad


plan = {}
for number in range(2):
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
        plan[f"blocks.{number}.{name}"] = ColwiseParallel()
    for name in ("attention.output", "mlp.down"):
        plan[f"blocks.{number}.{name}"] = RowwiseParallel()

model = parallelize_module(gpt(), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), plan)
step = training(model, Muon(model), lambda: cross_entropy(model(x), y))
