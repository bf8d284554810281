"""Experts on real ranks: outputs, gradients, drops and trained weights are those of the dense mixture."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mixtures import ExpertParallel, Mixture, shared_parameters
from rankcell import models
from rankcell.parallel.context import share_of_mean, sum_gradients
from rankcell.parallel.experts import route

pytestmark = pytest.mark.slow

D = 5


def mixture(n_experts=4, k=1, capacity_factor=None, bias=None):
    """A mixture in float64, the same wherever it is built; `bias` is (an expert, how it is liked)."""
    router = nn.Linear(D, n_experts, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.randn(n_experts, D, generator=models.generator(0, "router")))
        router.bias.zero_()
        if bias is not None:
            router.bias[bias[0]] = bias[1]
    parts = [
        models.MLP(D, 7, D, activation="gelu", seed=10 + e, dtype=torch.float64) for e in range(n_experts)
    ]
    return Mixture(router, parts, k=k, capacity_factor=capacity_factor)


def data(step, sizes):
    """Inputs and targets by rank, as many tokens as `sizes` says; no two ranks alike."""
    n = sum(sizes)
    x, y = (torch.randn(n, D, generator=models.generator(step, name), dtype=torch.float64) for name in "xy")
    x = x + torch.arange(n)[:, None] / n  # later ranks prefer other experts
    return x.split(sizes), y.split(sizes)


def token_by_token(m, x):
    """What a mixture computes, said as plainly as possible; nothing of the module is used but its layers."""
    p = m.router(x).softmax(-1)
    n_experts, limit = p.shape[1], float("inf")
    if m.capacity_factor is not None:
        limit = -(-m.capacity_factor * m.k * len(x) // n_experts)
    chosen = [sorted(range(n_experts), key=lambda e, row=row: (-row[e], e))[: m.k] for row in p.tolist()]
    seats, out, dropped = [0] * n_experts, [0.0 * x[0] for _ in x], 0
    for choice in range(m.k):
        for t in range(len(x)):
            e = chosen[t][choice]
            if seats[e] >= limit:
                dropped += 1
                continue
            seats[e] += 1
            weight = p[t, e] / (sum(p[t, c] for c in chosen[t]) if m.k > 1 else 1)
            out[t] = out[t] + weight * m.experts[e](x[t])
    f = torch.bincount(torch.tensor(chosen).flatten(), minlength=n_experts) / (m.k * len(x))
    return torch.stack(out), dropped, n_experts * (f * p.mean(0)).sum()


@pytest.mark.parametrize(("k", "factor"), [(1, None), (2, None), (1, 1.0), (2, 0.75), (3, 0.5)])
def test_mixture_equals_a_loop_over_tokens(k, factor):
    m, x = mixture(k=k, capacity_factor=factor), data(0, [23])[0][0].requires_grad_()
    plain, dropped, balance = token_by_token(m, x)
    inputs = [x, *m.parameters()]
    expected = torch.autograd.grad(plain.square().sum() + balance, inputs)
    y = m(x)
    got = torch.autograd.grad(y.square().sum() + m.routing.balance_loss, inputs)
    torch.testing.assert_close([y, m.routing.balance_loss, *got], [plain, balance, *expected])
    assert m.routing.dropped == dropped and (factor is None) == (dropped == 0)


# On ranks


def differences(sizes, options, copies):
    """The largest one between dense and spread, over four steps of AdamW: of outputs, gradients, losses, weights. With
    `copies` two ranks have all experts, and the other two their copies. And how many were dropped.
    """
    rank, inside, across = dist.get_rank(), None, None
    if copies:
        inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    dense, spread = mixture(**options), ExpertParallel(mixture(**options), process_group=inside)
    assert {n for n, _ in spread.named_parameters()} < {n for n, _ in dense.named_parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (dense, spread)]
    mine, worst, dropped = dict(dense.named_parameters()), 0.0, 0
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        xs, ys = data(step, sizes)
        x_all, x = torch.cat(xs).requires_grad_(), xs[rank].clone().requires_grad_()
        y_all, y = dense(x_all), spread(x)
        loss_all, loss = F.mse_loss(y_all, torch.cat(ys)), share_of_mean((y - ys[rank]).square())
        if not copies:
            loss_all = loss_all + 0.1 * dense.routing.balance_loss
            loss = loss + 0.1 * spread.routing.balance_loss
            assert torch.equal(spread.routing.load, dense.routing.load)
        loss_all.backward()
        loss.backward()
        sum_gradients(shared_parameters(spread))
        if copies:
            sum_gradients(spread.experts.parameters(), process_group=across)
        dist.all_reduce(total := loss.detach().clone())
        pairs = [(y, y_all[part]), (x.grad, x_all.grad[part]), (total, loss_all)]
        pairs += [(p.grad, mine[n].grad) for n, p in spread.named_parameters()]
        assert torch.equal(spread.routing.kept, dense.routing.kept[part])
        dropped += dense.routing.dropped
        for optimizer in optimizers:
            optimizer.step()
        pairs += [(p, mine[n]) for n, p in spread.named_parameters()]
        worst = max(worst, *((a - b).abs().max().item() for a, b in pairs if a.numel()))
    return worst, dropped


@pytest.mark.parametrize(
    ("sizes", "options", "copies"),
    [
        ([6, 6, 6, 6], {}, False),
        ([3, 11, 1, 9], {"k": 2, "n_experts": 8, "bias": (3, -100.0)}, False),  # nobody chooses 3
        ([3, 11, 1, 9], {"k": 2, "capacity_factor": 0.7}, False),
        ([0, 0, 4, 0], {"capacity_factor": 1.0, "bias": (2, 100.0)}, False),  # all choose 2, on one rank
        ([5, 2, 6, 4], {"k": 2}, True),
    ],
)
def test_equals_the_dense_mixture(four, sizes, options, copies):
    for worst, dropped in four.run(differences, args=(sizes, options, copies)).values:
        assert worst < 1e-9 and (dropped > 0) == ("capacity_factor" in options)


def test_what_travels(four):
    def step():
        layer = ExpertParallel(mixture(k=2))
        xs, _ = data(0, [6, 3, 8, 5])
        layer(xs[dist.get_rank()].clone().requires_grad_()).sum().backward()
        rows = D * 8 * layer.routing.counts.view(4, 4, -1).sum(-1)  # bytes from each rank to each rank
        return rows.fill_diagonal_(0).tolist()

    run = four.run(step)
    matrix = run.values[0]
    assert (
        run.values == [matrix] * 4 and sum(map(sum, matrix)) > 0 and not any(matrix[i][i] for i in range(4))
    )
    for r in run.ranks:
        assert sorted(e.op for e in r.events) == ["all_gather", *["all_to_all"] * 4]
    for i, row in enumerate(run.wire or ()):
        for j, measured in enumerate(
            row
        ):  # there and back, forward and backward; counts and headers come on top
            tokens = 2 * (matrix[i][j] + matrix[j][i])
            assert i == j or tokens <= measured <= tokens + 1500


def test_routing_on_paper():
    ties = route(torch.zeros(3, 4), 2, alone=True)  # go to the lower expert
    assert ties.experts.tolist() == [[0, 1]] * 3 and ties.weights.tolist() == [[0.5, 0.5]] * 3
    assert ties.load.tolist() == [3, 3, 0, 0]
    torch.testing.assert_close(route(10.0 * torch.eye(4), alone=True).balance_loss, torch.tensor(1.0))
    collapsed = route(torch.tensor([[50.0, 0, 0, 0]] * 4), alone=True)
    torch.testing.assert_close(collapsed.balance_loss, torch.tensor(4.0))
    # expert 0 takes two: the first choices of tokens 2 and 1, though token 0 asked for it as its second
    logits = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    r = route(logits, 2, capacity_factor=1.0, alone=True)
    assert r.kept.tolist() == [[True, False], [True, True], [True, True]]
    assert r.counts.tolist() == [[2, 2, 1]] and r.dropped == 1
