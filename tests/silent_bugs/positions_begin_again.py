"""A sequence is cut over the ranks, and each rotates its part as if it began at position 0.

source: https://github.com/NVIDIA/Megatron-LM/issues/560
mesh: cp 4
first: blocks.0.attention.output output
side: forward
"""

# %% one process
model = llama()
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.context import ContextParallel

model = ContextParallel(llama())
for block in model.module.blocks:  # broken
    block.attention.positions = torch.arange  # broken
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model.share_of_mean(cross_entropy(model(model.split(x)), model.split(y), reduction="none"))
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
