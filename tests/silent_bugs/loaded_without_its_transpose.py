"""A square weight is loaded as its transpose.

source: https://github.com/huggingface/transformers/pull/48519
mesh: tp 4
first: blocks.0.attention.query.weight parameter
side: start
says: transposed, interleaved or cut otherwise?
"""

# %% ranks
from rankcell.parallel.transformer import tensor_parallel

whole = gpt()
whole.blocks[0].attention.query.weight.data = whole.blocks[0].attention.query.weight.data.T.clone()  # broken
model = tensor_parallel(whole)
step = training(model, adam(model), lambda: model(x, y))
