"""ZeRO in three stages on real ranks: the dense run's weights, memory that is freed, bytes on the wire."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rankcell import models
from rankcell.engine import system
from rankcell.parallel import flat, fsdp
from rankcell.parallel.fsdp import FSDP
from rankcell.parallel.zero import ShardedOptimizer, ZeRO2, model_state_bytes

pytestmark = pytest.mark.slow

# The paper's Table 1, in GB = 10^9 bytes: https://arxiv.org/abs/1910.02054 (2020). From 100 on it cuts off.
DEGREES = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    (7.5e9, 1): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    (7.5e9, 2): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    (7.5e9, 3): (120, 30, 7.5, 1.88, 0.47, 0.12),
    (128e9, 1): (2048, 896, 608, 536, 518, 513),
    (128e9, 2): (2048, 704, 368, 284, 263, 257),
    (128e9, 3): (2048, 512, 128, 32, 8, 2),
    (1e12, 1): (16000, 7000, 4750, 4187, 4046, 4011),
    (1e12, 2): (16000, 5500, 2875, 2218, 2054, 2013),
    (1e12, 3): (16000, 4000, 1000, 250, 62.5, 15.6),
}


@pytest.mark.parametrize(("parameters", "stage"), TABLE_1)
def test_table_1_of_the_paper(parameters, stage):
    for degree, printed in zip(DEGREES, TABLE_1[parameters, stage], strict=True):
        gb = model_state_bytes(parameters, degree, stage) / 1e9
        if gb >= 100:
            assert int(gb) == printed
        else:
            assert abs(gb - printed) <= (0.0501 if gb >= 10 else 0.00501)


def test_bytes_of_each_kind():
    assert model_state_bytes(100, 4, 0) == 1600
    assert model_state_bytes(100, 4, 2, parameter=4, gradient=4, optimizer=8) == 400 + 100 + 200
    with pytest.raises(ValueError, match="There is no stage 4"):
        model_state_bytes(1, 1, 4)


def test_a_layout_cuts_every_number_once():
    shapes = [torch.Size(s) for s in ((3, 5), (7,), (), (0, 4), (2, 2, 2))]
    for n in (1, 2, 3, 4, 7, 50):
        layout = flat.Layout(shapes, n)
        assert layout.length == layout.chunk * n >= 31 > layout.length - n
        buffer = torch.arange(float(layout.length))
        for i, whole in enumerate(layout.views(buffer)):
            pieces = [layout.shard(buffer, r)[layout.parts(r)[i][1]] for r in range(n)]
            assert torch.equal(torch.cat(pieces), whole.reshape(-1))
            assert all(torch.equal(whole.reshape(-1)[layout.parts(r)[i][0]], pieces[r]) for r in range(n))


# What runs on the ranks


class Odd(nn.Module):
    """Sizes that no world size divides, a weight tied across units, one frozen, some that nobody uses."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(7, 5), nn.Linear(5, 7)
        self.three, self.unused = nn.Linear(7, 5), nn.Linear(3, 3)
        self.last = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Parameter(torch.ones(3, 2))  # unused too, but in a unit that is used
        self.three.weight = self.one.weight
        self.two.weight.requires_grad_(False)
        for i, p in enumerate(self.parameters()):
            p.data = 0.3 * torch.randn(p.shape, generator=models.generator(i, "odd"))

    def forward(self, x):
        return self.last(torch.relu(self.three(torch.relu(self.two(torch.relu(self.one(x))))))) * self.scale


def build(name, dtype=torch.float64):
    if name == "mlp":
        return models.MLP(6, 33, 3, dtype=dtype)
    if name == "odd":
        return Odd().to(dtype)
    return models.GPT(29, 16, n_heads=2, n_layers=3, context=12, dtype=dtype)


def a_batch(name, step, dtype, rank, world_size):
    """This rank's part of the global batch of a step, and the loss to use."""
    if name == "gpt":
        tokens = torch.arange(400) * 7919 % 29
        x, y = models.batch(tokens, step, size=8, length=12, rank=rank, world_size=world_size)
        return x, y, models.cross_entropy
    x, y = models.regression(8, 7 if name == "odd" else 6, seed=step)
    part = slice(8 * rank // world_size, 8 * (rank + 1) // world_size)
    return x[part].to(dtype), y[part].to(dtype), F.mse_loss


def a_group(size):
    """A group of `size` ranks that this rank is in; all four call it."""
    if size == 4:
        return None
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pairs[dist.get_rank() // 2]


def train(model, forward, optimizer, name, dtype, *, rank=0, world_size=1, steps=10, after=lambda: None):
    for step in range(steps):
        x, y, loss = a_batch(name, step, dtype, rank, world_size)
        optimizer.zero_grad()
        loss(forward(x), y).backward()
        after()
        optimizer.step()


def largest_difference(stage, name, dtype, size, clip=None, steps=10):
    """Between the weights of the parallel and of the dense run after `steps` of AdamW."""
    make = dict(lr=1e-2, weight_decay=0.1)
    dense = build(name, dtype)
    optimizer = torch.optim.AdamW(dense.parameters(), **make)
    clip_dense = lambda: clip and nn.utils.clip_grad_norm_(dense.parameters(), clip)
    train(dense, dense, optimizer, name, dtype, steps=steps, after=clip_dense)

    group, model = a_group(size), build(name, dtype)
    rank = dist.get_rank(group)
    how = dict(name=name, dtype=dtype, rank=rank, world_size=size, steps=steps)
    if stage == 1:

        def average():
            gradients = [p.grad.view(-1) for p in model.parameters() if p.grad is not None]
            together = torch.cat(gradients)
            dist.all_reduce(together, group=group)
            for gradient, mean in zip(gradients, together.split([len(g) for g in gradients]), strict=True):
                gradient.copy_(mean / size)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, **make)
        train(model, model, optimizer, after=average, **how)
        full = model.state_dict()
    elif stage == "fully_shard":
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (4,)) if size == 4 else DeviceMesh.from_group(group, "cpu")
        for unit in fsdp._default_units(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), **make)
        train(model, model, optimizer, **how)
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
    else:
        sharded = {2: ZeRO2, 3: FSDP}[stage](model, process_group=group, shard_vectors=clip is None)
        optimizer = torch.optim.AdamW(sharded.parameters(), **make)

        def finish():
            sharded.finish_gradient_synchronization()
            if clip:
                sharded.clip_grad_norm_(clip)

        train(model, sharded, optimizer, after=finish, **how)
        full = sharded.full_state_dict()
    assert full.keys() == dense.state_dict().keys()
    noise = "key.bias" if dtype == torch.float32 else "none"
    return max((full[k] - v).abs().max().item() for k, v in dense.state_dict().items() if noise not in k)


STAGES = (1, 2, 3, "fully_shard")


@pytest.mark.alike(4)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_those_of_the_dense_run(four, stage, name, size):
    run = four.run(largest_difference, args=(stage, name, torch.float64, size))
    assert max(run.values) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_float32_stays_close(four, stage):
    """All but the bias of the keys: softmax does not see it, so its gradient is rounding noise, and AdamW
    makes steps of full size from that.
    """
    run = four.run(largest_difference, args=(stage, "gpt", torch.float32, 4))
    assert max(run.values) < 2e-4


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_odd_sizes_tied_frozen_and_unused_parameters(four, stage, clip):
    run = four.run(largest_difference, args=(stage, "odd", torch.float64, 4, clip))
    assert max(run.values) < 1e-9


@pytest.mark.parametrize("stage", [2, 3])
def test_clipping_a_gpt_by_its_global_norm(four, stage):
    assert max(four.run(largest_difference, args=(stage, "gpt", torch.float64, 2, 0.1)).values) < 1e-9


# The sharded optimizer


def two_groups(size):
    """A second group, added later, with its own weight decay, and a schedule; saved and loaded half-way."""
    torch.manual_seed(0)
    dense, model = build("mlp"), build("mlp")
    group = a_group(size)

    def start(kind, model, **kwargs):
        optimizer = kind([{"params": model.up.parameters(), "weight_decay": 0.2}], lr=1e-2, **kwargs)
        optimizer.add_param_group({"params": list(model.down.parameters()), "lr": 3e-2})
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step(model, optimizer, schedule, step):
        x, y, loss = a_batch("mlp", step, torch.float64, 0, 1)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        schedule.step()

    reference = start(torch.optim.AdamW, dense)
    sharded = lambda params, **kw: ShardedOptimizer(params, torch.optim.AdamW, process_group=group, **kw)
    ours = start(sharded, model)
    for i in range(5):
        step(dense, *reference, i)
        step(model, *ours, i)
    assert [g["lr"] for g in ours[0].param_groups] == [g["lr"] for g in reference[0].param_groups]
    full, local = ours[0].full_state_dict(), ours[0].state_dict()
    for number, entries in reference[0].state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.allclose(full["state"][number][key], value), (number, key)

    from_full = torch.optim.AdamW([{"params": dense.up.parameters()}], lr=1.0)  # one process, from the full
    from_full.add_param_group({"params": dense.down.parameters()})
    from_full.load_state_dict(full)
    if size == 2:  # four ranks, from the full one of two
        loaded = start(lambda params, **kw: ShardedOptimizer(params, torch.optim.AdamW, **kw), model)[0]
        loaded.load_state_dict(full)
    else:  # from the shard
        loaded, _ = start(sharded, model)
        loaded.load_state_dict(local)
    step(dense, from_full, reference[1], 7)
    step(model, loaded, ours[1], 7)
    numbers = sum(s["exp_avg"].numel() for s in loaded.local.state.values())
    difference = max(
        (a - b).abs().max().item() for a, b in zip(dense.parameters(), model.parameters(), strict=True)
    )
    return difference, numbers, local


@pytest.mark.parametrize("size", [2, 4])
def test_groups_schedules_and_state_dicts(four, size):
    values = four.run(two_groups, args=(size,)).values
    assert max(v[0] for v in values) < 1e-12
    total = models.mlp_parameters(6, 33, 3)
    assert sum(v[1] for v in values) == total and max(v[1] for v in values) <= -(-total // 4) + 2
    assert values[0][2]["shard"] == {"rank": 0, "world_size": size}


def test_a_shard_of_another_world_is_refused(four):
    def load():
        optimizer = ShardedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
        try:
            optimizer.load_state_dict({"shard": {"rank": 1, "world_size": 8}})
        except ValueError as error:
            return str(error)

    assert four.run(load).values[2] == (
        "This is the shard of rank 1 of 8, but this is rank 2 of 4. Save `full_state_dict()` to load into "
        "another world size."
    )


def test_a_closure_and_momentum(four):
    def run():
        dense, model = build("mlp"), build("mlp")
        make = dict(lr=0.05, momentum=0.9, nesterov=True)
        both = (
            torch.optim.SGD(dense.parameters(), **make),
            ShardedOptimizer(model.parameters(), torch.optim.SGD, **make),
        )
        for step in range(4):
            x, y, loss = a_batch("mlp", step, torch.float64, 0, 1)
            for module, optimizer in zip((dense, model), both, strict=True):

                def closure(module=module, optimizer=optimizer, x=x, y=y, loss=loss):
                    optimizer.zero_grad()
                    value = loss(module(x), y)
                    value.backward()
                    return value

                value = optimizer.step(closure)
        assert value.item() > 0
        return max(
            (a - b).abs().max().item() for a, b in zip(dense.parameters(), model.parameters(), strict=True)
        )

    assert max(four.run(run).values) == 0


def test_a_number_without_dims_is_saved_and_loaded(four):
    """And a parameter of one number, whose averages have as many numbers as a step count."""

    def run():
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.scale = nn.Parameter(torch.ones(3, 6)), nn.Parameter(torch.tensor(1.5))
                self.one = nn.Parameter(torch.ones(1))

            def forward(self, x):
                return F.linear(x, self.weight) * self.scale + self.one

        def start(model, sharded, state=None):
            kind = torch.optim.AdamW
            make = dict(params=model.parameters(), lr=0.1)
            optimizer = ShardedOptimizer(optimizer_cls=kind, **make) if sharded else kind(**make)
            if state is not None:
                optimizer.load_state_dict(state)
            return optimizer

        def train(model, optimizer, steps):
            for step in steps:
                x, y, loss = a_batch("mlp", step, torch.float64, 0, 1)
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()

        dense, model, alone = (Scaled().double() for _ in range(3))
        optimizers = start(dense, False), start(model, True)
        train(dense, optimizers[0], range(6))
        train(model, optimizers[1], range(3))
        full = optimizers[1].full_state_dict()
        shapes = [tuple(full["state"][i]["exp_avg"].shape) for i in range(3)]
        alone.load_state_dict(model.state_dict())
        train(model, start(model, True, full), range(3, 6))
        train(alone, start(alone, False, full), range(3, 6))
        return shapes, [
            max((a - b).abs().max().item() for a, b in zip(dense.parameters(), m.parameters(), strict=True))
            for m in (model, alone)
        ]

    for shapes, differences in four.run(run).values:
        assert shapes == [(3, 6), (), (1,)] and max(differences) < 1e-12


def test_parameters_that_were_given_other_memory_go_on_being_trained(four):
    def run():
        def make():
            torch.manual_seed(0)
            return nn.Sequential(nn.Conv2d(3, 4, 3, dtype=torch.float64), nn.Flatten())

        dense, model = make(), make()
        optimizers = (
            torch.optim.AdamW(dense.parameters(), lr=0.1),
            ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1),
        )
        for step in range(5):
            if step == 1:
                model.to(memory_format=torch.channels_last)
            if step == 3:
                for module in (dense, model):
                    module[0].weight.data = 2 * module[0].weight.data
            x = torch.linspace(-1, 1, 2 * 3 * 25, dtype=torch.float64).view(2, 3, 5, 5)
            for module, optimizer in zip((dense, model), optimizers, strict=True):
                optimizer.zero_grad()
                module(x).square().sum().backward()
                optimizer.step()
        difference = max(
            (a - b).abs().max().item() for a, b in zip(dense.parameters(), model.parameters(), strict=True)
        )
        model.float()
        with pytest.raises(RuntimeError) as caught:
            optimizers[1].step()
        return difference, str(caught.value)

    for difference, said in four.run(run).values:
        assert difference < 1e-12
        assert said == (
            "A parameter is (4, 3, 3, 3), torch.float32 on cpu; when ShardedOptimizer took it, it was "
            "(4, 3, 3, 3), torch.float64 on cpu. Move or cast the model first, then make the optimizer."
        )


ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_treat_every_number_on_its_own(name):
    make = lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1)
    assert flat.is_elementwise(make, torch.device("cpu"))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_optimizers_of_whole_matrices_are_refused(four, name):
    def run(name):
        with pytest.raises(ValueError) as caught:
            ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], getattr(torch.optim, name), lr=0.1)
        return str(caught.value)

    told = (
        f"{name} does not treat every number of a parameter on its own, so that it computes something else "
        f"from a rank's part. Use one that does (SGD, Adam, AdamW, ...), or give the whole {name} to every "
        f"rank."
    )
    assert four.run(run, args=(name,)).values == [told] * 4


def test_outside_of_the_group_is_an_error(four):
    def run():
        group, said = dist.new_group([0, 1, 2]), []
        if dist.get_rank() == 3:
            for make in (
                lambda: ShardedOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, process_group=group),
                lambda: FSDP(nn.Linear(2, 2), process_group=group),
            ):
                with pytest.raises(ValueError) as caught:
                    make()
                said.append(str(caught.value))
        return said

    assert four.run(run).values[3] == [
        "Rank 3 is not in the process group of ShardedOptimizer. Only its members use it.",
        "Rank 3 is not in the process group of FSDP. Only its members use it.",
    ]


# Memory


def bytes_of(tensors):
    """Bytes of the storages behind some tensors, each counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def watch(kind, **options):
    """Bytes of whole parameters and gradients, where each unit computes, and after each part of a step."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])
    unit = 16 * 16 * 4
    sharded = kind(model, **options)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    flats = [flat for u in sharded._units for flat in u.flats]
    wholes = lambda: sum(flat.whole.untyped_storage().nbytes() for flat in flats) / unit
    gradients = lambda: (
        sum(t.nbytes for f in flats for t in (f.gradient, f.reducing and f.reducing[2]) if t is not None)
        / unit
    )
    seen = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: seen.append(("forward", wholes(), gradients())))
        layer.register_full_backward_pre_hook(lambda *_: seen.append(("backward", wholes(), gradients())))
    after = []
    for _ in range(2):
        seen.clear()
        out = sharded(torch.ones(2, 16, requires_grad=True))
        after = [wholes()]
        out.sum().backward()
        sharded.finish_gradient_synchronization()
        after += [wholes(), gradients()]
        optimizer.step()
    kinds = {
        "parameters": bytes_of(sharded.parameters()),
        "gradients": bytes_of(p.grad for p in sharded.parameters()),
        "states": bytes_of(t for s in optimizer.state.values() for t in s.values() if t.dim()),
    }
    at_once = {part: max(w for p, w, _ in seen if p == part) for part in ("forward", "backward")}
    return at_once, max(g for *_, g in seen), after, {k: v / (6 * unit) for k, v in kinds.items()}


def test_fsdp_holds_two_units_and_a_quarter_of_the_rest(four):
    for at_once, gradients, after, kinds in four.run(watch, args=(FSDP,)).values:
        assert at_once == {"forward": 2, "backward": 2}  # the one that computes and the next one
        assert gradients <= 2  # the one that is reduced and the one that computes
        assert after == [0, 0, 0]  # nothing is whole after forward, after backward, and no gradient
        assert kinds == {"parameters": 1 / 4, "gradients": 1 / 4, "states": 2 / 4}


def test_zero2_keeps_whole_parameters_only(four):
    for _, gradients, after, kinds in four.run(watch, args=(ZeRO2,)).values:
        assert gradients <= 2 and after == [6, 6, 0]
        assert kinds == {
            "parameters": 1,
            "gradients": 1 / 4,
            "states": 2 / 4,
        }  # the shard is inside the whole


def test_without_reshard_units_stay_whole_until_their_backward(four):
    def run():
        return watch(FSDP, reshard_after_forward=False)

    for at_once, _, after, _ in four.run(run).values:
        assert at_once["forward"] == 6 and after == [6, 0, 0]


# Bytes on the wire, against 2, 2 and 3 times the parameters


@pytest.mark.parametrize(("kind", "gathers"), [(ZeRO2, 1), (FSDP, 2)])
def test_bytes_on_the_wire(four, kind, gathers):
    """Each collective of S bytes moves (W-1)/W of S per rank; gloo's reduce-scatter runs an all-reduce."""
    psi = 4 * 128 * 128 * 4
    source = """
from torch import nn
model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(4)])
sharded = kind(model)
def step():
    sharded(torch.ones(2, 128)).sum().backward()
    sharded.finish_gradient_synchronization()
step()
"""
    four.run(source, push={"kind": kind})
    run = four.run("step()")
    events = run.ranks[0].events
    moved = {op: sum(e.nbytes for e in events if e.op == op) for op in ("all_gather", "reduce_scatter")}
    assert moved == {"all_gather": gathers * psi / 4, "reduce_scatter": psi}  # input bytes
    if system.LINUX:
        textbook, gloo = gathers + 1, gathers + 2
        sent = sum(map(sum, run.wire)) / 4 / (0.75 * psi)
        assert sent == pytest.approx(gloo, rel=0.02) and textbook == gathers + 1


def test_the_next_unit_is_gathered_before_this_one_computes(four):
    def run():
        model = FSDP(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
        ahead = []
        for i, layer in enumerate(model.module):
            layer.register_forward_pre_hook(
                lambda *_, i=i: ahead.append(("forward", i, [u.is_gathered for u in model._units]))
            )
            layer.register_full_backward_hook(
                lambda *_, i=i: ahead.append(("backward", i, [u.is_gathered for u in model._units]))
            )
        for _ in range(2):  # the first forward has to learn the order
            ahead.clear()
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
            model.finish_gradient_synchronization()
        return ahead

    for seen in four.run(run).values:
        for phase, i, gathered in seen:
            following = i + 1 if phase == "forward" else i - 1
            expected = {i, following} & set(range(4))
            assert {j for j, is_whole in enumerate(gathered) if is_whole} == expected, (phase, i)


# Low precision, and other ways to run


def test_compute_in_bfloat16_with_float32_shards(four):
    def run():
        model = FSDP(build("gpt", torch.float32), compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, dtypes = [], set()
        for step in range(15):
            x, y, loss = a_batch("gpt", step, None, dist.get_rank(), 4)
            out = model(x)
            value = loss(out.float(), y)
            optimizer.zero_grad()
            value.backward()
            model.finish_gradient_synchronization()
            dtypes |= {p.grad.dtype for p in model.parameters()} | {p.dtype for p in model.parameters()}
            optimizer.step()
            losses.append(value.item())
        return out.dtype, dtypes, losses[0], losses[-1]

    run = four.run(run)
    for out, dtypes, first, last in run.values:
        assert out == torch.bfloat16 and dtypes == {torch.float32} and last < first - 0.5
    seen = {(e.op, e.dtype) for e in run.ranks[0].events if e.op in ("all_gather", "reduce_scatter")}
    assert seen == {("all_gather", "bfloat16"), ("reduce_scatter", "float32")}


def test_accumulation_evaluation_checkpointing_and_errors(four):
    def run():
        from torch.utils.checkpoint import checkpoint

        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(
                    models.MLP(6, 9, 6, seed=i, dtype=torch.float64) for i in range(3)
                )

            def forward(self, x, fail=False):
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                    if fail:
                        raise KeyError("on purpose")
                return x

        rank, x = dist.get_rank(), models.regression(16, 6, 6)[0].double()
        dense, model = Deep(), FSDP(Deep())
        for part in x.split(8):  # two micro-batches
            dense(part).square().mean().backward()
            model(part[2 * rank : 2 * rank + 2]).square().mean().backward()
            with torch.no_grad():
                assert torch.allclose(model(x), dense(x))
        model.finish_gradient_synchronization()
        model.finish_gradient_synchronization()  # does nothing
        worst = 0.0
        flats = [f for u in model._units for f in u.flats]
        found = {id(p): w for f in flats for p, (w, _) in zip(f.parameters, f.parts, strict=True)}
        for a, b in zip(dense.parameters(), model.parameters(), strict=True):
            worst = max(
                worst,
                (a.grad.reshape(-1)[found[id(b)]] - b.grad.reshape(-1)).abs().max().item()
                if b.numel()
                else 0,
            )
        try:
            model(x, fail=True)
        except KeyError:
            pass
        assert all(f.whole.untyped_storage().nbytes() == 0 for f in flats)
        assert torch.allclose(model(x), dense(x))  # still usable

        other = FSDP(Deep())
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other.load_full_state_dict(model.full_state_dict())
        assert torch.equal(other(x), model(x))
        return worst

    assert max(four.run(run).values) < 1e-12


def test_a_block_that_is_used_twice_and_a_second_backward(four):
    def run():
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = (models.MLP(4, 5, 4, seed=i, dtype=torch.float64) for i in range(2))

            def forward(self, x):
                y = self.a(x)
                return self.a(self.b(y)), y

        dense, model = Twice(), FSDP(Twice(), shard_vectors=True)
        x = models.regression(8, 4)[0].double()
        part = x[2 * dist.get_rank() :][:2]
        for module, batch in ((dense, x), (model, part)):
            out, aux = module(batch)
            (out.square().mean() + aux.mean()).backward(retain_graph=True)
            (3 * aux.square().mean()).backward()
        model.finish_gradient_synchronization()
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (dense, model)]
        for optimizer in optimizers:
            optimizer.step()
        full = model.full_state_dict()
        return max((full[k] - v).abs().max().item() for k, v in dense.state_dict().items())

    assert max(four.run(run).values) < 1e-12


def test_rank_0_s_weights_and_buffers_are_everybody_s(four):
    def run():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        model.register_buffer("mask", torch.rand(4) > 0.5)
        model.register_buffer("turn", torch.randn(2, dtype=torch.complex64))
        return FSDP(model).full_state_dict()

    values = four.run(run).values
    assert list(values[0]) == ["mask", "turn", *(k for k in values[0] if "." in k)]
    assert all(torch.equal(values[0][k], v[k]) for v in values for k in v)


def test_a_state_dict_of_another_module_is_refused(four):
    def run():
        with pytest.raises(ValueError) as caught:
            FSDP(nn.Linear(2, 2)).load_full_state_dict({"weight": torch.ones(2, 2)})
        return str(caught.value)

    assert four.run(run).values[3] == "The state dict and the module differ in: bias."


# Without rankcell


class Small(nn.Module):
    """An embedding, a norm and two layers, as children: no list that would name the units."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 33), nn.Linear(33, 50, bias=False)

    def forward(self, tokens):
        return self.down(torch.relu(self.up(self.norm(self.embedding(tokens)))))


def plain_process(rank, world_size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(42)
    dense, tokens = Small(), torch.randint(0, 50, (8, 6))
    for dtype, atol in ((None, 1e-6), (torch.float16, 2e-3)):
        model = FSDP(models.initialise(Small()), compute_dtype=dtype)
        reference = models.initialise(Small())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        mine = tokens.chunk(world_size)[rank]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            models.cross_entropy(reference(tokens[:, :-1]), tokens[:, 1:]).backward()
            with torch.autograd.detect_anomaly(check_nan=False) if dtype is None else torch.enable_grad():
                models.cross_entropy(model(mine[:, :-1]).float(), mine[:, 1:]).backward()
            model.finish_gradient_synchronization()
            for p in model.module.parameters():
                assert p.grad.shape == p.shape and p.grad.dtype == p.dtype == torch.float32
            for name in ("norm.weight", "norm.bias", "up.bias"):  # vectors are whole on every rank
                gradient = model.module.get_parameter(name).grad
                everybody = [torch.empty_like(gradient) for _ in range(world_size)]
                dist.all_gather(everybody, gradient)
                assert all(torch.equal(other, gradient) for other in everybody)
            for optimizer in optimizers:
                optimizer.step()
            full = model.full_state_dict()
            for name, p in reference.named_parameters():
                assert torch.allclose(full[name], p, atol=atol), (dtype, name)
    sharded = Small()
    sharded.load_state_dict(dense.state_dict())
    make = dict(lr=0.1, weight_decay=0.1)
    both = (
        torch.optim.AdamW(dense.parameters(), **make),
        ShardedOptimizer(sharded.parameters(), torch.optim.AdamW, **make),
    )
    for _ in range(5):
        for module, optimizer in zip((dense, sharded), both, strict=True):
            optimizer.zero_grad()
            module(tokens).square().mean().backward()
            optimizer.step()
    for a, b in zip(dense.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)  # to the last bit
    dist.destroy_process_group()


@pytest.mark.slow
def test_in_processes_that_know_nothing_of_rankcell(tmp_path):
    torch.multiprocessing.spawn(plain_process, args=(2, tmp_path / "store"), nprocs=2)
