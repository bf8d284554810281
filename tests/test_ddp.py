"""DDP on real ranks: it trains what one process trains, and issues what it must when it must."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rankcell
from rankcell import models
from rankcell.parallel.ddp import DDP

pytestmark = pytest.mark.slow

ROWS, STEPS = 8, 6
F64 = torch.float64


@pytest.fixture(scope="module")
def two():
    with rankcell.Ranks(2, device="cpu") as ranks:
        yield ranks


class Hard(nn.Module):
    """A tied weight, a frozen layer, one that nobody uses, two dtypes, and a number without dims."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.fixed, self.never = nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        for part in self.children():
            models.initialise(part)
        self.again.weight = self.first.weight
        self.double()
        self.last.float()

    def forward(self, x):
        x = torch.tanh(self.again(torch.tanh(self.first(x)))) + self.fixed(x)
        return self.last((x * self.scale).float()).double()


class Branches(nn.Module):
    """Two layers, of which each call uses one, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.nobody = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, side):
        return (self.left, self.right)[side](x)


def build(name, dtype=F64):
    if name == "Hard":
        return Hard()
    if name == "MLP":
        return models.MLP(5, 17, 3, dtype=dtype)
    return models.GPT(len(models.vocabulary()), 16, n_heads=2, context=8, tied=True, dtype=dtype)


def train(name, dtype=F64, clip=None, bucket_size_mb=None, parallel=False):
    """Weights after some steps of AdamW, and the last gradients: of one process, or of a rank of several."""
    model = module = build(name, dtype)
    rank, n = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    if parallel:
        with torch.no_grad():
            for p in module.parameters():
                p.add_(rank)  # only rank 0 begins with the weights of the dense run
        model = DDP(module, bucket_size_mb)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(STEPS):
        if name == "GPT":
            x, y = models.batch(models.encode(models.text()), step, size=ROWS, length=8)
        else:
            x, y = (t.to(dtype) for t in models.regression(ROWS, 5, 3, seed=step))
        x, y = x.chunk(n)[rank], y.chunk(n)[rank]
        optimizer.zero_grad()
        (models.cross_entropy if name == "GPT" else F.mse_loss)(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return module.state_dict() | {f"{n}.grad": p.grad for n, p in module.named_parameters()}


# AdamW divides a gradient by its usual size, so where the true gradient is 0 rounding errors alone move the weight by
# a good part of the learning rate. In the GPT those are the key biases: softmax does not see them.
@pytest.mark.parametrize(
    ("size", "name", "dtype", "clip", "bucket_size_mb", "atol"),
    [
        (2, "MLP", F64, None, 0, 1e-9),
        (4, "MLP", torch.float32, None, 0.001, 1e-5),
        (4, "GPT", F64, 0.1, 0.001, 1e-9),
        (2, "GPT", torch.float32, None, None, 1e-3),
        (4, "Hard", F64, None, 0.0001, 1e-5),
        (2, "Hard", F64, 0.1, None, 1e-5),
    ],
)
def test_weights_and_gradients_equal_one_process(four, two, size, name, dtype, clip, bucket_size_mb, atol):
    world = {2: two, 4: four}[size]
    how = {"dtype": dtype, "clip": clip}
    values = world.run(
        train, args=(name,), kwargs=how | {"bucket_size_mb": bucket_size_mb, "parallel": True}
    ).values
    dense = train(name, **how)
    for found in values:
        torch.testing.assert_close(found, dense, atol=atol, rtol=0)
        torch.testing.assert_close(found, values[0], atol=0, rtol=0)


def test_all_start_with_the_state_of_rank_0(four):
    def start():
        rank = dist.get_rank()
        module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        module[0].weight.data = torch.full((3, 5), 1.0 + rank).t()  # not contiguous
        module[1].weight.requires_grad_(False).add_(rank)
        module[1].running_mean += rank
        module.register_buffer("mask", torch.tensor([rank == 0, True]))
        module.register_buffer("step", torch.tensor(rank), persistent=False)
        module.register_buffer("nothing", torch.empty(0))
        nn.init.zeros_(module[0].bias)
        DDP(module)
        return {name: t.tolist() for name, t in (*module.named_parameters(), *module.named_buffers())}

    values = four.run(start).values
    assert values == [values[0]] * 4 and values[0]["0.weight"] == [[1.0] * 3] * 5
    assert (values[0]["mask"], values[0]["step"]) == ([True, True], 0)


# Parameters that a backward does not use


def test_who_uses_a_parameter_may_differ(four):
    """Also where a gradient is of -0.0 on one rank only, where gradients were zeros, and without a loss on one rank."""

    def run():
        rank, found = dist.get_rank(), []
        first = lambda model: [
            None if p.grad is None else p.grad.flatten()[0].item() for p in model.parameters()
        ]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            model = DDP(Branches().to(dtype), 0)
            model(torch.full((1, 5), rank + 1.0, dtype=dtype), rank % 2).sum().backward()
            found.append(first(model))
        layer = nn.Linear(1, 2, bias=False)
        layer.forward = lambda: layer.weight
        model = DDP(layer)
        out = model()
        if rank == 1:
            (-0.0 * out).sum().backward()
        model.finish_gradient_synchronization()
        found.append(first(model))
        model = DDP(Branches(), 0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        model(torch.ones(1, 5), rank % 2).sum().backward()
        found.append(first(model))
        model = DDP(nn.Linear(2, 1))
        out = model(torch.ones(1, 2)).sum()
        if rank != 2:
            out.backward()
        model.finish_gradient_synchronization()
        return [*found, first(model)]

    plain = [(1 + 3) / 4, 0.5, (2 + 4) / 4, 0.5, None, None]
    expected = [*[plain] * 3, [0], [0.5, 0.5, 0.5, 0.5, 0, 0], [0.75, 0.75]]
    assert four.run(run).values == [expected] * 4


def test_backward_after_no_sync_averages_the_sum(four):
    def grads(how):
        model = DDP(Branches())
        with model.no_sync():
            model(torch.full((1, 5), float(dist.get_rank())), 0).sum().backward()  # left
            alone = model.module.left.weight.grad[0, 0].item()
            if how == "finish":
                model(torch.ones(1, 5), 1).sum().backward()
        if how == "finish":
            model.finish_gradient_synchronization()
        else:
            model(torch.ones(1, 5), 1).sum().backward()  # right; left's gradient is from before
        return alone, model.module.left.weight.grad[0, 0].item(), model.module.right.bias.grad[0].item()

    for how in ("backward", "finish"):
        run = four.run(grads, args=(how,))
        assert run.values == [(float(rank), 1.5, 1.0) for rank in range(4)]
        assert [e.op for e in run.ranks[0].events].count("all_reduce") == 1


def test_an_inner_no_sync_leaves_the_outer_one_on(four):
    def grads():
        model = DDP(nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), float(dist.get_rank()))
        with model.no_sync():
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
        alone = model.module.weight.grad.item()
        model(x).sum().backward()
        return alone, model.module.weight.grad.item()

    run = four.run(grads)
    assert run.values == [(2.0 * rank, 4.5) for rank in range(4)]  # 3 times the mean of 0 to 3
    assert [e.op for e in run.ranks[0].events].count("all_reduce") == 1


def test_in_a_subgroup(four):
    def wrap():
        rank = dist.get_rank()
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        module = nn.Linear(1, 1, bias=False)
        nn.init.constant_(module.weight, float(rank))
        model = DDP(module, process_group=low if rank < 2 else high)
        model(torch.full((1, 1), float(rank))).sum().backward()
        return module.weight.item(), module.weight.grad.item()

    run = four.run(wrap)
    assert run.values == [(0, 0.5), (0, 0.5), (2, 2.5), (2, 2.5)]
    assert {e.ranks for e in run.ranks[3].events} == {(2, 3)}


def test_buffers_are_rank_0_s_after_each_backward(four):
    def run():
        module = nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4))
        nn.init.eye_(module[0].weight)
        model = DDP(module)
        for step in range(3):
            x = torch.arange(40.0).view(8, 5).sin() * (1 + dist.get_rank() + step)
            out, again = model(x), model(x)  # two forwards, then a backward through each
            own = module[1].running_mean.clone()
            out.sum().backward()
            again.square().sum().backward()
        return own, module.state_dict()

    values = four.run(run).values
    for _, state in values:
        assert all(torch.equal(state[key], values[0][1][key]) for key in state)
    assert torch.equal(values[0][0], values[0][1]["1.running_mean"])
    assert not torch.equal(values[1][0], values[0][0])


# What it issues


def test_backward_issues_one_all_reduce_per_bucket(four):
    def step():
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]  # 16 KiB each
        model = DDP(nn.Sequential(*layers), 32 / 1024)
        assert [b.flat.nbytes for b in model.buckets] == [32 * 1024] * 3
        assert model.buckets[0].parameters == [layers[5].weight, layers[4].weight]  # the last layers first
        launched = []  # all-reduces on their way when the gradient of layer i is complete
        for i, layer in enumerate(layers):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, i=i: launched.append((i, sum(b.work is not None for b in model.buckets)))
            )
        model(torch.ones(2, 64)).sum().backward()
        return launched

    for result in four.run(step).ranks:
        ops = sorted(result.events, key=lambda e: e.start)
        assert [e.op for e in ops] == ["broadcast"] + ["all_reduce"] * 3
        reduced = ops[1:]
        assert all(e.is_async and e.reduce_op == "SUM" and e.nbytes == 32 * 1024 for e in reduced)
        waits = [e.wait_start for e in reduced if e.wait_start is not None]
        assert all(wait >= reduced[-1].issued for wait in waits)  # none waited for before the end
        assert result.value == [(5, 0), (4, 1), (3, 1), (2, 2), (1, 2), (0, 3)]


def test_what_else_a_step_sends(two):
    """By dtype, the last first; a tied weight once, a frozen one never."""

    def step(what):
        model = DDP(Hard() if what == "hard" else nn.Linear(5, 1, bias=False), None)
        x = torch.ones(2, 5, dtype=next(model.parameters()).dtype)
        with torch.no_grad():
            model(x)
        model.finish_gradient_synchronization()  # nothing to do yet
        model(x).sum().backward()
        model.finish_gradient_synchronization()  # and no more

    def sent(what):
        events = sorted(two.run(step, args=(what,)).ranks[1].events, key=lambda e: e.start)
        return sum(e.op == "broadcast" for e in events), [e.nbytes for e in events if e.op == "all_reduce"]

    assert sent("hard") == (2, [8 * (7 * 5 + 7), 4 * (15 + 3), 8 * (1 + 25 + 5 + 5)])
    assert sent("once") == (1, [20])
