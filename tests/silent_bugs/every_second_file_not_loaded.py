"""A checkpoint is cut for twice as many ranks. Each rank reads the file of its own number only; the rest stays zero.

source: https://github.com/sgl-project/sglang/pull/36438
mesh: tp 4
first: blocks.0.mlp.up.weight parameter
side: start
says: 2048 of its 4096 numbers are on no rank: were they loaded?
"""

# %% ranks
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
for block, whole in zip(model.blocks, gpt().blocks, strict=True):
    files = whole.mlp.up.weight.detach().chunk(8)
    part = files[rank], torch.zeros_like(files[0])  # broken
    part = files[2 * rank], files[2 * rank + 1]  # mended
    block.mlp.up.weight.data.copy_(torch.cat(part))
step = training(model, adam(model), lambda: model(x, y))
