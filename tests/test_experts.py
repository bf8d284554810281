"""Experts on real ranks: outputs, gradients, drops and trained weights are those of the dense mixture."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rankcell
from rankcell import models
from rankcell.parallel import experts
from rankcell.parallel.context import share_of_mean, sum_gradients
from rankcell.parallel.experts import ExpertParallel, Mixture, route, shared_parameters

pytestmark = pytest.mark.slow

D = 5


def mixture(n_experts=4, k=1, capacity_factor=None, unloved=None):
    """A mixture in float64, the same wherever it is built; `unloved` is an expert that nobody chooses."""
    router = nn.Linear(D, n_experts, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.randn(n_experts, D, generator=models.generator(0, "router")))
        router.bias.zero_()
        if unloved is not None:
            router.bias[unloved] = -100.0
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


CASES = [(1, None), (2, None), (1, 1.0), (2, 0.75), (3, 0.5)]


@pytest.mark.parametrize(("k", "factor"), CASES)
def test_the_mixture_is_what_it_says_token_by_token(k, factor):
    m, (x, _) = mixture(k=k, capacity_factor=factor), data(0, [23])
    x = x[0].requires_grad_()
    plain, dropped, balance = token_by_token(m, x)
    inputs = [x, *m.parameters()]
    expected = torch.autograd.grad(plain.square().sum() + balance, inputs)
    y = m(x)
    got = torch.autograd.grad(y.square().sum() + m.routing.balance_loss, inputs)
    torch.testing.assert_close([y, m.routing.balance_loss, *got], [plain, balance, *expected])
    assert m.routing.dropped == dropped and (factor is None) == (dropped == 0)


# What runs on the ranks


def a_group(size):
    if size == 4:
        return None
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]


def largest_differences(size, sizes, options, steps=4):
    """Between dense and spread, over some steps of AdamW: outputs, every gradient, weights, drops."""
    group = a_group(size)
    rank = dist.get_rank(group)
    sizes = sizes[:size]
    dense, whole = mixture(**options), mixture(**options)
    spread = ExpertParallel(whole, process_group=group)
    assert {n for n, _ in spread.named_parameters()} <= {n for n, _ in dense.named_parameters()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (dense, spread)]
    worst = {"output": 0.0, "input": 0.0, "gradient": 0.0, "weight": 0.0, "loss": 0.0}

    def note(name, a, b):
        if a.numel():
            worst[name] = max(worst[name], (a - b).abs().max().item())

    dropped = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        xs, ys = data(step, sizes)
        x_all, x = torch.cat(xs).requires_grad_(), xs[rank].clone().requires_grad_()
        y_all = dense(x_all)
        loss_all = F.mse_loss(y_all, torch.cat(ys)) + 0.1 * dense.routing.balance_loss
        loss_all.backward()
        y = spread(x)
        loss = share_of_mean((y - ys[rank]).square(), process_group=group) + 0.1 * spread.routing.balance_loss
        loss.backward()
        sum_gradients(shared_parameters(spread), process_group=group)

        part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        note("output", y, y_all[part])
        note("input", x.grad, x_all.grad[part])
        mine = dict(dense.named_parameters())
        for name, p in spread.named_parameters():
            note("gradient", p.grad, mine[name].grad)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        note("loss", total, loss_all.detach())
        assert torch.equal(spread.routing.kept, dense.routing.kept[part])
        assert torch.equal(spread.routing.load, dense.routing.load)
        dropped.append(dense.routing.dropped)
        for optimizer in optimizers:
            optimizer.step()
        for name, p in spread.named_parameters():
            note("weight", p, mine[name])
    return worst, dropped, spread.routing.load.tolist()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k": 2},
        {"k": 2, "n_experts": 8, "unloved": 3},
        {"capacity_factor": 0.7},
        {"k": 2, "capacity_factor": 0.7},
        {"k": 1, "unloved": 0},
    ],
    ids=str,
)
def test_equals_the_dense_mixture(four, size, options):
    for sizes in ([6, 6, 6, 6], [3, 11, 1, 9]):
        run = four.run(largest_differences, args=(size, sizes, options))
        for worst, dropped, load in run.values:
            assert max(worst.values()) < 1e-9, worst
            assert all(dropped) == ("capacity_factor" in options)
            if "unloved" in options and options.get("k", 1) == 1:
                assert load[options["unloved"]] == 0


def test_a_rank_without_tokens_and_an_expert_that_gets_all(four):
    for sizes in ([5, 0, 7, 3], [0, 0, 4, 0]):
        for worst, _, _ in four.run(largest_differences, args=(4, sizes, {"k": 1})).values:
            assert max(worst.values()) < 1e-9

    def everything_to_expert_2():
        m = mixture()
        with torch.no_grad():
            m.router.bias[2] = 100.0
        layer = ExpertParallel(m)
        x = torch.ones(3, D, dtype=torch.float64).requires_grad_()
        layer(x).sum().backward()
        grads = {n: p.grad for n, p in layer.experts.named_parameters()}
        return layer.routing.counts.tolist(), {n: bool(g.any()) for n, g in grads.items()}

    for rank, (counts, has) in enumerate(four.run(everything_to_expert_2).values):
        assert counts == [[0, 0, 3, 0]] * 4
        assert set(has.values()) == {rank == 2}  # zeros, as in the dense layer, not None


def test_data_parallel_times_experts(four):
    """Two copies of two expert ranks: experts sum over their copies, the router over all four ranks."""

    def train():
        rank = dist.get_rank()
        inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        dense, layer = mixture(k=2), ExpertParallel(mixture(k=2), process_group=inside)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, layer)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            xs, ys = data(step, [5, 2, 6, 4])
            F.mse_loss(dense(torch.cat(xs)), torch.cat(ys)).backward()
            share_of_mean((layer(xs[rank]) - ys[rank]).square()).backward()
            sum_gradients(shared_parameters(layer))
            sum_gradients(layer.experts.parameters(), process_group=copies)
            for optimizer in optimizers:
                optimizer.step()
        mine = dict(dense.named_parameters())
        return max((p - mine[n]).abs().max().item() for n, p in layer.named_parameters())

    assert max(four.run(train).values) < 1e-9


def test_in_a_gpt_block(four):
    """The MLP of a block replaced by experts, other sequences on every rank: the dense run's losses."""

    def train(spread):
        rank, world_size = (dist.get_rank(), 4) if spread else (0, 1)
        gpt = models.GPT(29, 16, n_heads=2, n_layers=2, context=8, dtype=torch.float64)
        router = nn.Linear(16, 4, bias=False, dtype=torch.float64)
        models.initialise(router, prefix="router")
        parts = [models.MLP(16, 8, 16, activation="gelu", seed=e, dtype=torch.float64) for e in range(4)]
        layer = Mixture(router, parts, k=2, capacity_factor=1.0)
        gpt.blocks[1].mlp = layer = ExpertParallel(layer) if spread else layer
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
        history = []
        for step in range(3):
            tokens = torch.arange(400) * 7919 % 29
            x, y = models.batch(tokens, step, size=8, length=8, rank=rank, world_size=world_size)
            losses = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten(), reduction="none")
            loss = (share_of_mean(losses) if spread else losses.mean()) + 0.01 * layer.routing.balance_loss
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            if spread:
                sum_gradients(shared_parameters(gpt))
                dist.all_reduce(total)
            optimizer.step()
            history.append(total.item())
        return history

    run = four.run(train, args=(True,))
    assert run.values == [run.values[0]] * 4
    torch.testing.assert_close(run.values[0], train(False), rtol=0, atol=1e-9)


# Messages


def test_what_travels(four):
    def step():
        layer = ExpertParallel(mixture(k=2))
        xs, _ = data(0, [6, 3, 8, 5])
        layer(xs[dist.get_rank()].clone().requires_grad_()).sum().backward()
        return experts.traffic(layer.routing.counts, D * 8)

    run = four.run(step)
    matrix = run.values[0]
    assert run.values == [matrix] * 4 and sum(map(sum, matrix)) > 0
    for r in run.ranks:
        assert sorted(e.op for e in r.events) == ["all_gather", *["all_to_all"] * 4]
    if run.wire:
        for i in range(4):
            for j in range(4):
                if i != j:  # there and back, forward and backward; counts and headers come on top
                    measured = run.wire[i][j]
                    assert (
                        2 * (matrix[i][j] + matrix[j][i])
                        <= measured
                        <= 2 * (matrix[i][j] + matrix[j][i]) + 1500
                    )


def test_bytes_by_formula():
    counts = torch.full((4, 8), 25)  # 200 choices per rank, all experts alike
    sent = sum(experts.traffic(counts, 256)[0])
    assert experts.bytes_sent(100, 256, 4, k=2) == {"forward": 2.0 * sent, "backward": 2.0 * sent}
    assert experts.bytes_sent(100, 256, 1)["forward"] == 0


# Routing


def test_ties_go_to_the_lower_expert():
    r = route(torch.zeros(3, 4), 2, alone=True)
    assert r.experts.tolist() == [[0, 1]] * 3 and r.weights.tolist() == [[0.5, 0.5]] * 3
    assert r.load.tolist() == [3, 3, 0, 0]


def test_balance_loss_is_one_at_balance_and_e_at_collapse():
    even = route(10.0 * torch.eye(4), alone=True)
    torch.testing.assert_close(even.balance_loss, torch.tensor(1.0))
    lost = route(torch.tensor([[50.0, 0, 0, 0]] * 4), alone=True)
    torch.testing.assert_close(lost.balance_loss, torch.tensor(4.0))


def test_first_choices_before_second_choices():
    """Expert 0 takes two: the first choices of tokens 2 and 1, though token 0 asked for it as its second."""
    logits = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    r = route(logits, 2, capacity_factor=1.0, alone=True)
    assert r.kept.tolist() == [[True, False], [True, True], [True, True]]
    assert r.counts.tolist() == [[2, 2, 1]] and r.dropped == 1


def test_capacity_rounds_up():
    assert experts.capacity(10, 4, 1, 1.0) == 3 and experts.capacity(8, 4, 2, 1.25) == 5


@pytest.mark.parametrize(
    ("k", "factor", "message"),
    [
        (5, None, "A token cannot choose 5 of 4 experts. Choose k from 1 to 4."),
        (0, None, "A token cannot choose 0 of 4 experts. Choose k from 1 to 4."),
        (1, 0.0, "A capacity factor of 0 lets no token in. Give one above 0."),
    ],
)
def test_routing_mistakes_are_told(k, factor, message):
    with pytest.raises(ValueError) as caught:
        route(torch.zeros(3, 4), k, capacity_factor=factor, alone=True)
    assert str(caught.value) == message


def test_experts_that_do_not_divide_and_ranks_outside(four):
    with pytest.raises(rankcell.RankError) as caught:
        four.run(lambda: ExpertParallel(mixture(n_experts=6)))
    assert "6 experts cannot be shared equally by 4 ranks. Use a number of experts that 4 divides." in str(
        caught.value
    )

    def outside():
        group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            ExpertParallel(mixture(), process_group=group)
            return ""
        with pytest.raises(ValueError) as caught:
            ExpertParallel(mixture(), process_group=group)
        return str(caught.value)

    told = "Rank 3 is not in the process group of these experts. Only its members call them."
    assert four.run(outside).values[3] == told
