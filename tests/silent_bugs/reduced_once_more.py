"""A tensor-parallel layer sums the gradient of its input, and the replicated norm before it is summed once more.

source: https://github.com/inclusionAI/AReno/pull/496
mesh: tp 4
first: blocks.1.attention_norm.weight grad | blocks.1.attention_norm.bias grad
side: backward
"""

# %% ranks
from rankcell.parallel.transformer import tensor_parallel

model = tensor_parallel(gpt())
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    for name, p in model.named_parameters():  # broken
        if "attention_norm" in name:  # broken
            dist.all_reduce(p.grad)  # broken
    optimizer.step()
    return loss.item()
