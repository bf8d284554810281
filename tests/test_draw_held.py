"""One box per tensor in the order of computing, in the colour of its layout; the picture gives no verdict."""

import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from rankcell.against import Comparison, Row
from rankcell.draw.held import LOOKS, held, look

SVG = "{http://www.w3.org/2000/svg}"


def row(name, kind, layout, status="fits", step=0):
    return Row(name, kind, step, layout, status, (0, 1))


ROWS = (
    row("up", "parameter", "sharded on dim 0"),
    row("up", "output", "sharded on dim 2"),
    row("down", "output", "partial over ranks 0-1", "partial"),
    row("down", "grad_output", "the same on all"),
    row("up", "grad", "4 times it", "scaled"),
    row("down", "grad", "other numbers (3% off)", "none"),
    row("up", "parameter", "sharded on dim 0", step=1),
)


def boxes(figure):
    """Title and fill of each box, from left to right and from top to bottom."""
    found = [r for r in ET.fromstring(figure.svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    found.sort(key=lambda r: (float(r.get("y")), float(r.get("x"))))
    return [(r.find(f"{SVG}title").text, r.get("fill")) for r in found]


def test_a_box_for_each_tensor_in_order():
    figure = held({"a run": Comparison(ROWS, None)})
    assert boxes(figure) == [
        ("up, outputs: sharded on dim 2", LOOKS["parts"][0]),
        ("down, outputs: partial over ranks 0-1", LOOKS["partial sum"][0]),
        ("down, their gradients: the same on all", LOOKS["same on all"][0]),
        ("up.grad, weights' gradients: 4 times it", LOOKS["multiple"][0]),
        ("down.grad, weights' gradients: other numbers (3% off)", LOOKS["something else"][0]),
    ]
    assert repr(figure).startswith(
        "a run: outputs #+  their gradients =  weights' gradients x!\n(= same on all, # parts,"
    )
    assert figure.alt == (
        "a run: outputs 1 in parts, 1 as partial sums; their gradients 1 the same on all; "
        "weights' gradients 1 a multiple of it, 1 something else."
    )


def test_weights_are_those_after_the_step():
    figure = held({"a run": Comparison(ROWS, None)}, kinds=("parameter",))
    assert boxes(figure) == [("up, weights: sharded on dim 0", LOOKS["parts"][0])]


def test_one_strip_below_the_other():
    figure = held({"first": Comparison(ROWS, None), "second": Comparison(ROWS[1:3], None)})
    assert [title for title, _ in boxes(figure)][-2:] == [
        "up, outputs: sharded on dim 2",
        "down, outputs: partial over ranks 0-1",
    ]
    assert repr(figure).split("\n")[1] == "second: outputs #+"


def test_it_says_nothing_of_what_is_to_blame():
    says = "its gradients are never summed"
    blamed = Row("up", "grad", 0, "partial over ranks 0-1", "none", (0, 1), says=says)
    figure = held({"a run": Comparison((blamed,), blamed)})
    assert says not in figure.svg + figure.alt + figure.text


@pytest.mark.parametrize(
    ("layout", "status", "expected"),
    [
        ("the same on all", "fits", "same on all"),
        ("part of the batch", "fits", "parts"),
        ("sharded on dim 1, strided", "fits", "parts"),
        ("each rank another multiple of it", "none", "another multiple on each"),
        ("1.92 times it", "none", "multiple"),
        ("partial over ranks 0-3", "none", "partial sum"),
        ("each its own part of the batch (over ranks 0-3)", "partial", "its own on each"),
        ("on no rank", "missing", "something else"),
        ("a number: not compared", "skipped", "not compared"),
        ("parts of a sum", "batch", "not compared"),
    ],
)
def test_kinds_of_layout(layout, status, expected):
    assert look(SimpleNamespace(layout=layout, status=status)) == expected


@pytest.mark.parametrize("runs", [{}, {"a run": Comparison(ROWS[:1], None)}])
def test_nothing_to_draw(runs):
    with pytest.raises(ValueError, match="There is nothing to draw"):
        held(runs)
