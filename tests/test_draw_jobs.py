"""Exact rows, words and bars of a job array's schedule."""

import xml.etree.ElementTree as ET

import pytest

from rankcell.draw.jobs import Task, at_once, schedule
from rankcell.draw.parts import WIDTH

SVG = "{http://www.w3.org/2000/svg}"
ARRAY = (Task(1, 5.0, 6.0), Task(2, 5.0, 6.5, -9), Task(3, 6.0, 7.0, 1), Task(4, 6.5, 7.0))


def bars(figure):
    rects = ET.fromstring(figure.svg).iter(f"{SVG}rect")
    return {
        r.find(f"{SVG}title").text: (float(r.get("x")), float(r.get("width")), r.get("fill"))
        for r in rects
        if r.find(f"{SVG}title") is not None
    }


def texts(figure):
    return [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]


def test_states_in_words():
    assert [t.state for t in ARRAY] == ["completed", "killed", "exit 1", "completed"]


def test_tasks_that_touch_do_not_overlap():
    assert at_once(ARRAY) == 2
    assert at_once([Task(1, 0.0, 1.0), Task(2, 1.0, 2.0)]) == 1
    assert at_once([]) == 0


def test_bars_are_to_scale_and_failures_have_their_colour():
    found = bars(schedule(ARRAY))
    first, killed, failed, last = found.values()
    assert list(found) == [
        "task 1: completed after 1 s",
        "task 2: killed after 1.5 s",
        "task 3: exit 1 after 1 s",
        "task 4: completed after 500 ms",
    ]
    assert first[1] == pytest.approx(2 * last[1], abs=0.02)
    assert last[0] + last[1] == pytest.approx(WIDTH - 16, abs=0.02)
    assert first[2] == last[2] != killed[2] == failed[2]


def test_alt_and_twin_say_the_finding():
    figure = schedule(ARRAY, title="Sweep")
    assert figure.alt == (
        "Sweep. 4 tasks, at most 2 at a time, done after 2 s: task 2 killed, task 3 exit 1."
    )
    assert "task 2  ##############################            killed" in repr(figure)
    assert {"waits", "runs", "failed", "killed", "exit 1", "task 4", "seconds since the first began"} <= {
        *texts(figure)
    }


def test_without_failures_the_key_has_none():
    figure = schedule([Task(1, 0.0, 1.0)])
    assert "failed" not in texts(figure)
    assert figure.alt == "1 task, at most 1 at a time, done after 1 s: all completed."


def test_no_tasks_is_said():
    with pytest.raises(ValueError, match=r"There is nothing to draw: no task was given\."):
        schedule([])
