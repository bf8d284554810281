"""The picture of a device mesh, and the bytes of each axis, from events and matrices written by hand."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rankcell.draw import mesh
from rankcell.draw.parts import pale, rank_colour
from rankcell.draw.svg import COLOURS
from rankcell.results import Event

CUBE = {"pp": 2, "dp": 2, "tp": 2}


def call(rank, op, ranks, nbytes=1024):
    return Event(rank, op, 0.0, 1.0, ranks=ranks, nbytes=nbytes)


def test_groups_run_fastest_along_the_last_axis():
    assert mesh.groups({"dp": 2, "tp": 2}) == {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
    assert mesh.groups(CUBE)["dp"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups(CUBE)["pp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups({"a": 3, "b": 1})["b"] == [(0,), (1,), (2,)]


def the_groups_of_torch(shape):
    found = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    return {n: tuple(torch.distributed.get_process_group_ranks(found.get_group(n))) for n in shape}


def test_groups_are_those_of_torch(four):
    shape = {"tp": 2, "pp": 1, "dp": 2}
    for rank, theirs in enumerate(four.run(the_groups_of_torch, args=(shape,)).values):
        for name, members in mesh.groups(shape).items():
            assert theirs[name] == next(m for m in members if rank in m)


def test_bytes_between_ranks_that_differ_in_one_axis():
    matrix = [[0, 1, 10, 100], [1, 0, 100, 10], [10, 100, 0, 1], [100, 10, 1, 0]]
    assert mesh.bytes_by_axis(matrix, {"dp": 2, "tp": 2}) == {"dp": 40, "tp": 4}
    with pytest.raises(ValueError, match=r"pp\(2\) \* dp\(2\) \* tp\(2\) = 8, but there are 4 ranks"):
        mesh.bytes_by_axis(matrix, CUBE)


def test_each_axis_says_what_its_groups_called():
    events = [call(r, "all_reduce", pair) for pair in ((0, 1), (2, 3)) for r in pair for _ in range(3)]
    events += [call(0, "send", (0, 2), 2048), call(2, "recv", (0, 2), 2048), call(1, "send", (1, 3))]
    events += [call(r, "barrier", (0, 1, 2, 3), 0) for r in range(4)]
    events += [Event(0, "forward", 0.0, 1.0, kind="compute")]
    figure = mesh.axes(events, {"pp": 2, "tp": 2}, title="A step")
    assert figure.alt == (
        "A step. pp: 2 groups of 2: send 0 to 1×, 0 B to 2 KiB. tp: 2 groups of 2: all_reduce 3×, 3 KiB. "
        "all ranks: barrier 1×, 0 B."
    )
    assert "pp: 2 groups of 2: ranks 0, 2, ranks 1, 3" in repr(figure)
    assert figure.svg.count(pale(rank_colour(1), 0.5)) == 4  # two ranks in each of two panels
    assert figure.svg.count(COLOURS["send"]) == 1  # the mark of the operation alone
    assert figure.svg.count(">3</text>") == 3


def test_an_axis_without_events_and_one_axis():
    assert mesh.axes([], {"dp": 4}).alt == "dp: 1 group of 4: nothing sent."
    with pytest.raises(ValueError, match="there are 9 ranks"):
        mesh.axes([call(8, "all_reduce", (0, 8))], CUBE)


def test_text_stays_inside():
    events = [call(r, "reduce_scatter", (0, 1), 3**r * 10**7) for r in (0, 1)]
    events += [call(4, "all_gather", (4, 5), 10**9)]
    svg = mesh.axes(events, CUBE).svg
    assert "reduce_scatter" in svg and len(svg) < 20_000


def test_ranks_on_nodes_say_which_axes_stay_inside():
    figure = mesh.on_nodes({"pp": 2, "dp": 2, "tp": 2}, per_node=2, colour="pp", title="A job")
    assert figure.alt == (
        "A job. 4 nodes of 2 ranks, coloured by pp. Inside a node: tp. Across nodes: pp, dp."
    )
    assert "node 2: ranks 4, 5 (pp 1, dp 0)" in repr(figure)
    assert figure.svg.count(pale(rank_colour(0), 0.5)) == figure.svg.count(pale(rank_colour(1), 0.5)) == 4
    swapped = mesh.on_nodes({"tp": 2, "dp": 2}, per_node=2, colour="tp")
    assert "Inside a node: dp. Across nodes: tp." in swapped.alt


def test_ranks_that_do_not_fill_their_nodes_are_refused():
    with pytest.raises(ValueError, match="8 ranks do not fill nodes of 3"):
        mesh.on_nodes(CUBE, per_node=3, colour="pp")
    with pytest.raises(ValueError, match="no axis 'cp'"):
        mesh.on_nodes(CUBE, per_node=4, colour="cp")
