"""Hand-written events in, exact bars, lanes, arrows and sentences out."""

import re
import xml.etree.ElementTree as ET

import pytest

from rankcell.draw.parts import WIDTH
from rankcell.draw.svg import COLOURS, PAPER
from rankcell.draw.timeline import _NAMES, _RIGHT, timeline, waiting
from rankcell.results import Event, RankResult, Run

SVG = "{http://www.w3.org/2000/svg}"
SPAN = WIDTH - _RIGHT - _NAMES  # px for the whole time


def all_reduce(rank, start, end, *, seq=1, ranks=(0, 1), **more):
    return Event(rank, "all_reduce", start, end, ranks=ranks, seq=seq, nbytes=4096, **more)


def late():
    """Two ranks compute for 6 ms and 2 ms, then all-reduce until 10 ms."""
    return [
        Event(0, "forward", 0.0, 0.006, kind="compute"),
        Event(1, "forward", 0.0, 0.002, kind="compute"),
        all_reduce(0, 0.006, 0.010),
        all_reduce(1, 0.002, 0.010),
    ]


def bars(figure, fill):
    """(start, end) in shares of the time, of the bars of that fill that are as high as a row."""
    found = []
    for r in ET.fromstring(figure.svg).iter(f"{SVG}rect"):
        if r.get("fill") == fill and r.get("width") not in ("100%", "18.00"):
            x, width = float(r.get("x")), float(r.get("width"))
            found.append((round((x - _NAMES) / SPAN, 3), round((x + width - _NAMES) / SPAN, 3)))
    return found


def light(op):
    colour = COLOURS[op]
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - 0.3 * (255 - p)):02x}" for p in parts)


def texts(figure):
    return [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]


def test_bars_stand_where_the_time_is():
    figure = timeline(late())
    assert bars(figure, COLOURS["compute"]) == [(0.0, 0.6), (0.0, 0.2)]
    assert bars(figure, COLOURS["all_reduce"]) == [(0.6, 1.0), (0.6, 1.0)]
    assert bars(figure, light("all_reduce")) == [(0.2, 0.6)]


def test_bars_carry_their_bytes_and_names_where_they_fit():
    assert texts(timeline(late())).count("4 KiB") == 2
    assert texts(timeline(late())).count("forward") == 2
    tight = [Event(0, "a long name of a span", 0.0, 0.001, kind="compute"), *late()]
    assert "a long name of a span" not in texts(timeline(tight))


def test_alt_text_says_who_waits_most():
    figure = timeline(late())
    assert figure.alt == "Timeline of ranks 0, 1 over 10 ms: rank 1 waits most for the others, 4 ms (40%)."
    assert waiting(late()) == pytest.approx({0: 0.0, 1: 0.004})


def test_alt_text_of_ranks_that_do_not_wait():
    events = [all_reduce(r, 0.001, 0.003) for r in (0, 1)]
    assert timeline(events, title="Sum").alt == (
        "Sum. Timeline of ranks 0, 1 over 2 ms: no rank waits for another."
    )


def test_time_begins_with_the_first_event_and_names_its_unit():
    assert "time in ms" in texts(timeline([all_reduce(0, 5.0, 5.004)]))
    assert "time in us" in texts(timeline([all_reduce(0, 5.0, 5.0004)]))
    assert "time in s" in texts(timeline([all_reduce(0, 5.0, 9.0)]))
    assert bars(timeline([all_reduce(0, 5.0, 5.004)]), COLOURS["all_reduce"]) == [(0.0, 1.0)]


def test_asynchronous_operations_lie_in_a_lane_and_the_row_shows_the_wait():
    events = [
        all_reduce(0, 0.0, 0.010, is_async=True, issued=0.0001, wait_start=0.008),
        all_reduce(1, 0.009, 0.010, is_async=True, issued=0.0091, wait_start=0.0095),
    ]
    figure = timeline(events)
    assert bars(figure, COLOURS["all_reduce"]) == [(0.0, 1.0), (0.9, 1.0), (0.9, 1.0), (0.95, 1.0)]
    assert bars(figure, light("all_reduce")) == [(0.8, 0.9)]
    assert "in the background" in texts(figure)
    assert waiting(events) == pytest.approx({0: 0.001, 1: 0.0})


def test_operations_in_flight_together_have_lanes_of_their_own():
    events = [
        Event(0, "send", 0.0, 0.01, peer=1, seq=1, via="isend"),
        Event(0, "recv", 0.0, 0.01, peer=1, seq=1, via="irecv"),
        Event(0, "send", 0.02, 0.03, peer=1, seq=2, via="isend"),
    ]
    tops = [
        float(r.get("y"))
        for r in ET.fromstring(timeline(events).svg).iter(f"{SVG}rect")
        if r.get("height") == "8.00" and r.get("fill") == COLOURS["send"]
    ]
    assert len(tops) == 3
    assert tops[0] == tops[2] < tops[1]


def messages():
    return [
        Event(0, "send", 0.0, 0.004, peer=1, seq=1, nbytes=8),
        Event(1, "recv", 0.002, 0.004, peer=0, seq=1, nbytes=8),
        Event(1, "send", 0.005, 0.006, peer=0, seq=1, tag=7, nbytes=8),
        Event(0, "recv", 0.005, 0.006, peer=1, seq=1, tag=8, nbytes=8),
    ]


def test_an_arrow_leads_from_a_send_to_its_receive():
    figure = timeline(messages())
    assert len(re.findall("<polygon", figure.svg)) == 1  # the second send has another tag
    x1, x2 = re.search(r'<line x1="([\d.]+)"[^>]*x2="([\d.]+)"[^>]*stroke="#1a1a1a"', figure.svg).groups()
    assert float(x1) == pytest.approx(_NAMES)
    assert float(x2) == pytest.approx(_NAMES + SPAN * 4 / 6, abs=0.01)
    assert "<polygon" not in timeline(messages(), arrows=False).svg


def test_a_send_waits_for_its_receiver():
    assert waiting(messages())[0] == pytest.approx(0.002)


def test_predicted_events_are_outlined_in_a_row_below():
    predicted = [all_reduce(r, 0.0, 0.008, predicted=True) for r in (0, 1)]
    figure = timeline([*late(), *predicted])
    assert "predicted" in texts(figure)
    assert texts(figure).count("rank 0") == 1
    outlines = re.findall(
        rf'<rect stroke-width="2" x="[\d.]+"[^>]*fill="{PAPER}" stroke="{COLOURS["all_reduce"]}"', figure.svg
    )
    assert len(outlines) == 2
    alone = timeline(predicted)
    assert alone.alt == "Predicted timeline of ranks 0, 1 over 8 ms: no rank waits for another."
    assert bars(alone, COLOURS["all_reduce"]) == []


def test_a_span_with_communication_inside_shows_both():
    events = [Event(0, "step", 0.0, 0.010, kind="compute"), all_reduce(0, 0.008, 0.010)]
    figure = timeline(events)
    x = next(float(t.get("x")) for t in ET.fromstring(figure.svg).iter(f"{SVG}text") if t.text == "step")
    assert x == pytest.approx(_NAMES + SPAN * 0.4, abs=0.1)  # in the middle of what is not covered


def test_ranks_without_events_keep_their_row():
    results = (RankResult(0, events=(all_reduce(0, 0.0, 0.1, ranks=(0,)),)), RankResult(1))
    assert "rank 1" in texts(timeline(Run("", results)))


def test_text_twin():
    assert repr(timeline(late())).split("\n") == [
        "Timeline of ranks 0, 1 over 10 ms: rank 1 waits most for the others, 4 ms (40%).",
        "= computes   # communicates   - waits   ~ in the background   (0 to 10 ms)",
        f"rank 0  |{'=' * 36}{'#' * 24}|  computes 6 ms, communicates 4 ms, waits 0 us",
        f"rank 1  |{'=' * 12}{'-' * 24}{'#' * 24}|  computes 2 ms, communicates 4 ms, waits 4 ms",
    ]


def test_communication_inside_a_span_is_no_computing():
    events = [Event(0, "step", 0.0, 0.010, kind="compute"), all_reduce(0, 0.002, 0.006, ranks=(0,))]
    assert "computes 6 ms, communicates 4 ms, waits 0 us" in repr(timeline(events))


def thousands():
    events = []
    for k in range(1000):
        t = 0.002 * k
        for r in range(8):
            call = t + 0.0005 + 0.001 * (r == 3)
            events.append(Event(r, "step", t, call, kind="compute"))
            events.append(all_reduce(r, call, t + 0.002, seq=k + 1, ranks=tuple(range(8))))
    return events


def test_thousands_of_events_stay_small_and_keep_their_shares():
    figure = timeline(thousands())
    assert len(figure._repr_html_()) < 100_000
    assert "height: share of the time" in texts(figure)
    assert re.search(r"rank 0 waits most for the others, .* \(50%\)", figure.alt)
    heights: dict[str, float] = {}
    for r in ET.fromstring(figure.svg).iter(f"{SVG}rect"):
        if r.get("rx") == "0":
            fill = r.get("fill")
            heights[fill] = heights.get(fill, 0.0) + float(r.get("height")) * float(r.get("width"))
    total = 8 * 32 * SPAN
    assert heights[COLOURS["compute"]] / total == pytest.approx((7 * 0.25 + 0.75) / 8, abs=0.02)
    assert heights[COLOURS["all_reduce"]] / total == pytest.approx(0.25, abs=0.02)
    assert heights[light("all_reduce")] / total == pytest.approx(7 / 8 * 0.5, abs=0.02)


def test_text_is_large_enough_for_a_phone():
    for figure in (timeline(late()), timeline(thousands())):
        sizes = {float(t.get("font-size")) for t in ET.fromstring(figure.svg).iter(f"{SVG}text")}
        assert min(sizes) * 340 / WIDTH > 11
        assert all(float(t.get("x")) < WIDTH for t in ET.fromstring(figure.svg).iter(f"{SVG}text"))


def test_no_events():
    with pytest.raises(ValueError, match="There is nothing to draw: no rank computed in a span or comm"):
        timeline([])


def test_the_first_rank_of_each_node_stands_under_its_name():
    run = Run(
        "source",
        tuple(
            RankResult(r, node="ab"[r // 2], events=(Event(r, "work", 0.0, 1.0, kind="compute"),))
            for r in range(4)
        ),
    )
    figure = timeline(run)
    assert [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text") if t.text in ("a", "b")] == [
        "a",
        "b",
    ]
    assert "rank 0 on a" in figure.text and "rank 3 on b" in figure.text
    without = timeline(run.events)
    height = [float(ET.fromstring(f.svg).get("viewBox").split()[3]) for f in (figure, without)]
    assert height[0] == height[1] + 60


def test_a_span_that_begins_where_another_ends_is_not_inside_it():
    """It is as high; one that begins earlier is lower, within the other."""

    def heights(second):
        events = [Event(0, "a", 0.0, 0.5, kind="compute"), Event(0, "b", second, 1.0, kind="compute")]
        found = ET.fromstring(timeline(events).svg).iter(f"{SVG}rect")
        return {
            float(r.get("height"))
            for r in found
            if r.get("fill") == COLOURS["compute"] and r.get("width") != "18.00"
        }

    assert len(heights(0.5)) == 1
    assert len(heights(0.25)) == 2
