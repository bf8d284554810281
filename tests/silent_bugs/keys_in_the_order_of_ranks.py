"""Each rank has an early and a late piece of the sequence and gathers the keys of all. They come in the order of the
ranks and not of the sequence, and the causal mask takes them to be in order.

source: https://github.com/NVIDIA/Model-Optimizer/pull/1804
mesh: cp 4
first: blocks.0.attention.output output
side: forward
"""

# %% ranks
from functools import partial

mine = torch.tensor([rank, 7 - rank])
places = torch.arange(8)  # broken
places = torch.tensor([0, 7, 1, 6, 2, 5, 3, 4])  # mended


class Gather(torch.autograd.Function):
    """The pieces of all ranks as they come, for queries that differ from rank to rank."""

    @staticmethod
    def forward(ctx, piece):
        pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(4)]
        dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(4, 2)[rank]


def attend(self, h, documents=None):
    q, k, v = (self.heads(layer(h)) for layer in (self.query, self.key, self.value))
    k, v = (Gather.apply(t) for t in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mine[:, None] >= places)
    return self.output(mixed.transpose(1, 2).flatten(2))


model = gpt()
model.embed = partial(GPT.embed, model, positions=mine)
for block in model.blocks:
    block.attention.forward = partial(attend, block.attention)
optimizer = adam(model)


def step():
    optimizer.zero_grad()
    loss = cross_entropy(model(x[:, mine]), y[:, mine])
    loss.backward()
    average(model)
    optimizer.step()
    return loss.item()
