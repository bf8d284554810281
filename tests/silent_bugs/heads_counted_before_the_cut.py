"""Muon takes each head as a matrix of its own, but counts the heads of the whole model: its blocks are parts of heads.

source: https://github.com/deepspeedai/DeepSpeed/pull/8384
mesh: tp 4
first: blocks.*.attention.*.weight parameter
side: update
"""


# %% one process
class HeadwiseMuon(torch.optim.Optimizer):
    """Orthogonal updates for each head's block of query, key and value; gradient descent for all else."""

    def __init__(self, model, heads=4):
        matrices = [getattr(b.attention, n).weight for b in model.blocks for n in ("query", "key", "value")]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        super().__init__([{"params": matrices, "heads": heads}, {"params": others, "heads": 0}], {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not group["heads"]:
                    p -= 0.1 * p.grad
                    continue
                blocks = p.grad.view(group["heads"], -1, p.shape[1])
                blocks = blocks / blocks.norm(dim=(1, 2), keepdim=True)
                for _ in range(5):
                    blocks = 1.5 * blocks - 0.5 * blocks @ blocks.mT @ blocks
                p -= 0.02 * blocks.view_as(p)


model = gpt()
step = training(model, HeadwiseMuon(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.transformer import tensor_parallel


class HeadwiseMuon(torch.optim.Optimizer):
    """Orthogonal updates for each head's block of query, key and value; gradient descent for all else."""

    def __init__(self, model, heads=4):
        heads = heads // 4  # mended
        matrices = [getattr(b.attention, n).weight for b in model.blocks for n in ("query", "key", "value")]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        super().__init__([{"params": matrices, "heads": heads}, {"params": others, "heads": 0}], {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not group["heads"]:
                    p -= 0.1 * p.grad
                    continue
                blocks = p.grad.reshape(group["heads"], -1, p.shape[1])
                blocks = blocks / blocks.norm(dim=(1, 2), keepdim=True)
                for _ in range(5):
                    blocks = 1.5 * blocks - 0.5 * blocks @ blocks.mT @ blocks
                p -= 0.02 * blocks.view_as(p)


model = tensor_parallel(gpt())
step = training(model, HeadwiseMuon(model), lambda: model(x, y))
