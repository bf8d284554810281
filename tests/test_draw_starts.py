"""The picture of who starts whom has one box per process, within its node, and one arrow to each."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from rankcell.draw.parts import WIDTH
from rankcell.draw.starts import meeting, starts

SVG = "{http://www.w3.org/2000/svg}"


def texts(figure):
    return [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]


def arrows(figure):
    """Where the solid lines begin and end."""
    found = ET.fromstring(figure.svg).iter(f"{SVG}line")
    ends = ("x1", "y1", "x2", "y2")
    return [tuple(float(e.get(k)) for k in ends) for e in found if not e.get("stroke-dasharray")]


def test_srun_starts_every_rank_and_torchrun_those_of_its_node():
    by_srun, by_torchrun = starts(2, 2), starts(2, 2, torchrun=True)
    assert texts(by_srun).count("torchrun") == 0 and texts(by_torchrun).count("torchrun") == 2
    for figure in (by_srun, by_torchrun):
        assert {"sbatch", "job script", "srun", "node1", "node2", "rank 0", "rank 3"} <= {*texts(figure)}
    assert len(arrows(by_srun)) == 2 + 4 and len(arrows(by_torchrun)) == 2 + 2 + 4
    assert len({(x, y) for x, y, *_ in arrows(by_srun)[2:]}) == 1, "all ranks come from one srun"
    assert len({(x, y) for x, y, *_ in arrows(by_torchrun)[4:]}) == 2, "and here from two agents"


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 4), (2, 4), (3, 2)])
@pytest.mark.parametrize("torchrun", [False, True])
def test_all_boxes_are_on_the_paper_and_do_not_overlap(nodes, ranks, torchrun):
    root = ET.fromstring(starts(nodes, ranks, torchrun=torchrun).svg)
    boxes = [r for r in root.iter(f"{SVG}rect") if r.get("fill") not in ("none", "#ffffff")]
    assert len(boxes) == 3 + torchrun * nodes + nodes * ranks
    spans = sorted((float(b.get("y")), float(b.get("x")), float(b.get("width"))) for b in boxes)
    assert all(0 < x and x + width < WIDTH for _, x, width in spans)
    for (y, x, width), (y2, x2, _) in pairwise(spans):
        assert y != y2 or x + width < x2


def test_the_text_twin_is_the_tree():
    assert repr(starts(2, 1, torchrun=True)).split("\n")[1:] == [
        "sbatch",
        "  job script on node1",
        "    srun",
        "      torchrun on node1",
        "        rank 0 on node1",
        "      torchrun on node2",
        "        rank 1 on node2",
    ]


def test_too_many_are_refused():
    with pytest.raises(ValueError, match="no room for 4 nodes of 2 ranks: 3 nodes, 4 ranks on each"):
        starts(4, 2)


def test_nodes_that_meet_are_numbered_by_their_names_whoever_comes_first():
    assert repr(meeting(["node2", "node10"], 2)).split("\n")[1:] == [
        "node2 is here",
        "node10 is here",
        "node10 gets ranks 0, 1",
        "node2 gets ranks 2, 3",
    ]
    figure = meeting(["node2", "node1"], 2)
    assert {"store", "2 of 2: sort", "ranks 0-1", "ranks 2-3"} <= {*texts(figure)}
    come = [text for text in texts(figure) if "is here" in text]
    assert come == ["node2 is here", "node1 is here"], "in the order of their arrival"


def test_a_meeting_of_one_or_of_twins_is_refused():
    with pytest.raises(ValueError, match="2 or 3 nodes of 1 to 4 ranks, not 1 of 2"):
        meeting(["node1"], 2)
    with pytest.raises(ValueError, match="Two nodes have one name: a, a"):
        meeting(["a", "a"], 2)
