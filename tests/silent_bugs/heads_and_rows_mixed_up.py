"""After the all-to-all of Ulysses what came from each rank is a stretch of the sequence for all rows of the batch. It
is reshaped as if there were one row only, so the stretches of other rows follow each other as one sequence.

source: https://github.com/deepspeedai/DeepSpeed/issues/5808
mesh: sp 4
first: blocks.0.attention.output output
side: forward
"""

# %% ranks
from rankcell.parallel.context import ContextParallel


class AllToAll(torch.autograd.Function):
    """The first dim says for which rank a part is, and afterwards from which rank it came."""

    @staticmethod
    def forward(ctx, parts):
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


def to_heads(t):
    """(batch, 4 heads, length / 4, 8) -> (batch, 1 head, length, 8)"""
    batch, _, part, width = t.shape
    came = AllToAll.apply(t.movedim(1, 0)[:, :, None])  # (from, batch, 1, length / 4, 8)
    return came.reshape(batch, 1, 4 * part, width)  # broken
    return came.permute(1, 2, 0, 3, 4).reshape(batch, 1, 4 * part, width)  # mended


def to_positions(t):
    """(batch, 1 head, length, 8) -> (batch, 4 heads, length / 4, 8)"""
    batch, _, length, width = t.shape
    came = AllToAll.apply(
        t.reshape(batch, 4, length // 4, width).movedim(1, 0)
    )  # (from, batch, length / 4, 8)
    return came.movedim(0, 1)


def attend(query, key, value, documents=None):
    query, key, value = (to_heads(t) for t in (query, key, value))
    return to_positions(F.scaled_dot_product_attention(query, key, value, is_causal=True))


model = ContextParallel(gpt(), layout="contiguous")
for block in model.module.blocks:
    block.attention.attend = attend
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = model.share_of_mean(cross_entropy(model(model.split(x)), model.split(y), reduction="none"))
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 4 * loss.item()
