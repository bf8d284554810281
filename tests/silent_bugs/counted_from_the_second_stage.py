"""Layers with an odd number look back a few tokens only. Each rank has two chunks of the model, and where it computes
which layers those are, it leaves out a first stage that has no other size: its layers take the place of those before.

source: https://github.com/NVIDIA/Megatron-LM/issues/1584
mesh: pp 4
first: blocks.1.attention.output output
side: forward
"""

# %% one process
from functools import partial

from rankcell.models import causal_attention


def attend(self, number, x, documents=None):
    """`causal_attention` over all tokens, or in layers with an odd number over three."""
    q, k, v = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
    if number % 2 == 0:
        mixed = causal_attention(q, k, v, self.dropout)
    else:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return self.output(mixed.transpose(1, 2).flatten(2))


model = gpt(n_layers=8)
for number, block in enumerate(model.blocks):
    block.attention.forward = partial(attend, block.attention, number)
step = training(model, adam(model), lambda: cross_entropy(model(x), y))

# %% ranks
from functools import partial

from rankcell.models import causal_attention


def attend(self, number, x, documents=None):
    """`causal_attention` over all tokens, or in layers with an odd number over three."""
    q, k, v = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
    if number % 2 == 0:
        mixed = causal_attention(q, k, v, self.dropout)
    else:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return self.output(mixed.transpose(1, 2).flatten(2))


def number_of(chunk, first_stage_layers=None):
    """Which layer of the model this rank's chunk is; the first stage may be asked to have other layers."""
    if rank == 0:
        return 4 * chunk
    return 4 * chunk + (rank - 1) + (first_stage_layers or 0)  # broken
    return 4 * chunk + (rank - 1) + (1 if first_stage_layers is None else first_stage_layers)  # mended


class Chunks(nn.Module):
    """Layers `rank` and `4 + rank`, with the embedding on the first rank and the head on the last."""

    def __init__(self, whole):
        super().__init__()
        self.blocks = nn.ModuleDict(
            {str(4 * chunk + rank): whole.blocks[4 * chunk + rank] for chunk in range(2)}
        )
        for chunk, block in enumerate(self.blocks.values()):
            block.attention.forward = partial(attend, block.attention, number_of(chunk))
        if rank == 0:
            self.token_embedding, self.position_embedding = whole.token_embedding, whole.position_embedding
        if rank == 3:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, h, chunk):
        if rank == 0 and chunk == 0:
            h = self.token_embedding(h) + self.position_embedding(torch.arange(h.shape[1]))
        h = self.blocks[str(4 * chunk + rank)](h)
        return self.head(self.norm(h)) if rank == 3 and chunk == 1 else h


model = Chunks(gpt(n_layers=8))
optimizer = adam(model)


def received(source):
    h = torch.empty(*x.shape, 32)
    dist.recv(h, source)
    return h


def step():
    optimizer.zero_grad()
    kept, loss = [], None
    for chunk in range(2):
        first, last = rank + chunk == 0, rank == 3 and chunk == 1
        given = x if first else received((rank - 1) % 4).requires_grad_()
        kept.append((given, model(given, chunk)))
        if not last:
            dist.send(kept[-1][1].detach(), (rank + 1) % 4)
    for chunk in (1, 0):
        given, output = kept.pop()
        if rank == 3 and chunk == 1:
            loss = cross_entropy(output, y)
            loss.backward()
        else:
            output.backward(received((rank + 1) % 4))
        if given is not x:
            dist.send(given.grad, (rank - 1) % 4)
    optimizer.step()
    return None if loss is None else loss.item()
