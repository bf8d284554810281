"""Exact shades, numbers and sentences of a traffic matrix."""

import xml.etree.ElementTree as ET

import pytest

from rankcell.draw.parts import WIDTH
from rankcell.draw.svg import COLOURS, PAPER
from rankcell.draw.traffic import traffic

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20


def ring(n, nbytes, step=1):
    return [[nbytes if j == (i + step) % n else 0 for j in range(n)] for i in range(n)]


def fills(figure):
    return [r.get("fill") for r in ET.fromstring(figure.svg).iter(f"{SVG}rect")][1:]


def texts(figure):
    return [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]


def test_most_is_darkest_and_the_diagonal_is_grey():
    figure = traffic([[0, 200], [100, 0]])
    assert fills(figure) == ["#f4f4f4", COLOURS["all_reduce"], "#80b8d8", "#f4f4f4"]
    assert texts(figure) == [
        "to rank", "sent in all", "0", "1", "rank 0", "200 B", "200 B", "rank 1", "100 B", "100 B",
    ]  # fmt: skip


def test_predicted_is_outlined():
    figure = traffic(ring(2, 8), predicted=True)
    assert fills(figure) == ["#f4f4f4", PAPER, PAPER, "#f4f4f4"]
    assert figure.alt == (
        "Predicted traffic between 2 ranks, 16 B in all: each sends 8 B, over 2 of 2 directed pairs."
    )


@pytest.mark.parametrize(("step", "said"), [(1, "to the next rank"), (-1, "to the rank before")])
def test_a_ring_is_called_a_ring(step, said):
    figure = traffic(ring(4, 1.5 * MIB, step), title="all_reduce")
    assert figure.alt == (
        f"all_reduce. Traffic between 4 ranks, 6 MiB in all: each sends 1.5 MiB, all of it {said}: a ring."
    )


def test_small_messages_beside_a_ring_do_not_hide_it():
    matrix = ring(4, MIB)
    matrix[0][2] = 100
    assert "a ring" in traffic(matrix).alt


def test_uneven_traffic_names_the_rank_that_sends_most():
    matrix = [[0, 512, 512], [0, 0, 512], [0, 0, 0]]
    assert traffic(matrix).alt == (
        "Traffic between 3 ranks, 1.5 KiB in all: rank 0 sends most, 1 KiB, over 3 of 6 directed pairs."
    )


def test_silence():
    assert traffic([[0, 0], [0, 0]]).alt == "Traffic between 2 ranks: no rank sends anything."


def test_text_twin():
    assert repr(traffic([[0, 2048], [100, 0]])).split("\n")[1:] == [
        "         to 0   to 1  in all",
        "rank 0      .  2 KiB   2 KiB",
        "rank 1  100 B      .   100 B",
    ]


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_fits_the_page_and_a_phone(n):
    figure = traffic([[0 if i == j else 3.3 * MIB for j in range(n)] for i in range(n)])
    root = ET.fromstring(figure.svg)
    assert all(float(t.get("font-size")) * 340 / WIDTH > 11 for t in root.iter(f"{SVG}text"))
    rects = [r for r in root.iter(f"{SVG}rect") if r.get("x")]
    assert max(float(r.get("x")) + float(r.get("width")) for r in rects) < WIDTH
    assert n > 16 or len(figure._repr_html_()) < 100_000


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([], "0 rows have lengths none"),
        ([[0, 1], [0]], "2 rows have lengths 2, 1"),
        ([[0, -1], [0, 0]], "fewer than 0 bytes"),
    ],
)
def test_what_is_no_traffic(matrix, message):
    with pytest.raises(ValueError, match=message):
        traffic(matrix)


def test_nodes_are_framed_and_what_crosses_is_counted():
    matrix = [[0, 10, 30, 0], [10, 0, 0, 0], [0, 0, 0, 50], [0, 0, 0, 0]]
    figure = traffic(matrix, nodes=("a", "a", "b", "b"))
    assert figure.alt.endswith("30 B (30%) cross from node to node.")
    assert "a: ranks 0, 1, inside its frame" in figure.svg and "b: ranks 2, 3" in figure.svg


def test_every_rank_needs_its_node():
    with pytest.raises(ValueError, match="Traffic of 2 ranks needs the node of each of them; got 1 names"):
        traffic([[0, 1], [1, 0]], nodes=("a",))
