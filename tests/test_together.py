"""Ranks that take turns in one process do what ranks do that are processes, with values, and say what they cannot."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rankcell
import test_rehearse
from rankcell import Deadlock, RankError, RankMismatch, models
from rankcell.engine import cell
from rankcell.errors import OptionError, WorldSizeError
from rankcell.results import NotSent

pytestmark = pytest.mark.slow

VOCAB, WIDTH, LENGTH, ROWS, STEPS = 40, 32, 8, 8, 3


@pytest.fixture(scope="module")
def many():
    """64 ranks in one process."""
    with rankcell.Ranks(64, local=True) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def few():
    """Four ranks in one process, as many as `four` has processes."""
    with rankcell.Ranks(4, local=True) as ranks:
        yield ranks


def equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# Each operation, against arithmetic


def reductions():
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, everybody = torch.tensor([rank, 1, -rank]), torch.arange(n)
    for op, expected in (
        (dist.ReduceOp.SUM, [everybody.sum(), n, -everybody.sum()]),
        (dist.ReduceOp.MAX, [n - 1, 1, 0]),
        (dist.ReduceOp.MIN, [0, 1, 1 - n]),
        (dist.ReduceOp.BOR, [2 ** (n - 1).bit_length() - 1, 1, -1]),
    ):
        x = mine.clone()
        dist.all_reduce(x, op=op)
        equal(x, torch.tensor([int(e) for e in expected]))
    x = torch.full((2, 2), 2.0 if rank == 3 else 1.0)
    dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
    equal(x, torch.full((2, 2), 2.0))
    x = mine.clone()
    dist.reduce(x, 5)
    equal(x[1], torch.tensor(n if rank == 5 else 1))
    parts = torch.arange(2 * n).float() + rank
    share = torch.empty(2)
    dist.reduce_scatter_single(share, parts)
    equal(share, n * torch.arange(2.0 * rank, 2 * rank + 2) + everybody.sum())
    dist.reduce_scatter(share, list(parts.view(n, 2)))
    equal(share, n * torch.arange(2.0 * rank, 2 * rank + 2) + everybody.sum())


def from_one_and_to_one():
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([float(rank)])
    dist.broadcast(x, 7)
    equal(x, torch.tensor([7.0]))
    x = torch.tensor([rank, rank])
    parts = [torch.empty_like(x) for _ in range(n)] if rank == 2 else None
    dist.gather(x, parts, dst=2)
    assert parts is None or [int(p[0]) for p in parts] == list(range(n))
    dist.scatter(x, [torch.full((2,), 10 * i) for i in range(n)] if rank == 1 else None, src=1)
    equal(x, torch.full((2,), 10 * rank))
    parts = [torch.empty(1) for _ in range(n)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    equal(torch.cat(parts), torch.arange(float(n)))
    whole = torch.empty(n, 2)
    dist.all_gather_single(whole, torch.full((1, 2), float(rank)))
    equal(whole[:, 1], torch.arange(float(n)))
    dist.barrier()


def all_to_all():
    rank, n = dist.get_rank(), dist.get_world_size()
    out = torch.empty(n)
    dist.all_to_all_single(out, torch.arange(n) * 100.0 + rank)
    equal(out, 100.0 * rank + torch.arange(n))
    # rank r sends r % 3 rows to the ranks with an even number, and one to the others
    to = [rank % 3 if j % 2 == 0 else 1 for j in range(n)]
    came = [j % 3 if rank % 2 == 0 else 1 for j in range(n)]
    out = torch.empty(sum(came), 2)
    dist.all_to_all_single(out, torch.full((sum(to), 2), float(rank)), came, to)
    equal(out[:, 0], torch.arange(float(n)).repeat_interleave(torch.tensor(came)))
    ins = [torch.full((1 + (rank + j) % 2,), float(rank)) for j in range(n)]
    outs = [torch.empty(1 + (rank + j) % 2) for j in range(n)]
    dist.all_to_all(outs, ins)
    assert [float(o[0]) for o in outs] == list(range(n))


def pairs():
    rank, n = dist.get_rank(), dist.get_world_size()
    x, left, right = torch.tensor([float(rank)]), torch.empty(1), torch.empty(1)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, (rank + 1) % n),
            dist.P2POp(dist.isend, x, (rank - 1) % n),
            dist.P2POp(dist.irecv, left, (rank - 1) % n),
            dist.P2POp(dist.irecv, right, (rank + 1) % n),
        ]
    ):
        work.wait()
    assert (left.item(), right.item()) == ((rank - 1) % n, (rank + 1) % n)
    a, b = torch.empty(1), torch.empty(1)
    if rank == 0:  # tags are kept apart, whoever comes first
        first, second = dist.irecv(a, 1, tag=1), dist.irecv(b, 1, tag=2)
        second.wait()
        first.wait()
        assert (a.item(), b.item()) == (10, 20)
        heard = {dist.recv(a) for _ in range(n - 1)}  # from anyone
        assert heard == set(range(1, n))
    else:
        if rank == 1:
            dist.send(torch.tensor([20.0]), 0, tag=2)
            dist.send(torch.tensor([10.0]), 0, tag=1)
        dist.send(x, 0)


def in_any_order():
    """Operations that nobody waits for yet do not keep their rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    all_ranks = dist.new_group(range(n))
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    calls = [
        lambda: dist.all_reduce(x, async_op=True),
        lambda: dist.all_reduce(y, group=all_ranks, async_op=True),
    ]
    works = [call() for call in (calls if rank % 2 else reversed(calls))]
    while not works[0].is_completed():
        pass
    assert works[1].get_future().wait()
    for work in works:
        work.wait()
    assert (x.item(), y.item()) == (n, 2 * n)


def objects_and_groups():
    rank, n = dist.get_rank(), dist.get_world_size()
    found = [None] * n
    dist.all_gather_object(found, {"rank": rank})
    assert [f["rank"] for f in found] == list(range(n))
    given = ["a", rank] if rank == 4 else [None, None]
    dist.broadcast_object_list(given, src=4)
    assert given == ["a", 4]
    mesh = init_device_mesh("cpu", (n // 8, 8), mesh_dim_names=("dp", "tp"))
    for name, expected in (("tp", rank // 8 * 8 * 8 + 28), ("dp", sum(range(rank % 8, n, 8)))):
        x = torch.tensor([rank])
        dist.all_reduce(x, group=mesh[name].get_group())
        assert x.item() == expected
    assert list(mesh.get_coordinate()) == [rank // 8, rank % 8]
    even = dist.new_group(range(0, n, 2))
    if rank % 2 == 0:
        x = torch.tensor([rank])
        dist.all_reduce(x, group=even)
        assert x.item() == sum(range(0, n, 2))
    assert dist.get_rank(even) == (rank // 2 if rank % 2 == 0 else -1)


def functional():
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((n,), float(rank))
    assert (functional.all_reduce(x, "sum", group=dist.group.WORLD) + 0)[0].item() == n * (n - 1) / 2
    assert (functional.reduce_scatter_tensor(x, "avg", 0, group=dist.group.WORLD) + 0).tolist() == [
        (n - 1) / 2
    ]
    whole = torch.arange(3.0 * n).view(n, 3)
    mesh = init_device_mesh("cpu", (n,))
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    equal(spread.to_local(), whole[rank : rank + 1])
    equal((spread * 2).redistribute(mesh, [Replicate()]).to_local(), 2 * whole)
    equal(DTensor.from_local(whole, mesh, [Replicate()]).sum().full_tensor(), whole.sum())


OPERATIONS = [
    reductions,
    from_one_and_to_one,
    all_to_all,
    pairs,
    in_any_order,
    objects_and_groups,
    functional,
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_64_ranks_compute_what_arithmetic_says(many, operation):
    run = many.run(operation, timeout=120)
    assert run.world_size == 64 and len(run.ran) == 64
    assert (run.device, run.backend) == ("cpu", "local")


def test_256_ranks_fit_into_little_memory():
    with rankcell.Ranks(256, local=True) as ranks:
        idle = sum(ranks.memory())
        run = ranks.run("x = torch.ones(1000) * rank\ndist.all_reduce(x)\nx[0].item()", timeout=120)
        assert set(run.values) == {255 * 128.0}
        assert len(run.events) == 256
        assert idle < 1 << 30 and sum(ranks.memory()) < 1 << 30  # as processes they take ten times as much


# Each strategy, against one process, and against ranks that are processes


def gpt(**options):
    shape = dict(n_heads=4, n_layers=2, context=LENGTH, dtype=torch.float64)
    return models.GPT(VOCAB, WIDTH, **shape | options)


def batch(step, place=0, count=1):
    tokens = torch.arange(400) * 7919 % VOCAB
    return models.batch(tokens, step, size=ROWS, length=LENGTH, rank=place, world_size=count)


def trained(model, place=0, count=1, optimizer=None, loss=models.cross_entropy):
    """Some steps of AdamW on this rank's rows."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = batch(step, place, count)
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def everybody():
    return dist.get_rank(), dist.get_world_size()


def torch_ddp():
    return trained(nn.parallel.DistributedDataParallel(gpt()), *everybody()).module.state_dict()


def our_ddp():
    from rankcell.parallel.ddp import DDP

    return trained(DDP(gpt()), *everybody()).module.state_dict()


def torch_fsdp():
    from torch.distributed.fsdp import fully_shard

    model = gpt()
    for block in model.blocks:
        fully_shard(block)
    trained(fully_shard(model), *everybody())
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def torch_tensor():
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    model = nn.Sequential(
        *[models.MLP(WIDTH, 4 * WIDTH, WIDTH, seed=i, dtype=torch.float64) for i in range(2)]
    )
    for mlp in model:
        parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    mlps(model)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}


def mlps(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=models.generator(step, "x"), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def two_mlps():
    return nn.Sequential(
        *[models.MLP(WIDTH, 4 * WIDTH, WIDTH, seed=i, dtype=torch.float64) for i in range(2)]
    )


def our_zero():
    from rankcell.parallel.ddp import DDP
    from rankcell.parallel.zero import ShardedOptimizer

    model = DDP(gpt())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return trained(model, *everybody(), optimizer).module.state_dict()


def our_tensor():
    from rankcell.parallel.tensor import full_state_dict
    from rankcell.parallel.transformer import tensor_parallel

    return full_state_dict(
        trained(tensor_parallel(gpt(n_heads=dist.get_world_size()), sequence_parallel=True))
    )


def our_pipeline():
    from rankcell.parallel.pipeline import Pipeline, split_gpt
    from rankcell.schedules import one_f_one_b

    n = dist.get_world_size()
    stages = split_gpt(gpt(n_layers=n), n)
    pipeline = Pipeline(stages, one_f_one_b(n, 4), models.cross_entropy, between=(LENGTH, WIDTH))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    for step in range(STEPS):
        pipeline.step(*batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return dict(pipeline.state_dict())


def our_context():
    from rankcell.parallel.context import ContextParallel, share_of_mean, split, sum_gradients

    rank, n = everybody()
    model = gpt(context=2 * n)
    spread = ContextParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = models.batch(torch.arange(400) * 7919 % VOCAB, step, size=ROWS, length=2 * n)
        losses = nn.functional.cross_entropy(
            spread(split(x, n)[rank]).flatten(0, 1), split(y, n)[rank].flatten(), reduction="none"
        )
        share_of_mean(losses).backward()
        sum_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def dense_context(n):
    model = gpt(context=2 * n)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = models.batch(torch.arange(400) * 7919 % VOCAB, step, size=ROWS, length=2 * n)
        models.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


STRATEGIES = {
    torch_ddp: lambda n: trained(gpt()),
    our_ddp: lambda n: trained(gpt()),
    torch_fsdp: lambda n: trained(gpt()),
    torch_tensor: lambda n: mlps(two_mlps()),
    our_zero: lambda n: trained(gpt()),
    our_tensor: lambda n: trained(gpt(n_heads=n)),
    our_pipeline: lambda n: trained(gpt(n_layers=n)),
    our_context: dense_context,
}


@pytest.fixture(scope="module")
def eight():
    with rankcell.Ranks(8, local=True) as ranks:
        yield ranks


@pytest.mark.alike(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda f: f.__name__)
def test_a_strategy_trains_as_one_process_does(eight, strategy):
    run = eight.run(strategy, timeout=120)
    dense = STRATEGIES[strategy](8).state_dict()
    seen = set()
    for weights in run.values:
        assert not isinstance(weights, NotSent)
        for name, value in weights.items():
            torch.testing.assert_close(value, dense[name], rtol=0, atol=1e-9)
        seen |= weights.keys()
    assert seen == dense.keys()


def our_experts():
    import test_experts

    worst, *_ = test_experts.largest_differences(4, [5, 7, 3, 8], {"k": 2}, steps=STEPS)
    assert max(worst.values()) < 1e-9


@pytest.mark.alike(3)
@pytest.mark.parametrize("strategy", [*STRATEGIES, our_experts], ids=lambda f: f.__name__)
def test_its_operations_are_those_of_ranks_that_are_processes(few, four, strategy):
    mine, theirs = few.run(strategy, timeout=120), four.run(strategy, timeout=120)
    name = strategy.__name__
    assert mine.events
    for a, b in zip(mine.ranks, theirs.ranks, strict=True):
        told = [test_rehearse.in_a_fixed_order(name, test_rehearse.told(r)) for r in (a, b)]
        assert told[0] == told[1]


def test_every_kind_of_call_is_recorded_as_on_processes(few, four):
    mine, theirs = few.run(test_rehearse.by_hand), four.run(test_rehearse.by_hand)
    assert [test_rehearse.told(r) for r in mine.ranks] == [test_rehearse.told(r) for r in theirs.ranks]


# What each rank has of its own

SEEDED = """
import random
import numpy as np
torch.manual_seed(rank); random.seed(rank); np.random.seed(rank)
a = torch.rand(3), random.random(), np.random.rand()
dist.barrier()
b = torch.rand(3), random.random(), np.random.rand()
dist.barrier()
a, b, torch.randn(2)
"""


def test_random_numbers_are_each_ranks_own(few, four):
    mine, theirs = few.run(SEEDED).values, four.run(SEEDED).values
    assert repr(mine) == repr(theirs)
    assert len({repr(v) for v in mine}) == 4
    assert repr(few.run("torch.rand(2)").values) == repr(
        four.run("torch.rand(2)").values
    )  # the next cell goes on


def test_the_default_dtype_is_each_ranks_own(few):
    run = few.run("torch.set_default_dtype([torch.float32, torch.float64][rank % 2])\ndist.barrier()")
    run = few.run("dtype = torch.ones(1).dtype\ntorch.set_default_dtype(torch.float32)\ndtype")
    assert run.values == [torch.float32, torch.float64] * 2


def test_two_runs_are_alike(many):
    source = "x = torch.ones(1)\norder = [dist.recv(x) for _ in range(63)] if rank == 0 else dist.send(x, 0)\norder"
    assert many.run(source).values == many.run(source).values
    assert rankcell.run("dist.get_rank()", world_size=3, local=True).values == [0, 1, 2]


def test_names_and_groups_live_on(few):
    few.run("x = torch.ones(2) * rank\npair = dist.new_group([0, 1])\nclass Mine: at = rank")
    run = few.run(
        "if rank < 2: dist.all_reduce(x, group=pair)\nx[0].item(), Mine.at, __import__('__main__').x is x"
    )
    assert run.values == [(1.0, 0, True), (1.0, 1, True), (2.0, 2, True), (3.0, 3, True)]
    assert few.run("rank + y", push={"y": 1}, pull=["y"]).pulled["y"] == [1] * 4


def test_text_is_that_of_the_rank_that_wrote_it(few):
    run = few.run(
        """
        import os, subprocess, sys
        print("one of", rank)
        print("aside", rank, file=sys.stderr)
        subprocess.run(["echo", f"from a child of {rank}"], check=True)
        dist.barrier()
        print("two of", rank, os.environ["RANK"], os.environ["LOCAL_RANK"])
        display(rank)
        """.replace("\n        ", "\n")
    )
    for r in run.ranks:
        assert sorted(r.stdout.splitlines()) == [
            f"from a child of {r.rank}",
            f"one of {r.rank}",
            f"two of {r.rank} {r.rank} {r.rank}",
        ]
        assert r.stderr == f"aside {r.rank}\n"
        assert r.displays[0].data["text/plain"] == str(r.rank)


def test_sleeping_ranks_do_not_keep_the_others(many):
    began = time.monotonic()
    run = many.run("import time; time.sleep(1); dist.barrier(); time.time()", timeout=60)
    assert time.monotonic() - began < 40 and len(run.values) == 64  # one after another: 64 s


def test_spans_memory_steps_values_and_traces_are_each_ranks_own(few, shell):
    run = few.run(
        "model = torch.nn.Linear(4, 4)\nwith rankcell.memory(model), rankcell.span('work'), rankcell.trace(model):\n"
        "    y = model(torch.ones(2, 4)).sum()\n    dist.all_reduce(y)\n    y.backward()",
        push={"rankcell": rankcell},
        values=True,
        step=["y"],
    )
    for r in run.ranks:
        assert [e.op for e in r.events if e.kind == "compute"] == ["work"]
        assert r.memory[-1].parameters == 80
        assert len(r.trace) == len(run.ranks[0].trace) > 0
        assert next(e for e in r.events if e.kind == "comm").values is not None
        assert [s.line for s in r.steps][:2] == [1, 2]
    torch.manual_seed(0)
    shell.user_ns["dense"], shell.user_ns["x"] = nn.Linear(4, 1), torch.randn(8, 4)
    line = "%%ranks 4 --local --push dense,x --against dense -o run"
    cell = "DDP(dense)(x[2 * rank : 2 * rank + 2]).mean().backward()"
    shell.run_cell(f"{line}\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n{cell}")
    run = shell.user_ns["run"]
    assert run.against.ok, run.against
    assert (
        len({tuple((t.name, t.kind) for t in r.trace) for r in run.ranks}) == 1
    )  # nobody has traced another's model


# What goes wrong


def test_a_deadlock_is_told_as_on_processes(few, four):
    source = "x = torch.ones(4)\nif rank != 2:\n    dist.all_reduce(x)"
    texts = []
    for ranks in (few, four):
        with pytest.raises(Deadlock) as raised:
            ranks.run(source, timeout=60)
        texts.append(str(raised.value))
        assert ranks.run("dist.barrier(); rank").values == [0, 1, 2, 3]
    assert texts[0] == texts[1]


def test_calls_that_do_not_match_are_told(many):
    with pytest.raises(RankMismatch, match="different shapes"):
        many.run("dist.all_reduce(torch.ones(3 if rank == 40 else 4))", timeout=60)
    with pytest.raises(Deadlock, match=r"ranks 0-63 all send first"):
        many.run("dist.send(torch.ones(1), rank ^ 1)", timeout=60)
    assert sum(many.run("dist.barrier(); rank").values) == 63 * 32


def test_a_rank_that_raises_ends_the_cell(many):
    with pytest.raises(RankError, match="rank 5 of 64") as raised:
        many.run("kept = 1\nif rank == 5:\n    1 / 0\ndist.barrier()", timeout=60)
    assert "ZeroDivisionError" in str(raised.value)
    assert sum(r.state == "error" for r in raised.value.run.ranks) == 64
    assert many.run("kept").values == [1] * 64


@pytest.mark.parametrize("endless", ["while True: pass", "if rank: dist.barrier()\nwhile True: pass"])
def test_an_endless_loop_can_be_interrupted(few, endless, monkeypatch):
    """However busy the machine: the ranks get all the time that they need to come back."""
    for name, seconds in {"GRACE": 4.0, "PATIENCE": 60.0, "SPINS": 60.0}.items():
        monkeypatch.setattr(cell, name, seconds)
    few.run("kept = rank")
    with pytest.raises(rankcell.RankTimeout):
        few.run(endless, timeout=0.5)
    assert few.run("kept").values == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "deaf",
    [
        "import ctypes\nctypes.CDLL(None).sleep(600)",
        "x = torch.ones(3000, 3000, dtype=torch.long)\nx @ x",  # this one computes meanwhile
    ],
)
def test_a_rank_that_cannot_be_interrupted_is_replaced_with_the_others(few, deaf):
    with pytest.raises(rankcell.RankTimeout, match="ranks 0-3 did not react and were replaced"):
        few.run(deaf, timeout=0.5)
    assert few.run("dist.barrier(); rank").values == [0, 1, 2, 3]


def test_a_thread_that_communicates_is_told_to_leave_it(few):
    source = "import threading\ndef f():\n    global said\n    try: dist.barrier()\n"
    source += "    except Exception as e: said = str(e)\n"
    run = few.run(source + "t = threading.Thread(target=f); t.start(); t.join(); said", timeout=60)
    assert all("only the main thread of a rank can communicate" in v for v in run.values)


def test_what_local_cannot_be(shell):
    for options in ({"device": "cuda"}, {"nodes": 2}, {"on": "h100"}):
        with pytest.raises(ValueError, match="do not go together"):
            rankcell.Ranks(4, local=True, **options)
    with pytest.raises(WorldSizeError, match="1,024 do"):
        rankcell.Ranks(5000, local=True)
    assert shell.run_cell("%%ranks 2 --local\n1").success
    result = shell.run_cell("%%ranks 2 --local --device cuda\n1")
    assert isinstance(result.error_in_exec, OptionError)


def test_the_magic(shell, capsys):
    shell.run_cell("%%ranks 16 --local -o run\nx = torch.tensor([rank])\ndist.all_reduce(x)\nx.item()")
    assert shell.user_ns["run"].values == [120] * 16
    assert "16 ranks talk over no network: they take turns in one process" in capsys.readouterr().out
    shell.run_cell("%%ranks 16 --local --only 3 -o run\nx.item() + rank")
    assert shell.user_ns["run"].ranks[3].value == 123
    line = next(t for t in repr(shell.run_line_magic("ranks", "")).splitlines() if t.startswith("16 ranks"))
    assert line.startswith("16 ranks on cpu (local), ") and line.count(",") == 2  # one process
    shell.run_cell("%%ranks 16 --local --fresh -o run\n'x' in globals()")
    assert shell.user_ns["run"].values == [False] * 16
