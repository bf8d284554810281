"""Memory by kind, from fixed numbers: which bars there are, how long they are, and that every word fits."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rankcell.draw import memory
from rankcell.draw.parts import text_width

SVG = "{http://www.w3.org/2000/svg}"
KIB = 1024


def marks(figure, tag):
    """All elements of one kind, in drawing order."""
    return list(ElementTree.fromstring(figure.svg).iter(SVG + tag))


def words(figure):
    """All texts of the picture."""
    return [t.text for t in marks(figure, "text")]


def number(element, name):
    return float(element.get(name))


def one_step(**options):
    held = {
        "activations": [0, 40 * KIB, 40 * KIB, 0, 0],
        "parameters": [16 * KIB] * 5,
        "gradients": [0, 0, 8 * KIB, 16 * KIB, 16 * KIB],
        "optimizer": [0, 0, 0, 0, 32 * KIB],
    }
    phases = [(0, "forward"), (2, "backward"), (4, "step")]
    return memory.over_time([0, 1, 2, 3, 4], held, x_label="operations", **({"phases": phases} | options))


def two_ranks(**options):
    rows = [{"parameters": 300.0, "gradients": 100.0}, {"gradients": 100.0, "parameters": 100.0}]
    formula = [{"parameters": 300.0, "gradients": 100.0}, {"parameters": 100.0, "gradients": 102.0}]
    return memory.by_rank(rows, **({"formula": formula} | options))


def all_figures():
    many = [{k: 2.0**20 * (r + 1) for k in memory.COLOURS} for r in range(8)]
    phases = [(k * 50, n) for k, n in enumerate(("forward", "backward", "step") * 3)]
    return {
        "one step": one_step(),
        "no phases": one_step(phases=()),
        "crowded phases": memory.over_time(
            range(500), {"parameters": [2**30] * 500}, x_label="operations", phases=phases
        ),
        "one look": memory.over_time([3], {"rest": [5]}, x_label="ms"),
        "nothing held": memory.over_time([0, 1], {"rest": [0, 0]}, x_label="ms"),
        "a kind of one's own": memory.over_time([0, 1], {"cache": [1, 2], "rest": [1, 1]}, x_label="ms"),
        "two ranks": two_ranks(),
        "no formula": two_ranks(formula=()),
        "eight ranks": memory.by_rank(many, many),
        "named": memory.by_rank([{"parameters": 3}, {"rest": 5}], names=["SGD", "AdamW"]),
        "empty rank": memory.by_rank([{"parameters": 0}]),
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
        assert size * 380 / width > 11, f"{text.text!r} is under 11 px on a phone"
        span = text_width(text.text, size)
        left = {"start": x, "middle": x - span / 2, "end": x - span}[text.get("text-anchor")]
        assert left >= -1 and left + span <= width + 4, f"{text.text!r} leaves the picture"
        assert size * 0.7 <= y <= height, f"{text.text!r} leaves the picture"
        spans.append((y, left, left + span * 0.92, text.text))
    for (y1, _, end, first), (y2, begin, _, second) in pairwise(sorted(spans)):
        assert y1 != y2 or begin >= end - 4, f"{first!r} touches {second!r}"


# Over time


def test_kinds_are_piled_in_the_course_s_order():
    tips = [t.text for polygon in marks(one_step(), "polygon") for t in polygon]
    assert tips == [
        "parameters: at most 16 KiB",
        "gradients: at most 16 KiB",
        "optimizer: at most 32 KiB",
        "activations: at most 40 KiB",
    ]
    assert [w for w in words(one_step()) if w in memory.COLOURS] == [tip.split(":")[0] for tip in tips]


def test_a_pile_is_a_staircase_that_ends_where_the_next_begins():
    polygons = [
        [tuple(map(float, p.split(","))) for p in polygon.get("points").split()]
        for polygon in marks(one_step(), "polygon")
    ]
    for corners in polygons:
        for (xa, ya), (xb, yb) in pairwise(corners):
            assert xa == xb or ya == yb, "a step is upright or level"
    parameters, gradients = polygons[:2]
    top_of_parameters = min(y for _, y in parameters)
    assert max(y for _, y in gradients) == top_of_parameters
    heights = [max(y for _, y in p) - min(y for _, y in p) for p in (parameters, gradients)]
    assert heights[0] == pytest.approx(heights[1], abs=0.2)  # both 16 KiB at most


def test_phases_stand_where_they_begin_and_the_axis_is_binary():
    said = words(one_step())
    assert {"forward", "backward", "step", "0 B", "16 KiB", "32 KiB", "48 KiB", "operations"} <= set(said)
    dotted = [line for line in marks(one_step(), "line") if line.get("stroke-dasharray")]
    assert len(dotted) == 2  # none at the left end


def test_alt_text_says_the_peak_and_where():
    assert one_step().alt == (
        "Memory is highest in backward, 64 KiB: parameters 16 KiB, gradients 8 KiB, activations 40 KiB."
    )
    assert one_step(phases=()).alt.startswith("Memory is highest, 64 KiB: ")
    assert one_step(alt="My finding.").alt == "My finding."


def test_text_twin_is_a_table_by_phase():
    assert repr(one_step()).splitlines() == [
        "by operations    parameters  gradients  optimizer  activations  together  at most",
        "end of forward       16 KiB        0 B        0 B       40 KiB    56 KiB   56 KiB",
        "end of backward      16 KiB     16 KiB        0 B          0 B    32 KiB   64 KiB",
        "end of step          16 KiB     16 KiB     32 KiB          0 B    64 KiB   64 KiB",
    ]


def test_names_of_phases_move_to_a_second_row_rather_than_touch():
    figure = all_figures()["crowded phases"]
    rows = {text.get("y") for text in marks(figure, "text") if text.text in ("forward", "backward")}
    assert len(rows) > 1


def test_over_time_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="memory was never looked at"):
        memory.over_time([], {}, x_label="ms")
    with pytest.raises(ValueError, match=r"rest has 1 values for 2 places\. Give one per place\."):
        memory.over_time([0, 1], {"rest": [1]}, x_label="ms")


# By rank


def bars(figure, height):
    return [b for b in marks(figure, "rect") if b.get("height") == f"{height:.2f}"]


def test_measured_is_solid_and_the_formula_outlined_on_one_scale():
    solid = bars(two_ranks(), 30)
    assert [b.get("fill") for b in solid] == [memory.COLOURS["parameters"], memory.COLOURS["gradients"]] * 2
    assert [number(b, "width") for b in solid] == pytest.approx([435, 145, 145, 145])
    outlined = [b for b in bars(two_ranks(), 16) if b.get("stroke-width") == "2"]
    assert {b.get("fill") for b in outlined} == {"#ffffff"}
    assert [number(b, "width") for b in outlined] == pytest.approx([433, 143, 143, 145.9], abs=0.01)


def test_bars_say_their_sizes():
    said = words(two_ranks())
    assert {"rank 0", "rank 1", "400 B", "200 B", "300 B", "outlined: by formula"} <= set(said)
    assert "outlined: by formula" not in words(two_ranks(formula=()))
    assert [t.text for b in bars(two_ranks(), 30) for t in b][:2] == ["parameters: 300 B", "gradients: 100 B"]


def test_alt_text_of_ranks_says_who_holds_most_and_how_far_the_formula_is_off():
    assert (
        two_ranks().alt
        == "Rank 0 holds the most, 400 B, 75% of it parameters. The formula is at most 0.99% off."
    )
    same = [{"parameters": 3.0, "gradients": 1.0}] * 2
    assert memory.by_rank(same, same).alt == (
        "Each of the 2 holds 4 B, 75% of it parameters. The formula is exact."
    )
    assert memory.by_rank([{"rest": 5}], names=["AdamW"]).alt == "AdamW holds 5 B, 100% of it rest."


def test_text_twin_of_ranks_is_a_table():
    assert repr(two_ranks()).splitlines() == [
        "              parameters  gradients  together",
        "rank 0             300 B      100 B     400 B",
        "  by formula       300 B      100 B     400 B",
        "rank 1             100 B      100 B     200 B",
        "  by formula       100 B      102 B     202 B",
    ]


def test_by_rank_refuses_what_does_not_match():
    with pytest.raises(ValueError, match="no rank was measured"):
        memory.by_rank([])
    with pytest.raises(ValueError, match="2 were measured, the formula is for 1"):
        memory.by_rank([{"rest": 1}] * 2, [{"rest": 1}])
    with pytest.raises(ValueError, match="2 were measured, 1 have names"):
        memory.by_rank([{"rest": 1}] * 2, names=["a"])


def test_kinds_of_one_s_own_get_free_colours():
    kinds = ["rest", "cache", "buffers"]
    colours = [memory.colour_of(kind, kinds) for kind in kinds]
    assert len(set(colours)) == 3 and not set(colours[1:]) & set(memory.COLOURS.values())
