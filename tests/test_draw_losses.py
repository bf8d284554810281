"""Loss curves from fixed numbers: where they run, which is broad, and that every word fits."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rankcell.draw.losses import losses
from rankcell.draw.parts import text_width

SVG = "{http://www.w3.org/2000/svg}"


def marks(figure, tag):
    return list(ElementTree.fromstring(figure.svg).iter(SVG + tag))


def points(polyline):
    return [tuple(map(float, p.split(","))) for p in polyline.get("points").split()]


def number(element, name):
    return float(element.get(name))


def example(**options):
    curves = {"one process": [4.0, 2.0, 1.0], "2 ranks": [4.0, 2.0, 1.25]}
    return losses(curves, **options)


def all_figures():
    return {
        "two": example(),
        "levels": example(levels={"a guess: ln 49": 3.89}),
        "log": example(log=True),
        "one point": losses({"a": [2.0]}),
        "long": losses({"training": [4 / (1 + i) for i in range(5000)]}, log=True),
        "four": losses({f"{n} ranks": [1.0 + n, 1.0] for n in (1, 2, 4, 8)}),
        "broken": losses({"a <b>": [1.0, 2.0, math.inf, math.nan, 1.0]}),
        "sparse": losses({"training": [3.0] * 101, "held out": [3.0] * 3}, every={"held out": 50}),
    }


@pytest.mark.parametrize(("name", "figure"), all_figures().items(), ids=list(all_figures()))
def test_every_picture_reads_on_a_phone_and_in_a_terminal(name, figure):
    root = ElementTree.fromstring(figure.svg)
    width, height = (float(v) for v in root.get("viewBox").split()[2:])
    assert width == 600 and len(figure.svg) < 100_000
    assert figure.alt.strip() and figure.alt == root.get("aria-label")
    assert figure.text.strip() and repr(figure) == figure.text
    spans = []
    for text in root.iter(SVG + "text"):
        size, x, y = number(text, "font-size"), number(text, "x"), number(text, "y")
        assert size * 380 / width > 11
        span = text_width(text.text, size)
        left = {"start": x, "middle": x - span / 2, "end": x - span}[text.get("text-anchor")]
        assert left >= -1 and left + span <= width + 4, f"{text.text!r} leaves the picture"
        assert size * 0.7 <= y <= height
        spans.append((y, left, left + span * 0.92, text.text))
    for (y1, _, end, first), (y2, begin, _, second) in pairwise(sorted(spans)):
        assert y1 != y2 or begin >= end - 4, f"{first!r} touches {second!r}"


def test_the_first_of_several_is_broad_and_pale_so_that_equal_curves_are_both_seen():
    broad, thin = marks(example(), "polyline")
    assert number(broad, "stroke-width") > 3 * number(thin, "stroke-width")
    assert number(broad, "stroke-opacity") < 1 == number(thin, "stroke-opacity")
    assert points(broad)[:2] == points(thin)[:2] and points(broad)[2] != points(thin)[2]
    assert number(marks(losses({"a": [1.0, 2.0]}), "polyline")[0], "stroke-width") == 2.5


def test_lines_are_straight_where_they_should_be():
    (curve,) = marks(losses({"a": [4.0, 2.0, 1.0]}, log=True), "polyline")
    (xa, ya), (xb, yb), (xc, yc) = points(curve)
    assert xb - xa == pytest.approx(xc - xb, abs=0.2) and yb - ya == pytest.approx(yc - yb, abs=0.2)


def test_curves_of_unlike_spacing_share_the_axis():
    dense, sparse = marks(all_figures()["sparse"], "polyline")
    assert points(dense)[50][0] == points(sparse)[1][0]
    assert points(dense)[-1] == points(sparse)[-1]


def test_a_long_curve_is_thinned_and_keeps_its_end():
    (curve,) = marks(all_figures()["long"], "polyline")
    assert len(points(curve)) <= 402
    assert points(curve)[-1][0] == pytest.approx(582, abs=0.1)


def test_what_is_not_a_number_leaves_a_gap_and_is_said():
    figure = all_figures()["broken"]
    assert [len(points(p)) for p in marks(figure, "polyline")] == [2, 1]
    assert "not a number from step 2" in repr(figure)


def test_alt_text_says_the_finding():
    assert example().alt == (
        "Loss: one process goes from 4 to 1; 2 ranks goes from 4 to 1.25. They are at most 0.25 apart."
    )
    assert losses({"a": [2.0, 1.0]}).alt == "Loss: a goes from 2 to 1."
    assert "apart" not in all_figures()["sparse"].alt
    assert example(alt="Equal.").alt == "Equal."


def test_text_twin():
    assert repr(example(levels={"a guess": 3.891})).splitlines() == [
        "loss against step",
        "one process: 0: 4, 1: 2, 2: 1",
        "2 ranks: 0: 4, 1: 2, 2: 1.25",
        "a guess: 3.891",
    ]


def test_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="no curve has a value"):
        losses({"a": []})
    with pytest.raises(ValueError, match="no value is a finite number"):
        losses({"a": [math.nan]})
    with pytest.raises(ValueError, match=r"no place for a loss of 0\. Use log=False\."):
        losses({"a": [1.0, 0.0]}, log=True)
