"""Hand-written standings in; circles, arrows, words and the finding out."""

import math
import re
from xml.etree import ElementTree

import pytest

import rankcell
from rankcell.draw.parts import WIDTH, text_width
from rankcell.draw.svg import COLOURS, INK
from rankcell.draw.waits import waits, who_waits
from rankcell.results import Run, Standing

SVG = "{http://www.w3.org/2000/svg}"


def waiting(rank, op, line, *peers):
    text = f"{op}(float32[4])"
    return Standing(rank, "running", f"waits in {text} (call 1 of the world)", op, text, line, peers)


def finished(rank):
    return Standing(rank, "finished", "finished the cell after 0 calls")


def picture(*standings):
    return waits(Run("", (), standstill=standings))


CASES = {
    "a ring of sends": (
        [waiting(r, "send", 2, (r + 1) % 4) for r in range(4)],
        "ranks 0-3 wait in a circle: 0 → 1 → 2 → 3 → 0",
    ),
    "recv and recv": (
        [waiting(0, "recv", 4, 1), waiting(1, "recv", 5, 0), finished(2), finished(3)],
        "ranks 0 and 1 wait for each other",
    ),
    "a skipped collective": (
        [waiting(r, "all_reduce", 4, 2) if r != 2 else finished(2) for r in range(4)],
        "ranks 0, 1, 3 wait for rank 2, which has finished",
    ),
    "two pairs": (
        [waiting(r, "recv", 3, r ^ 1) for r in range(4)],
        "ranks 0 and 1 wait for each other; ranks 2 and 3 wait for each other",
    ),
    "three in different collectives": (
        [waiting(r, ["barrier", "all_gather", "reduce_scatter"][r], 9, *({0, 1, 2} - {r})) for r in range(3)],
        "ranks 0-2 wait for each other",
    ),
    "a cycle and those behind it": (
        [waiting(0, "recv", 5, 1), waiting(1, "barrier", 8, 0), waiting(2, "barrier", 8, 0)],
        "ranks 0 and 1 wait for each other; rank 2 waits behind them",
    ),
    "a chain": (
        [waiting(0, "recv", 5, 1), waiting(1, "recv", 8, 2), waiting(2, "recv", 8, 3), finished(3)],
        "rank 2 waits for rank 3, which has finished; ranks 0 and 1 wait behind them",
    ),
    "a rank that failed": (
        [waiting(0, "barrier", 2, 1), Standing(1, "error", "failed: ZeroDivisionError: division by zero")],
        "rank 0 waits for rank 1, which has failed",
    ),
    "a rank that was lost": (
        [waiting(0, "monitored_barrier", 2, 1), Standing(1, "lost", "was killed (SIGKILL)")],
        "rank 0 waits for rank 1, which was lost",
    ),
    "ranks left out": (
        [waiting(0, "barrier", 2, 1, 2), *(Standing(r, "absent", "does not run this cell") for r in (1, 2))],
        "rank 0 waits for ranks 1 and 2, which do not run this cell",
    ),
    "a timeout": (
        [
            waiting(0, "barrier", 3, 1, 2),
            finished(1),
            Standing(2, "running", "computes at line 2", line=2),
        ],
        "rank 0 waits for rank 1, which has finished; rank 0 waits for rank 2, which computes",
    ),
    "an interrupt while all compute": (
        [Standing(r, "running", "computes at line 2", line=2) for r in range(2)],
        "rank 0 computes; rank 1 computes; nobody waits for another",
    ),
    "a receive from anyone": (
        [waiting(0, "recv", 3, 1, 2, 3), *(finished(r) for r in (1, 2, 3))],
        "rank 0 waits for ranks 1-3, which have finished",
    ),
    "one rank": ([Standing(0, "running", "computes at line 1", line=1)], "rank 0 computes; nobody waits"),
    "eight ranks": (
        [waiting(r, "all_to_all", 3, 5) if r != 5 else finished(5) for r in range(8)],
        "ranks 0-4, 6, 7 wait for rank 5, which has finished",
    ),
    "sixteen ranks": (
        [waiting(r, "send", 3, (r + 1) % 16) for r in range(16)],
        "ranks 0-15 wait in a circle",
    ),
}
each_case = pytest.mark.parametrize(("standings", "finding"), CASES.values(), ids=list(CASES))


def marks(figure, tag):
    return list(ElementTree.fromstring(figure.svg).iter(SVG + tag))


def number(element, name):
    return float(element.get(name))


def words(figure):
    return [t.text for t in marks(figure, "text")]


def arrows(figure):
    """(colour, width, from, to) of each arrow: the ranks whose circles its ends are nearest to."""
    centres = {
        k: (number(c, "cx"), number(c, "cy"))
        for k, c in enumerate(marks(figure, "circle"))  # drawn in order of rank
    }

    def nearest(x, y):
        return min(centres, key=lambda k: math.dist(centres[k], (x, y)))

    return [
        (
            mark.get("stroke"),
            number(mark, "stroke-width"),
            nearest(number(mark, "x1"), number(mark, "y1")),
            nearest(number(mark, "x2"), number(mark, "y2")),
        )
        for mark in marks(figure, "line")
    ]


@each_case
def test_the_finding_is_said_in_the_alt_text_the_twin_and_the_picture(standings, finding):
    figure = picture(*standings)
    assert figure.alt.startswith(f"Who waits for whom: {finding}")
    assert figure.alt.endswith(".") and figure.alt == marks(figure, "svg")[0].get("aria-label")
    first, *rows = repr(figure).splitlines()
    assert first.startswith(finding)
    assert len(rows) == len(standings)
    for row, standing in zip(rows, standings, strict=True):
        assert row.startswith(f"rank {standing.rank}  {standing.doing}")
        assert bool(standing.waits_for) == ("; waits for" in row)
    assert finding.lower() in " ".join(words(figure)).lower()


@each_case
def test_every_edge_is_an_arrow_from_who_waits_to_whom(standings, finding):
    expected = sorted((s.rank, peer) for s in standings for peer in s.waits_for)
    figure = picture(*standings)
    assert sorted((a, b) for _, _, a, b in arrows(figure)) == expected
    assert len(marks(figure, "polygon")) == len(expected)  # heads
    assert len(marks(figure, "circle")) == len(standings)


@each_case
def test_it_reads_on_a_phone(standings, finding):
    figure = picture(*standings)
    root = ElementTree.fromstring(figure.svg)
    width, height = (float(v) for v in root.get("viewBox").split()[2:])
    assert width == WIDTH and len(figure.svg) < 20_000
    boxes = []
    for text in root.iter(SVG + "text"):
        size, x, y = number(text, "font-size"), number(text, "x"), number(text, "y")
        assert size * 380 / width > 11
        span = text_width(text.text, size) * (1.12 if text.get("font-weight") else 1)
        left = {"start": x, "middle": x - span / 2, "end": x - span}[text.get("text-anchor")]
        assert left >= 0 and left + span <= width, f"{text.text!r} leaves the picture"
        assert size * 0.7 <= y <= height - 4, f"{text.text!r} leaves the picture"
        boxes.append((left, y - 0.7 * size, left + span, y, text.text))
    for k, a in enumerate(boxes):
        for b in boxes[:k]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, f"{a[4]!r} lies on {b[4]!r}"
    circles = [(number(c, "cx"), number(c, "cy"), number(c, "r")) for c in marks(figure, "circle")]
    for k, (x, y, r) in enumerate(circles):
        for x2, y2, r2 in circles[:k]:
            assert math.hypot(x - x2, y - y2) > r + r2 + 4


def test_arrows_of_a_cycle_are_thick_in_the_colour_of_the_operation():
    figure = picture(*CASES["a cycle and those behind it"][0])
    assert arrows(figure) == [
        (COLOURS["recv"], 5, 0, 1),
        (COLOURS["barrier"], 5, 1, 0),
        (COLOURS["barrier"], 2.5, 2, 0),
    ]


def test_two_that_wait_for_each_other_have_two_arrows_apart():
    there, back = marks(picture(*CASES["recv and recv"][0]), "line")
    assert number(there, "y1") == number(there, "y2") == number(back, "y1") + 20 == number(back, "y2") + 20
    assert number(there, "x1") < number(there, "x2") and number(back, "x1") > number(back, "x2")


def test_ranks_stand_clockwise_from_the_top_left():
    at = [(number(c, "cx"), number(c, "cy")) for c in marks(picture(*CASES["a ring of sends"][0]), "circle")]
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = at
    assert x0 == x3 < x1 == x2 and y0 == y1 < y2 == y3


def test_operation_and_line_stand_beside_the_rank_that_waits():
    figure = picture(*CASES["recv and recv"][0])
    assert words(figure)[:10] == [
        "0", "1", "2", "3", "recv", "line 4", "recv", "line 5", "finished", "finished",
    ]  # fmt: skip
    beside = {t.text: t for t in marks(figure, "text")}
    first, second = (number(c, "cx") for c in marks(figure, "circle")[:2])
    assert beside["line 4"].get("text-anchor") == "end" and number(beside["line 4"], "x") < first
    assert beside["line 5"].get("text-anchor") == "start" and number(beside["line 5"], "x") > second


def test_what_became_of_a_rank_is_drawn_and_said():
    figure = picture(
        waiting(0, "barrier", 2, 1),
        Standing(1, "error", "failed: ZeroDivisionError"),
        Standing(2, "lost", "was killed"),
        Standing(3, "absent", "does not run this cell"),
        finished(4),
        Standing(5, "running", "computes at line 7", line=7),
    )
    fills = [c.get("fill") for c in marks(figure, "circle")]
    assert fills == ["#ffffff", INK, "#ffffff", "#ffffff", COLOURS["wait"], "#ffffff"]
    dashes = [c.get("stroke-dasharray") for c in marks(figure, "circle")]
    assert dashes == [None, None, "6 5", "6 5", None, "2 4"]
    said = " ".join(words(figure))
    assert re.search("barrier line 2 failed lost not in this cell finished computes line 7", said)


def test_a_receive_from_anyone_is_dashed():
    figure = picture(*CASES["a receive from anyone"][0])
    assert {m.get("stroke-dasharray") for m in marks(figure, "line")} == {"7 5"}
    assert "; waits for any of ranks 1-3" in repr(figure)


def test_a_large_world_has_its_words_below():
    figure = picture(*CASES["sixteen ranks"][0])
    assert words(figure)[:16] == [str(r) for r in range(16)]
    assert words(figure)[16:] == ["ranks 0-15: send, line 3", "Ranks 0-15 wait in a circle."]


def test_standings_may_come_in_any_order():
    standings = CASES["a skipped collective"][0]
    assert picture(*reversed(standings)) == picture(*standings)


def test_who_waits_is_a_dictionary_of_the_arrows():
    run = Run("", (), standstill=tuple(reversed(CASES["a chain"][0])))
    assert who_waits(run) == {0: (1,), 1: (2,), 2: (3,)}
    assert who_waits(Run("", ())) == {}


def test_a_run_that_came_to_its_end_is_refused():
    with pytest.raises(ValueError, match=r"this run has no standstill, .* Keep the run of the cell"):
        waits(Run("x", ()))


def test_a_real_deadlock(four):
    with pytest.raises(rankcell.Deadlock) as caught:
        four.run("x = torch.ones(4)\nif rank < 2:\n    dist.recv(x, 1 - rank)")
    figure = waits(caught.value.run)
    assert figure.alt == "Who waits for whom: ranks 0 and 1 wait for each other."
    assert [(a, b) for _, _, a, b in arrows(figure)] == [(0, 1), (1, 0)]
    assert words(figure)[4:10] == ["recv", "line 3", "recv", "line 3", "finished", "finished"]
