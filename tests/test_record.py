"""What is recorded equals what each strategy must issue, and the bytes on the wire equal the formulas."""

import textwrap
from dataclasses import fields

import pytest

from rankcell.draw import page
from rankcell.draw.collectives import steps
from rankcell.engine import operation, system
from rankcell.engine.record import MAX_EVENTS
from rankcell.results import Event

MIB = 1 << 20


@pytest.fixture
def run(four):
    """Run the source of a cell on the shared world of four ranks and return its `Run`."""
    return lambda source, **options: four.run(textwrap.dedent(source), **options)


def operations(run, rank=0):
    """What one rank called, in order."""
    return [e.op for e in sorted(run.ranks[rank].events, key=lambda e: e.start) if e.kind == "comm"]


def test_an_event_says_what_was_called(run):
    found = run("x = torch.ones(5, dtype=torch.float64)\n\ndist.all_reduce(x, op=dist.ReduceOp.MAX)")
    (event,) = found.ranks[2].events
    assert (event.op, event.shape, event.dtype, event.nbytes) == ("all_reduce", (5,), "float64", 40)
    assert (event.reduce_op, event.ranks, event.seq, event.line) == ("MAX", (0, 1, 2, 3), 1, 3)
    assert 0 <= event.start <= event.issued <= event.end and not event.is_async
    assert event.text == "all_reduce(float64[5], MAX)"
    assert [e.start for e in found.events] == sorted(e.start for e in found.events) and len(found.events) == 4


def test_no_field_of_an_event_is_forgotten():
    by_hand = {"rank", "start", "end", "done", "seq", "values", "issued", "wait_start"}
    others = {"kind", "predicted"}  # of events that are no operation of the ranks
    assert {f.name for f in fields(Event)} == by_hand | others | {*operation._OF_EVENT}


COLLECTIVES = """
def numbers(n): return torch.arange(float(n)) + 10 * rank
def new(n): return torch.full((n,), torch.nan)
def cut(x, root): return list(x.chunk(4)) if rank == root else None

x, part, even, odd = numbers(4), new(1), dist.new_group([0, 2]), dist.new_group([1, 3])
dist.broadcast(x, src=1)
dist.scatter(part, cut(numbers(4), 0), src=0)
dist.gather(part, [new(1) for _ in range(4)] if rank == 2 else None, dst=2)
dist.reduce(x, dst=3)
x = numbers(4)
dist.all_reduce(x, op=dist.ReduceOp.MAX)
dist.all_gather_single(new(4), part)
dist.all_gather([new(1) for _ in range(4)], part)
dist.reduce_scatter_single(part, numbers(4))
dist.all_to_all_single(new(4), numbers(4))
dist.all_reduce(numbers(1), group=odd if rank % 2 else even)
dist.barrier()
"""
AFTER = {"broadcast": (10.0, 11.0, 12.0, 13.0), "scatter": (3.0,), "reduce": (40.0, 44.0, 48.0, 52.0)}
AFTER |= {"all_to_all": (3.0, 13.0, 23.0, 33.0), "reduce_scatter": (72.0,)}  # what rank 3 has of each


def test_every_collective_is_recorded_once_and_drawn(run):
    """With the rank that it names, what the tensors held before and after, and the picture that notebook 04 makes."""
    found = run(COLLECTIVES, values=True)
    names = "broadcast scatter gather reduce all_reduce all_gather all_gather reduce_scatter".split()
    calls = [op for op in operations(found, 3) if op != "new_group"]
    assert calls == [*names, "all_to_all", "all_reduce", "barrier"]
    events = [e for e in found.ranks[3].events if e.op != "new_group"]
    assert [e.peer for e in events[:5]] == [1, 0, 2, 3, None] and events[9].ranks == (1, 3)
    after = {e.op: e.values.output_after[0] for e in events if e.op in AFTER}
    assert after == AFTER and events[4].values.input_before == ((30.0, 31.0, 32.0, 33.0),)
    for op in dict.fromkeys([*names, "all_to_all"]):
        frames = steps(found, op)
        said = f"{op}{', MAX' if op == 'all_reduce' else ''} on ranks 0-3. After:"
        assert frames.figures[2].alt.startswith(said)


def test_messages_know_their_peer_and_tag(run):
    """By the rank of the world, also in a group in which that rank has another number, and from anyone."""
    found = run("""
    pair, x = dist.new_group([1, 3]), torch.ones(2)
    if rank == 0: dist.send(x, 3, tag=7)
    if rank == 1: dist.isend(x, 3, group=pair).wait()
    if rank == 3:
        dist.recv(x, 0, tag=7)
        dist.irecv(x, group=pair).wait()
    """)
    of = [[(e.op, e.peer, e.tag) for e in r.events if e.op in ("send", "recv")] for r in found.ranks]
    assert of == [[("send", 3, 7)], [("send", 3, 0)], [], [("recv", 0, 7), ("recv", 1, 0)]]


def test_a_message_from_anyone_counts_for_its_pair(run):
    """What comes next from the same rank is its second message, and has another size."""
    source = """
    if rank == 1:
        for n in (1, 5): dist.send(torch.ones(n), 0)
    if rank == 0: dist.recv(torch.ones(5), src=dist.recv(torch.ones(1)))
    """
    assert [(e.op, e.peer, e.seq) for e in run(source).ranks[0].events] == [("recv", 1, 1), ("recv", 1, 2)]


def test_a_wait_for_what_is_over_is_recorded(run):
    """Rank 0 calls last: what the others call is not over before they have its Work."""
    source = """
    from rankcell.engine import current
    store = dist.distributed_c10d._get_default_store()
    if rank == 0: store.wait([f"called {r}" for r in range(1, world_size)])
    w = dist.all_reduce(torch.ones(4), async_op=True)
    store.set(f"called {rank}", "")
    while current.recorder.open: pass
    w.wait()
    dist.all_reduce(torch.ones(4), async_op=True)
    while current.recorder.open: pass
    """
    for result in run(source).ranks[1:]:
        waited, left = result.events
        assert waited.wait_start >= waited.done == waited.end and left.wait_start is None


def test_a_wait_is_recorded_where_the_work_is_over_before_the_program_has_it(run):
    source = """
    from rankcell.engine.listen import Listener
    answered = Listener._answered
    def late(self, o, *given):
        result = answered(self, o, *given)
        while o.done is None: pass
        return result
    Listener._answered = late
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    Listener._answered = answered
    """
    for result in run(source).ranks:
        assert result.events[0].wait_start >= result.events[0].done


def test_spans_are_recorded_beside_communication(run):
    source = """
    from rankcell import span
    w = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    w.wait()
    for i in range(10_400):
        with span(f"step {i}"): pass
    """
    result = run(source).ranks[0]
    event, *spans = result.events
    assert event.is_async and event.issued < event.end and event.wait_start is not None
    assert len(spans) == 10_000 and spans[-1].op == "step 10399" and {s.kind for s in spans} == {"compute"}
    assert result.dropped == 400


def test_a_long_run_counts_what_it_drops(run):
    found = run(f"""
    x, alone = torch.ones(4), dist.new_group([0])
    if rank == 0:
        for _ in range({MAX_EVENTS + 50}): dist.all_reduce(x, group=alone)
    """)
    assert len(found.ranks[0].events) == MAX_EVENTS
    assert [r.dropped for r in found.ranks] == [50, 0, 0, 0]
    assert "its 50 oldest events are not kept" in page.as_text(found)


WIRE = {  # bytes each rank sends, as a fraction of the buffer of S bytes; the formula, and gloo's exception
    "dist.all_reduce(x)": 1.5,
    "dist.all_gather_single(x, x[: x.numel() // 4].clone())": 0.75,
    "dist.all_to_all_single(torch.empty_like(x), x)": 0.75,
    "dist.reduce_scatter_single(x[: x.numel() // 4].clone(), x)": 1.5,  # textbook 0.75: an all-reduce runs
}


@pytest.mark.skipif(not system.LINUX, reason="the kernel's TCP counters are Linux's")
def test_bytes_on_the_wire(run):
    run("x = torch.ones(1 << 18)")
    for call, share in WIRE.items():
        wire = run(call).wire
        assert sum(map(sum, wire)) / 4 == pytest.approx(share * MIB, rel=0.01), call
        if call == "dist.all_reduce(x)":  # a ring
            assert all(wire[i][(i - 1) % 4] > MIB and wire[i][(i + 1) % 4] < 10_000 for i in range(4))
