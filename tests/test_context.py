"""Context parallelism on real ranks: outputs, gradients and training are those of dense attention."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rankcell
from rankcell import models
from rankcell.parallel import context
from rankcell.parallel.context import (
    LAYOUTS,
    ContextParallel,
    OnlineSoftmax,
    positions,
    share_of_mean,
    split,
    sum_gradients,
)

pytestmark = pytest.mark.slow

METHODS = ("ring_attention", "all_to_all_attention")


def dense_attention(query, key, value, causal, documents=None):
    """Written out, with all scores at once."""
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if documents is not None:
        apart = documents[:, None, :, None] != documents[:, None, None, :]
        scores = scores.masked_fill(apart, -math.inf)
    return scores.softmax(-1) @ value


def whole(length=16, heads=4, d_head=3, dtype=torch.float64, scale=1.0, kv_heads=None):
    """Query, key, value and a gradient for the output, the same on every rank."""
    numbers = {"query": heads, "key": kv_heads or heads, "value": kv_heads or heads, "grad": heads}
    return [
        scale
        * torch.randn((2, n, length, d_head), generator=models.generator(0, name), dtype=torch.float64).to(
            dtype
        )
        for name, n in numbers.items()
    ]


DOCUMENTS = torch.tensor(
    [[0] * 3 + [1] * 6 + [2] * 1 + [0] * 2 + [-1] * 4, [5] * 9 + [7] * 7]  # the 0 comes back; -1 is padding
)


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_split_gives_each_position_to_one_rank(layout, n):
    x = torch.arange(2 * 16 * 3).view(2, 16, 3)
    parts = split(x, n, dim=1, layout=layout)
    held = torch.cat([positions(16, rank, n, layout=layout) for rank in range(n)])
    assert held.sort().values.tolist() == list(range(16))
    for rank, part in enumerate(parts):
        assert torch.equal(part, x[:, positions(16, rank, n, layout=layout)])


def test_what_the_layouts_are():
    assert [positions(8, r, 2, layout="contiguous").tolist() for r in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [positions(8, r, 2, layout="zigzag").tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def scores_computed(layout, n):
    """By rank, in blocks of one piece of the zig-zag layout: how much of the causal triangle it computes."""
    unit = (2 / len(context.pieces(0, n, layout=layout))) ** 2
    pairs = [[p for s in range(n) for p in context._pairs(rank, s, n, layout, True)] for rank in range(n)]
    return [unit * sum(0.5 if triangle else 1.0 for *_, triangle in mine) for mine in pairs]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_zigzag_shares_the_triangle_equally(n):
    assert scores_computed("zigzag", n) == [2.0 * n] * n
    assert scores_computed("contiguous", n) == [4.0 * r + 2 for r in range(n)]
    assert sum(scores_computed("contiguous", n)) == sum(scores_computed("zigzag", n))


@pytest.mark.parametrize(
    ("length", "layout", "message"),
    [
        (
            10,
            "contiguous",
            "A sequence of 10 positions cannot be cut into 4 equal pieces, as the contiguous layout needs on "
            "4 ranks. Pad it to 12.",
        ),
        (
            12,
            "zigzag",
            "A sequence of 12 positions cannot be cut into 8 equal pieces, as the zigzag layout needs on 4 "
            "ranks. Pad it to 16.",
        ),
        (
            0,
            "contiguous",
            "A sequence of 0 positions cannot be cut into 4 equal pieces, as the contiguous "
            "layout needs on 4 ranks. Pad it to 4.",
        ),
        (8, "spiral", "There is no layout 'spiral'. Choose one of contiguous, zigzag."),
    ],
)
def test_lengths_and_layouts_that_do_not_fit(length, layout, message):
    for f in (
        lambda: positions(length, 0, 4, layout=layout),
        lambda: split(torch.zeros(2, length), 4, layout=layout),
    ):
        with pytest.raises(ValueError) as caught:
            f()
        assert str(caught.value) == message


# The online softmax, on one process


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_blocks_in_any_order_give_the_dense_attention(scale):
    """Scores far beyond what exp can take, and a largest score that grows, shrinks and grows again."""
    query, key, value, _ = whole(scale=scale)
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        state = OnlineSoftmax(query)
        for block in order:
            part = slice(4 * block, 4 * block + 4)
            state.add(key[:, :, part], value[:, :, part])
        scores = query @ key.transpose(-2, -1) / math.sqrt(3)
        torch.testing.assert_close(state.output(), dense_attention(query, key, value, False))
        torch.testing.assert_close(state.log_sum_exp()[..., 0], scores.logsumexp(-1))


def test_the_backward_of_blocks_adds_up_to_that_of_autograd():
    query, key, value, grad = (t.requires_grad_() for t in whole())
    output = dense_attention(query, key, value, True)
    expected = torch.autograd.grad(output, (query, key, value), grad)
    with torch.no_grad():
        scores = query @ key.transpose(-2, -1) / math.sqrt(3)
        scores = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf)
        lse, correction = scores.logsumexp(-1, keepdim=True), (grad * output).sum(-1, keepdim=True)
        got = [torch.zeros_like(t) for t in (query, key, value)]
        for i in range(4):
            for j in range(i + 1):
                a, b = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
                q, g, total_lse, c = (t[:, :, a] for t in (query, grad, lse, correction))
                parts = context.block_backward(
                    q, key[:, :, b], value[:, :, b], g, total_lse, c, triangle=i == j
                )
                for total, rows, part in zip(got, (a, b, b), parts, strict=True):
                    total[:, :, rows] += part
    torch.testing.assert_close(got, list(expected))


# Attention over ranks


def a_group(size):
    if size == 4:
        return None
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]


def largest_difference(size, dtype=torch.float64, scale=1.0, kv_heads=None, documents=None):
    """Of outputs and gradients to the dense ones, for both methods and layouts, causal and not."""
    group = a_group(size)
    rank, worst = dist.get_rank(group), {}
    for causal in (True, False):
        tensors = [t.requires_grad_() for t in whole(scale=scale, kv_heads=kv_heads)]
        output = dense_attention(*tensors[:3], causal, documents)
        grads = torch.autograd.grad(output, tensors[:3], tensors[3])
        for layout in LAYOUTS:
            take = lambda t, layout=layout: split(t.detach(), size, dim=2, layout=layout)[rank]
            expected = [take(t) for t in (output, *grads)]
            for method in METHODS:
                *mine, grad = (take(t).to(dtype).requires_grad_() for t in tensors)
                how = {"causal": causal, "layout": layout, "process_group": group}
                if documents is not None:
                    how["documents"] = split(documents, size, layout=layout)[rank]
                out = getattr(context, method)(*mine, **how)
                got = [out, *torch.autograd.grad(out, mine, grad)]
                assert all(g.dtype == dtype for g in got)
                worst[method, layout, causal] = max(
                    (g - e).abs().max().item() for g, e in zip(got, expected, strict=True)
                )
    return worst


@pytest.mark.parametrize("size", [2, 4])
def test_forward_and_backward_equal_dense_attention(four, size):
    for worst in four.run(largest_difference, args=(size,)).values:
        assert len(worst) == 8 and max(worst.values()) < 1e-12, worst


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_value_heads(four, size, kv_heads):
    for worst in four.run(largest_difference, args=(size,), kwargs={"kv_heads": kv_heads}).values:
        assert len(worst) == 8 and max(worst.values()) < 1e-12, worst


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_documents_and_padding(four, size, kv_heads):
    """Also where a query sees nothing of the first blocks that come."""
    how = {"kv_heads": kv_heads, "documents": DOCUMENTS}
    for worst in four.run(largest_difference, args=(size,), kwargs=how).values:
        assert len(worst) == 8 and max(worst.values()) < 1e-12, worst


def test_large_scores(four):
    for worst in four.run(largest_difference, args=(4,), kwargs={"scale": 30.0}).values:
        assert max(worst.values()) < 1e-8, worst


def test_sixteen_bits_are_summed_in_thirty_two(four):
    for worst in four.run(largest_difference, args=(4, torch.bfloat16)).values:
        ring = max(v for k, v in worst.items() if k[0] == "ring_attention")
        assert ring < 0.1, worst  # inputs and outputs rounded to 8 bits


def test_one_rank_sends_nothing(four):
    def alone():
        groups = [dist.new_group([r]) for r in range(4)]
        group = groups[dist.get_rank()]
        query, key, value, grad = (t.requires_grad_() for t in whole())
        out = context.ring_attention(query, key, value, process_group=group)
        got = torch.autograd.grad(out, (query, key, value), grad)
        dense = dense_attention(query, key, value, True)
        torch.testing.assert_close(
            [out, *got], [dense, *torch.autograd.grad(dense, (query, key, value), grad)]
        )

    assert not [e for r in four.run(alone).ranks for e in r.events if e.op in ("send", "recv")]


def test_only_some_inputs_need_a_gradient(four):
    def one(name):
        tensors = dict(zip(("query", "key", "value"), whole()[:3], strict=True))
        tensors = {n: split(t, 4, dim=2)[dist.get_rank()] for n, t in tensors.items()}
        tensors[name].requires_grad_()
        context.ring_attention(**tensors).sum().backward()
        return [n for n, t in tensors.items() if t.grad is not None]

    for name in ("query", "value"):
        assert four.run(one, args=(name,)).values == [[name]] * 4


# What it sends


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize(("method", "messages"), [("ring", 3 + 3 + 4), ("all_to_all", 4)])
def test_bytes_by_formula(four, method, messages, kv_heads):
    def step(method, kv_heads):
        tensors = whole(64, heads=8, dtype=torch.float32, kv_heads=kv_heads)
        tensors = [split(t, 4, dim=2)[dist.get_rank()] for t in tensors]
        query, key, value, grad = (t.requires_grad_() for t in tensors)
        out = getattr(context, f"{method}_attention")(query, key, value)
        torch.autograd.grad(out, (query, key, value), grad)
        return query.nbytes, key.nbytes

    run = four.run(step, args=(method, kv_heads))
    block, kv_block = run.values[0]
    assert kv_block == block * kv_heads / 8
    formula = sum(context.bytes_sent(method, block, 4, kv_block=kv_block).values())
    for r in run.ranks:
        sent = [e for e in r.events if e.op in ("send", "all_to_all")]
        assert len(sent) == messages
        if method == "ring":  # to the next rank only
            assert sum(e.nbytes for e in sent) == formula and {e.peer for e in sent} == {(r.rank + 1) % 4}
        else:  # a quarter of what goes in stays
            assert sum(e.nbytes for e in sent) * 3 / 4 == formula
    if run.wire:
        for row in run.wire:
            assert formula <= sum(row) < formula + 2500


def test_formulas():
    assert context.bytes_sent("ring", 100, 4) == {"forward": 600, "backward": 1400}
    assert context.bytes_sent("all_to_all", 100, 4) == {"forward": 300, "backward": 300}
    assert context.bytes_sent("ring", 100, 4, kv_block=25) == {"forward": 150, "backward": 350}
    for method in ("ring", "all_to_all"):
        assert set(context.bytes_sent(method, 100, 1).values()) == {0}
    with pytest.raises(ValueError, match="There is no method 'star'"):
        context.bytes_sent("star", 1, 1)


# A model


NUMBERS = torch.tensor([[0] * 7 + [1] * 9] * 3 + [[0] * 4 + [1] * 9 + [-1] * 3])  # documents of the batch


def train(kind="gpt", options=None, size=1, steps=4, packed=False):
    """Losses, first gradients and last weights of the tiny GPT or Llama, on its own or over `size` ranks.
    Packed with documents, the padding counts for nothing in the loss.
    """
    group = a_group(size) if size > 1 else None
    shape = dict(n_heads=4, n_layers=2, context=16, dtype=torch.float64)
    if kind == "gpt":
        gpt = models.GPT(29, 16, **shape)
    else:
        gpt = models.Llama(29, 16, n_kv_heads=int(kind), **shape)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    model = ContextParallel(gpt, process_group=group, **options) if size > 1 else gpt
    losses, first = [], None
    for step in range(steps):
        x, y = models.batch(torch.arange(400) * 7919 % 29, step, size=4, length=16)
        documents = NUMBERS if packed else None
        optimizer.zero_grad()
        if size > 1:
            x, y = model.split(x), model.split(y)
            documents = model.split(NUMBERS) if packed else None
        each = F.cross_entropy(model(x, documents).flatten(0, 1), y.flatten(), reduction="none")
        if packed:
            each = each[documents.flatten() >= 0]
        if size > 1:
            loss = model.share_of_mean(each)
            loss.backward()
            model.finish_gradient_synchronization()
            dist.all_reduce(loss := loss.detach().clone(), group=group)
        else:
            loss = each.mean()
            loss.backward()
        first = first or {n: p.grad.clone() for n, p in gpt.named_parameters()}
        losses.append(loss.item())
        optimizer.step()
    return losses, first, {n: p.detach() for n, p in gpt.state_dict().items()}


@pytest.mark.alike(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gpt_trains_to_the_losses_of_one_process(four, size, method, layout):
    run = four.run(train, args=("gpt", {"method": method, "layout": layout}, size))
    losses, grads, weights = train()
    for theirs in run.values:
        torch.testing.assert_close(theirs[0], losses, rtol=0, atol=1e-9)
        torch.testing.assert_close(theirs[1], grads, rtol=0, atol=1e-9)
        torch.testing.assert_close(theirs[2], weights, rtol=0, atol=1e-9)


@pytest.mark.alike(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "packed"), [("1", False), ("2", True), ("4", False), ("gpt", True)])
def test_the_llama_and_packed_documents_train_as_one_process(four, size, method, layout, kind, packed):
    """The positions of its rotations are those of the whole sequence; fewer and as many key/value heads."""
    how = {"packed": packed, "steps": 3}
    run = four.run(train, args=(kind, {"method": method, "layout": layout}, size), kwargs=how)
    expected = train(kind, **how)
    for theirs in run.values:
        for ours, dense in zip(theirs, expected, strict=True):
            torch.testing.assert_close(ours, dense, rtol=0, atol=1e-9)


def test_data_parallel_times_context(four):
    """Other sequences in the two groups: losses are shares of all four ranks' tokens, gradients their sum."""

    def step():
        rank = dist.get_rank()
        group = a_group(2)
        tokens = torch.arange(400) * 7919 % 29
        x, y = models.batch(tokens, 0, size=4, length=16)
        gpt = models.GPT(29, 16, n_heads=2, context=16, dtype=torch.float64)
        models.cross_entropy(gpt(x), y).backward()
        dense = [p.grad.clone() for p in gpt.parameters()]
        gpt.zero_grad()
        model = ContextParallel(gpt, process_group=group)
        x, y = (model.split(t.chunk(2)[rank // 2]) for t in (x, y))
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        share_of_mean(losses).backward()
        sum_gradients(gpt.parameters())
        return max((p.grad - d).abs().max().item() for p, d in zip(gpt.parameters(), dense, strict=True))

    assert max(four.run(step).values) < 1e-12


def test_the_mean_where_ranks_have_different_numbers_of_tokens(four):
    def share():
        rank = dist.get_rank()
        x = torch.full((rank + 1,), float(rank), requires_grad=True)  # 1, 2, 3, 4 losses
        loss = share_of_mean(x)
        loss.backward()
        return loss.item(), x.grad.tolist()

    values = four.run(share).values
    assert math.isclose(sum(v for v, _ in values), (0 + 2 + 6 + 12) / 10, rel_tol=1e-6)
    assert all(math.isclose(g, 0.1, rel_tol=1e-6) for _, grads in values for g in grads)


def test_sum_of_gradients_of_tied_mixed_and_unused_parameters(four):
    def grads():
        a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        b.weight = a.weight
        c, unused = nn.Linear(2, 1).double(), nn.Linear(1, 1)
        frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        rank = float(dist.get_rank())
        b(a(torch.ones(1, 2))).sum().backward()
        alone = a.weight.grad.clone()
        if rank < 2:
            c(torch.full((1, 2), rank, dtype=torch.float64)).sum().backward()
        sum_gradients([a.weight, b.weight, *c.parameters(), *unused.parameters(), frozen])
        return (
            (a.weight.grad / 4 - alone).abs().max().item(),
            c.weight.grad.tolist(),
            unused.bias.grad,
            frozen.grad,
        )

    def same_start():
        torch.manual_seed(0)
        return grads()

    for tied, c, unused, frozen in four.run(same_start).values:
        assert tied < 1e-6 and c == [[1.0, 1.0]] and unused.tolist() == [0.0] and frozen is None


# Mistakes


def told(f):
    with pytest.raises(ValueError) as caught:
        f()
    return str(caught.value)


def test_mistakes_are_told(four):
    def messages():
        x, z = torch.zeros(1, 3, 3, 2), torch.zeros(1, 12, 2, 2)
        gpt = lambda **options: models.GPT(9, 8, n_heads=2, context=8, **options)
        group = dist.new_group([0, 1])
        return {
            "odd": told(lambda: context.ring_attention(x, x, x)),
            "heads": told(lambda: context.all_to_all_attention(x, x, x, layout="contiguous")),
            "shapes": told(lambda: context.ring_attention(x, x[:, :2], x)),
            "kv heads": told(lambda: context.all_to_all_attention(z[:, :12], z[:, :3], z[:, :3])),
            "documents": told(lambda: context.ring_attention(z, z, z, documents=torch.zeros(1, 8))),
            "layout": told(lambda: context.ring_attention(x, x, x, layout="spiral")),
            "method": told(lambda: ContextParallel(gpt(), method="star")),
            "context": told(lambda: ContextParallel(gpt())(torch.zeros(1, 4, dtype=torch.long))),
            "dropout": told(lambda: ContextParallel(gpt(dropout=0.1))),
            "group": told(lambda: context.ring_attention(x, x, x, process_group=group))
            if dist.get_rank() == 3
            else "",
        }

    expected = {
        "odd": "A sequence of 12 positions cannot be cut into 8 equal pieces, as the zigzag layout needs on "
        "4 ranks. Pad it to 16.",
        "heads": "3 heads cannot be shared by 4 ranks, and the all-to-all shares heads. Use ring_attention, "
        "or a number of ranks that divides 3.",
        "shapes": "Query, key and value need one shape, (batch, heads, length / W, d_head), but key and "
        "value may have fewer heads whose number divides that of the query; they have (1, 3, 3, 2), "
        "(1, 2, 3, 2), (1, 3, 3, 2).",
        "kv heads": "3 key/value heads cannot be shared by 4 ranks: neither number divides the other, and "
        "the all-to-all shares heads. Use ring_attention, or another number of ranks.",
        "documents": "The documents need one number for each of this rank's positions, (1, 2); they have "
        "(1, 8). Cut them with `split`, as the tokens.",
        "layout": "There is no layout 'spiral'. Choose one of contiguous, zigzag.",
        "method": "There is no method 'star'. Choose one of ring, all_to_all.",
        "context": "16 tokens on all ranks are more than the context of 8. Cut the sequence.",
        "dropout": "The attention has dropout 0.1 on its weights, which no rank holds together. Build the "
        "model with dropout=0.",
        "group": "Rank 3 is not in the process group of this context parallelism. Only its members call it.",
    }
    assert four.run(messages).values[3] == expected


def test_a_length_that_does_not_fit_is_an_error_under_a_rank_cell(four):
    with pytest.raises(rankcell.RankError, match="Pad it to 24"):
        four.run(lambda: split(torch.zeros(2, 18), 4))
