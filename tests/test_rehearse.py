"""A rehearsed rank does what a real one does: the same operations, bytes and memory, and no computing."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import parallel

import rankcell
from rankcell import models
from rankcell.planner import communication, layout, stacks
from rankcell.rehearsal import Cluster, sent_by_level
from rankcell.rehearsal.clock import StreamClock
from rankcell.results import Event

pytestmark = pytest.mark.slow

VOCAB, WIDTH, LENGTH = 40, 32, 8
COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
PLAN = {name: parallel.ColwiseParallel() for name in COLUMNS}
PLAN |= {"attention.output": parallel.RowwiseParallel(), "mlp.down": parallel.RowwiseParallel()}


def ddp():
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
    for _ in range(3):
        model(torch.ones(8, WIDTH)).sum().backward()
        model.zero_grad()


def fsdp2_and_tensor():
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = models.Llama(VOCAB, WIDTH, n_heads=4, n_kv_heads=4, n_layers=2, context=LENGTH)
    for block in model.blocks:
        parallel.parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # places in a text that are drawn, and read as numbers
    tokens, place = torch.arange(400) * 7919 % VOCAB, mesh.get_local_rank("dp")
    with rankcell.memory(model, optimizer):
        for _ in range(2):
            x, y = models.batch(tokens, 0, size=8, length=LENGTH, rank=place, world_size=2)
            models.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def by_hand():
    """Every kind of call, waited for in every way."""
    rank, n = dist.get_rank(), dist.get_world_size()
    group = [dist.new_group(range(first, n, 2)) for first in range(2)][rank % 2]
    x, parts = torch.ones(n, 6), [torch.empty(6) for _ in range(n)]
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    work = dist.all_reduce(x, async_op=True)
    dist.broadcast(x, 1)
    work.wait()
    dist.reduce(x, 0)
    dist.all_gather(parts, x[0])
    dist.gather(x[0], parts if rank == 2 else None, dst=2)
    dist.scatter(x[0], parts if rank == 1 else None, src=1)
    dist.all_to_all_single(torch.empty(n, 6), x)
    dist.reduce_scatter_tensor(torch.empty(6), x.flatten())
    if rank in (0, 1):
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank, tag=3)
    functional.all_reduce(x, "sum", group=group) + 1
    functional.reduce_scatter_tensor(x, "avg", 0, group=dist.group.WORLD) + 1
    dist.barrier()


CASES = [ddp, fsdp2_and_tensor, by_hand]
SAID = "op ranks seq shape dtype nbytes peer tag reduce_op is_async line via"


def told(result):
    """All that an operation is, but its times."""
    return [tuple(getattr(e, name) for name in SAID.split()) for e in result.events if e.kind == "comm"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_operation_and_byte_is_that_of_a_real_run(four, case):
    run = rankcell.rehearse(case, world_size=4, as_rank=3, on="1xh100x4")
    assert [r.rank for r in run.ran] == [3] and (run.world_size, run.backend) == (4, "fake")
    mine, theirs = run.ranks[3], four.run(case).ranks[3]
    assert told(mine) == told(theirs) != []
    if theirs.memory:
        # the states are the same to the byte; what gloo's threads still hold for a moment is not
        for kind in ("parameters", "gradients", "optimizer"):
            held = [max(sample.by_kind[kind] for sample in result.memory) for result in (mine, theirs)]
            assert held[0] == pytest.approx(held[1], rel=0.01), kind
        assert mine.peak.total == pytest.approx(theirs.peak.total, rel=0.15)


@pytest.fixture(scope="module")
def seventh():
    """Rank 7 of 1,024."""
    with rankcell.Ranks(1024, on="128xh100x8", as_rank=7) as ranks:
        yield ranks


def test_what_comes_with_the_task_is_fake_too(seventh):
    source = (
        "model(x).sum().backward()\nw = model.weight\norder.tolist(), tuple(w.grad.shape), w.nbytes, rank"
    )
    given = {"model": nn.Linear(3, 4), "x": torch.ones(2, 3), "order": torch.arange(3)}
    run = seventh.run(source, push=given)
    assert run.ranks[7].value == ([0, 1, 2], (4, 3), 48, 7) and run.ranks[7].peak.gradients == 4 * (12 + 4)
    kept = seventh.run("x").ranks[7].value
    assert kept.reason == "a tensor of a rehearsal has a shape and no numbers to send"


ASKS = ["x.sum().item()", "x.nonzero()", "f'{x.sum():.3f}'", "x.numpy()", "dist.all_reduce(r); r.tolist()"]


@pytest.mark.parametrize("asks", ASKS)
def test_what_only_computing_gives_is_an_error(seventh, asks):
    with pytest.raises(rankcell.RankError, match=r"a rehearsal cannot know that") as raised:
        seventh.run(f"x, r = torch.ones(3), torch.tensor([rank])\n{asks}")
    assert "at line 2:" in str(raised.value)


def sends():
    big = torch.empty(1 << 28)  # 1 GiB
    near, far = dist.new_group(range(8)), dist.new_group(range(7, 1024, 8))
    with rankcell.span("product"):
        torch.empty(4096, 4096, dtype=torch.bfloat16) @ torch.empty(4096, 4096, dtype=torch.bfloat16)
    dist.all_reduce(big, group=near)
    work = dist.all_reduce(big, group=far, async_op=True)
    torch.empty(1 << 20).add_(1)
    work.wait()
    dist.all_reduce(big)


def test_the_clock_goes_by_the_planner(seventh):
    run = seventh.run(sends)
    result = run.ranks[7]
    near, far, everybody = (e for e in result.events if e.kind == "comm")
    (product,) = (e for e in result.events if e.kind == "compute")
    chip = Cluster.parse("128xh100x8", 1024).chip
    rate = chip.peak("bf16") * stacks.efficiency(chip, "bf16")
    assert product.seconds == pytest.approx(2 * 4096**3 / rate)
    job = layout.Job(None, chip, 1024, 1, 1, "bf16", None)
    for event, ranks, stride in ((near, 8, 1), (far, 128, 8), (everybody, 1024, 1)):
        bandwidth, latency, _ = communication.link(job, ranks, stride)
        assert event.seconds == pytest.approx(2 * communication.ring(2**30, ranks, bandwidth, latency))
    assert far.issued < far.wait_start < far.done == far.end <= everybody.start
    assert result.seconds == everybody.end
    sent = sent_by_level(run)
    assert sent["between nodes"] == pytest.approx(2 * 2**30 * (127 / 128 + 1023 / 1024 / 8))
    assert sent["inside a node"] == pytest.approx(2 * 2**30 * (7 / 8 + 1023 / 1024 * 7 / 8))
    assert run.nodes[:9] == ("node 0",) * 8 + ("node 1",)


def test_what_one_operation_takes_by_hand():
    """One after another in a group, not so in two. Eight ranks on two nodes are a ring over the ports of four GPUs."""
    clock = StreamClock()
    clock.work(1.0)
    ends = [clock.communicate(group, seconds) for group, seconds in (("a", 2.0), ("a", 3.0), ("b", 0.5))]
    assert ends == [3.0, 6.0, 1.5] and clock() == 1.0 and clock.finish() == 6.0
    cluster = Cluster.parse("2xh100x4", 8)
    chip, four, eight = cluster.chip, tuple(range(4)), tuple(range(8))
    alpha, share = chip.alpha, 2**20 / chip.bus  # of an array of 1 MiB
    ring = 3 * alpha + 3 / 4 * share
    gather, tree = 3 * alpha + 3 * share, 2 * alpha + share  # 1 MiB is what each rank brings to a gather
    wanted = {"reduce_scatter": ring, "all_reduce": 2 * ring, "all_gather": gather, "gather": gather}
    wanted |= {"broadcast": tree, "reduce": tree, "send": alpha + share}
    wanted |= {"all_to_all": alpha + 3 / 4 * share, "barrier": 4 * alpha}
    assert {op: cluster.seconds(op, 2**20, four) for op in wanted} == pytest.approx(wanted)
    port = 2**20 / (0.95 * chip.network)
    gathered, swapped = (cluster.seconds(op, 2**20, eight) for op in ("all_gather", "all_to_all"))
    assert gathered == pytest.approx(7 * chip.alpha_across + 7 / 4 * port)
    assert swapped == pytest.approx(chip.alpha_across + 3 / 8 * share + port / 2)
    assert cluster.seconds("all_reduce", 2**20, (5,)) == 0
    swap = Event(1, "all_to_all", 0.0, 1.0, nbytes=12, ranks=four)
    assert list(sent_by_level([swap], ["a", "a", "b", "b"]).values()) == pytest.approx([3.0, 6.0])


UNFIT = [
    ("100xh100x8", 0, "800 GPUs, and the job has 1024"), ("h99", 0, "There is no GPU called"),
    ("8x8", 0, "names no cluster"), ("h100", 1024, "rank 1024 does not exist among 1024 ranks: they are 0 to 1023"),
]  # fmt: skip


@pytest.mark.parametrize(("on", "as_rank", "says"), UNFIT)
def test_a_cluster_that_does_not_fit_is_an_error(on, as_rank, says):
    with pytest.raises(ValueError, match=says):
        rankcell.Ranks(1024, on=on, as_rank=as_rank)
