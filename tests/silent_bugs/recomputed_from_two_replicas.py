"""What a checkpointed MLP needs for computing again is kept in parts, one for each tensor-parallel rank. The parts are
cut and gathered over the group of neighbouring ranks, and those are replicas with other rows here.

source: https://github.com/NVIDIA/Megatron-LM/issues/7452
mesh: tp 2, dp 2
first: blocks.1.mlp.up grad_output
side: backward
"""

# %% ranks
from torch.distributed.device_mesh import init_device_mesh

from rankcell.parallel.transformer import tensor_parallel

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
dp = mesh.get_local_rank("dp")
group = mesh.get_group("dp")  # broken
group = mesh.get_group("tp")  # mended


class Checkpoint(torch.autograd.Function):
    """Keeps this rank's part of the input only, and computes all again in the backward."""

    @staticmethod
    def forward(ctx, h, run):
        ctx.run, ctx.shape = run, h.shape
        ctx.part = h.flatten().chunk(2)[dist.get_rank(group)].clone()
        return run(h)

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(ctx.part) for _ in range(2)]
        dist.all_gather(parts, ctx.part, group=group)
        h = torch.cat(parts).view(ctx.shape).requires_grad_()
        with torch.enable_grad():
            output = ctx.run(h)
        output.backward(grad)
        return h.grad, None


model = tensor_parallel(gpt(), mesh.get_group("tp"))
for block in model.blocks:
    block.mlp.forward = lambda h, run=block.mlp.forward: Checkpoint.apply(h, run)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model(x.chunk(2)[dp], y.chunk(2)[dp])
    loss.backward()
    average(model, mesh.get_group("dp"))
    optimizer.step()
    return loss.item()
