"""There are fewer key heads than ranks, so every rank has all of them and takes the one that its query head shares.
Neighbouring query heads share one; the rank takes the remainder in place of the quotient.

source: https://github.com/vllm-project/tpu-inference/pull/1429
mesh: tp 4
first: blocks.0.attention.output output
side: forward
"""

# %% one process
model = llama()
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))

# %% ranks
from rankcell.models import rotate
from rankcell.parallel.tensor import ColumnParallelLinear, RowParallelLinear, copy_to_group


class Head(nn.Module):
    """One query head of four, with its key head of two."""

    def __init__(self, dense):
        super().__init__()
        self.query = ColumnParallelLinear.from_linear(dense.query)
        self.key, self.value = dense.key, dense.value
        self.output = RowParallelLinear.from_linear(dense.output)

    def forward(self, h, documents=None):
        shared = rank % 2  # broken
        shared = rank // 2  # mended
        q = self.query(h)
        k, v = (
            copy_to_group(layer(h)).unflatten(-1, (2, 8))[..., shared, :] for layer in (self.key, self.value)
        )
        q, k = (rotate(t, torch.arange(h.shape[1])) for t in (q, k))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True))


model = llama()
for block in model.blocks:
    block.attention = Head(block.attention)
step = training(model, adam(model, 3e-3), lambda: cross_entropy(model(x), y))
