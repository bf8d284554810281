"""Each layer learns more slowly than the one above it. A stage of the pipeline counts its own layers, from zero, and
gives all of them the rate of the lowest ones.

source: https://github.com/NVIDIA-NeMo/RL/pull/3259
mesh: pp 4
first: blocks.* parameter
side: update
"""

# %% one process


def groups(model):
    yield {
        "params": [*model.token_embedding.parameters(), *model.position_embedding.parameters()],
        "lr": 1e-3,
    }
    for number, block in enumerate(model.blocks):
        yield {"params": list(block.parameters()), "lr": 1e-2 * 0.6 ** (4 - number)}
    yield {"params": [*model.norm.parameters(), *model.head.parameters()], "lr": 1e-2}


model = gpt(n_layers=4)
step = training(model, torch.optim.Adam(groups(model)), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.parallel.pipeline import split_gpt

model = split_gpt(gpt(n_layers=4), 4)[rank]


def groups(stage):
    if stage.token_embedding is not None:
        yield {
            "params": [*stage.token_embedding.parameters(), *stage.position_embedding.parameters()],
            "lr": 1e-3,
        }
    for number, block in enumerate(stage.blocks):
        number += rank * len(stage.blocks)  # mended
        yield {"params": list(block.parameters()), "lr": 1e-2 * 0.6 ** (4 - number)}
    if stage.head is not None:
        yield {"params": [*stage.norm.parameters(), *stage.head.parameters()], "lr": 1e-2}


optimizer = torch.optim.Adam(groups(model))


def step():
    optimizer.zero_grad()
    loss = through(model, [0, 1, 2, 3], x, y)
    optimizer.step()
    return loss
