"""`rankcell.trace` and `check.against`: right strategies raise no alarm, tracing changes nothing, and what they say."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rankcell
from rankcell import check
from rankcell.against import NothingToCompare
from rankcell.models import GPT, MLP, Llama, generator

COMMON = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.distributed.device_mesh import init_device_mesh
import rankcell
from rankcell.models import GPT, MLP, Llama, generator

x = torch.randint(0, 49, (8, 8), generator=generator(0, "x"))
y = torch.randint(0, 49, (8, 8), generator=generator(0, "y"))
mine, targets = x[rank::4], y[rank::4]


def gpt(**options):
    return GPT(49, 32, **({"context": 8} | options))


def cross_entropy(logits, targets, **options):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
"""
x = torch.randint(0, 49, (8, 8), generator=generator(0, "x"))
y = torch.randint(0, 49, (8, 8), generator=generator(0, "y"))


def gpt(**options):
    return GPT(49, 32, **({"context": 8} | options))


def loss_of(model, inputs=x, targets=y):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def dense(model=None, steps=2):
    """The trace of steps with AdamW in one process."""
    model = model or gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with rankcell.trace(model) as one:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    return one


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


STEPS = """
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
with rankcell.trace(model):
    for _ in range(2):
        optimizer.zero_grad()
        BACKWARD
        optimizer.step()
"""


def training(make, backward, optimizer=None):
    steps = STEPS.replace("BACKWARD", backward.replace("\n", "\n        "))
    if optimizer:
        steps = steps.replace("torch.optim.AdamW(model.parameters(), 1e-3)", optimizer)
    return f"{make}\n{steps}"


OWN_SHARE = "cross_entropy(model(mine), targets).backward()"
SYNCHRONISED = f"{OWN_SHARE}\nmodel.finish_gradient_synchronization()"
CONTEXT = """losses = cross_entropy(model(model.split(x)), model.split(y), reduction="none")
model.share_of_mean(losses).backward()
model.finish_gradient_synchronization()"""
MESH = """mesh = init_device_mesh("cpu", {sizes}, mesh_dim_names=("pp", "dp", "tp"))
model = MeshParallel(gpt(), mesh, **{options})
place, many = model.place("dp"), model.degree("dp")"""
MESH_STEP = "model.step(x.chunk(many)[place], y.chunk(many)[place])"
PARALLELIZE = """from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

model = gpt(tied=False)
plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
plan |= {f"attention.{part}": ColwiseParallel() for part in ("query", "key", "value")}
plan |= {"attention.output": RowwiseParallel()}
"""

RIGHT = {
    "alone": ("model = gpt()", "cross_entropy(model(x), y).backward()", {}),
    "DDP": ("from rankcell.parallel.ddp import DDP\nmodel = DDP(gpt())", SYNCHRONISED, {}),
    "FSDP": ("from rankcell.parallel.fsdp import FSDP\nmodel = FSDP(gpt())", SYNCHRONISED, {}),
    "ZeRO2": ("from rankcell.parallel.zero import ZeRO2\nmodel = ZeRO2(gpt())", SYNCHRONISED, {}),
    "ShardedOptimizer and DDP": (
        "from rankcell.parallel.ddp import DDP\nfrom rankcell.parallel.zero import ShardedOptimizer\n"
        "model = DDP(gpt())",
        SYNCHRONISED,
        {"optimizer": "ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)"},
    ),
    "tensor parallel": (
        "from rankcell.parallel.transformer import tensor_parallel\nmodel = tensor_parallel(gpt())",
        "model(x, y).backward()",
        {},
    ),
    "sequence parallel": (
        "from rankcell.parallel.transformer import tensor_parallel\n"
        "model = tensor_parallel(gpt(), sequence_parallel=True)",
        "cross_entropy(model(x), y).backward()",
        {},
    ),
    "tensor parallel Llama": (
        "from rankcell.parallel.transformer import tensor_parallel\n"
        "model = tensor_parallel(Llama(49, 32, context=8), sequence_parallel=True)",
        "model(x, y).backward()",
        {"dense": lambda: Llama(49, 32, context=8)},
    ),
    "ContextParallel": (
        "from rankcell.parallel.context import ContextParallel\nmodel = ContextParallel(gpt())",
        CONTEXT,
        {},
    ),
    "ContextParallel Llama, all-to-all": (
        "from rankcell.parallel.context import ContextParallel\n"
        "model = ContextParallel(Llama(49, 32, n_kv_heads=4, context=8), method='all_to_all')",
        CONTEXT,
        {"dense": lambda: Llama(49, 32, n_kv_heads=4, context=8)},
    ),
    "Pipeline": (
        "from rankcell.parallel.pipeline import Pipeline, split_gpt\nfrom rankcell.schedules import one_f_one_b\n"
        "stages = split_gpt(gpt(n_layers=4), 4)\n"
        "model = Pipeline(stages, one_f_one_b(4, 4), cross_entropy, between=(8, 32))",
        "model.step(x, y)",
        {"dense": lambda: gpt(n_layers=4)},
    ),
    "interleaved Pipeline": (
        "from rankcell.parallel.pipeline import Pipeline, split_gpt\n"
        "from rankcell.schedules import interleaved\n"
        "stages = split_gpt(gpt(n_layers=8), 8)\n"
        "model = Pipeline(stages, interleaved(4, 4, 2), cross_entropy, between=(8, 32))",
        "model.step(x, y)",
        {"dense": lambda: gpt(n_layers=8)},
    ),
    "mesh 1 x 2 x 2": (
        "from rankcell.parallel.mesh import MeshParallel\n" + MESH.format(sizes=(1, 2, 2), options={}),
        MESH_STEP,
        {"mesh": {"pp": 1, "dp": 2, "tp": 2}},
    ),
    "mesh 2 x 2 x 1": (
        "from rankcell.parallel.mesh import MeshParallel\n" + MESH.format(sizes=(2, 2, 1), options={}),
        MESH_STEP,
        {"mesh": {"pp": 2, "dp": 2, "tp": 1}},
    ),
    "mesh 1 x 2 x 2, sharded": (
        "from rankcell.parallel.mesh import MeshParallel\n"
        + MESH.format(sizes=(1, 2, 2), options={"zero": True, "sequence_parallel": True}),
        MESH_STEP,
        {"mesh": {"pp": 1, "dp": 2, "tp": 2}},
    ),
    "torch's DDP": (
        "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(gpt())",
        OWN_SHARE,
        {},
    ),
    "torch's fully_shard": (
        "from torch.distributed.fsdp import fully_shard\nmodel = gpt()\n"
        "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)",
        OWN_SHARE,
        {},
    ),
    "torch's parallelize_module": (
        PARALLELIZE + 'mesh = init_device_mesh("cpu", (4,))\n'
        "for block in model.blocks:\n    parallelize_module(block, mesh, plan)",
        "cross_entropy(model(x), y).backward()",
        {"dense": lambda: gpt(tied=False)},
    ),
    "torch's parallelize_module and fully_shard": (
        PARALLELIZE + 'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))\n'
        "for block in model.blocks:\n    parallelize_module(block, mesh['tp'], plan)\n"
        "    fully_shard(block, mesh=mesh['dp'])\nfully_shard(model, mesh=mesh['dp'])",
        "cross_entropy(model(x.chunk(2)[rank // 2]), y.chunk(2)[rank // 2]).backward()",
        {"dense": lambda: gpt(tied=False), "mesh": {"dp": 2, "tp": 2}},
    ),
    "accumulation": (
        "from rankcell.parallel.ddp import DDP\nmodel = DDP(gpt(), None)",
        "with model.no_sync():\n    (cross_entropy(model(mine[:1]), targets[:1]) / 2).backward()\n"
        "(cross_entropy(model(mine[1:]), targets[1:]) / 2).backward()",
        {},
    ),
    "checkpoints": (
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from torch.utils.checkpoint import checkpoint\nmodel = gpt()\n"
        "for block in model.blocks:\n"
        "    block.forward = lambda h, documents=None, f=block.forward: checkpoint(f, h, use_reentrant=False)\n"
        "model = DistributedDataParallel(model)",
        OWN_SHARE,
        {},
    ),
    "contiguous rows": (
        "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(gpt())\n"
        "mine, targets = x.chunk(4)[rank], y.chunk(4)[rank]",
        OWN_SHARE,
        {},
    ),
}


@pytest.mark.alike(3)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_strategy_raises_no_alarm(four, name):
    make, backward, how = RIGHT[name]
    run = four.run(COMMON + training(make, backward, how.get("optimizer")))
    verdict = check.against(run, dense(how.get("dense", gpt)()), mesh=how.get("mesh"))
    assert verdict.ok, repr(verdict)
    kinds = {row.kind for row in verdict.rows if row.status != "skipped"}
    assert kinds >= {"output", "grad", "parameter"}
    assert {row.step for row in verdict.rows} == {0, 1, 2}
    assert {row.kind for row in verdict._shown()} == {row.kind for row in verdict.rows}


def test_expert_parallel_raises_no_alarm(four):
    net = """
from rankcell.models import MLP, initialise
from rankcell.parallel.experts import ExpertParallel, Mixture, shared_parameters
from rankcell.parallel.context import share_of_mean, sum_gradients

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(49, 32)
        self.layer = Mixture(nn.Linear(32, 4, bias=False), [MLP(32, 32, 32) for _ in range(4)], k=2)
        self.head = nn.Linear(32, 49, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.layer(h))

model = initialise(Net())
"""
    space = {"nn": nn}
    exec(net, space)
    run = four.run(
        COMMON
        + training(
            net + "model.layer = ExpertParallel(model.layer)",
            "share_of_mean(cross_entropy(model(x.chunk(4)[rank]), y.chunk(4)[rank], reduction='none')).backward()\n"
            "sum_gradients(shared_parameters(model))",
        )
    )
    verdict = check.against(run, dense(space["model"]))
    assert verdict.ok, repr(verdict)


# Tracing


def train(trace):
    model = gpt(dropout=0.1)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []

    def steps():
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if trace:
        with trace(model):
            steps()
    else:
        steps()
    return losses, model


@pytest.mark.parametrize("whole", [True, False], ids=["in one process", "on a rank"])
def test_tracing_changes_no_number_and_leaves_nothing_behind(whole):
    from rankcell.engine.trace import Trace

    losses, model = train(None)
    traced, other = train(lambda m: Trace(m, whole=whole))
    assert losses == traced
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for module in other.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in other.parameters())
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_an_error_in_the_block_leaves_no_hooks_either():
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="on purpose"), rankcell.trace(model):
        loss_of(model).backward()
        optimizer.step()
        raise RuntimeError("on purpose")
    assert not any(module._forward_hooks for module in model.modules())
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_trace_wants_a_module():
    with pytest.raises(TypeError, match="needs a module"):
        rankcell.trace(3)


class Net(nn.Module):
    """Two layers and a constant, two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
        self.constant = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.last(self.first(x)) + self.constant, x[0]


def seen(entries):
    return [(e.kind, e.name, e.step, e.call, e.part, e.type) for e in entries]


def test_a_trace_lists_what_steps_compute_in_their_order():
    net, names = Net(), ("constant", "first.weight", "first.bias", "last.weight")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with rankcell.trace(net) as one:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(4, 3))[0].sum().backward()
            optimizer.step()
    owners = {"constant": "Net"} | dict.fromkeys(names[1:], "Linear")
    expected = [("parameter", name, 0, 0, 0, owners[name]) for name in names]
    for k in (0, 1):  # a step, and a call of each module in it
        outputs = [("first", 0, "Linear"), ("last", 0, "Linear"), ("", 0, "Net"), ("", 1, "Net")]
        expected += [("output", name, k, k, part, owner) for name, part, owner in outputs]
        backward = [("", "Net"), ("last", "Linear"), ("first", "Linear")]  # x[0] needs no gradient
        expected += [("grad_output", name, k, k, 0, owner) for name, owner in backward]
        expected += [
            ("grad", name, k, 0, 0, "Linear") for name in ("last.weight", "first.bias", "first.weight")
        ]
        expected += [("parameter", name, k + 1, 0, 0, "SGD") for name in names]
    assert seen(one.entries) == expected
    orders = [e.order for e in one.entries]
    assert orders == sorted(set(orders)) and orders[0] == 1
    assert one.nbytes == sum(4 * math.prod(e.shape) for e in one.entries)
    assert repr(one).startswith(
        "Trace of 3 modules: 12 parameters, 8 outputs, 6 grad_outputs, 6 grads; 0.0 MB"
    )
    before, after = (next(e for e in one.entries if e.name == "first.bias" and e.step == k) for k in (0, 1))
    gradient = next(e.whole for e in one.entries if e.kind == "grad" and e.name == "first.bias")
    assert after.whole == pytest.approx(
        before.whole - 0.1 * gradient
    )  # copies: the last step changed no earlier one


def test_without_a_step_the_parameters_are_noted_again_only_if_they_changed():
    def kinds(change):
        net = nn.Linear(3, 2)
        with rankcell.trace(net) as one:
            net(torch.ones(4, 3)).sum().backward()
            with torch.no_grad():
                net.bias += change
        return [(e.kind, e.step) for e in one.entries]

    computed = [("parameter", 0)] * 2 + [("output", 0), ("grad_output", 0)] + [("grad", 0)] * 2
    assert kinds(0.0) == computed and kinds(1.0) == computed + [("parameter", 1)] * 2


def test_of_two_optimizers_both_count_or_the_one_that_is_named():
    def traced(named):
        net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
        each = [torch.optim.SGD(net[0].parameters(), 0.1), torch.optim.Adam(net[1].parameters(), 0.1)]
        with rankcell.trace(net, None if named is None else each[named]) as one:
            net(torch.ones(4, 3)).sum().backward()
            for optimizer in each:
                optimizer.step()
        final = [e.whole for e in one.entries if e.kind == "parameter"][-2:]
        assert all((a == p.detach().numpy()).all() for a, p in zip(final, net.parameters(), strict=True))
        return [(e.kind, e.name, e.step, e.type) for e in one.entries if e.kind in ("grad", "parameter")]

    def expected(last):
        states = [
            ("parameter", f"{k}.weight", step, by) for step, by in enumerate(("Linear", last)) for k in (0, 1)
        ]
        return [*states[:2], *(("grad", f"{k}.weight", 0, "Linear") for k in (1, 0)), *states[2:]]

    assert traced(None) == traced(1) == expected("Adam") and traced(0) == expected("SGD")


def test_a_tied_weight_has_both_names_in_one_process_and_is_held_once_by_a_rank():
    from rankcell.engine.trace import Trace

    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    names = {}
    for whole in (True, False):
        with Trace(net, whole=whole) as trace:
            pass
        names[whole] = [e.name for e in trace.entries]
    assert names == {True: ["0.weight", "1.weight"], False: ["0.weight"]}


def test_a_dropout_that_is_on_leaves_a_digest_of_its_zeros():
    def masks(seed, p=0.5, train=True):
        torch.manual_seed(seed)
        layer = nn.Dropout(p).train(train)
        with rankcell.trace(layer) as one:
            layer(torch.ones(50))
        return one.entries[-1].mask, one.entries[-1].before

    first, again, other = masks(1), masks(1), masks(2)
    assert first == again and first[0] != other[0] and first[1] == other[1] and all(map(len, first))
    assert masks(1, p=0.0) == masks(1, train=False) == ("", "")


@pytest.mark.parametrize("of_parameter", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (7,), (), (600, 300), (3, 70_000), (64, 50, 60)])
def test_what_a_rank_keeps_are_products_with_random_vectors(shape, of_parameter):
    """Of a large tensor block by block, of a small one at once: the same numbers."""
    from rankcell.engine.trace import _sums
    from rankcell.layouts import weights

    tensor = torch.randn(shape, generator=generator(0, "sums"))
    n = math.prod(shape[:1] if of_parameter else shape[:-1]) if len(shape) > 1 else math.prod(shape)
    matrix = tensor.double().reshape(n, -1).numpy()
    kept = _sums(tensor, of_parameter)
    rows = matrix @ weights(matrix.shape[1]) if len(shape) > 1 else matrix[:, [0, 0]]
    assert np.allclose(kept["rows"], rows) and np.allclose(kept["columns"], weights(n).T @ matrix)
    if not of_parameter:
        assert "flat" not in kept
    elif matrix.size <= 4096:
        assert kept["at"] == (0,) and (kept["flat"] == matrix.reshape(-1)).all()
    else:  # 16 numbers each from 64 places, the first and the last among them
        at, flat = kept["at"], matrix.reshape(-1)
        assert (len(at), at[0], at[-1]) == (64, 0, matrix.size - 16)
        assert (kept["flat"].reshape(64, 16) == [flat[i : i + 16] for i in at]).all()


def test_what_a_rank_keeps_is_little_and_finite():
    from rankcell.engine.trace import _sums

    column = torch.zeros(2**18 + 1)
    assert _sums(column[:-1], False)["rows"].shape == (2**18, 2) and _sums(column, False)["rows"].shape == (
        0,
        2,
    )
    assert (
        len(_sums(torch.zeros(4096), True)["flat"]) == 4096
        and len(_sums(torch.zeros(4097), True)["flat"]) == 1024
    )
    bad = torch.tensor([[1.0, math.nan], [math.inf, -math.inf]])
    kept = _sums(bad, False)
    assert all(math.isfinite(x) for x in kept["columns"].reshape(-1).tolist())
    assert len(set(kept["columns"].reshape(-1).tolist())) == 4


def test_the_limit_of_a_trace_is_a_gib():
    from rankcell.engine.trace import Trace, TraceTooLarge

    model = nn.Linear(256, 1, bias=False)  # 1 KiB
    for held in (2**30 - 1024, 2**30 - 1023):
        trace = Trace(model)
        trace._nbytes = held
        if held == 2**30 - 1024:
            with trace:
                pass
            assert trace.nbytes == 2**30
        else:
            with pytest.raises(TraceTooLarge, match="1024 MiB"), trace:
                pass


def test_too_large_a_trace_says_so(monkeypatch):
    from rankcell.engine import trace

    monkeypatch.setattr(trace, "LIMIT", 1000)
    with pytest.raises(trace.TraceTooLarge, match="smaller batch"), rankcell.trace(gpt()):
        pass


# What the verdicts say


def compared(four, source, one=None, **options):
    return check.against(four.run(COMMON + source), one or dense(steps=1), **options)


ONE_STEP = STEPS.replace("range(2)", "range(1)")


def test_gradients_that_are_never_averaged(four):
    verdict = compared(four, "model = gpt()" + ONE_STEP.replace("BACKWARD", OWN_SHARE), mesh={"dp": 4})
    assert not verdict
    assert verdict.first.kind == "grad" and verdict.first.ranks == (0, 1, 2, 3)
    assert verdict.text.endswith(
        "each rank has that of its own part of the batch (over dp): its gradients are never averaged"
    )


def test_a_sum_where_a_mean_is_meant(four):
    backward = f"{OWN_SHARE}\n        for p in model.parameters():\n            dist.all_reduce(p.grad)"
    verdict = compared(four, "model = gpt()" + ONE_STEP.replace("BACKWARD", backward), mesh={"dp": 4})
    assert verdict.first.factor == pytest.approx(4)
    assert "4 times the dense gradient on ranks 0-3: a sum over dp where a mean is meant" in verdict.text


def test_older_weights_on_some_ranks(four):
    source = ONE_STEP.replace("BACKWARD", "cross_entropy(model(x), y).backward()")
    source = source.replace("        optimizer.step()", "        if rank < 2:\n            optimizer.step()")
    verdict = compared(four, "model = gpt()" + source)
    assert verdict.first.kind == "parameter" and verdict.first.ranks == (2, 3)
    assert "ranks 2, 3 hold older weights than ranks 0, 1: no update reached them" in verdict.text


def test_other_weights_from_the_start(four):
    source = "model = gpt(seed=int(rank == 3))" + ONE_STEP.replace("BACKWARD", OWN_SHARE)
    verdict = compared(four, source)
    assert (verdict.first.kind, verdict.first.step, verdict.first.ranks) == ("parameter", 0, (3,))
    assert "rank 3: other weights than one process has, before anything is computed" in verdict.text


def test_ranks_that_part_under_dropout(four):
    """The dense model cannot be compared, but ranks with one another can."""
    source = "torch.manual_seed(0)\nmodel = gpt(dropout=0.1)" + ONE_STEP
    source = source.replace("BACKWARD", "cross_entropy(model(x), y).backward()")
    one = dense(gpt(dropout=0.1), steps=1)
    assert compared(four, source, one).ok
    verdict = compared(
        four, source.replace("        optimizer.step()", "        optimizer.step() if rank else None"), one
    )
    assert verdict.first.kind == "parameter" and verdict.first.ranks == (0,)
    assert "rank 0 holds older weights than ranks 1-3" in verdict.text
    verdict = compared(four, source.replace("1e-3", "1e-3 if rank < 2 else 2e-3"), one)
    assert verdict.first.kind == "parameter" and verdict.first.ranks == (0, 2)
    assert "ranks 0 and 2 hold the same part of it, and after the step other numbers" in verdict.text


def test_the_line_is_the_learners(four):
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, h):
        h = torch.relu(self.up(h))
        return self.down(h)

torch.manual_seed(0)
model = Net()
if rank == 2:
    model.down.forward = lambda h: 1.1 * F.linear(h, model.down.weight, model.down.bias)
with rankcell.trace(model):
    model(torch.ones(4, 6)).sum().backward()
"""
    space = {"nn": nn, "torch": torch, "rank": 0, "rankcell": rankcell, "F": F}
    exec(source.replace("with rankcell.trace(model):", "with rankcell.trace(model) as one:"), space)
    verdict = compared(four, source, space["one"])
    lines = (COMMON + source).split("\n")
    assert verdict.first.name == "down" and verdict.first.ranks == (2,)
    assert lines[verdict.first.line - 1].strip() == "return self.down(h)"
    assert f"`down` (line {verdict.first.line})" in verdict.text


def test_numbers_that_are_not_finite(four):
    source = "model = gpt()\nif rank == 1:\n    model.norm.weight.data[3] = math.nan" + ONE_STEP
    verdict = compared(four, "import math\n" + source.replace("BACKWARD", OWN_SHARE))
    assert (verdict.first.name, verdict.first.kind, verdict.first.ranks) == ("norm.weight", "parameter", (1,))


def test_it_shows_as_a_table_that_fits_a_screen(four):
    verdict = compared(four, "model = gpt()" + ONE_STEP.replace("BACKWARD", OWN_SHARE))
    lines = repr(verdict).split("\n")
    assert lines[0].startswith("✗") and len(lines) <= 20
    assert any(line.startswith(" > ") for line in lines)
    html = verdict._repr_html_()
    assert html.count("<tr") <= 14 and "font-weight:600" in html


def test_names_map_the_ranks_modules_to_the_dense_ones(four):
    source = "inner = gpt()\nmodel = nn.ModuleDict({'net': inner})\n" + ONE_STEP
    source = source.replace("BACKWARD", "cross_entropy(inner(x), y).backward()")
    one = dense(steps=1)
    assert compared(four, source, one, names={"net": ""}).ok
    assert compared(four, source, one, names=lambda name: name.removeprefix("net").removeprefix(".")).ok


# Bad input


def test_without_a_trace_it_says_where_one_is_made(four):
    one = dense(steps=1)
    with pytest.raises(NothingToCompare, match="The ranks have traced nothing"):
        check.against(four.run("1"), one)
    run = four.run(COMMON + "model = gpt()\nwith rankcell.trace(model):\n    model(x)")
    with pytest.raises(NothingToCompare, match="no trace of one process"):
        check.against(run, [])
    with pytest.raises(NothingToCompare, match="made on a rank"):
        check.against(run, run.ranks[0].trace)
    with pytest.raises(NothingToCompare, match="has 8 places, and the Run has 4 ranks"):
        check.against(run, one, mesh={"dp": 2, "tp": 4})
    run = four.run(COMMON + "model = gpt(seed=1)\nwith rankcell.trace(model):\n    model(x)")
    with pytest.raises(NothingToCompare, match="No tensor of the ranks has a name of the dense model"):
        check.against(run, one, names=lambda name: f"other.{name}")


def test_a_forward_alone_is_judged_by_its_output(four):
    model = MLP(6, 8, 3)
    with torch.no_grad(), rankcell.trace(model) as one:
        model(torch.ones(4, 6))
    source = "model = MLP(6, 8, 3)\nwith torch.no_grad(), rankcell.trace(model):\n    model(torch.ones(4, 6) * SIZE)"
    assert compared(four, source.replace("SIZE", "1"), one).ok
    verdict = compared(four, source.replace("SIZE", "(1 + rank)"), one)
    assert verdict.first.kind == "output" and math.isfinite(verdict.first.factor)


def few(source, one, world_size=2, **options):
    """The verdict on a world of another size."""
    with rankcell.Ranks(world_size, device="cpu") as ranks:
        return check.against(ranks.run(COMMON + source), one, **options)


ONE_BACKWARD = """
x[:, 0] = 5
with rankcell.trace(model):
    cross_entropy(model(x[rank::2]).float(), y[rank::2]).backward()
"""
AVERAGE = """    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
"""


@pytest.mark.parametrize("cast", ["", ".bfloat16()"], ids=["float32", "bfloat16"])
def test_samples_that_begin_alike_are_told_apart(cast):
    """Causal attention makes the first rows of sequences with one first token equal, whatever follows."""
    model, alike = eval(f"gpt(){cast}"), x.clone()
    alike[:, 0] = 5
    with rankcell.trace(model) as one:
        F.cross_entropy(model(alike).flatten(0, 1).float(), y.flatten()).backward()
    assert few(f"model = gpt(){cast}{ONE_BACKWARD}{AVERAGE}", one).ok
    first = few(f"model = gpt(){cast}{ONE_BACKWARD}", one).first
    assert first.kind == "grad" and "never averaged" in first.says


def test_torchs_pipelining_raises_no_alarm():
    source = """
from rankcell.parallel.pipeline import split_gpt
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

stage = PipelineStage(split_gpt(gpt(tied=False), 2)[rank], rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=cross_entropy)
optimizer = torch.optim.AdamW(stage.submod.parameters(), 1e-3)
with rankcell.trace(stage):
    schedule.step(x) if rank == 0 else schedule.step(target=y)
    optimizer.step()
"""
    verdict = few(source, dense(gpt(tied=False), steps=1))
    assert verdict.ok, verdict


def test_three_axes_raise_no_alarm():
    source = """
from rankcell.parallel.mesh import MeshParallel

mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
model = MeshParallel(gpt(), mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
place = model.place("dp")
with rankcell.trace(model):
    model.step(x.chunk(2)[place], y.chunk(2)[place])
    optimizer.step()
"""
    verdict = few(source, dense(steps=1), 8, mesh={"pp": 2, "dp": 2, "tp": 2})
    assert verdict.ok, verdict


def test_a_stage_that_never_steps_and_ranks_that_never_do(four):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    source = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
part = nn.Sequential()
part.add_module(str(rank % 2), model[rank % 2])
optimizer = torch.optim.SGD(part.parameters(), 0.1)
with rankcell.trace(part):
    if rank % 2 == 0:
        out = part(torch.ones(3, 4))
        gradient = torch.ones(3, 4) @ model[1].weight.detach()
        out.backward(gradient)
    else:
        part(model[0](torch.ones(3, 4)).detach()).sum().backward()
    if STEPS:
        optimizer.step()
"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rankcell.trace(model) as one:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert compared(four, source.replace("STEPS", "True"), one).ok
    first = compared(four, source.replace("STEPS", "rank % 2 == 0"), one).first
    assert first.name.startswith("1.") and first.kind == "parameter" and first.ranks == (1, 3)
    assert "older weights" in first.says
    verdict = compared(four, source.replace("STEPS", "False"), one)
    assert verdict.ok and "no rank did" in verdict.notes[0]


@pytest.mark.parametrize("how", ["twice in one", "one after the other"])
def test_what_a_checkpoint_computes_again_has_the_number_of_its_first_time(how):
    def gradients(again):
        torch.manual_seed(0)
        part, inputs = nn.Linear(3, 3), [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
        call = (lambda f, x: checkpoint(f, x, use_reentrant=True)) if again else lambda f, x: f(x)
        with rankcell.trace(part) as trace:
            if how == "twice in one":
                call(lambda h: part(part(h)), inputs[0]).square().sum().backward()
            else:  # as micro-batches in GPipe: both forwards, then both backwards
                outputs = [call(part, h) for h in inputs]
                for output in outputs:
                    output.square().sum().backward()
        return {e.call: e.whole.tolist() for e in trace.entries if e.kind == "grad_output"}

    assert gradients(again=True) == gradients(again=False) and len(gradients(again=True)) == 2
