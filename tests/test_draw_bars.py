"""Bars are as long as their values, from zero, and the limit stands at its value."""

from xml.etree import ElementTree

import pytest

from rankcell.draw.bars import bars
from rankcell.draw.parts import EDGE, WIDTH

SVG = "{http://www.w3.org/2000/svg}"
NEEDS = {"small": {"parameters": 2, "optimizer": 12}, "large": {"parameters": 20, "optimizer": 120}}


def rects(figure):
    """Width and colour of all bars, by the text a mouse over them shows."""
    found = ElementTree.fromstring(figure.svg).iter(f"{SVG}rect")
    return {r.find(f"{SVG}title").text: r for r in found if r.find(f"{SVG}title") is not None}


def test_lengths_are_proportional_and_parts_follow_each_other():
    drawn = rects(bars(NEEDS, unit="GB"))
    widths = {name: float(r.get("width")) for name, r in drawn.items()}
    assert widths["large, optimizer: 120"] == pytest.approx(10 * widths["small, optimizer: 12"], abs=0.1)
    assert widths["large, parameters: 20"] + widths["large, optimizer: 120"] == pytest.approx(
        WIDTH - 2 * EDGE, abs=0.1
    )
    assert float(drawn["small, parameters: 2"].get("x")) == EDGE
    assert float(drawn["small, optimizer: 12"].get("x")) == pytest.approx(
        EDGE + widths["small, parameters: 2"], abs=0.1
    )


def test_the_limit_stands_at_its_value_in_every_row():
    figure = bars(NEEDS, unit="GB", limit=("it has", 70))
    lines = ElementTree.fromstring(figure.svg).iter(f"{SVG}line")
    at = [float(x.get("x1")) for x in lines if x.get("stroke") == "#1a1a1a"][1:]  # after the key
    assert at == [pytest.approx((WIDTH) / 2, abs=0.1)] * 2
    assert "| it has: 70" in repr(figure)


def test_plain_numbers_measured_or_not():
    solid, pale = (bars({"a": 1.0}, unit="s", measured=measured) for measured in (True, False))
    assert rects(solid)["a: 1"].get("fill") == "#0072b2" != rects(pale)["a: 1"].get("fill")
    assert repr(solid) == "s\na: 1" and solid.alt == "a has the longest bar: 1."


def test_nothing_to_draw():
    for rows in ({}, {"a": -1.0}):
        with pytest.raises(ValueError, match="at least one row"):
            bars(rows, unit="s")
