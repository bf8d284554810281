"""What only a GPU can show. `make gpu` runs these; `notebooks/recorded` says on which GPU they ran last."""

import pytest
import torch

import rankcell
from rankcell import Deadlock, RankError, RankLost

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"


@pytest.fixture(scope="module")
def four():
    """Four ranks on as many GPUs as there are; with fewer than four they share them."""
    with rankcell.Ranks(4, device=DEVICE) as ranks:
        yield ranks


def works(ranks):
    source = "probe = torch.full((3,), float(rank), device=device); dist.all_reduce(probe); probe.tolist()"
    assert ranks.run(source).values == [[6.0] * 3] * 4


def test_operations_are_right(four):
    source = """
x, y, part, turned = (torch.arange(8.0) + 10 * rank).to(device), *(torch.empty(n, device=device) for n in (32, 2, 8))
dist.all_gather_single(y, x)
dist.reduce_scatter_single(part, x)
dist.all_to_all_single(turned, x)
came, total, last = torch.empty_like(x), x.clone(), x.clone()
calls = [lambda: dist.isend(x, (rank + 1) % 4), lambda: dist.irecv(came, (rank - 1) % 4)][:: 1 if rank % 2 else -1]
for w in [call() for call in calls]: w.wait()
dist.all_reduce(total)
dist.broadcast(last, 3)
dist.barrier()
[device.index, *(t.cpu() for t in (y, part, turned, came, total, last))]
"""
    w = torch.arange(8.0) + 10 * torch.arange(4.0)[:, None]
    turned = w.view(4, 4, 2).transpose(0, 1).reshape(4, 8)
    for rank, (index, *values) in enumerate(four.run(source).values):
        right = (w.flatten(), w.sum(0).chunk(4)[rank], turned[rank], w[rank - 1], w.sum(0), w[3])
        assert index == rank % torch.cuda.device_count() and all(map(torch.equal, values, right))


# fmt: off
FAILURES = {
    "if rank != 2:\n    dist.all_reduce(x)\nx.tolist()": (
        Deadlock, "rank 2 finished the cell without the all_reduce that ranks 0, 1, 3 wait in"),
    "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)\nx.tolist()": (
        RankLost, "rank 1 of 4 was killed"),
    "if rank == 0: torch.empty(1 << 42, device=device)\ndist.barrier()": (
        RankError, r"rank 0 of 4 failed first: (torch\.)?OutOfMemoryError"),
    "if rank != 2: dist.all_reduce(torch.ones(4))": (Deadlock, "rank 2 finished the cell without"),
}
# fmt: on


@pytest.mark.parametrize("source", FAILURES)
def test_a_failure_is_explained_and_names_are_kept(four, source):
    kind, headline = FAILURES[source]
    four.run("kept = torch.full((2,), float(rank), device=device)\nx = torch.ones(4, device=device)")
    with pytest.raises(kind, match=headline):
        four.run(source)
    works(four)
    kept = four.run("kept.tolist() if 'kept' in globals() else None").values
    assert kept == [None if kind is RankLost and r == 1 else [float(r)] * 2 for r in range(4)]


def test_one_rank_is_recorded_and_let_go():
    """One rank has a GPU of its own: it talks over nccl on every machine that has it. Memory is the allocator's."""
    source = """
import rankcell
from IPython import get_ipython
from rankcell import models
x = torch.ones(1000, device=device)
for _ in range(300):
    dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
torch.cuda.synchronize()
dist.all_reduce(x)
still = len(get_ipython().recorder.open)
model = models.GPT(64, 128, n_heads=4, context=64, device=device)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(64, (8, 65), device=device)
for step in range(2):
    with rankcell.memory(model, optimizer) as held:
        models.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
    if step == 0: optimizer.zero_grad()
states = sum(p.numel() * 4 * 4 for p in model.parameters())
peak, last = max(m.total for m in held.samples), held.samples[-1]
kinds = last.parameters + last.gradients + last.optimizer
[still, states, kinds, last.total, torch.cuda.memory_allocated(), peak, torch.cuda.max_memory_allocated()]
"""
    with rankcell.Ranks(1, device=DEVICE) as one:
        run = one.run(source)
        (event,) = one.run("x = torch.arange(3.0, device=device)\ndist.all_reduce(x)", values=True).events
    assert event.values.input_before == event.values.output_after == ((0.0, 1.0, 2.0),)
    assert [e.op for e in run.events if e.kind == "comm"] == ["all_reduce"] * 302
    still, states, kinds, total, allocated, peak, most = run.values[0]
    assert still <= 1 and abs(kinds - states) < 0.02 * states
    # the allocator hands out multiples of 512 bytes; workspaces of cuBLAS are its own affair: 32 MiB on an H100, one in
    # the thread of the forward and one in that of the backward
    assert total <= allocated <= total + (80 << 20)
    assert peak <= most <= peak + (128 << 20)


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
    if four.backend == "nccl":  # gloo takes both
        with pytest.raises(rankcell.RankMismatch, match="a tensor on the CPU and one on a GPU"):
            four.run("dist.all_reduce(torch.ones(4, device=device if rank else 'cpu'))")
        works(four)
