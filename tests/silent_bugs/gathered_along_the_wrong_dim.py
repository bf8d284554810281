"""An all-gather puts parts one after the other, and is read as if it had put them side by side.

source: https://github.com/NVIDIA/TransformerEngine/issues/530
mesh: tp 4
first: the model output
side: forward
"""

# %% one process
model = gpt(48)
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y % 48))

# %% ranks
from rankcell.parallel.tensor import gather_from_group
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt(48))


def unembed(h):
    logits = model.head(model.norm(h))  # (8, 8, 12)
    logits = gather_from_group(logits, 0).view(8, 8, 48)  # broken
    logits = gather_from_group(logits, -1)  # mended
    return logits


model.unembed = unembed
step = training(model, adam(model), lambda: cross_entropy(model(x % 48), y % 48))
