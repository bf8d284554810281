"""The simulated device: exact times, exact races."""

import pytest

from rankcell.results import Event
from rankcell.simulate import Device, RaceError, busy_together

MS = 1e-3


def device(**more):
    return Device(launch=0.0, **more)


def times(gpu, kinds=("compute", "copy", "comm")):
    """Row and milliseconds of every job, in order of time."""
    return [
        (e.op, e.group, round(e.start * 1e3, 6), round(e.end * 1e3, 6)) for e in gpu.events if e.kind in kinds
    ]


# The host and one stream


def test_the_host_runs_ahead_of_the_device():
    gpu = Device(launch=1 * MS)
    for _ in range(3):
        gpu.matmul(seconds=10 * MS)
    assert gpu.now == pytest.approx(3 * MS)
    gpu.synchronize()
    assert gpu.now == pytest.approx(31 * MS)  # the first launch, then three products
    assert times(gpu) == [
        ("matmul", "default", 1, 11),
        ("matmul", "default", 11, 21),
        ("matmul", "default", 21, 31),
    ]
    assert times(gpu, ("host",)) == [("launch matmul", "host", k, k + 1) for k in range(3)]
    assert times(gpu, ("wait",)) == [("synchronize", "host", 3, 31)]


def test_a_job_knows_the_buffers_that_it_touches():
    gpu = device()
    gpu.copy(seconds=1 * MS, writes="X")
    gpu.kernel("step", 1 * MS, reads=("X", "g"), writes="W")
    assert gpu.buffers("step") == ("W", "X", "g") and gpu.buffers("no such job") == ()


def test_a_device_faster_than_its_host_waits_for_launches():
    gpu = Device(launch=5 * MS)
    for _ in range(3):
        gpu.kernel("add", 1 * MS)
    gpu.synchronize()
    assert [start for _, _, start, _ in times(gpu)] == [5, 10, 15]
    assert gpu.seconds == pytest.approx(16 * MS)


def test_synchronize_with_nothing_to_wait_for_costs_nothing():
    gpu = device()
    gpu.synchronize()
    assert gpu.now == 0 and gpu.events == ()


def test_kernels_of_one_stream_and_of_one_engine_run_one_by_one():
    gpu = device()
    gpu.matmul(seconds=2 * MS)
    with gpu.use(gpu.stream("side")):
        gpu.matmul(seconds=3 * MS)
    assert times(gpu) == [("matmul", "default", 0, 2), ("matmul", "side", 2, 5)]


def test_an_engine_takes_what_is_ready_first_not_what_was_enqueued_first():
    gpu = device()
    side = gpu.stream("side")
    gpu.copy(seconds=5 * MS, pinned=True, non_blocking=True)
    gpu.matmul(seconds=2 * MS)  # behind the copy
    with gpu.use(side):
        gpu.kernel("add", 1 * MS)  # enqueued later, ready at once
    assert times(gpu) == [
        ("copy H2D", "default", 0, 5),
        ("add", "side", 0, 1),
        ("matmul", "default", 5, 7),
    ]


def test_a_device_that_is_told_nothing_has_the_rates_it_says():
    """10 us for a launch; pinned 25, pageable 10 and links 100 GB/s: 250 MB take 10, 25 and 2.5 ms."""
    gpu = Device()
    assert gpu.now == 0 and gpu.seconds == 0
    gpu.copy(250_000_000, pinned=True)
    assert gpu.now == pytest.approx(10e-6 + 10 * MS)
    gpu.copy(250_000_000)
    assert gpu.now == pytest.approx(2 * 10e-6 + 35 * MS)
    gpu.all_reduce("g", 250_000_000)
    gpu.kernel("add", 1 * MS)
    gpu.synchronize()
    assert gpu.now == pytest.approx(3 * 10e-6 + 38.5 * MS)
    assert [e.nbytes for e in gpu.events if e.kind in ("copy", "comm", "compute")] == [250_000_000] * 3 + [0]


# Copies


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "end", "host"),
    [(True, True, 10, 0), (True, False, 10, 10), (False, True, 25, 25), (False, False, 25, 25)],
)
def test_only_pinned_and_non_blocking_lets_the_host_go_on(pinned, non_blocking, end, host):
    gpu = device(pinned_rate=25e9, pageable_rate=10e9)
    gpu.copy(250_000_000, pinned=pinned, non_blocking=non_blocking)
    assert times(gpu) == [("copy H2D", "default", 0, end)]
    assert gpu.now == pytest.approx(host * MS)


def test_copies_in_both_directions_have_engines_of_their_own():
    gpu = device()
    for to in ("device", "host"):
        with gpu.use(gpu.stream(to)):
            gpu.copy(seconds=4 * MS, to=to, pinned=True, non_blocking=True)
    assert times(gpu) == [("copy H2D", "device", 0, 4), ("copy D2H", "host", 0, 4)]
    with pytest.raises(ValueError, match="goes to 'device' or to 'host', not to 'gpu'"):
        gpu.copy(to="gpu")


def order_experiment(*, copy_first, pinned):
    """A product of 100 ms and an independent copy of 60 ms on two streams."""
    gpu = device()
    compute, copies = gpu.stream("compute"), gpu.stream("copies")

    def product():
        with gpu.use(compute):
            gpu.matmul(seconds=100 * MS, reads="X", writes="Z")

    def copy():
        with gpu.use(copies):
            gpu.copy(seconds=60 * MS, writes="Y", pinned=pinned, non_blocking=pinned)

    for block in (copy, product) if copy_first else (product, copy):
        block()
    gpu.synchronize()
    return gpu


@pytest.mark.parametrize(
    ("copy_first", "pinned", "seconds", "overlap"),
    [(False, False, 100, 60), (True, False, 160, 0), (False, True, 100, 60), (True, True, 100, 60)],
)
def test_the_order_matters_for_a_pageable_copy_only(copy_first, pinned, seconds, overlap):
    gpu = order_experiment(copy_first=copy_first, pinned=pinned)
    assert gpu.seconds == pytest.approx(seconds * MS)
    assert busy_together(gpu.events, "compute", "copy") == pytest.approx(overlap * MS)
    assert gpu.races == ()


# Events and waits


def test_wait_stream_orders_both_ways():
    gpu = device()
    default, side = gpu.default_stream(), gpu.stream("side")
    gpu.kernel("make X", 1 * MS, writes="X")
    side.wait_stream(default)
    with gpu.use(side):
        gpu.copy(seconds=2 * MS, to="host", pinned=True, non_blocking=True, reads="X")
    default.wait_stream(side)
    gpu.kernel("change X", 1 * MS, writes="X")
    assert times(gpu) == [
        ("make X", "default", 0, 1),
        ("copy D2H", "side", 1, 3),
        ("change X", "default", 3, 4),
    ]
    assert gpu.races == () and gpu.now == 0
    orders = [e for e in gpu.events if e.kind == "order"]
    assert [(e.peer, e.rank, round(e.issued, 6), round(e.start, 6)) for e in orders] == [
        (1, 2, 0.001, 0.001),
        (2, 1, 0.003, 0.003),
    ]


def test_an_event_does_not_wait_for_what_comes_after_it():
    gpu = device()
    side = gpu.stream("side")
    gpu.kernel("a", 1 * MS)
    event = gpu.current_stream().record_event()
    gpu.kernel("b", 9 * MS)
    side.wait_event(event)
    with gpu.use(side):
        gpu.copy(seconds=1 * MS, pinned=True, non_blocking=True)
    assert ("copy H2D", "side", 1, 2) in times(gpu)


def test_waits_are_passed_on_by_a_stream_with_no_work_between():
    gpu = device()
    a, b = gpu.stream("a"), gpu.stream("b")
    gpu.kernel("first", 3 * MS, writes="X")
    a.wait_stream(gpu.default_stream())
    b.wait_stream(a)
    with gpu.use(b):
        gpu.copy(seconds=1 * MS, to="host", pinned=True, non_blocking=True, reads="X")
    assert times(gpu)[-1] == ("copy D2H", "b", 3, 4) and gpu.races == ()


def test_events_time_the_device_and_the_host_s_clock_does_not():
    gpu = Device(launch=1 * MS)
    stream = gpu.current_stream()
    gpu.matmul(seconds=5 * MS)
    start, begin = stream.record_event(), gpu.now
    gpu.matmul(seconds=20 * MS)
    end = stream.record_event()
    assert gpu.now - begin == pytest.approx(1 * MS)
    assert not end.query() and not stream.query()
    end.synchronize()
    assert end.query() and stream.query()
    assert start.elapsed_time(end) == pytest.approx(20)


def test_stream_synchronize_waits_for_one_stream_only():
    gpu = device()
    side = gpu.stream("side")
    gpu.matmul(seconds=9 * MS)
    with gpu.use(side):
        gpu.copy(seconds=2 * MS, pinned=True, non_blocking=True)
    side.synchronize()
    assert gpu.now == pytest.approx(2 * MS)
    gpu.synchronize()
    assert gpu.now == pytest.approx(9 * MS)


def test_what_the_host_saw_stays_as_it_was():
    gpu = device()
    side = gpu.stream("side")
    gpu.copy(seconds=4 * MS, pinned=True, non_blocking=True)
    gpu.matmul(seconds=4 * MS)
    with gpu.use(side):
        gpu.kernel("add", 3 * MS)
    side.synchronize()
    before = times(gpu)[:2]
    with gpu.use(side):
        gpu.kernel("add", 5 * MS)  # ready at 3 ms, before the matmul
    assert times(gpu)[:2] == before
    assert times(gpu)[2:] == [("add", "side", 3, 8), ("matmul", "default", 8, 12)]


def test_streams_of_two_devices_do_not_mix():
    one, other = device(), device()
    with pytest.raises(ValueError, match="event belongs to another device"):
        one.default_stream().wait_stream(other.default_stream())
    with pytest.raises(ValueError, match="belongs to another device"), one.use(other.default_stream()):
        pass
    with pytest.raises(ValueError, match="cannot take -1 seconds"):
        one.matmul(seconds=-1)


# Communication


def test_a_synchronous_all_reduce_runs_on_the_current_stream_since_2_8():
    gpu = device()
    gpu.matmul(seconds=2 * MS, writes="g")
    assert gpu.all_reduce("g", seconds=3 * MS) is None
    gpu.matmul(seconds=1 * MS, reads="g")
    assert [t[1] for t in times(gpu)] == ["default"] * 3
    assert gpu.seconds == pytest.approx(6 * MS) and gpu.races == () and gpu.now == 0


def test_before_2_8_it_ran_on_a_stream_of_its_own_in_the_same_time():
    gpu = device(collectives_on_current_stream=False)
    gpu.matmul(seconds=2 * MS, writes="g")
    assert gpu.all_reduce("g", seconds=3 * MS) is None
    gpu.matmul(seconds=1 * MS, reads="g")
    assert [t[1] for t in times(gpu)] == ["default", "nccl", "default"]
    assert gpu.seconds == pytest.approx(6 * MS) and gpu.races == ()


def test_an_async_all_reduce_waits_for_its_input_and_overlaps_what_follows():
    gpu = device(link_rate=100e9)
    gpu.matmul(seconds=2 * MS, writes="g")
    work = gpu.all_reduce("g", 300_000_000, async_op=True)
    gpu.matmul(seconds=2 * MS, writes="h")
    assert not work.is_completed()
    work.wait()
    assert gpu.now == 0  # wait() holds the stream, not the host
    gpu.kernel("step", 1 * MS, reads=("g", "h"))
    assert times(gpu) == [
        ("matmul", "default", 0, 2),
        ("matmul", "default", 2, 4),
        ("all_reduce", "nccl", 2, 5),
        ("step", "default", 5, 6),
    ]
    assert busy_together(gpu.events, "compute", "comm") == pytest.approx(2 * MS)
    assert gpu.races == ()
    gpu.synchronize()
    assert work.is_completed()


def test_an_async_all_reduce_without_wait_is_a_race():
    gpu = device()
    gpu.all_reduce("g", seconds=3 * MS, async_op=True)
    gpu.kernel("step", 1 * MS, reads="g")
    (race,) = gpu.races
    assert str(race) == (
        "Race on g: all_reduce on nccl writes it, step on default reads it, and nothing orders the two. Here "
        "they ran at the same time. Put default.wait_stream(nccl) before the second."
    )


# Races


def test_a_race_is_found_even_where_the_times_came_out_right():
    gpu = device()
    gpu.kernel("make X", 5 * MS, writes="X")
    with gpu.use(gpu.stream("side")):
        gpu.matmul(seconds=1 * MS, reads="X")  # one compute engine: it runs later, by luck
    (race,) = gpu.races
    assert (race.buffer, race.first, race.second) == ("X", "make X on default", "matmul on side")
    assert "Here the first happened to be over in time; nothing promises it." in str(race)
    with pytest.raises(RaceError, match="Race on X: make X on default writes it, matmul on side reads it"):
        gpu.check()
    assert RaceError("Race on X")._render_traceback_() == ["RaceError: Race on X"]


def test_a_race_in_which_the_second_ran_first():
    gpu = device()
    gpu.copy(seconds=5 * MS, pinned=True, non_blocking=True)
    gpu.kernel("make X", 1 * MS, writes="X")
    with gpu.use(gpu.stream("side")):
        gpu.matmul(seconds=1 * MS, reads="X")
    assert "Here the second even ran first." in str(gpu.races[0])


def test_reading_together_is_no_race_and_writing_together_is():
    gpu = device()
    gpu.kernel("a", 1 * MS, reads="X", writes="Y")
    with gpu.use(gpu.stream("side")):
        gpu.kernel("b", 1 * MS, reads="X", writes=("Y", "Z"))
    assert [race.buffer for race in gpu.races] == ["Y"]
    gpu = device()
    gpu.kernel("a", 1 * MS, reads="X")
    with gpu.use(gpu.stream("side")):
        gpu.kernel("b", 1 * MS, reads="X")
    gpu.check()


def test_a_race_is_told_once_per_pair_of_streams():
    gpu = device()
    gpu.kernel("make X", 1 * MS, writes="X")
    with gpu.use(gpu.stream("side")):
        for _ in range(3):
            gpu.kernel("use X", 1 * MS, reads="X")
    assert len(gpu.races) == 1


def test_the_host_that_waited_orders_what_it_enqueues_next():
    gpu = device()
    gpu.kernel("make X", 5 * MS, writes="X")
    gpu.synchronize()
    with gpu.use(gpu.stream("side")):
        gpu.matmul(seconds=1 * MS, reads="X")
    gpu.check()


def test_the_host_reads_a_copy_too_early():
    gpu = device()
    gpu.copy(seconds=5 * MS, to="host", pinned=True, non_blocking=True, writes="result")
    gpu.on_host("print", 1 * MS, reads="result")
    assert str(gpu.races[0]) == (
        "Race on result: copy D2H on default writes it, print on host reads it, and nothing orders the two. "
        "Here they ran at the same time. Let the host wait before the second: default.synchronize()."
    )
    gpu = device()
    gpu.copy(seconds=5 * MS, to="host", pinned=True, non_blocking=True, writes="result")
    gpu.current_stream().synchronize()
    gpu.on_host("print", 1 * MS, reads="result")
    gpu.check()
    assert gpu.seconds == pytest.approx(6 * MS)


def test_the_host_writes_a_batch_while_it_is_being_copied():
    gpu = device()
    gpu.on_host("batch 0", 1 * MS, writes="staging")
    gpu.copy(seconds=5 * MS, pinned=True, non_blocking=True, reads="staging", writes="X")
    gpu.on_host("batch 1", 1 * MS, writes="staging")
    (race,) = gpu.races
    assert race.second == "batch 1 on host"


# Memory


def reuse(*, record=False, wait=False):
    """A side stream reads Z; the default stream drops Z and takes memory of the same size for W."""
    gpu = device()
    side = gpu.stream("side")
    gpu.empty("Z", 4096)
    gpu.kernel("make Z", 1 * MS, writes="Z")
    side.wait_stream(gpu.current_stream())
    with gpu.use(side):
        gpu.copy(seconds=9 * MS, to="host", pinned=True, non_blocking=True, reads="Z")
    if record:
        gpu.record_stream("Z", side)
    if wait:
        gpu.current_stream().wait_stream(side)
    gpu.free("Z")
    gpu.empty("W", 4096)
    gpu.kernel("make W", 1 * MS, writes="W")
    return gpu


def test_memory_reused_before_a_side_stream_is_done_is_a_race():
    (race,) = reuse().races
    assert race.reused
    assert str(race) == (
        "Memory reused too early: W was given the memory of Z, which was freed while copy D2H on side may "
        "still be reading it; now make W on default writes it. Here they ran at the same time. Call "
        'record_stream("Z", side) before freeing Z.'
    )


def test_record_stream_takes_other_memory_and_a_wait_takes_time():
    kept, waited = reuse(record=True), reuse(wait=True)
    assert kept.races == waited.races == ()
    assert [t[2:] for t in times(kept) if t[0] == "make W"] == [(1, 2)]
    assert [t[2:] for t in times(waited) if t[0] == "make W"] == [(10, 11)]


def test_recording_the_stream_that_owns_the_memory_changes_nothing():
    gpu = Device(launch=0.0)
    side = gpu.stream("side")
    gpu.empty("Z")
    gpu.matmul(seconds=1.0, writes="Z")
    side.wait_stream(gpu.current_stream())
    with gpu.use(side):
        gpu.kernel("read Z", 3.0, reads="Z")
    gpu.record_stream("Z", gpu.current_stream())
    gpu.free("Z")
    gpu.empty("W")
    gpu.kernel("make W", 1.0, writes="W")
    assert gpu.races[0].reused


def test_recorded_memory_comes_back_when_the_stream_is_done():
    gpu = reuse(record=True)
    gpu.synchronize()
    gpu.empty("V", 4096)
    gpu.kernel("make V", 1 * MS, writes="V")
    gpu.check()
    assert gpu._blocks["V"][0] != gpu._blocks["W"][0] and gpu._freed == []


def test_memory_of_another_size_or_stream_is_not_reused():
    gpu = device()
    gpu.empty("A", 64)
    gpu.free("A")
    gpu.empty("B", 128)
    with gpu.use(gpu.stream("side")):
        gpu.empty("C", 64)
    assert len(gpu._freed) == 1
    gpu.empty("D", 64)
    assert gpu._freed == []


def test_a_freed_buffer_cannot_be_used():
    gpu = device()
    gpu.empty("A")
    gpu.free("A")
    with pytest.raises(ValueError, match=r"A was freed. Give it memory again with empty\('A'\)"):
        gpu.kernel("a", 0.0, reads="A")
    gpu.empty("A")
    gpu.kernel("a", 0.0, reads="A")


def test_everything_is_marked_as_predicted():
    assert all(e.predicted for e in reuse(record=True).events)


def test_time_in_which_two_of_a_kind_run_counts_once():
    two = [Event(0, "a", 0.0, 3.0, kind="compute"), Event(1, "b", 1.0, 4.0, kind="compute")]
    message = Event(0, "all_reduce", 2.0, 6.0)
    assert busy_together([*two, message], "compute", "comm") == 2.0
    assert busy_together([*two, message], "comm", "compute") == 2.0


def test_a_short_event_inside_a_long_one_does_not_end_it():
    long, short = Event(0, "a", 0.0, 10.0, kind="compute"), Event(0, "b", 1.0, 2.0, kind="compute")
    assert busy_together([long, short, Event(0, "send", 3.0, 5.0)], "compute", "comm") == 2.0
