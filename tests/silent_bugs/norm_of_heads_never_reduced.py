"""Queries and keys are normalised head by head with one weight for all heads. Each rank has other heads and a copy of
that weight, and the copies' gradients are not added up.

source: https://github.com/NVIDIA-NeMo/RL/issues/3716
mesh: tp 4
first: blocks.1.attention.q_norm.weight grad | blocks.1.attention.k_norm.weight grad
side: backward
"""

# %% one process
from rankcell.models import causal_attention, rotate


def normalise_heads(model):
    """A Llama whose queries and keys are normalised before they are rotated, as Qwen3's."""
    for block in model.blocks:
        block.attention.q_norm, block.attention.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        block.attention.forward = attention(block.attention)
    return model


def attention(a):
    def forward(x, documents=None):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (a.query, a.key, a.value))
        q, k = (rotate(t, torch.arange(x.shape[1])) for t in (a.q_norm(q), a.k_norm(k)))
        return a.output(causal_attention(q, k, v, nn.Identity()).transpose(1, 2).flatten(2))

    return forward


model = normalise_heads(llama(n_kv_heads=4))
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import causal_attention, rotate
from rankcell.parallel.transformer import tensor_parallel


def normalise_heads(model):
    for block in model.blocks:
        block.attention.q_norm, block.attention.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        block.attention.forward = attention(block.attention)
    return model


def attention(a):
    def forward(x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (a.query, a.key, a.value))
        q, k = (rotate(t, torch.arange(x.shape[1])) for t in (a.q_norm(q), a.k_norm(k)))
        return a.output(causal_attention(q, k, v, nn.Identity()).transpose(1, 2).flatten(2))

    return forward


model = normalise_heads(tensor_parallel(llama(n_kv_heads=4)))
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    for block in model.blocks:  # mended
        for norm in (block.attention.q_norm, block.attention.k_norm):  # mended
            dist.all_reduce(norm.weight.grad)  # mended
    optimizer.step()
    return loss.item()
