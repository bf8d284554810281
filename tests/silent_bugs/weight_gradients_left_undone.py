"""Linear layers leave the gradients of their weights to be done later, when a zero bubble has a gap. Where zero bubble
is switched off nobody does them: norms, biases and embeddings learn, and the loss falls.

source: https://github.com/deepspeedai/Megatron-DeepSpeed/issues/442
mesh: pp 4
first: head.weight grad
side: backward
"""

# %% one process
model = gpt(n_layers=4)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

later = []  # layers, their inputs, and the gradients of their outputs


class Product(torch.autograd.Function):
    """x times a weight; its backward finds the gradient of x only."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        later.append((ctx.layer, *ctx.saved_tensors, grad))
        return grad @ ctx.layer.weight, None, None


def forward_of(layer):
    def forward(h):
        product = Product.apply(h, layer.weight, layer)
        return product if layer.bias is None else product + layer.bias

    return forward


model = split_gpt(gpt(n_layers=4), 4)[rank]
for layer in model.modules():
    if isinstance(layer, nn.Linear):
        layer.forward = forward_of(layer)
optimizer = adam(model)


def do_weights():
    for layer, given, grad in later:
        found = grad.flatten(0, -2).T @ given.flatten(0, -2)
        layer.weight.grad = found if layer.weight.grad is None else layer.weight.grad + found


def step():
    optimizer.zero_grad()
    loss = through(model, [0, 1, 2, 3], x, y)
    do_weights()  # mended
    later.clear()
    optimizer.step()
    return loss
