"""Context parallelism on real ranks: outputs, gradients and training are those of dense attention."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rankcell import models
from rankcell.parallel import context
from rankcell.parallel.context import ContextParallel, positions, share_of_mean, split, sum_gradients

pytestmark = pytest.mark.slow


def dense_attention(query, key, value):
    """Written out, with all scores at once."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value


def whole(length=16, heads=4, dtype=torch.float64):
    """Query, key, value and a gradient for the output, the same on every rank."""
    names = ("query", "key", "value", "grad")
    return [torch.randn(2, heads, length, 3, generator=models.generator(0, k)).to(dtype) for k in names]


def a_group(size):
    return None if size == 4 else [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]


def test_layouts_share_positions_and_the_triangle():
    assert [positions(8, r, 2, layout="contiguous").tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [positions(8, r, 2).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    x = torch.arange(96).view(2, 16, 3)
    for layout, shares in (("zigzag", [8, 8, 8, 8]), ("contiguous", [2, 6, 10, 14])):
        for rank, part in enumerate(split(x, 4, dim=1, layout=layout)):
            assert torch.equal(part, x[:, positions(16, rank, 4, layout=layout)])
        # in blocks of one piece of the zig-zag layout: how much of the causal triangle a rank computes
        unit, held = 1 if layout == "zigzag" else 4, [context.pieces(r, 4, layout=layout) for r in range(4)]
        every = [piece for mine in held for piece in mine]
        seen = [[0.5 if a == b else 1 for a in mine for b in every if b <= a] for mine in held]
        assert [unit * sum(mine) for mine in seen] == shares


# Attention over ranks


def largest_difference(size, scale=1.0):
    """Of outputs and gradients to the dense ones, in both layouts."""
    group, worst = a_group(size), 0.0
    take = lambda t, layout: split(t.detach(), size, dim=2, layout=layout)[dist.get_rank(group)]
    tensors = [scale * t for t in whole()]
    *inputs, grad = (t.requires_grad_() for t in tensors)
    output = dense_attention(*inputs)
    dense = [output, *torch.autograd.grad(output, inputs, grad)]
    for layout in ("contiguous", "zigzag"):
        *mine, own = (take(t, layout).requires_grad_() for t in tensors)
        out = context.ring_attention(*mine, layout=layout, process_group=group)
        for got, expected in zip([out, *torch.autograd.grad(out, mine, own)], dense, strict=True):
            worst = max(worst, (got - take(expected, layout)).abs().max().item())
    return worst


@pytest.mark.parametrize(
    ("size", "atol", "how"),
    [
        (2, 1e-12, {}),
        (4, 1e-12, {}),
        (4, 1e-8, {"scale": 30.0}),  # far beyond what exp can take
    ],
)
def test_forward_and_backward_equal_dense_attention(four, size, atol, how):
    assert max(four.run(largest_difference, args=(size,), kwargs=how).values) < atol


def test_one_rank_sends_nothing(four):
    def run():
        alone = [dist.new_group([r]) for r in range(4)][dist.get_rank()]
        *inputs, grad = (t.requires_grad_() for t in whole())
        out, dense = context.ring_attention(*inputs, process_group=alone), dense_attention(*inputs)
        got, expected = ([t, *torch.autograd.grad(t, inputs, grad)] for t in (out, dense))
        torch.testing.assert_close(got, expected)

    assert not [e for e in four.run(run).events if e.op in ("send", "recv")]


def test_keys_and_values_go_round_once_forward_and_their_gradients_home(four):
    def step():
        tensors = whole(64, dtype=torch.float32)
        *inputs, grad = (split(t, 4, dim=2)[dist.get_rank()].requires_grad_() for t in tensors)
        out = context.ring_attention(*inputs)
        torch.autograd.grad(out, inputs, grad)
        return inputs[0].nbytes

    run = four.run(step)
    for r in run.ranks:
        sent = [e for e in r.events if e.op == "send"]
        assert {e.peer for e in sent} == {(r.rank + 1) % 4}
        assert [e.nbytes for e in sent] == [2 * run.values[0]] * (3 + 3 + 4)
    for row in run.wire or ():
        assert 20 * run.values[0] <= sum(row) < 20 * run.values[0] + 2500


# A model


def train(kv_heads=None, size=1, **options):
    """Losses, first gradients and last weights of a GPT, or a Llama, on its own or over ranks, of which each pair may
    have its own rows ("dp").
    """
    with_dp = options.pop("dp", False)
    group = a_group(size) if size > 1 else None
    kind, more = (models.GPT, {}) if kv_heads is None else (models.Llama, {"n_kv_heads": kv_heads})
    module = kind(29, 16, n_heads=4, n_layers=2, context=16, dtype=torch.float64, **more)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model = ContextParallel(module, process_group=group, **options) if size > 1 else module
    cut = lambda t: t if size == 1 else model.split(t.chunk(2)[dist.get_rank() // 2] if with_dp else t)
    losses, first = [], None
    for step in range(3):
        x, y = (cut(t) for t in models.batch(torch.arange(400) * 7919 % 29, step, size=4, length=16))
        optimizer.zero_grad()
        logits = model(x)
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        if size == 1:
            loss = each.mean()
        elif with_dp:  # shares of all ranks' tokens, and the sum of their gradients
            loss = share_of_mean(each)
        else:
            loss = share_of_mean(each, process_group=group)
        loss.backward()
        loss = loss.detach().clone()
        if size > 1:
            sum_gradients(module.parameters()) if with_dp else model.finish_gradient_synchronization()
            dist.all_reduce(loss, group=None if with_dp else group)
        first = first or {n: p.grad.clone() for n, p in module.named_parameters()}
        losses.append(loss.item())
        optimizer.step()
    return losses, first, dict(module.state_dict())


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, {"size": 4}),
        ({}, {"size": 2, "layout": "contiguous"}),
        ({"kv_heads": 1}, {"size": 4, "layout": "contiguous"}),
        ({"kv_heads": 2}, {"size": 2}),
        ({"kv_heads": 2}, {"size": 4}),
        ({}, {"size": 2, "dp": True}),
    ],
)
def test_models_train_as_one_process(four, how, options):
    expected = train(**how)
    for theirs in four.run(train, kwargs=how | options).values:
        torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-9)


def test_shares_of_a_mean_and_sums_of_gradients(four):
    def run():
        rank = dist.get_rank()
        x = torch.full((rank + 1,), float(rank), requires_grad=True)  # 1, 2, 3, 4 losses
        loss = share_of_mean(x)
        loss.backward()
        tied, double, unused, frozen = (nn.Parameter(torch.zeros(2)) for _ in range(4))
        double.data, double.grad = (
            double.data.double(),
            torch.full((2,), rank + 1.0).double() if rank < 2 else None,
        )
        tied.grad = torch.full((2,), float(rank))
        sum_gradients([tied, tied, double, unused, frozen.requires_grad_(False)])
        sums = [p.grad if p.grad is None else p.grad[0].item() for p in (tied, double, unused, frozen)]
        return loss.item(), x.grad[0].item(), sums

    values = four.run(run).values
    assert sum(v[0] for v in values) == pytest.approx((0 + 2 + 6 + 12) / 10)
    assert all(v[1] == pytest.approx(0.1) and v[2] == [6, 3, 0, None] for v in values)
