"""All query heads share one key head, which every rank holds. The gradients of its weights are summed over the ranks,
that of its input is not.

source: https://github.com/bigcode-project/Megatron-LM/pull/36
mesh: tp 4
first: blocks.1.attention.key grad_output | blocks.1.attention.value grad_output
side: backward
says: an all-reduce over tp is missing in the backward
"""

# %% one process
model = llama(n_kv_heads=1)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import causal_attention, rotate
from rankcell.parallel.tensor import copy_to_group, reduce_from_group

model = llama(n_kv_heads=1)


def attend(h, documents=None, *, of):
    copied = copy_to_group(h)
    shared = h  # broken
    shared = copied  # mended
    query, key, value = (of.heads(t) for t in (of.query(copied), of.key(shared), of.value(shared)))
    query, key = (rotate(t, torch.arange(8), base=10000.0) for t in (query, key))
    mixed = causal_attention(query, key, value, lambda weights: weights)
    return reduce_from_group(of.output(mixed.transpose(1, 2).flatten(2)))


for block in model.blocks:
    own = block.attention
    own.query.weight = nn.Parameter(own.query.weight.detach().chunk(4)[rank].clone())
    own.output.weight = nn.Parameter(own.output.weight.detach().chunk(4, 1)[rank].clone())
    own.forward = lambda h, documents=None, own=own: attend(h, documents, of=own)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    for block in model.blocks:
        for layer in (block.attention.key, block.attention.value):
            dist.all_reduce(layer.weight.grad)
    optimizer.step()
    return loss.item()
