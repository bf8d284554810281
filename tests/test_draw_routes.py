"""Pictures of routes, from arrows written by hand."""

import pytest

from rankcell.draw import routes

RING = [(r, (r + 1) % 8) for r in range(8)]


def test_arrows_between_nodes_are_counted_and_have_a_colour_of_their_own():
    inside = [(r, 4 * (r // 4) + (r + 1) % 4) for r in range(8)]
    figure = routes.on_nodes({"flat ring": RING, "inside": inside}, 4, title="Two nodes")
    assert figure.alt == (
        "Two nodes. flat ring: 8 arrows, 2 of them between the nodes; inside: 8 arrows, 0 of them between the nodes."
    )
    assert figure.svg.count("<polygon points") == 8 + 8 + 2  # and two in the key
    assert figure.svg.count('fill="#d55e00"') == 3
    assert figure.svg.count(">node 1</text>") == 2


def test_a_rank_that_the_nodes_do_not_have_is_refused():
    with pytest.raises(ValueError, match="hold ranks 0 to 7, not 8"):
        routes.on_nodes({"ring": [(7, 8)]}, 4)


def test_a_tree_stands_with_its_root_above():
    figure = routes.trees({"one": {1: 0, 2: 0}, "other": {0: 1, 2: 1}})
    assert (
        figure.alt
        == "one: ranks 0 take in, ranks 1, 2 are leaves; other: ranks 1 take in, ranks 0, 2 are leaves."
    )
    assert figure.svg.count("<circle") == 6
    assert figure.svg.count("<polygon") == 4


def test_pieces_of_all_programs_stand_on_one_axis():
    figure = routes.pieces(
        {"whole": [(1, 0, 0.0, 4.0)], "halves": [(1, 0, 0.0, 1.0), (1, 1, 1.0, 2.0)]}, unit="ms"
    )
    assert figure.alt == "whole: done after 4 ms; halves: done after 2 ms."
    widths = [float(part.split('"')[0]) for part in figure.svg.split('width="')[3:] if "piece" in part[:200]]
    assert widths[0] == pytest.approx(2 * (widths[1] + widths[2]), rel=0.01)
