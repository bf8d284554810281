"""DDP on real ranks: it trains what one process trains, and issues what it must when it must."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rankcell
from rankcell import models

pytestmark = pytest.mark.slow

BATCH = 8
STEPS = 10
LR = 1e-3


@pytest.fixture(scope="module")
def two():
    with rankcell.Ranks(2, device="cpu") as ranks:
        yield ranks


@pytest.fixture(params=[2, 4])
def world(request, four, two):
    """Two ranks, then four."""
    return two if request.param == 2 else four


# Models that make it hard


class Odd(nn.Module):
    """Parameters of 1, 3, 7, 35 numbers, none a multiple of the world size, one of them no matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self):
        super().__init__()
        self.inner, self.again, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.again.weight = self.inner.weight

    def forward(self, x):
        return self.last(torch.tanh(self.again(torch.tanh(self.inner(x)))))


class Frozen(nn.Module):
    """A layer that is not trained, and a parameter that never was."""

    def __init__(self):
        super().__init__()
        self.fixed, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.constant = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.fixed.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.fixed(x)) * self.constant)


class Unused(nn.Module):
    """A layer that nobody uses, between two that everybody does."""

    def __init__(self):
        super().__init__()
        self.first, self.never, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Mixed(nn.Module):
    """Layers in turns of float32 and float64."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


class Branches(nn.Module):
    """Two layers, of which each call uses one."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.nobody = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, side):
        return (self.left, self.right)[side](x)


def build(name, dtype):
    """A model, the same wherever it is built."""
    if name == "MLP":
        return models.MLP(5, 17, 3, dtype=dtype)
    if name == "GPT":
        return models.GPT(len(models.vocabulary()), 16, n_heads=2, context=8, tied=True, dtype=dtype)
    model = {"Odd": Odd, "Tied": Tied, "Frozen": Frozen, "Unused": Unused, "Mixed": Mixed}[name]()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape).roll(i) / (i + 1))
    return model if name == "Mixed" else model.to(dtype)


def global_batch(name, step, dtype):
    """Inputs and targets of one step, for all ranks together."""
    if name == "GPT":
        return models.batch(models.encode(models.text()), step, size=BATCH, length=8)
    x, y = models.regression(BATCH * STEPS, 5, 3)
    rows = slice(BATCH * step, BATCH * (step + 1))
    return x[rows].to(dtype), y[rows].to(dtype)


def loss_of(name, out, y):
    return models.cross_entropy(out, y) if name == "GPT" else F.mse_loss(out, y.to(out.dtype))


def train_dense(name, dtype, clip=None):
    """Weights after ten steps of one process on the global batches."""
    model = build(name, dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(STEPS):
        x, y = global_batch(name, step, dtype)
        optimizer.zero_grad()
        loss_of(name, model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def train_ddp(name, dtype, bucket_size_mb, clip=None):
    """The same on this rank's part of the batches."""
    import torch.distributed as dist

    from rankcell.parallel.ddp import DDP

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(name, dtype)
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)  # only rank 0 begins with the weights of the dense run
    model = DDP(model, bucket_size_mb)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(STEPS):
        x, y = (part.chunk(world_size)[rank] for part in global_batch(name, step, dtype))
        optimizer.zero_grad()
        loss_of(name, model(x), y).backward()
        model.finish_gradient_synchronization()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.module.state_dict()


def assert_equal_to(dense, by_rank, atol):
    for rank, state in enumerate(by_rank):
        assert state.keys() == dense.keys()
        for key in dense:
            torch.testing.assert_close(
                state[key], dense[key], atol=atol, rtol=0, msg=lambda m, at=(rank, key): f"{at}: {m}"
            )
            assert torch.equal(state[key], by_rank[0][key]), f"rank {rank} differs from rank 0 in {key}"


# The same answer as one process


@pytest.mark.alike(2)
@pytest.mark.parametrize("bucket_size_mb", [0, 0.001, None])
@pytest.mark.parametrize("name", ["MLP", "GPT"])
def test_float64_equals_one_process(world, name, bucket_size_mb):
    run = world.run(train_ddp, args=(name, torch.float64, bucket_size_mb))
    assert_equal_to(train_dense(name, torch.float64), run.values, 1e-6)


# AdamW divides a gradient by its usual size, so where the true gradient is 0 rounding errors alone move the
# weight by a good part of the learning rate. In the GPT those are the key biases: softmax does not see them.
@pytest.mark.parametrize(("name", "atol"), [("MLP", 1e-5), ("GPT", 1e-3)])
def test_float32_equals_one_process(world, name, atol):
    run = world.run(train_ddp, args=(name, torch.float32, 0.001))
    assert_equal_to(train_dense(name, torch.float32), run.values, atol)


@pytest.mark.parametrize("bucket_size_mb", [0, 0.0001, None])
@pytest.mark.parametrize("name", ["Odd", "Tied", "Frozen", "Unused", "Mixed"])
def test_hard_modules_equal_one_process(four, name, bucket_size_mb):
    run = four.run(train_ddp, args=(name, torch.float64, bucket_size_mb))
    assert_equal_to(train_dense(name, torch.float64), run.values, 1e-6)


def test_clipping_by_the_global_norm_equals_one_process(four):
    run = four.run(train_ddp, args=("GPT", torch.float64, 0.001, 0.1))
    assert_equal_to(train_dense("GPT", torch.float64, 0.1), run.values, 1e-6)


def test_equal_to_torchs_own(four):
    def both():
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from rankcell.parallel.ddp import DDP

        states = []
        for wrap in (DDP, DistributedDataParallel):
            model = wrap(build("MLP", torch.float64))
            x, y = (part.chunk(4)[dist.get_rank()] for part in global_batch("MLP", 0, torch.float64))
            F.mse_loss(model(x), y).backward()
            states.append([p.grad for p in model.parameters()])
        return states

    for ours, theirs in four.run(both).values:
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-15, rtol=1e-12)


# The start


def test_parameters_and_buffers_start_as_those_of_rank_0(four):
    def start():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        torch.manual_seed(dist.get_rank())
        module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        module[0].weight.data = torch.randn(3, 5).t()  # not contiguous
        module.register_buffer("mask", torch.tensor([dist.get_rank() == 0, True]))
        module.register_buffer("step", torch.tensor(dist.get_rank()), persistent=False)
        module.register_buffer("nothing", torch.empty(0))
        module[1].running_mean += dist.get_rank()
        module[1].num_batches_tracked += dist.get_rank()
        module[1].weight.requires_grad_(False)
        before = copy.deepcopy(module.state_dict())
        ddp = DDP(module)
        assert ddp.module is module and list(ddp.state_dict()) == [f"module.{key}" for key in before]
        return before, module.state_dict(), module.step

    values = four.run(start).values
    for before, after, step in values:
        assert step == 0
        for key, tensor in after.items():
            assert torch.equal(tensor, values[0][0][key]), key
        assert before.keys() == after.keys()
    assert not torch.equal(values[1][0]["0.weight"], values[0][0]["0.weight"])


# Parameters that a backward does not use


def test_used_on_some_ranks_only(four):
    """Left is used by ranks 0 and 2, right by 1 and 3, one layer by nobody: it must keep no gradient."""

    def grads():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        rank = dist.get_rank()
        model = DDP(Branches(), 0)
        model(torch.full((1, 5), float(rank + 1)), rank % 2).sum().backward()
        return [None if p.grad is None else p.grad for p in model.parameters()]

    for left, left_bias, right, right_bias, *nobody in four.run(grads).values:
        torch.testing.assert_close(left, torch.full((3, 5), (1 + 3) / 4))
        torch.testing.assert_close(right, torch.full((3, 5), (2 + 4) / 4))
        torch.testing.assert_close([left_bias, right_bias], [torch.full((3,), 0.5)] * 2)
        assert nobody == [None, None]


def test_a_gradient_of_zeros_is_a_gradient(four):
    """Rank 1 alone uses the parameter, and its gradient is -0.0: all ranks must have a gradient, of zeros."""

    def grad():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        model = DDP(Branches(), 0)
        model(torch.full((1, 5), -0.0), int(dist.get_rank() != 1)).mul(-0.0).sum().backward()
        return model.module.left.weight.grad

    for value in four.run(grad).values:
        assert value is not None and not value.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_unused_in_every_dtype(two, dtype):
    def grads(dtype):
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        model = DDP(Branches().to(dtype))
        model(torch.ones(1, 5, dtype=dtype), dist.get_rank()).sum().backward()
        return model.module.left.bias.grad, model.module.nobody.weight.grad

    for left, nobody in two.run(grads, args=(dtype,)).values:
        assert left.dtype == dtype and left.tolist() == [0.5] * 3 and nobody is None


def test_a_loss_that_uses_no_parameter_on_one_rank(four):
    def grads():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        model = DDP(nn.Linear(2, 1))
        out = model(torch.ones(1, 2))
        if dist.get_rank() != 2:
            out.sum().backward()
        model.finish_gradient_synchronization()
        return model.module.weight.grad

    assert all(g.tolist() == [[0.75, 0.75]] for g in four.run(grads).values)


def test_gradients_that_were_not_set_to_none(four):
    """With zeros in place of None, an optimizer sees the same as in one process."""

    def grads():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        model = DDP(Branches(), 0)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            model(torch.ones(1, 5), dist.get_rank() % 2).sum().backward()
        return [p.grad[..., 0].flatten()[0].item() for p in model.parameters()]

    assert four.run(grads).values == [[0.5, 0.5, 0.5, 0.5, 0, 0]] * 4


# Accumulation


def test_no_sync_sends_nothing_and_the_next_backward_the_sum(four):
    def grads(how):
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        rank = dist.get_rank()
        model = DDP(Branches())
        with model.no_sync():
            model(torch.full((1, 5), float(rank)), 0).sum().backward()  # left
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


def test_two_backwards_without_zeroing_add_up_as_in_one_process(four):
    def grads():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        model = DDP(nn.Linear(2, 1, bias=False))
        for factor in (1, 10):
            model(torch.full((1, 2), factor * float(dist.get_rank()))).sum().backward()
        model.finish_gradient_synchronization()
        return model.module.weight.grad

    assert all(g.tolist() == [[16.5, 16.5]] for g in four.run(grads).values)


# Groups, more than one model, other habits


def test_in_a_subgroup(four):
    def train():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        rank = dist.get_rank()
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        module = nn.Linear(1, 1, bias=False)
        nn.init.constant_(module.weight, float(rank))
        model = DDP(module, process_group=low if rank < 2 else high)
        model(torch.full((1, 1), float(rank))).sum().backward()
        return module.weight.item(), module.weight.grad.item()

    run = four.run(train)
    assert run.values == [(0.0, 0.5), (0.0, 0.5), (2.0, 2.5), (2.0, 2.5)]
    assert {e.ranks for e in run.ranks[3].events} == {(2, 3)}


def test_outside_of_the_group_is_an_error(four):
    def wrap():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            DDP(nn.Linear(1, 1), process_group=group)
            return ""
        with pytest.raises(ValueError) as caught:
            DDP(nn.Linear(1, 1), process_group=group)
        return str(caught.value)

    told = "Rank {} is not in the process group of DDP. Only its members wrap the module."
    assert four.run(wrap).values == ["", "", told.format(2), told.format(3)]


# Ranks with fewer batches, buffers, copies


@pytest.mark.parametrize("by_all", [True, False])
def test_ranks_may_have_different_numbers_of_batches(four, by_all):
    """Ranks have 3, 1, 0 and 4 batches. One process takes, step by step, the mean of those that are there."""
    counts = (3, 1, 0, 4)

    def batch_of(rank, step):
        return [part.double() for part in models.regression(4, 5, 3, seed=10 * rank + step)]

    def train(by_all):
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        rank = dist.get_rank()
        model = DDP(build("Odd", torch.float64), 0.0001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                x, y = batch_of(rank, step)
                with model.no_sync():  # accumulation sends nothing here either
                    (F.mse_loss(model(x[:2]), y[:2]) / 2).backward()
                (F.mse_loss(model(x[2:]), y[2:]) / 2).backward()
                optimizer.step()
        x, y = batch_of(rank, 7)
        F.mse_loss(model(x), y).backward()  # and afterwards as before
        return model.module.state_dict(), [p.grad for p in model.parameters()][-1]

    dense = build("Odd", torch.float64)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for step in range(4):
        there = [rank for rank in range(4) if step < counts[rank]]
        losses = [F.mse_loss(dense(x), y) for x, y in (batch_of(rank, step) for rank in there)]
        optimizer.zero_grad()
        (sum(losses) / (4 if by_all else len(there))).backward()
        optimizer.step()
    run = four.run(train, args=(by_all,))
    assert_equal_to(dense.state_dict(), [state for state, _ in run.values], 1e-12)
    assert all(torch.equal(grad, run.values[0][1]) for _, grad in run.values)
    reduced = [[e.nbytes for e in rank.events if e.op == "all_reduce"] for rank in run.ranks]
    assert all(sizes == reduced[0] for sizes in reduced)  # the one without a batch takes part in all
    assert reduced[0].count(4 * 4) == 4 + 1  # who is there: once a step, and when nobody is


def test_buffers_are_those_of_the_first_rank_after_each_backward(four):
    def train(broadcast):
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        module = nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4))
        nn.init.eye_(module[0].weight)
        model = DDP(module, broadcast_buffers=broadcast)
        for step in range(3):
            x = torch.arange(40.0).view(8, 5).sin() * (1 + dist.get_rank() + step)
            out, again = model(x), model(x)  # two forwards, then a backward through each
            out.sum().backward()
            again.square().sum().backward()
        return model.module.state_dict()

    values = four.run(train, args=(True,)).values
    for key in values[0]:
        assert all(torch.equal(value[key], values[0][key]) for value in values), key
    assert values[0]["1.num_batches_tracked"] == 6
    apart = four.run(train, args=(False,)).values
    assert not torch.equal(apart[0]["1.running_mean"], apart[1]["1.running_mean"])
    torch.testing.assert_close(values[0]["1.running_mean"], apart[0]["1.running_mean"])


def test_copies_and_what_was_saved_whole_average_for_themselves(four):
    def train():
        import io

        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = DDP(build("MLP", torch.float64), 0.001, process_group=pairs[dist.get_rank() // 2])
        file = io.BytesIO()
        torch.save(DDP(build("MLP", torch.float64), 0.001), file)
        file.seek(0)
        found = []
        for each in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
            each(torch.full((2, 5), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
            found.append([p.grad for p in each.parameters()])
        return found

    values = four.run(train).values
    for original, copied, loaded in values:
        torch.testing.assert_close(original, copied, rtol=0, atol=0)
        torch.testing.assert_close(loaded, values[0][2], rtol=0, atol=0)
    mean = [(a + b) / 2 for a, b in zip(values[0][0], values[2][0], strict=True)]
    torch.testing.assert_close(values[0][2], mean)  # over all four


def test_wrapped_again_it_is_averaged_once(two):
    def train():
        from rankcell.parallel.ddp import DDP

        model = DDP(nn.Linear(1, 1, bias=False))
        model = DDP(model.module)
        model(torch.ones(1, 1)).sum().backward()

    assert [e.op for e in two.run(train).ranks[0].events] == ["broadcast", "broadcast", "all_reduce"]


def test_after_a_backward_that_raised(two):
    def train():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise RuntimeError("on purpose")

        model = DDP(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)]), 0)
        model.module.forward = lambda x, f: model.module[1](f(model.module[0](x)))
        x = torch.full((1, 2), float(dist.get_rank()))
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x, Fails.apply).sum().backward()
        for p in model.parameters():
            p.grad = None
        model(x, torch.relu).sum().backward()
        return [p.grad for p in model.parameters()]

    first, second = two.run(train).values
    torch.testing.assert_close(first, second)


def test_checkpointed_layers(two):
    def grads(reentrant):
        import torch.distributed as dist
        from torch.utils.checkpoint import checkpoint

        from rankcell.parallel.ddp import DDP

        model = DDP(build("MLP", torch.float64), 0)
        x = torch.full((2, 5), float(dist.get_rank()), dtype=torch.float64, requires_grad=True)
        plain = model(x).sum()
        plain.backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)

    two.run(grads, args=(False,))
    two.run(grads, args=(True,))


def test_complex_parameters(two):
    def grad():
        import torch.distributed as dist

        from rankcell.parallel.ddp import DDP

        model = DDP(nn.Linear(1, 1, bias=False, dtype=torch.complex64))
        x = torch.full((1, 1), 2j * dist.get_rank(), dtype=torch.complex64)
        model(x).abs().sum().backward()
        alone = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
        alone.load_state_dict(model.module.state_dict())
        (alone(x).abs().sum()).backward()
        return model.module.weight.grad, alone.weight.grad

    (mean, zero), (_, one) = two.run(grad).values
    torch.testing.assert_close(mean, (zero + one) / 2)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            "cast",
            "A gradient is torch.float64 on cpu; when DDP wrapped the module it was torch.float32 on cpu",
        ),
        ("thaw", "A parameter was frozen when DDP wrapped the module and is trainable now"),
        ("sparse", "A gradient is sparse, and DDP averages dense ones. Use sparse=False."),
    ],
)
def test_mistakes_are_told(two, mistake, message):
    def make(mistake):
        from rankcell.parallel.ddp import DDP

        x = torch.zeros(1, dtype=torch.long)
        module = nn.Sequential(nn.Embedding(2, 3, sparse=mistake == "sparse"), nn.Linear(3, 1))
        module[1].requires_grad_(mistake != "thaw")
        model = DDP(module)
        if mistake == "cast":
            model.double()
        module.requires_grad_(True)
        model(x).sum().backward()

    with pytest.raises(rankcell.RankError) as caught:
        two.run(make, args=(mistake,))
    assert message in str(caught.value)


# What it issues


def test_issues_one_all_reduce_per_bucket_during_the_backward(four):
    def step():
        from rankcell.parallel.ddp import DDP

        torch.manual_seed(0)
        layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]  # 16 KiB each
        model = DDP(nn.Sequential(*layers), 32 / 1024)
        assert [b.nbytes for b in model.buckets] == [32 * 1024] * 3
        assert model.buckets[0].parameters == [layers[5].weight, layers[4].weight]  # the last layers first
        launched = []  # all-reduces on their way when the gradient of layer i is complete
        for i, layer in enumerate(layers):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, i=i: launched.append((i, sum(b.work is not None for b in model.buckets)))
            )
        model(torch.ones(2, 64)).sum().backward()
        return launched

    run = four.run(step)
    for result in run.ranks:
        ops = [e for e in sorted(result.events, key=lambda e: e.start)]
        assert [e.op for e in ops] == ["broadcast"] * 6 + ["all_reduce"] * 3
        reduced = ops[6:]
        assert all(e.is_async and e.reduce_op == "SUM" and e.nbytes == 32 * 1024 for e in reduced)
        waits = [e.wait_start for e in reduced if e.wait_start is not None]
        assert all(wait >= reduced[-1].issued for wait in waits)  # none waited for before the end
        assert result.value == [(5, 0), (4, 1), (3, 1), (2, 2), (1, 2), (0, 3)]


def test_a_tied_weight_travels_once_and_a_frozen_one_never(four):
    def step(name):
        from rankcell.parallel.ddp import DDP

        model = DDP(build(name, torch.float32))
        model(torch.ones(2, 5)).sum().backward()

    for name, broadcasts, numbers in (("Tied", 5, 25 + 5 + 5 + 15 + 3), ("Frozen", 5, 15 + 3)):
        events = sorted(four.run(step, args=(name,)).ranks[1].events, key=lambda e: e.start)
        assert [e.op for e in events] == ["broadcast"] * broadcasts + ["all_reduce"]
        assert events[-1].nbytes == 4 * numbers


def test_buckets_hold_one_dtype_each_and_the_first_to_be_complete_goes_first(two):
    def buckets():
        from rankcell.parallel.ddp import DDP

        model = DDP(build("Mixed", None))
        model(torch.ones(2, 5)).sum().backward()
        return [(str(b.flat.dtype), b.flat.numel()) for b in model.buckets]

    run = two.run(buckets)
    assert run.values[0] == [("torch.float64", 30), ("torch.float32", 48)]
    assert [e.dtype for e in run.ranks[0].events if e.op == "all_reduce"] == ["float64", "float32"]


def test_evaluation_and_a_second_finish_send_nothing(two):
    def evaluate():
        from rankcell.parallel.ddp import DDP

        model = DDP(nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            model(torch.ones(1, 1))
        model.finish_gradient_synchronization()
        model(torch.ones(1, 1)).sum().backward()
        model.finish_gradient_synchronization()
        model.finish_gradient_synchronization()

    assert [e.op for e in two.run(evaluate).ranks[0].events] == ["broadcast", "all_reduce"]


def test_a_module_without_trainable_parameters(two):
    def wrap():
        from rankcell.parallel.ddp import DDP

        model = DDP(nn.Linear(1, 1).requires_grad_(False))
        model.finish_gradient_synchronization()
        return model(torch.ones(1, 1)).shape

    assert two.run(wrap).values == [(1, 1)] * 2


def test_works_outside_of_a_rank_cell(tmp_path):
    """A process group that somebody else set up, here of one process."""
    import subprocess
    import sys

    code = f"""
import torch, torch.distributed as dist
from rankcell.parallel.ddp import DDP
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model = DDP(torch.nn.Linear(3, 1))
model(torch.ones(2, 3)).sum().backward()
assert model.module.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
dist.destroy_process_group()
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
