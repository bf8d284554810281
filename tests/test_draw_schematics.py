"""The schematic pictures draw what they are told: every link, every box, every word inside the picture."""

from xml.etree import ElementTree

import pytest

from rankcell.draw import schematics
from rankcell.draw.parts import WIDTH, text_width

SVG = "{http://www.w3.org/2000/svg}"
MESH = {(i, j): 6 for i in range(4) for j in range(i)}
PATHS = {"pageable": ["pageable memory", "a core copies", "pinned buffer", "over PCIe", "GPU memory"]}


def all_figures():
    return {
        "bottlenecks": schematics.bottlenecks(
            memory="112 GB for 80 GB", compute="187,000 hours", storage="49 s per checkpoint", network="1 s"
        ),
        "links": schematics.links(MESH, per_link="25 GB/s"),
        "fat tree": schematics.fat_tree(leaves=4, down=4, ups=(4, 1)),
        "wide tree": schematics.fat_tree(leaves=6, down=8, ups=(8,)),
        "paths": schematics.paths(PATHS),
    }


@pytest.mark.parametrize(("name", "figure"), all_figures().items(), ids=list(all_figures()))
def test_every_word_is_inside_and_reads_on_a_phone(name, figure):
    root = ElementTree.fromstring(figure.svg)
    _, height = (float(v) for v in root.get("viewBox").split()[2:])
    assert figure.alt and figure.text
    for text in root.iter(SVG + "text"):
        size, x = float(text.get("font-size")), float(text.get("x"))
        span = text_width(text.text, size)
        left = {"start": x, "middle": x - span / 2, "end": x - span}[text.get("text-anchor")]
        assert size * 380 / WIDTH > 11
        assert left >= -1 and left + span <= WIDTH + 4, text.text
        assert 0 < float(text.get("y")) < height


def lines(figure, **wanted):
    found = ElementTree.fromstring(figure.svg).iter(SVG + "line")
    return [x for x in found if all(x.get(k.replace("_", "-")) == v for k, v in wanted.items())]


def test_each_pair_has_its_links():
    figure = schematics.links(MESH)
    assert len(lines(figure)) == 6 * 6
    assert "18 links leave each GPU." in repr(figure)
    with pytest.raises(ValueError, match="at least one pair"):
        schematics.links({})


def test_fat_trees_have_their_links_and_say_what_crosses():
    figure = schematics.fat_tree(leaves=4, down=4, ups=(4, 1))
    solid = [x for x in lines(figure) if not x.get("stroke-dasharray")]
    assert len(solid) == 2 * 16 + 4 * 4 + 4 * 1
    assert repr(figure).splitlines() == [
        "4 down, 4 up: 1:1; 8 links between the halves",
        "4 down, 1 up: 4:1; 2 links between the halves",
    ]
    with pytest.raises(ValueError, match="room for 2, 4 or 6 leaves"):
        schematics.fat_tree(leaves=3, down=4, ups=(4,))


def test_paths_are_boxes_and_arrows_in_turn():
    figure = schematics.paths(PATHS)
    assert len(lines(figure, stroke_width="4")) == 2
    assert (
        repr(figure)
        == "pageable: pageable memory --(a core copies)-> pinned buffer --(over PCIe)-> GPU memory"
    )
    with pytest.raises(ValueError, match="beginning and ending with a box"):
        schematics.paths({"a": ["box", "arrow"]})
