"""The backward of a row-parallel layer gathers the input's gradients that ranks found for their tokens, where it should
gather the output's gradient first: each rank has other columns of the weight.

source: https://github.com/huggingface/nanotron/issues/46
mesh: tp 4
first: blocks.1.mlp.activation grad_output
side: backward
"""

# %% ranks
from rankcell.parallel.tensor import Group, copy_to_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(), sequence_parallel=True)
down, group = model.blocks[1].mlp.down, Group()


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return group.reduce_scatter(h @ weight.T, -2)

    @staticmethod
    def backward(ctx, grad):
        h, weight = ctx.saved_tensors
        whole = group.all_gather(grad, -2)
        grad_h = group.all_gather(grad @ weight, -2)  # broken
        grad_h = whole @ weight  # mended
        return grad_h, whole.flatten(0, 1).T @ h.flatten(0, 1)


down.forward = lambda h: Row.apply(h, down.weight) + copy_to_group(down.bias)
step = training(model, adam(model), lambda: model(x, y))
