"""What the bugs share: data, models and a few loops. It runs before each of them, on the ranks and in one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rankcell
from rankcell.models import GPT, Llama, generator

x = torch.randint(0, 49, (8, 8), generator=generator(0, "x"))
y = torch.randint(0, 49, (8, 8), generator=generator(0, "y"))


def gpt(vocab=49, **options):
    """A GPT of two blocks and 32 features; the same weights everywhere."""
    return GPT(vocab, 32, **({"tied": False, "context": 8} | options))


def llama(**options):
    """A Llama of two blocks and 32 features."""
    return Llama(49, 32, **({"context": 8} | options))


def cross_entropy(logits, targets, **options):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def adam(model, lr=1e-3, **options):
    return torch.optim.AdamW(model.parameters(), lr, **options)


def training(model, optimizer, loss, then=lambda model: None):
    """A step: the gradient of `loss()`, what is done with it `then`, and an update; returns the loss."""

    def step():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        then(model)
        optimizer.step()
        return value.item()

    return step


def average(model, group=None):
    """Replace gradients by their mean over a group, as data parallelism does: all of a dtype in one bucket."""
    trained = [p for p in model.parameters() if p.grad is not None]
    for dtype in {p.dtype for p in trained}:
        gradients = [p.grad for p in trained if p.dtype == dtype]
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket, group=group)
        bucket /= dist.get_world_size(group)
        for gradient, part in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def through(stage, ranks, tokens, targets, loss=cross_entropy):
    """Forward and backward of one micro-batch through the stages that `ranks` hold; the loss on the last."""
    me = ranks.index(dist.get_rank())
    given = tokens
    if me > 0:
        given = torch.empty(*tokens.shape, 32)
        dist.recv(given, ranks[me - 1])
        given.requires_grad_()
    output = stage(given)
    if me < len(ranks) - 1:
        dist.send(output.detach(), ranks[me + 1])
        grad = torch.empty_like(output)
        dist.recv(grad, ranks[me + 1])
        output.backward(grad)
        value = None
    else:
        value = loss(output, targets)
        value.backward()
    if me > 0:
        dist.send(given.grad, ranks[me - 1])
    return None if value is None else value.item()


class Swap(torch.autograd.Function):
    """An all-to-all that cuts one dim into parts for the ranks, and joins along another; and its way back."""

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.how = join, cut
        sent = torch.stack(x.chunk(dist.get_world_size(), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad, *ctx.how), None, None


def by_heads(query, key, value, documents=None):
    """Causal attention of blocks of positions, `(batch, heads, positions, d_head)`: each rank computes some heads."""
    query, key, value = (Swap.apply(t, 1, 2) for t in (query, key, value))
    seen = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool).tril()
    if documents is not None:
        parts = [torch.empty_like(documents) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, documents.contiguous())
        numbers = torch.cat(parts, 1)
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    return Swap.apply(F.scaled_dot_product_attention(query, key, value, attn_mask=seen), 2, 1)
