"""What is recorded equals what each strategy must issue, and the bytes on the wire equal the formulas."""

import textwrap

import pytest

from rankcell.engine import system
from rankcell.results import Event

MIB = 1 << 20


def operations(run, rank=0):
    """What one rank called, in order."""
    return [e.op for e in sorted(run.ranks[rank].events, key=lambda e: e.start) if e.kind == "comm"]


def test_an_event_says_what_was_called(four):
    run = four.run("x = torch.ones(5, dtype=torch.float64)\n\ndist.all_reduce(x, op=dist.ReduceOp.MAX)")
    (event,) = run.ranks[2].events
    assert (event.op, event.shape, event.dtype, event.nbytes) == ("all_reduce", (5,), "float64", 40)
    assert (event.reduce_op, event.ranks, event.seq, event.line) == ("MAX", (0, 1, 2, 3), 1, 3)
    assert 0 <= event.start <= event.issued <= event.end and not event.is_async
    assert event.text == "all_reduce(float64[5], MAX)"


def test_every_collective_is_recorded_once(four):
    source = """
    x, parts = torch.ones(4), [torch.ones(1) for _ in range(4)]
    dist.broadcast(x, 1); dist.all_reduce(x); dist.reduce(x, 2)
    dist.all_gather(parts, torch.ones(1)); dist.all_gather_single(x, torch.ones(1))
    dist.scatter(torch.ones(1), parts if rank == 3 else None, src=3)
    dist.gather(torch.ones(1), parts if rank == 3 else None, dst=3)
    dist.reduce_scatter_single(torch.ones(1), x); dist.all_to_all_single(torch.ones(4), x)
    dist.barrier()
    """
    run = four.run(textwrap.dedent(source))
    names = ["broadcast", "all_reduce", "reduce", "all_gather", "all_gather", "scatter", "gather"]
    assert operations(run, 1) == [*names, "reduce_scatter", "all_to_all", "barrier"]
    peers = {e.op: e.peer for e in run.ranks[0].events}
    assert (peers["broadcast"], peers["reduce"], peers["scatter"], peers["gather"]) == (1, 2, 3, 3)


def test_a_gather_that_crashes_gloo_on_a_gpu_goes_through_the_host(four):
    """Here there is no GPU: the ranks are told that it crashes on the CPU, too."""
    source = """
    import torch.distributed._functional_collectives as collectives
    from rankcell.engine import record

    truth, seen = record._crashes, []
    record._crashes = lambda name, tensor: seen.append(name) or name.startswith("allgather_into_tensor_coalesced")
    try:
        part = torch.full((2,), float(rank))
        whole = collectives.wait_tensor(collectives.all_gather_tensor(part, 0, dist.group.WORLD))
    finally:
        record._crashes = truth
    [whole.tolist(), seen, truth("allgather_into_tensor_coalesced_", part)]
    """
    run = four.run(textwrap.dedent(source))
    everybody = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert run.values == [[everybody, ["allgather_into_tensor_coalesced_"], False]] * 4
    assert operations(run) == ["all_gather"]


def test_send_and_receive_know_their_peer_and_tag(four):
    run = four.run(
        "x = torch.ones(2)\nif rank == 0: dist.send(x, 3, tag=7)\nif rank == 3: dist.recv(x, 0, tag=7)"
    )
    (sent,), (received,) = run.ranks[0].events, run.ranks[3].events
    assert (sent.op, sent.peer, sent.tag) == ("send", 3, 7) and (received.op, received.peer) == ("recv", 0)


def test_a_receive_from_anyone_learns_whose_message_came(four):
    """By the rank of the world, also in a group in which that rank has another number."""
    source = """
    pair, x = dist.new_group([1, 3]), torch.ones(2)
    if rank == 1: dist.isend(x, 3, group=pair).wait()
    if rank == 3: dist.irecv(x, group=pair).wait()
    """
    (received,) = (e for e in four.run(textwrap.dedent(source)).ranks[3].events if e.op == "recv")
    assert received.peer == 1


def test_an_async_operation_ends_when_it_is_done(four):
    run = four.run("w = dist.all_reduce(torch.ones(1 << 20), async_op=True)\nw.wait()")
    (event,) = run.ranks[0].events
    assert event.is_async and event.issued < event.end and event.wait_start is not None


def test_ddp_sends_its_buckets(four):
    source = """
    from torch.nn.parallel import DistributedDataParallel
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    model = DistributedDataParallel(model, bucket_cap_mb=0.3)
    for _ in range(2): model(torch.ones(2, 256)).sum().backward()
    """
    four.run(textwrap.dedent(source))
    run = four.run("model(torch.ones(2, 256)).sum().backward()")
    events = [e for e in run.ranks[1].events if e.op == "all_reduce"]
    assert len(events) == 2  # the first bucket holds 1 MiB, whatever bucket_cap_mb says
    assert sum(e.nbytes for e in events) == 4 * (256 * 256 + 256) * 4
    assert all(e.is_async and e.via == "backward" for e in events)


def test_fsdp2_gathers_and_scatters(four):
    source = """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    mesh = init_device_mesh("cpu", (4,))
    for layer in model: fully_shard(layer, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    model(torch.ones(2, 64)).sum().backward()
    """
    four.run(textwrap.dedent(source))
    names = operations(four.run("model(torch.ones(2, 64)).sum().backward()"))
    assert names.count("all_gather") == 6 and names.count("reduce_scatter") == 3  # forward 3, backward 3


def test_tensor_parallel_all_reduces_once(four):
    source = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
    """
    four.run(textwrap.dedent(source))
    assert operations(four.run("y = model(torch.ones(2, 8))")) == ["all_reduce"]


def test_a_pipeline_sends_activations_and_gradients(four):
    source = """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    layer = torch.nn.Linear(8, 8)
    stage = PipelineStage(layer, rank, world_size, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    x = torch.ones(8, 8)
    def step():
        if rank == 0: schedule.step(x)
        elif rank == world_size - 1: schedule.step(target=x)
        else: schedule.step()
    step()
    """
    four.run(textwrap.dedent(source))
    run = four.run("step()")
    sends = [sum(e.op == "send" for e in r.events) for r in run.ranks]
    assert sends == [4, 8, 8, 4]  # 4 activations forward, 4 gradients backward, none past the ends


def test_spans_are_recorded_beside_communication(four):
    source = "from rankcell import span\nwith span('forward'):\n    torch.ones(3)\ndist.barrier()"
    events = four.run(source).ranks[0].events
    assert {(e.kind, e.op) for e in events} == {("compute", "forward"), ("comm", "barrier")}


def test_values_hold_what_the_tensors_held(four):
    run = four.run("x = torch.full((2,), float(rank))\ndist.all_reduce(x)", values=True)
    (event,) = run.ranks[3].events
    assert event.values.input_before == ((3.0, 3.0),) and event.values.output_after == ((6.0, 6.0),)


def test_a_long_run_keeps_the_newest_events_and_sums_up_the_rest(four):
    from rankcell.draw import page
    from rankcell.engine.record import MAX_EVENTS

    source = f"""
    x = torch.ones(4)
    alone = dist.new_group([0])
    if rank == 0:
        dist.broadcast(x, 0, group=alone)
        for _ in range({MAX_EVENTS + 50}): dist.all_reduce(x, group=alone)
    """
    run = four.run(textwrap.dedent(source))
    first = run.ranks[0]
    assert len(first.events) == MAX_EVENTS and {e.op for e in first.events} == {"all_reduce"}
    assert first.dropped_events == 51 and run.ranks[1].dropped == ()
    (broadcast, summed) = first.dropped
    assert (broadcast.op, broadcast.count, summed.op, summed.count) == ("broadcast", 1, "all_reduce", 50)
    assert summed.nbytes == 50 * 16 and 0 < summed.seconds < first.events[0].start + 1
    said = "rank 0: a long run; of the oldest events only sums are kept, in run.ranks[r].dropped: "
    assert f"{said}1 broadcast of 16 B together, 50 all_reduce of 800 B together" in page.as_text(run)
    assert "50 all_reduce of 800 B" in page.as_html(run) and "sums" not in page.as_text(four.run("1"))


def test_many_spans_are_summed_up_too_under_a_limited_number_of_names(four):
    source = """
    from rankcell import span
    for i in range(10_400):
        with span(f"step {i}"): pass
    """
    result = four.run(textwrap.dedent(source)).ranks[0]
    assert len(result.events) == 10_000 and result.events[-1].op == "step 10399"
    assert len(result.dropped) == 201 and result.dropped[-1].op == "others"
    assert result.dropped_events == 400 and {d.kind for d in result.dropped} == {"compute"}


def test_memory_of_the_recorder_is_bounded_however_long_a_cell_runs(four):
    """Blocks that Python holds after 11,000 further calls in one cell: as many as before them, but for the calls that
    are over and not yet swept up (at most 256, of some eight blocks each). One block a call would be 5,000 or more.
    """
    source = """
    import gc, sys, time
    x, alone = torch.ones(1), dist.new_group([0])
    held = []
    if rank == 0:
        for _ in range(3):
            for _ in range(5_000): dist.all_reduce(x, group=alone)
            works = [dist.all_reduce(x, group=alone, async_op=True) for _ in range(6_000)]  # nobody waits
            while not all(work.is_completed() for work in works): time.sleep(0.01)  # gloo holds what it has not done
            del works
            gc.collect()
            held.append(sys.getallocatedblocks())
    held
    """
    _, second, third = four.run(textwrap.dedent(source)).values[0]
    assert third - second < 4_000


WIRE = {  # bytes each rank sends, as a fraction of the buffer of S bytes; the formula, and gloo's exception
    "dist.all_reduce(x)": 1.5,
    "dist.all_gather_single(x, x[: x.numel() // 4].clone())": 0.75,
    "dist.all_to_all_single(torch.empty_like(x), x)": 0.75,
    "dist.broadcast(x, 0)": 0.75,
    "dist.reduce_scatter_single(x[: x.numel() // 4].clone(), x)": 1.5,  # textbook 0.75: an all-reduce runs
}


@pytest.mark.skipif(not system.LINUX, reason="the kernel's TCP counters are Linux's")
@pytest.mark.parametrize("call", WIRE)
def test_bytes_on_the_wire(four, call):
    four.run("x = torch.ones(1 << 18)")
    wire = four.run(call).wire
    mean = sum(map(sum, wire)) / 4
    assert mean == pytest.approx(WIRE[call] * MIB, rel=0.01)


def test_the_wire_shows_the_ring(four):
    if not system.LINUX:
        pytest.skip("the kernel's TCP counters are Linux's")
    wire = four.run("x = torch.ones(1 << 18); dist.all_reduce(x)").wire
    assert all(wire[i][(i - 1) % 4] > MIB and wire[i][(i + 1) % 4] < 10_000 for i in range(4))


def test_events_sort_by_time(four):
    times = [e.start for e in four.run("dist.barrier(); dist.barrier()").events]
    assert (
        times == sorted(times) and len(times) == 8 and isinstance(four.run("dist.barrier()").events[0], Event)
    )
