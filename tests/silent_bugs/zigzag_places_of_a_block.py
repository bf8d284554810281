"""Each rank has a block of the sequence, and turns its queries and keys by the places of a zigzag.

source: https://github.com/ISEEKYAN/Megatron-LM/pull/208
mesh: cp 4
first: blocks.0.attention.output output
side: forward
says: right at position 0, wrong at positions 1-7: is what comes from earlier positions right
"""

# %% one process
model = llama(context=16)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.context import ContextParallel, positions

model = ContextParallel(llama(context=16), layout="contiguous")
layout = "zigzag"  # broken
layout = "contiguous"  # mended
for block in model.module.blocks:
    block.attention.positions = lambda n: positions(4 * n, rank, 4, layout=layout)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model.share_of_mean(cross_entropy(model(model.split(x)), model.split(y), reduction="none"))
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
