"""What only a GPU can show. `make gpu` runs these, and everything else that is marked gpu.

`notebooks/recorded` says on which GPU they ran last.
"""

import time

import pytest
import torch

import rankcell
from rankcell import Deadlock, RankLost
from rankcell.engine import devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
SUM = "probe = torch.full((3,), float(rank), device=device); dist.all_reduce(probe); probe.tolist()"


@pytest.fixture(scope="module")
def four():
    """Four ranks on as many GPUs as there are; with fewer than four they share them."""
    with rankcell.Ranks(4, device=DEVICE) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one():
    """One rank with a GPU of its own: it talks over nccl on every machine that has it."""
    with rankcell.Ranks(1, device=DEVICE) as ranks:
        yield ranks


def works(ranks):
    assert ranks.run(SUM).values == [[6.0] * 3] * 4


# --- the world ---


def test_ranks_share_what_gpus_there_are(four):
    choice = devices.choose(4, DEVICE, devices.look())
    run = four.run("x = torch.ones(1, device=device)\n[x.device.type, x.device.index]")
    gpus = torch.cuda.device_count()
    assert run.values == [[DEVICE, r % gpus] for r in range(4)]
    assert choice.shared == -(-4 // gpus)
    assert four.backend in (choice.backend, "gloo") and four.device_note


OPERATIONS = {
    "all_reduce": ("x = mine(); dist.all_reduce(x); x", lambda w: [w.sum(0)] * 4),
    "broadcast": ("x = mine(); dist.broadcast(x, 2); x", lambda w: [w[2]] * 4),
    "all_gather_single": (
        "y = torch.empty(32, device=device); dist.all_gather_single(y, mine()); y",
        lambda w: [w.flatten()] * 4,
    ),
    "reduce_scatter_single": (
        "y = torch.empty(2, device=device); dist.reduce_scatter_single(y, mine()); y",
        lambda w: list(w.sum(0).chunk(4)),
    ),
    "all_to_all_single": (
        "y = torch.empty(8, device=device); dist.all_to_all_single(y, mine()); y",
        lambda w: list(w.view(4, 4, 2).transpose(0, 1).reshape(4, 8)),
    ),
    "send and recv": (
        "x, y = mine(), torch.empty(8, device=device)\n"
        "works = [dist.isend(x, (rank + 1) % 4), dist.irecv(y, (rank - 1) % 4)] if rank % 2 else "
        "[dist.irecv(y, (rank - 1) % 4), dist.isend(x, (rank + 1) % 4)]\n"
        "for w in works: w.wait()\ny",
        lambda w: [w[(r - 1) % 4] for r in range(4)],
    ),
    "barrier": ("dist.barrier(); mine()", lambda w: list(w)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_right(four, name):
    source, expected = OPERATIONS[name]
    helper = "def mine(): return (torch.arange(8.0) + 10 * rank).to(device)\n"
    whole = torch.arange(8.0) + 10 * torch.arange(4.0)[:, None]
    values = [v.cpu() for v in four.run(helper + source).values]
    for value, right in zip(values, expected(whole), strict=True):
        assert torch.equal(value, right)


def test_one_rank_cannot_take_all_of_a_shared_gpu(four):
    fraction = four._choice.memory_fraction
    if fraction is None:
        pytest.skip("every rank has a GPU of its own")
    source = """
total = torch.cuda.get_device_properties(device).total_memory
try:
    x = torch.empty(int(total * 0.5), dtype=torch.uint8, device=device)
    said = "it got half of the GPU"
except torch.cuda.OutOfMemoryError:
    said = "refused"
x = None
said
"""
    assert fraction < 0.5 and four.run(source, only=[0]).values == ["refused"]
    works(four)


# --- failures ---


def test_a_hang_is_explained_in_five_seconds_and_names_are_kept(four):
    works(four)
    four.run("kept = torch.full((2,), float(rank), device=device)")
    start = time.monotonic()
    with pytest.raises(
        Deadlock, match=r"rank 2 finished the cell without the all_reduce that ranks 0, 1, 3 wait in"
    ):
        four.run("x = torch.ones(4, device=device)\nif rank != 2:\n    dist.all_reduce(x)\nx.tolist()")
    assert time.monotonic() - start < 5
    works(four)
    assert four.run("kept.tolist()").values == [[float(r)] * 2 for r in range(4)]


def test_a_rank_that_is_killed_is_replaced(four):
    with pytest.raises(RankLost, match="rank 1 of 4 was killed"):
        four.run(
            "import os, signal\nx = torch.ones(4, device=device)\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)\nx.tolist()"
        )
    works(four)


def test_out_of_memory_is_an_ordinary_exception(four):
    with pytest.raises(rankcell.RankError, match=r"rank 0 of 4 failed first: (torch\.)?OutOfMemoryError"):
        four.run("if rank == 0: torch.empty(1 << 42, device=device)\ndist.barrier()")
    works(four)


def test_a_slow_kernel_is_not_stuck(four):
    source = """
import time
x = torch.randn(2048, 2048, device=device)
end = time.monotonic() + 3
while rank == 1 and time.monotonic() < end:
    x = torch.tanh(x @ x)
y = torch.ones(1, device=device)
dist.all_reduce(y)
y.item()
"""
    assert four.run(source).values == [4.0] * 4


# --- nccl, with one rank: what it enqueues, and what becomes of it ---


def test_nccl_of_one_rank_is_recorded_and_let_go(one):
    if one.backend != "nccl":
        pytest.skip("this torch has no nccl")
    source = """
from IPython import get_ipython
x = torch.ones(1000, device=device)
for _ in range(300):
    dist.all_reduce(x)
w = dist.all_reduce(x, async_op=True)
w.wait()
torch.cuda.synchronize()
dist.all_reduce(x)
len(get_ipython().recorder.open)
"""
    run = one.run(source)
    assert run.values[0] <= 1
    assert [e.op for e in run.events] == ["all_reduce"] * 302


def test_nccl_values_before_and_after(one):
    run = one.run("x = torch.arange(3.0, device=device)\ndist.all_reduce(x)", values=True)
    assert run.events[0].values.input_before == ((0.0, 1.0, 2.0),)
    assert run.events[0].values.output_after == ((0.0, 1.0, 2.0),)


# --- tensors on the CPU, in a world of GPUs ---


def test_tensors_on_the_cpu_go_over_gloo(four):
    source = """
x, y, everybody = torch.ones(4) * rank, torch.ones(3, device=device), [None] * 4
dist.all_reduce(x)
dist.all_reduce(y)
works = [dist.all_reduce(x, async_op=True), dist.isend(torch.ones(2) * rank, (rank + 1) % 4)]
came = torch.empty(2)
dist.recv(came, (rank - 1) % 4)
for w in works: w.wait()
dist.all_gather_object(everybody, rank)
[x.tolist(), y.tolist(), came.tolist(), everybody]
"""
    run = four.run(source)
    assert run.values == [[[24.0] * 4, [4.0] * 3, [float((r - 1) % 4)] * 2, [0, 1, 2, 3]] for r in range(4)]


def test_a_hang_on_the_cpu_is_explained_and_mended(four):
    with pytest.raises(Deadlock, match="rank 2 finished the cell without the all_reduce"):
        four.run("if rank != 2:\n    dist.all_reduce(torch.ones(4))")
    works(four)
    assert four.run("x = torch.ones(2)\ndist.all_reduce(x)\nx.tolist()").values == [[4.0, 4.0]] * 4


def test_a_tensor_on_the_cpu_does_not_match_one_on_a_gpu(four):
    if four.backend != "nccl":
        pytest.skip("gloo takes both")
    with pytest.raises(rankcell.RankMismatch, match="a tensor on the CPU and one on a GPU"):
        four.run("dist.all_reduce(torch.ones(4, device=device if rank else 'cpu'))")
    works(four)


def test_ranks_on_the_cpu_see_no_gpu():
    """torch takes a GPU that it sees where no device is named, in fully_shard for example."""
    with rankcell.Ranks(2, device="cpu") as ranks:
        run = ranks.run(
            "from torch.distributed.fsdp import fully_shard\nmodel = torch.nn.Linear(4, 4)\nfully_shard(model)\n"
            "model(torch.ones(2, 4)).sum().backward()\n[torch.cuda.is_available(), model.weight.device.type]"
        )
    assert run.values == [[False, "cpu"]] * 2


def test_a_tensor_in_parts_becomes_whole(four):
    """By functional collectives, whose Work nobody in Python waits for."""
    source = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh(device.type, (4,))
for _ in range(20):
    whole = distribute_tensor(torch.arange(8.0, device=device), mesh, [Shard(0)]).full_tensor()
whole.tolist()
"""
    assert four.run(source).values == [[float(i) for i in range(8)]] * 4


# --- recorders ---


def test_events_are_those_that_kineto_counts(four):
    source = """
from collections import Counter
from torch.profiler import ProfilerActivity, profile
x, y = torch.ones(64, device=device), torch.empty(256, device=device)
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
    for _ in range(3): dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_gather_single(y, x)
    dist.barrier()
    torch.cuda.synchronize()
dict(Counter(e.key for e in p.events() if e.key.startswith("c10d::")))
"""
    run = four.run(source)
    kineto = {"c10d::allreduce_": 3, "c10d::broadcast_": 1, "c10d::_allgather_base_": 1, "c10d::barrier": 1}
    assert run.values == [kineto] * 4
    for rank in range(4):
        ours = [e.op for e in run.events if e.rank == rank]
        assert ours == ["all_reduce"] * 3 + ["broadcast", "all_gather", "barrier"]


def test_memory_is_what_the_allocator_says(one):
    source = """
import rankcell
from rankcell import models
model = models.GPT(64, 128, n_heads=4, context=64, device=device)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(64, (8, 65), device=device)
for step in range(2):
    with rankcell.memory(model, optimizer) as held:
        models.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
    if step == 0: optimizer.zero_grad()
states = sum(p.numel() * 4 * 4 for p in model.parameters())
peak = max(held.samples, key=lambda m: m.total)
last = held.samples[-1]
kinds = last.parameters + last.gradients + last.optimizer
[states, kinds, last.total, last.allocated, peak.total, torch.cuda.max_memory_allocated()]
"""
    states, kinds, total, allocated, peak, most = one.run(source).values[0]
    assert abs(kinds - states) < 0.02 * states
    # the allocator hands out multiples of 512 bytes; workspaces of cuBLAS are its own affair: 32 MiB on an H100, one in
    # the thread of the forward and one in that of the backward
    assert total <= allocated <= total + (80 << 20)
    assert peak <= most <= peak + (128 << 20)


# --- strategies: the same answer as one process ---

STRATEGY = """
from rankcell import models
from rankcell.parallel.ddp import DDP
from rankcell.parallel.fsdp import FSDP
torch.manual_seed(0)
dtype = getattr(torch, "{dtype}")
model = models.MLP(8, 64, 4).to(device, dtype)
wrapped = {wrap}
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
x, y = (t.to(device, dtype) for t in models.regression(32, 8, 4))
rows = slice(8 * rank, 8 * rank + 8)
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(wrapped(x[rows]), y[rows])
    loss.backward()
    {finish}
    optimizer.step()
    mean = loss.detach().float()
    dist.all_reduce(mean)
    losses.append(mean.item() / world_size)
losses
"""
STRATEGIES = {
    "DDP of the lesson": ("DDP(model)", "pass"),
    "FSDP of the lesson": ("FSDP(model)", "pass"),
    "DistributedDataParallel": ("torch.nn.parallel.DistributedDataParallel(model)", "pass"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_what_one_process_trains(four, name, dtype):
    from rankcell import models

    wrap, finish = STRATEGIES[name]
    values = four.run(STRATEGY.format(dtype=dtype, wrap=wrap, finish=finish)).values
    assert all(v == values[0] for v in values)
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    model = models.MLP(8, 64, 4).to(DEVICE, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (t.to(DEVICE, kind) for t in models.regression(32, 8, 4))
    dense = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        dense.append(loss.item())
    # float32: sums in another order, and TF32 is off by default; bfloat16 has 8 bits of mantissa
    assert values[0] == pytest.approx(dense, rel=1e-4 if dtype == "float32" else 3e-2)


# --- streams ---


def test_streams_really_overlap():
    """A pinned copy and products on two streams take less than one after the other."""
    x = torch.randn(2048, 2048, device=DEVICE)
    host = torch.randn(2**26, pin_memory=True)  # 256 MiB
    compute, copies = torch.cuda.Stream(), torch.cuda.Stream()
    count = 0  # of products: they must take about as long as the copy, or there is nothing to see

    def products():
        for _ in range(count):
            torch.mm(x, x, out=out)

    out, target = torch.empty_like(x), torch.empty(2**26, device=DEVICE)

    def milliseconds(*, together):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for stream in (compute, copies):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(compute):
            products()
        with torch.cuda.stream(copies if together else compute):
            target.copy_(host, non_blocking=True)
        for stream in (compute, copies):
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    milliseconds(together=True)  # wakes the GPU
    copy = milliseconds(together=False)
    count = 20
    milliseconds(together=True)  # loads the libraries
    count = max(1, round(copy / ((milliseconds(together=False) - copy) / count)))
    apart = min(milliseconds(together=False) for _ in range(5))
    together = min(milliseconds(together=True) for _ in range(5))
    assert together < 0.9 * apart
