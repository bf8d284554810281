"""What happened when: timeline, streams and schedules, from hand-written events."""

import re

import pytest

from rankcell import schedules
from rankcell.draw.parts import WIDTH, pale
from rankcell.draw.schedule import grid
from rankcell.draw.streams import stacked, streams
from rankcell.draw.svg import COLOURS
from rankcell.draw.timeline import _NAMES, _RIGHT, timeline
from rankcell.results import Event, RankResult, Run
from rankcell.simulate import Device
from test_draw_charts import marks, number, words

SPAN = WIDTH - _RIGHT - _NAMES  # px for the whole time
DARK = COLOURS["all_reduce"]
LIGHT = pale(DARK, 0.3)  # of the wait in it


def span(rank, op, start, end, **more):
    return Event(rank, op, start, end, kind="compute", **more)


def all_reduce(rank, start, end, *, seq=1, ranks=(0, 1), **more):
    return Event(rank, "all_reduce", start, end, ranks=ranks, seq=seq, nbytes=4096, **more)


def late():
    """Two ranks compute for 6 ms and 2 ms, then all-reduce until 10 ms."""
    computing = [span(0, "forward", 0.0, 0.006), span(1, "forward", 0.0, 0.002)]
    return [*computing, all_reduce(0, 0.006, 0.010), all_reduce(1, 0.002, 0.010)]


def bars(figure, fill):
    """(start, end) in shares of the time, of the bars of that fill; not those of the key."""
    found = [r for r in marks(figure, "rect") if r.get("fill") == fill]
    found = [r for r in found if r.get("width") not in ("100%", "18.00")]
    at = [(number(r, "x") - _NAMES, number(r, "width")) for r in found]
    return [(round(x / SPAN, 3), round((x + width) / SPAN, 3)) for x, width in at]


def test_bars_stand_in_time_and_waits_are_pale():
    figure = timeline(late())
    assert bars(figure, COLOURS["compute"]) == [(0.0, 0.6), (0.0, 0.2)]
    assert bars(figure, DARK) == [(0.6, 1.0), (0.6, 1.0)] and bars(figure, LIGHT) == [(0.2, 0.6)]
    assert figure.alt == "Timeline of ranks 0, 1 over 10 ms: rank 1 waits most for the others, 4 ms (40%)."


def test_time_begins_with_the_first_event():
    for seconds, unit in ((4.0, "s"), (0.004, "ms"), (0.0004, "us")):
        figure = timeline([all_reduce(0, 5.0, 5.0 + seconds)])
        assert f"time in {unit}" in words(figure) and bars(figure, DARK) == [(0.0, 1.0)]
    results = (RankResult(0, events=(all_reduce(0, 0.0, 0.1, ranks=(0,)),)), RankResult(1))
    assert "rank 1" in words(timeline(Run("", results))), "its row is kept"


def test_a_call_that_a_rank_never_made_is_all_waiting():
    alone = RankResult(0, events=(span(0, "forward", 0.0, 0.004), all_reduce(0, 0.004, 0.010)))
    for other, waits in (((), [(0.4, 1.0)]), ((all_reduce(1, 0.007, 0.010),), [(0.4, 0.7)])):
        figure = timeline(Run("", (alone, RankResult(1, events=other))))
        assert bars(figure, LIGHT) == waits
    assert bars(timeline(e for e in alone.events), LIGHT) == [], "of some events nobody knows who else called"


def test_asynchronous_operations_lie_in_lanes_of_their_own():
    events = [
        all_reduce(0, 0.0, 0.010, is_async=True, issued=0.0001, wait_start=0.008),
        all_reduce(1, 0.009, 0.010, is_async=True, issued=0.0091, wait_start=0.0095),
    ]
    figure = timeline(events)
    assert bars(figure, DARK) == [(0.0, 1.0), (0.9, 1.0), (0.9, 1.0), (0.95, 1.0)]
    assert bars(figure, LIGHT) == [(0.8, 0.9)] and figure.alt.endswith(
        "rank 0 waits most for the others, 1 ms (10%)."
    )


def test_an_arrow_leads_from_send_to_receive():
    messages = [Event(0, "send", 0.0, 0.004, peer=1, seq=1), Event(1, "recv", 0.002, 0.004, peer=0, seq=1)]
    messages += [Event(1, "send", 5.0, 6.0, peer=0, tag=7), Event(0, "recv", 5.0, 6.0, peer=1, tag=8)]
    assert len(marks(timeline(messages), "polygon")) == 1, "the second receive has another tag"
    alone = timeline(messages[:2]).alt
    assert alone.endswith("rank 0 waits most for the others, 2 ms (50%)."), "a send waits for its receiver"
    alone = timeline([all_reduce(r, 0.0, 0.008) for r in (0, 1)])
    assert alone.alt == "Timeline of ranks 0, 1 over 8 ms: no rank waits for a late one."


def test_spans_show_what_is_inside_them():
    figure = timeline([span(0, "step", 0.0, 0.010), all_reduce(0, 0.008, 0.010, ranks=(0,))])
    (name,) = (t for t in marks(figure, "text") if t.text == "step")
    assert number(name, "x") == pytest.approx(_NAMES + SPAN * 0.4, abs=0.1), "amid what is not covered"
    for second, levels in ((0.5, 1), (0.25, 2)):  # one that begins earlier is within the other, and lower
        drawn = marks(timeline([span(0, "a", 0.0, 0.5), span(0, "b", second, 1.0)]), "rect")
        rows = [r for r in drawn if r.get("fill") == COLOURS["compute"] and r.get("width") != "18.00"]
        assert len({r.get("height") for r in rows}) == levels


def overlapped():
    gpu = Device(launch=0.0)
    side = gpu.stream("copies")
    with gpu.use(side):
        gpu.copy(seconds=0.004, pinned=True, non_blocking=True)
    gpu.matmul(seconds=0.010)
    side.wait_stream(gpu.default_stream())
    with gpu.use(side):
        gpu.copy(seconds=0.010, to="host", pinned=True)
    return gpu.events


def test_streams_say_what_overlaps():
    said = "Simulated: done after 20 ms; 4 ms of work overlap; the host stands for 20 ms."
    assert streams(overlapped(), title="Two streams").alt == f"Two streams. {said}"
    alone = streams([Event(0, "matmul", 0.0, 0.01, kind="compute", group="host")])
    assert alone.alt == "Simulated: done after 10 ms; nothing overlaps; the host never stands."
    short = Device(launch=0.0)
    short.matmul(seconds=0.010)
    both = stacked({"long": overlapped(), "short": short.events})
    wide, same = re.findall(r' width="([\d.]+)"[^>]*><title>matmul', both.svg)
    assert (
        wide == same
        and float(wide) < 300
        and [words(both).count(row) for row in ("host", "default", "copies")] == [2, 2, 2]
    )
    assert both.alt == f"long: {said} short: {streams(short.events).alt}"


def measured():
    """Two ranks, 10 s in: 0F0 1F0 1B0 0B0."""
    times = {"0F0": (10.0, 10.1), "1F0": (10.1, 10.2), "1B0": (10.2, 10.3), "0B0": (10.3, 10.5)}
    others = [span(0, "optimizer", 10.5, 11.0), Event(0, "send", 10.1, 10.11)]
    return [*(span(int(action[0]), action, *at) for action, at in times.items()), *others]


def test_a_schedule_has_a_box_for_each_action():
    figure = grid(measured(), title="By hand")
    assert figure.alt == "By hand. 2 ranks, 1 micro-batch; measured: done after 500 ms, ranks idle 50 %."
    idle, forward, backward = (p.get("d").count("M") for p in marks(figure, "path"))
    assert (idle, forward, backward) == (2, 2, 2), "boxes on two grounds"
    ranks = tuple(RankResult(r, events=tuple(e for e in measured() if e.rank == r)) for r in (0, 1))
    assert grid(Run("", ranks), title="By hand").svg == figure.svg


def test_later_stages_are_explained():
    stages = grid(schedules.interleaved(2, 4, 2))
    assert stages.alt == "2 ranks, 4 micro-batches; predicted: done after 13.5 forwards, ranks idle 11 %."
    assert "later stage: paler" in words(stages)
