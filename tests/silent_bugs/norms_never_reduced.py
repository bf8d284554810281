"""With sequence parallelism each rank normalises other tokens; the norm's gradients are parts, and nobody sums them.

source: https://github.com/NVIDIA/Megatron-LM/issues/1446
mesh: tp 4
first: norm.weight grad | norm.bias grad
side: backward
"""

# %% ranks
from rankcell.parallel.tensor import Group, copy_to_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(), sequence_parallel=True)
norm = model.norm


def normalise(h):
    weight, bias = norm.weight, norm.bias
    weight, bias = copy_to_group(weight), copy_to_group(bias)  # mended
    return F.layer_norm(h, (32,), weight, bias)


norm.forward = normalise
step = training(model, adam(model), lambda: model(x, y))
