"""The simulated device: exact times, exact races.

Lesson 07 checks the host's clock, launches, pinned and pageable copies.
"""

import pytest

from rankcell.simulate import Device

MS = 1e-3
BESIDE = {"pinned": True, "non_blocking": True}


def device(**more):
    return Device(launch=0.0, **more)


def times(gpu, kinds=("compute", "copy", "comm")):
    """Name, row and milliseconds of every job, in order of time."""
    chosen = [e for e in gpu.events if e.kind in kinds]
    return [(e.op, e.group, round(e.start * 1e3, 6), round(e.end * 1e3, 6)) for e in chosen]


def test_a_device_has_the_rates_it_says():
    gpu = Device()
    assert (gpu.launch, gpu.pinned_rate, gpu.pageable_rate) == (10e-6, 25e9, 10e9)
    gpu.copy(250_000_000)
    assert gpu.now == gpu.seconds == pytest.approx(10e-6 + 25 * MS)  # pageable: the host waits


def test_an_engine_takes_what_is_ready_first():
    """And what the host saw stays as it was."""
    gpu = device()
    side = gpu.stream("side")
    gpu.copy(seconds=5 * MS, **BESIDE)
    gpu.matmul(seconds=2 * MS)  # behind the copy
    with gpu.use(side):
        gpu.kernel("add", 1 * MS)  # enqueued later, ready at once
    side.synchronize()
    assert gpu.now == pytest.approx(1 * MS)  # one stream only
    ran = [("copy H2D", "default", 0, 5), ("add", "side", 0, 1), ("matmul", "default", 5, 7)]
    assert times(gpu) == ran
    with gpu.use(side):
        gpu.kernel("add", 6 * MS)  # ready at 1 ms, before the matmul, which must wait: one engine
    assert times(gpu) == [*ran[:2], ("add", "side", 1, 7), ("matmul", "default", 7, 9)]


def test_wait_stream_orders_both_ways():
    gpu = device()
    default, side, far = gpu.default_stream(), gpu.stream("side"), gpu.stream("far")
    gpu.kernel("make X", 1 * MS, writes="X")
    side.wait_stream(default)
    far.wait_stream(side)  # passed on by a stream with no work between
    early = default.record_event()
    gpu.kernel("other", 9 * MS, writes="Y")
    with gpu.use(side):
        gpu.copy(seconds=2 * MS, to="host", **BESIDE, reads="X")
    with gpu.use(far):
        gpu.copy(seconds=2 * MS, **BESIDE, reads="X")
    gpu.stream("late").wait_event(early)  # an event does not wait for what comes after it
    with gpu.use(gpu.stream("late")):
        gpu.all_reduce(seconds=1 * MS)
    default.wait_stream(side)
    default.wait_stream(far)
    gpu.kernel("change X", 1 * MS, writes="X")
    found = [("make X", "default", 0, 1), ("other", "default", 1, 10), ("copy D2H", "side", 1, 3)]
    found += [("copy H2D", "far", 1, 3), ("all_reduce", "late", 1, 2), ("change X", "default", 10, 11)]
    assert times(gpu) == found
    assert gpu.races == () and gpu.now == 0
    orders = [
        (e.peer, e.rank, round(e.issued * 1e3), round(e.start * 1e3)) for e in gpu.events if e.kind == "order"
    ]
    assert orders == [(1, 2, 1, 1), (1, 3, 1, 1), (1, 4, 1, 1), (2, 1, 3, 10), (3, 1, 3, 10)]


def test_async_all_reduce_overlaps_until_wait():
    gpu = device()
    gpu.matmul(seconds=2 * MS, writes="g")
    work = gpu.all_reduce("g", seconds=3 * MS, async_op=True)
    gpu.matmul(seconds=2 * MS, writes="h")
    assert gpu.races == ()
    gpu.kernel("log", 0.0, reads="g")
    work.wait()
    assert gpu.now == 0  # wait() holds the stream, not the host
    gpu.kernel("step", 1 * MS, reads=("g", "h"), writes="W")
    found = [("matmul", "default", 0, 2), ("matmul", "default", 2, 4), ("all_reduce", "nccl", 2, 5)]
    assert times(gpu) == [*found, ("log", "default", 4, 4), ("step", "default", 5, 6)]
    assert gpu.buffers("step") == ("W", "g", "h")
    (race,) = gpu.races
    assert race.text.startswith(
        "Race on g: all_reduce on nccl writes it, log on default reads it, and nothing orders the two. Here"
    )
    assert race.text.endswith("Before the second, call wait() on what all_reduce returned.")


def test_race_is_found_whatever_the_times():
    gpu = device()
    gpu.kernel("make X", 5 * MS, writes="X")
    with gpu.use(gpu.stream("side")):
        for _ in range(2):  # told once per pair of streams
            gpu.matmul(seconds=1 * MS, reads="X")  # one compute engine: it runs later, by luck
    (race,) = gpu.races
    assert (race.buffer, race.first, race.second) == ("X", "make X on default", "matmul on side")
    assert "Here the first happened to be over in time; nothing promises it." in race.text
    gpu = device()
    gpu.copy(seconds=5 * MS, **BESIDE)
    gpu.kernel("make X", 1 * MS, writes="X")
    with gpu.use(gpu.stream("side")):
        gpu.matmul(seconds=1 * MS, reads="X")
    assert "Here the second even ran first." in gpu.races[0].text


def test_only_concurrent_writes_are_races():
    gpu = device()
    gpu.kernel("a", 1 * MS, reads=("X", "R"), writes="Y")
    with gpu.use(gpu.stream("side")):
        gpu.kernel("b", 1 * MS, reads="X", writes=("Y", "R"))
    gpu.synchronize()  # the host that waited orders what it enqueues next
    with gpu.use(gpu.stream("third")):
        gpu.kernel("c", 1 * MS, writes="X")
    assert {race.buffer for race in gpu.races} == {"Y", "R"}


def test_the_host_must_wait_for_a_copy_too():
    gpu = device()
    gpu.on_host("batch 0", 1 * MS, writes="staging")
    gpu.copy(seconds=5 * MS, **BESIDE, reads="staging", writes="result")
    gpu.on_host("batch 1", 2 * MS, writes="staging")
    assert gpu.races[0].text == (
        "Race on staging: copy H2D on default reads it, batch 1 on host writes it, and nothing orders the two. "
        "Here they ran at the same time. Let the host wait before the second: default.synchronize()."
    )
    gpu.current_stream().synchronize()
    gpu.on_host("print", 1 * MS, reads="result")
    assert len(gpu.races) == 1 and gpu.seconds == pytest.approx(7 * MS)


def reuse(*, recorded=None, wait=False):
    """A side stream reads Z; the default stream drops Z and takes memory of the same size for W."""
    gpu = device()
    side = gpu.stream("side")
    gpu.empty("Z", 4096)
    gpu.kernel("make Z", 1 * MS, writes="Z")
    side.wait_stream(gpu.current_stream())
    with gpu.use(side):
        gpu.copy(seconds=9 * MS, to="host", **BESIDE, reads="Z")
    if recorded:
        gpu.record_stream("Z", gpu.stream(recorded))
    if wait:
        gpu.current_stream().wait_stream(side)
    gpu.free("Z")
    gpu.empty("W", 4096)
    gpu.kernel("make W", 1 * MS, writes="W")
    return gpu


def test_early_reuse_of_memory_is_a_race():
    (race,) = reuse().races
    assert race.text == (
        "Memory reused too early: W was given the memory of Z, which was freed while copy D2H on side may "
        "still be reading it; now make W on default writes it. Here they ran at the same time. Call "
        'record_stream("Z", side) before freeing Z.'
    )
    assert reuse(recorded="default").races == (race,)  # the stream that owns the memory: nothing new


def test_record_stream_prevents_reuse_without_a_wait():
    kept, waited = reuse(recorded="side"), reuse(wait=True)
    assert kept.races == waited.races == ()
    assert [t[2:] for gpu in (kept, waited) for t in times(gpu) if t[0] == "make W"] == [(1, 2), (10, 11)]
    kept.synchronize()  # the memory comes back when the stream is done
    kept.empty("V", 4096)
    kept.kernel("make V", 1 * MS, writes="V")
    assert kept.races == () and kept._blocks["V"][0] != kept._blocks["W"][0] and kept._freed == []


def test_memory_is_reused_by_size_and_stream():
    gpu = device()
    gpu.empty("A", 64)
    gpu.free("A")
    gpu.empty("B", 128)
    with gpu.use(gpu.stream("side")):
        gpu.empty("C", 64)
    assert len(gpu._freed) == 1
    with pytest.raises(ValueError, match=r"A was freed. Give it memory again with empty\('A'\)"):
        gpu.kernel("a", 0.0, reads="A")
    gpu.empty("A", 64)
    gpu.kernel("a", 0.0, reads="A")
    assert gpu._freed == []


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda gpu: gpu.matmul(seconds=-1), "cannot take -1 seconds"),
     (lambda gpu: gpu.copy(to="gpu"), "goes to 'device' or to 'host', not to 'gpu'")],
)  # fmt: skip
def test_what_a_device_cannot_do_is_said(call, says):
    with pytest.raises(ValueError, match=says):
        call(device())
