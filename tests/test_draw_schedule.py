"""The schedule grid: exact boxes from hand-written events, sentences, twins; the slider and the panel."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from rankcell import schedules
from rankcell.draw import explorer
from rankcell.draw.schedule import cases, explore, grid, planned
from rankcell.results import Event, RankResult, Run

SVG = "{http://www.w3.org/2000/svg}"


def span(rank, op, start, end, **more):
    return Event(rank, op, start, end, kind="compute", **more)


def measured():
    """Two ranks, 10 s in: 0F0 1F0 1B0 0B0."""
    return [
        span(0, "0F0", 10.0, 10.1),
        span(1, "1F0", 10.1, 10.2),
        span(1, "1B0", 10.2, 10.3),
        span(0, "0B0", 10.3, 10.5),
        span(0, "optimizer", 10.5, 11.0),
        Event(0, "send", 10.1, 10.11),
    ]


def boxes(figure):
    """Every box as (fill, stroke, x, y, width, height)."""
    found = []
    for path in ET.fromstring(figure.svg).iter(f"{SVG}path"):
        for x, y, w, h in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", path.get("d")):
            found.append((path.get("fill"), path.get("stroke"), *map(float, (x, y, w, h))))
    return found


def texts(figure):
    return [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]


def test_measured_boxes_are_solid_and_stand_where_the_time_is():
    figure = grid(measured())
    actions = [b for b in boxes(figure) if b[0] != "#efefef"]
    assert {b[1] for b in actions} == {"#ffffff"} and len(actions) == 4
    left, full = 84.0, 600 - 84 - 14  # px for 500 ms
    assert sorted((b[2], b[4]) for b in actions) == [
        pytest.approx((left, full / 5), abs=0.11),
        pytest.approx((left + full / 5, full / 5), abs=0.11),
        pytest.approx((left + 2 * full / 5, full / 5), abs=0.11),
        pytest.approx((left + 3 * full / 5, 2 * full / 5), abs=0.11),
    ]
    assert figure.alt == "2 ranks, 1 micro-batch; measured: done after 500 ms, ranks idle 50 %."
    assert "time in ms" in texts(figure) and texts(figure).count("0") == 5  # four boxes and the axis


def test_the_twin_has_a_letter_per_column():
    lines = repr(grid(measured(), title="By hand")).splitlines()
    assert lines[0] == "By hand. 2 ranks, 1 micro-batch; measured: done after 500 ms, ranks idle 50 %."
    assert lines[1] == "F forward   B backward   . idle"
    assert lines[2] == "rank 0  |" + "F" * 13 + "." * 27 + "B" * 26 + "|  idle 40 %"
    assert lines[3] == "rank 1  |" + "." * 13 + "F" * 13 + "B" * 14 + "." * 26 + "|  idle 60 %"


def test_predicted_boxes_are_outlined_above_the_measured_ones():
    plan = schedules.gpipe(2, 1)
    figure = grid(measured(), schedules.predict(plan, forward=0.1, backward=0.1))
    outlined = [b for b in boxes(figure) if b[1] not in ("none", "#ffffff")]
    solid = [b for b in boxes(figure) if b[1] == "#ffffff"]
    assert len(outlined) == len(solid) == 4
    assert min(b[3] for b in outlined) < min(b[3] for b in solid)  # above
    assert figure.alt == (
        "2 ranks, 1 micro-batch; predicted: done after 400 ms, ranks idle 50 %; measured: done after 500 ms, "
        "ranks idle 50 %."
    )
    assert "predicted" in texts(figure)
    assert [line.split("|")[0].strip() for line in repr(figure).splitlines()[2:]] == [
        "rank 0 predicted",
        "rank 0 measured",
        "rank 1 predicted",
        "rank 1 measured",
    ]


def test_a_run_and_a_schedule_are_drawn_too():
    events = measured()
    ranks = tuple(RankResult(r, events=tuple(e for e in events if e.rank == r)) for r in (0, 1))
    assert grid(Run("", ranks)).svg == grid(events).svg
    figure = grid(schedules.interleaved(2, 4, 2))
    assert figure.alt == "2 ranks, 4 micro-batches; predicted: done after 13.5 forwards, ranks idle 11 %."
    assert len({b[0] for b in boxes(figure) if b[0] != "#efefef"}) == 4  # two kinds, two chunks
    assert "later chunk: paler" in texts(figure)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match='no event is named after an action, such as "1F0"'):
        grid([span(0, "forward", 0, 1)])


@pytest.mark.parametrize("name", list(schedules.SCHEDULES))
def test_large_schedules_stay_small(name):
    figure = planned(name, 8, 32, 4)
    assert len(figure._repr_html_()) < 100_000
    assert len(grid(replace_all(figure, name))._repr_html_()) < 100_000


def replace_all(_, name):
    plan = schedules.SCHEDULES[name](8, 32)
    return [replace(e, predicted=False) for e in schedules.predict(plan)]


def test_cases_share_time_size_and_key():
    frames = cases({name: make(4, 8) for name, make in schedules.SCHEDULES.items()}, still=2)
    assert frames.labels == (
        "naive: idle 75 %",
        "GPipe: idle 27 %",
        "1F1B: idle 27 %",
        "interleaved: idle 16 %",
        "zero bubble: idle 11 %",
    )
    heights = {ET.fromstring(f.svg).get("height") for f in frames.figures}
    assert len(heights) == 1 and len(frames._repr_html_()) < 100_000
    last = [max(b[2] + b[4] for b in boxes(f) if b[0] != "#efefef") for f in frames.figures]
    assert last[0] == pytest.approx(586, abs=1.5) and last[4] < last[2] == pytest.approx(last[1], abs=0.2)


def test_the_panel_draws_anew_at_each_move():
    shown = explore()
    by_name = {c.description: c for c in shown.children if getattr(c, "description", "")}
    assert list(by_name) == ["schedule", "ranks", "microbatches", "chunks", "backward"]
    picture = shown.children[-2]
    assert planned().data_uri() in picture.value
    by_name["schedule"].value = "zero bubble"
    by_name["ranks"].value = 3
    assert planned("zero bubble", 3).data_uri() in picture.value


def test_a_planned_schedule_says_what_is_held_in_micro_batches():
    """Interleaved, the first rank holds up to 11 chunks, each half of its layers."""
    assert "at most 4 micro-batches held" in planned("1F1B", 4, 8).svg
    assert "at most 5.5 micro-batches held" in planned("interleaved", 4, 8, 2).svg


def test_a_panel_shows_what_cannot_be():
    def draw(n):
        if n == 2:
            raise ValueError("2 < 3 is not allowed.")
        return planned(ranks=n)

    shown = explorer.panel(draw, {"n": [1, 2]})
    shown.children[0].value = 2
    assert shown.children[1].value == "<p>2 &lt; 3 is not allowed.</p>"
