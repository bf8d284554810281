"""Which part of which matrix is filled, and the words between the ranks."""

import xml.etree.ElementTree as ET

import pytest
import torch

from rankcell.draw.splits import Split, located, mlp_three_ways, part, side_by_side, strips
from rankcell.draw.svg import RANK_COLOURS

SVG = "{http://www.w3.org/2000/svg}"


def filled(figure, rank):
    """Sizes in px of the parts that a rank holds, from left to right."""
    return [
        (round(float(r.get("width"))), round(float(r.get("height"))))
        for r in ET.fromstring(figure.svg).iter(f"{SVG}rect")
        if r.get("fill") == RANK_COLOURS[rank]
    ]


def texts(figure):
    return [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]


def test_part_counts_from_slices():
    assert part(slice(0, 4), slice(None), of=(8, 4)) == ((0, 4), (0, 4))
    assert part(slice(None), slice(4, None), of=(4, 8)) == ((0, 4), (4, 8))
    assert part(2, slice(None), of=(4, 8)) == ((2, 3), (0, 8))


def test_parts_are_located_by_their_numbers():
    x, A = torch.randn(4, 8), torch.randn(8, 8)
    y = x @ A
    rows = [
        {"x": x.chunk(4, 1)[r], "A": A.chunk(4)[r], "y": x.chunk(4, 1)[r] @ A.chunk(4)[r]} for r in range(4)
    ]
    whole = {"x": x, "A": A, "y": y}
    split = located("rows", rows, whole=whole, exchange=("all-reduce",))
    everything = ((0, 4), (0, 8))
    assert split.name == "rows" and split.exchange == ("all-reduce",) and split.partial == ("y",)
    assert split.held[1] == {"x": ((0, 4), (2, 4)), "A": ((2, 4), (0, 8)), "y": everything}

    blocks = [{"x": x[r : r + 1], "A": None, "y": y[r : r + 1, 2 * r : 2 * r + 2] + 1e-7} for r in range(4)]
    split = located("blocks", blocks, whole=whole)
    assert split.partial == ()
    assert split.held[3] == {"x": ((3, 4), (0, 8)), "A": None, "y": ((3, 4), (6, 8))}
    assert "rank 3: x rows 3-3, A nothing, y rows 3-3 columns 6-7" in repr(
        side_by_side([split], {name: t.shape for name, t in whole.items()})
    )
    done = located("done", [{"y": y}, {"y": torch.zeros(4, 8)}], whole=whole)
    assert done.partial == ("y",), "one wrong rank is enough"


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({"B": torch.ones(2, 2)}, r"Rank 1 holds a part of B, but whole has A\. Add B there\."),
        (
            {"A": torch.full((2, 4), 7.0)},
            r"Rank 1's part of A is 2 x 4, the whole is 4 x 4, and the part is nowhere in it: at best its numbers "
            r"are off by 5\. A partial sum would have the shape of the whole\.",
        ),
        ({"A": torch.full((2, 4), torch.nan)}, r"at best its numbers are off by nan\."),
        ({"A": torch.ones(5, 4)}, r"Rank 1's part of A is 5 x 4, the whole is 4 x 4, .*: it is too large\."),
        (
            {"A": torch.ones(4)},
            r"Rank 1's part of A has the shape \(4,\); only matrices with rows and columns",
        ),
    ],
)
def test_a_part_that_is_nowhere_is_refused(mine, said):
    A = torch.arange(4.0)[:, None].expand(4, 4).clone()
    with pytest.raises(ValueError, match=said):
        located("rows", [{"A": A[:2]}, mine], whole={"A": A})


def test_parts_are_to_scale_and_the_rest_is_empty():
    shapes = {"A": (4, 4), "B": (4, 2)}
    held = [{"A": ((0, 2), (0, 4)), "B": None}, {"A": ((2, 4), (0, 4)), "B": ((0, 4), (0, 2))}]
    figure = side_by_side([Split("rows", held, ("one message",))], shapes)
    (half,) = filled(figure, 0)
    assert filled(figure, 1) == [half, (half[1], half[0])]
    assert half[0] == 2 * half[1]
    assert {"rows", "rank 0", "rank 1", "one message", "A", "B"} <= {*texts(figure)}
    assert repr(figure) == (
        "rows: exchanges one message\n  rank 0: A rows 0-1, B nothing\n  rank 1: A rows 2-3, B all"
    )
    assert figure.alt == "rows: one message."


def test_partial_sums_are_hatched():
    held = [{"x": ((0, 2), (0, 2)), "y": ((0, 2), (0, 2))}] * 2
    shapes = {"x": (2, 2), "y": (2, 2)}
    plain = side_by_side([Split("rows", held, ("all-reduce",))], shapes)
    figure = side_by_side([Split("rows", held, ("all-reduce",), partial=("y",))], shapes)
    assert len(filled(plain, 1)) == 2 and len(filled(figure, 1)) == 1 + 1  # x, and the lines of the pattern
    assert figure.svg.count('fill="url(#partial1)"') == 1
    assert "hatched: a partial sum" in texts(figure) and "hatched: a partial sum" not in texts(plain)
    assert "x all, y all, partial" in repr(figure)


def test_mlp_three_ways():
    figure = mlp_three_ways(x=(8, 4), w1=(4, 8), w2=(8, 4))
    assert repr(figure).split("\n") == [
        "data: exchanges gradients, once a step (both backward)",
        "  rank 0: x rows 0-3, W1 all, W2 all",
        "  rank 1: x rows 4-7, W1 all, W2 all",
        "pipeline: exchanges activations, at each cut (down forward, up backward)",
        "  rank 0: x all, W1 all, W2 nothing",
        "  rank 1: x nothing, W1 nothing, W2 all",
        "tensor: exchanges partial sums, in each block (both forward, both backward)",
        "  rank 0: x all, W1 columns 0-3, W2 rows 0-3",
        "  rank 1: x all, W1 columns 4-7, W2 rows 4-7",
    ]
    assert len(filled(figure, 0)) == 8 and len(filled(figure, 1)) == 7


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {"x": (8, 4), "w1": (8, 4), "w2": (4, 8)},
            r"x \(8, 4\), W1 \(8, 4\) and W2 \(4, 8\) cannot be multiplied in this order\.",
        ),
        (
            {"x": (7, 4), "w1": (4, 8), "w2": (8, 4)},
            r"Two ranks cannot share 7 rows and 8 hidden units evenly\. Make both even\.",
        ),
    ],
)
def test_what_cannot_be_cut_is_said(shapes, said):
    with pytest.raises(ValueError, match=said):
        mlp_three_ways(**shapes)


def test_splits_need_the_same_ranks():
    one, two = Split("a", [{}]), Split("b", [{}, {}])
    with pytest.raises(
        ValueError, match=r"Every split needs the same number of ranks; these have \[1, 2\]\."
    ):
        side_by_side([one, two], {"A": (1, 1)})


def test_more_ranks_than_colours_begin_again():
    """Nine ranks used to end in an IndexError."""
    held = [{"x": part(rank, slice(None), of=(9, 2))} for rank in range(9)]
    figure = side_by_side([Split("rows", held)], {"x": (9, 2)})
    assert figure.svg.count(f'fill="{RANK_COLOURS[0]}"') == 2


def test_strips_are_to_one_scale_and_cuts_go_through_the_ones_above():
    figure = strips(
        {"2 layers": [("layer 0", 60), ("layer 1", 40)], "2 shards": [("rank 0", 50), ("rank 1", 50)]}
    )
    root = ET.fromstring(figure.svg)
    pieces = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = [float(r.get("width")) for r in pieces]
    assert widths == pytest.approx([348, 232, 290, 290])
    assert pieces[0].find(f"{SVG}title").text == "layer 0: 60 numbers"
    (cut,) = [mark for mark in root.iter(f"{SVG}line") if mark.get("stroke-dasharray")]
    assert float(cut.get("x1")) == float(cut.get("x2")) == pytest.approx(10 + 290)
    assert {"2 layers", "layer 0", "layer 1", "2 shards", "rank 0", "rank 1"} <= {*texts(figure)}
    assert repr(figure) == "2 layers: layer 0 60, layer 1 40\n2 shards: rank 0 50, rank 1 50"


def test_a_name_without_room_is_left_out_and_strips_must_be_alike():
    assert "a very long name" not in texts(strips({"all": [("a very long name", 1), ("rest", 99)]}))
    with pytest.raises(ValueError, match=r"their lengths differ: layers 9, shards 12\."):
        strips({"layers": [("a", 9)], "shards": [("rank 0", 12)]})
    with pytest.raises(ValueError, match="There is nothing to draw"):
        strips({})


def test_a_piece_may_have_a_rank_s_colour_and_a_name_of_its_own():
    cards = {
        "who": [("rank 0", 6), ("rank 1", 6)],
        "dealt": [(f"rank {k % 2}: {9 - k}", 2) for k in range(6)],
    }
    figure = strips(cards, across=False)
    root = ET.fromstring(figure.svg)
    fills = [r.get("fill") for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert fills[2:] == fills[:2] * 3
    assert {"9", "4"} <= {*texts(figure)}
    assert not [mark for mark in root.iter(f"{SVG}line") if mark.get("stroke-dasharray")]
