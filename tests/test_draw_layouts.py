"""Who holds what, and where: meshes, splits, layouts of tensors, nodes and links."""

from types import SimpleNamespace

import torch

from rankcell.compare.judge import Comparison, Row
from rankcell.draw import mesh
from rankcell.draw.held import held, look
from rankcell.draw.parts import pale, rank_colour
from rankcell.draw.sketches import sketch
from rankcell.draw.splits import Split, located, side_by_side
from rankcell.draw.svg import COLOURS, RANK_COLOURS
from rankcell.results import Event
from test_draw_charts import marks, number, tipped, words


def comm(rank, op, ranks, nbytes=1024):
    return Event(rank, op, 0.0, 1.0, ranks=ranks, nbytes=nbytes)


def test_each_axis_says_what_its_groups_called():
    events = [comm(r, "all_reduce", pair) for pair in ((0, 1), (2, 3)) for r in pair for _ in range(3)]
    events += [comm(0, "send", (0, 2), 2048), comm(2, "recv", (0, 2), 2048), comm(1, "send", (1, 3))]
    events += [comm(r, "barrier", (0, 1, 2, 3), 0) for r in range(4)]
    figure = mesh.axes(events, {"pp": 2, "tp": 2}, title="A step")
    assert figure.alt == (
        "A step. pp: 2 groups of 2: send 0 to 1×, 0 B to 2 KiB. tp: 2 groups of 2: all_reduce 3×, 3 KiB. "
        "all ranks: barrier 1×, 0 B."
    )
    assert figure.svg.count(pale(rank_colour(1), 0.5)) == 4  # two ranks in each of two panels
    assert figure.svg.count(COLOURS["send"]) == 1 and words(figure).count("3") == 3
    at = {tip: (number(box, "x"), number(box, "y")) for tip, box in tipped(figure).items()}
    assert at["rank 0"][0] < at["rank 1"][0] == at["rank 3"][0] and at["rank 0"][1] < at["rank 2"][1]
    at = {
        tip: (number(box, "x"), number(box, "y"))
        for tip, box in tipped(mesh.axes([], {"dp": 2, "tp": 4})).items()
    }
    assert (
        at["rank 0"][1] == at["rank 3"][1] < at["rank 4"][1]
        and at["rank 0"][0] == at["rank 4"][0] < at["rank 3"][0]
    )
    assert mesh.axes([], {"dp": 4}).alt == "dp: 1 group of 4: nothing sent."
    events = [comm(r, "all_gather", pair) for pair in ((0, 2), (1, 3), (4, 6), (5, 7)) for r in pair]
    cube = mesh.axes(events, {"pp": 2, "dp": 2, "tp": 2}).alt
    assert "dp: 4 groups of 2: all_gather 1×, 1 KiB." in cube, "the last axis runs fastest, as torch's"


def test_parts_are_located_by_their_numbers():
    x, A = torch.randn(4, 8), torch.randn(8, 8)
    y = x @ A
    columns, rows = x.chunk(4, 1), A.chunk(4)
    whole = {"x": x, "A": A, "y": y}
    mine = [{"x": columns[r], "A": rows[r], "y": columns[r] @ rows[r]} for r in range(4)]
    split = located("rows", mine, whole=whole, exchange=("all-reduce",))
    assert split.name == "rows" and split.exchange == ("all-reduce",) and split.partial == ("y",)
    assert split.held[1] == {"x": ((0, 4), (2, 4)), "A": ((2, 4), (0, 8)), "y": ((0, 4), (0, 8))}
    blocks = [{"x": x[r : r + 1], "y": y[r : r + 1, 2 * r : 2 * r + 2] + 1e-7} for r in range(4)]
    split = located("blocks", blocks, whole=whole)
    assert split.held[3] == {"x": ((3, 4), (0, 8)), "y": ((3, 4), (6, 8))} and split.partial == ()
    assert located("done", [{"y": y}, {"y": torch.zeros(4, 8)}], whole=whole).partial == ("y",)


def test_splits_say_who_holds_what():
    mine = [{"A": ((0, 2), (0, 4)), "B": ((0, 4), (1, 2))}, {"A": ((2, 4), (0, 4)), "B": ((0, 4), (0, 2))}]
    figure = side_by_side(
        [Split("rows", mine, ("one message",), ("A",))], {"A": (4, 4), "B": (4, 2)}, alt="Rows."
    )
    fills = [r.get("fill") for r in marks(figure, "rect")]
    shares = [fills.count(colour) for colour in (*RANK_COLOURS[:2], "url(#partial1)")]
    assert shares == [2, 2, 1], "one stripe and one part of B each; rank 1 has a share of A"
    nine = Split("rows", [{"x": ((rank, rank + 1), (0, 2))} for rank in range(9)], (), ())
    colours = [r.get("fill") for r in marks(side_by_side([nine], {"x": (9, 2)}, alt="Nine."), "rect")]
    assert colours.count(RANK_COLOURS[0]) == 2, "they begin again"


def row(name, kind, layout, status="fits", step=0, **more):
    return Row(name, kind, step, layout, status, (0, 1), **more)


ROWS = (
    row("up", "parameter", "sharded on dim 0"),
    row("up", "output", "sharded on dim 2"),
    row("down", "output", "partial over ranks 0-1", "partial"),
    row("down", "grad_output", "the same on all"),
    row("up", "grad", "4 times it", "scaled"),
    row("down", "grad", "other numbers (3% off)", "none", says="whom to blame"),
    row("up", "parameter", "sharded on dim 1", step=1),
)


def test_a_box_for_each_tensor_in_its_look():
    figure = held({"a run": Comparison(ROWS, None), "second": Comparison(ROWS[1:3], None)})
    assert figure.alt.startswith(
        "a run: outputs 1 in parts, 1 as partial sums; their gradients 1 the same on all; "
        "weights' gradients 1 a multiple of it, 1 something else."
    )
    assert "blame" not in figure.svg
    looks = {
        ("the same on all", "fits"): "same on all",
        ("part of the batch", "fits"): "parts",
        ("each rank another multiple of it", "none"): "another multiple on each",
        ("1.92 times it", "none"): "multiple",
        ("partial over ranks 0-3", "none"): "partial sum",
        ("each its own part of the batch (over ranks 0-3)", "partial"): "its own on each",
        ("on no rank", "missing"): "something else",
        ("a number: not compared", "skipped"): "not compared",
    }
    for (layout, status), expected in looks.items():
        assert look(SimpleNamespace(layout=layout, status=status)) == expected


def test_sketches_take_words_and_say_their_finding():
    costs = sketch("copy_paths", pageable=26.85, pinned="<1")
    assert (
        "returns after 26.85 ms; the host stands by" in words(costs) and "it returns after <1 ms" in costs.alt
    )
    assert sketch("srun").alt.startswith("sbatch starts the job script on the first of 2 nodes")
