"""A gradient that is not contiguous is copied for the all-reduce, and the backward returns the one that was not summed.

source: https://github.com/NovaSky-AI/SkyRL/pull/1886
mesh: tp 4
first: blocks.1.mlp_norm grad_output
side: backward
"""

# %% ranks
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
up = model.blocks[1].mlp.up


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()  # mended
        dist.all_reduce(grad.contiguous())
        return grad


def forward(h):
    h = Copy.apply(h.transpose(0, 1)).transpose(0, 1)
    return F.linear(h.contiguous(), up.weight, up.bias)


up.forward = forward
step = training(model, adam(model), lambda: model(x, y))
