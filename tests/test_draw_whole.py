"""Fifteen pictures as they were looked at, mark by mark; that all can be read; what is refused.

SVG and text twin are compared with tests/data/pictures/NAME.svg. After a change that is meant:

    REDRAW=1 python -m pytest tests/test_draw_whole.py    # writes what differs; look at it, then commit it
"""

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
import torch

from rankcell import hardware as hw
from rankcell import schedules
from rankcell.compare.judge import Comparison
from rankcell.draw import (
    bars,
    charts,
    collectives,
    errors,
    held,
    jobs,
    losses,
    maps,
    memory,
    mesh,
    messages,
    routes,
    schedule,
    schematics,
    splits,
    starts,
    streams,
    timeline,
    traffic,
)
from rankcell.draw.charts import Rung, Series
from rankcell.draw.parts import text_width
from rankcell.draw.splits import Split
from rankcell.draw.svg import Figure, Frames, format_seconds
from rankcell.results import Event, RankResult, Run, Standing, Values
from test_draw_charts import example_machine, marks, number, one_step, two_ranks
from test_draw_collectives import (
    ALL,
    CASES,
    EVERY,
    OWN,
    TREE,
    all_reduce,
    all_to_all,
    call,
    event,
    finished,
    message,
    picture,
    waiting,
)
from test_draw_layouts import row
from test_draw_timeline import span

KEPT = Path(__file__).parent / "data" / "pictures"
HOW = "If the change is meant: REDRAW=1 python -m pytest tests/test_draw_whole.py, look at the picture, commit it."
MIB = 2**20


def comm(rank, op, start, end, *, ranks=(0, 1, 2, 3), seq=1, nbytes=4 * MIB, **more):
    return Event(rank, op, start, end, ranks=ranks, seq=seq, nbytes=nbytes, **more)


def two_nodes():
    """Spans, one in another, calls that wait, messages both ways, an operation in a lane, an idle rank."""
    south, later = {"ranks": (2, 3), "nbytes": 0}, {"is_async": True, "issued": 0.01, "wait_start": 0.09}
    of_rank = [
        [
            span(0, "step", 0.000, 0.050),
            span(0, "forward", 0.001, 0.020),
            comm(0, "all_reduce", 0.050, 0.080),
        ],
        [comm(1, "all_gather", 0.01, 0.095, ranks=(1,), **later), comm(1, "all_reduce", 0.07, 0.08)],
        [comm(2, "recv", 0.002, 0.030, peer=0), comm(2, "all_reduce", 0.031, 0.080)],
        [span(3, "a name that has no room", 0.0, 0.010), comm(3, "all_reduce", 0.0305, 0.080)],
        [],
    ]
    of_rank[0] += [comm(0, "send", 0.021, 0.030, peer=2), comm(0, "recv", 0.081, 0.092, peer=3)]
    of_rank[2] += [comm(2, "barrier", 0.085, 0.100, **south)]
    of_rank[3] += [comm(3, "send", 0.081, 0.084, peer=0), comm(3, "barrier", 0.090, 0.100, **south)]
    nodes = ("north", "north", "south", "south", "south")
    found = (RankResult(r, node=nodes[r], events=tuple(events)) for r, events in enumerate(of_rank))
    return timeline.timeline(Run("", tuple(found)), title="A step on two nodes")


def crowded():
    """Too many bars to draw each: columns, filled by the share of the time, where anything happened."""
    events = [span(r, "end", 3.99, 4.0) for r in (0, 1)]
    for k in range(140):
        t, both = 0.001 * k, {"ranks": (0, 1), "seq": k + 1}
        events += [span(0, "step", t, t + 0.0008), comm(0, "all_reduce", t + 0.0003, t + 0.0009, **both)]
        events += [comm(1, "all_reduce", t + 0.0006, t + 0.0009, **both)]
        if k % 3 == 0:
            events += [comm(1, "reduce", t, t + 0.001, peer=0, is_async=True)]
    return timeline.timeline([*events, comm(1, "broadcast", 1.9, 1.91, predicted=True)])


def device():
    """A host that launches and waits, a communication, a copy, both ways to wait, short and long names."""

    queues, both = ("host", "compute stream", "comm", "copies"), {"issued": 0.0004, "nbytes": 8 * MIB}
    rows = [
        (0, "data loader", 0.0004, 0.00207, "host", {}),
        (0, "synchronize", 0.00207, 0.0080, "wait", {}),
        (1, "matmul", 0.0002, 0.0030, "compute", {"issued": 0.0001}),
        (1, "wait", 0.0058, 0.0058, "order", {"peer": 2, "issued": 0.0055}),
        (1, "tiny", 0.0061, 0.00611, "compute", {"issued": 0.0020}),
        (2, "wait", 0.0030, 0.0030, "order", {"peer": 1, "issued": 0.0030}),
        (2, "all_reduce", 0.0030, 0.0055, "comm", both),
        (3, "copy D2H", 0.0040, 0.0080, "copy", both),
    ]
    return streams.streams([Event(*r[:4], kind=r[4], group=queues[r[0]], **r[5]) for r in rows])


def two_and_one_chunk():
    """A rank with two chunks and one with one, whose backward comes in two halves."""
    plan = schedules.schedule("mine", [["0F0", "2F0", "2B0", "0B0"], ["1F0", "1I0", "1W0"]])
    times = {"0F0": (0, 0.1), "2F0": (0.25, 0.35), "2B0": (0.35, 0.6), "0B0": (0.72, 1), "after": (1, 1.5)}
    found = [span(0, action, *at) for action, at in times.items()]
    found += [span(1, "1F0", 0.1, 0.25), span(1, "1I0", 0.6, 0.7), span(1, "1W0", 0.7, 0.85)]
    return schedule.grid(found, schedules.predict(plan, forward=0.1, backward=0.2), title="Planned, and done")


def all_kinds():
    """Every phase, an arrow that closes a cycle, one that does not."""
    ends = [("error", "failed: ZeroDivisionError"), ("lost", "was killed"), ("absent", "is not in it")]
    waits = waiting(0, "all_to_all", 12, 1), waiting(1, "recv", 3, 0), waiting(2, "barrier", 8, 3, 4)
    others = [Standing(3 + k, *end) for k, end in enumerate(ends)]
    return picture(*waits, *others, finished(6), Standing(7, "running", "computes at line 7", line=7))


def of_all_kinds():
    """Points of all five kinds, measured and predicted, marks of which one has no room and one is outside."""
    series = [
        Series("measured", [(2**10, 1e9), (2**20, 1e10), (2**30, 1e11)]),
        Series("published", [(2**10, 1e11), (2**30, 1.2e11)], measured=False),
        Series("a third one with a long name", [(2**15, 3e9)]),
        Series("4", [(2**12, 4e9), (2**29, 5e10)], colour="#5d3a9b"),
        Series("the fifth", [(2**14, 2e9)], measured=False),
    ]
    places = [(2**25, "L3"), (2**15, "L1d"), (2**16.2, "L2"), (2**50, "outside")]
    return charts.by_size(series, alt="It grows.", marks=places)


def lengths():
    rungs = [Rung("a", 4e-6, measured=True), Rung("a rung whose factor has no room", 2.3e-3), Rung("d", 3.0)]
    named = {"unit": "seconds", "outlined": "by formula", "solid": "here", "format_value": format_seconds}
    needs = {"small": {"weights": 2, "optimizer": 12}, "a large model": {"weights": 84}}
    off = {"collectives": [0.02, 0.31], "a training step": [-0.2, -0.7]}
    return (
        charts.ladder(rungs, alt="d is slowest.", **named),
        bars.bars(needs, unit="GB", format_value="{:g} GB".format, limit=("one GPU has", 80)),
        errors.signed_errors(off, unit="predicted over measured, less 1", most=0.4),
    )


def layouts():
    """Parts, nothing, a partial sum; messages down, up and both ways; layouts of tensors."""
    shapes = {"A": (2, 2), "C": (2, 1)}
    rows = [{"A": ((r, r + 1), (0, 2)), "C": ((0, 2), (0, 1))} for r in range(2)]
    whole = {"A": ((0, 2), (0, 2)), "C": None}
    found = [row("up", "output", "sharded on dim 2"), row("down", "output", "partial over 0-1", "partial")]
    found += [row("up", "grad", "4 times it", "scaled"), row("down", "grad", "others (3% off)", "none")]
    split = Split("rows", rows, ("all-reduce",), partial=("C",), backward="both")
    words = ("activations of this layer,", "once")
    stages = Split("stages", [whole, rows[1]], words, forward="down", backward="up")
    return (
        splits.side_by_side([split, stages], shapes),
        held.held({"as it was": Comparison(tuple(found), None), "one": Comparison(tuple(found[:1]), None)}),
    )


WIDE, MEAN = [[[1000.25 * (r + 1)] * 12] for r in range(4)], [[[2500.625] * 12]] * 4  # long in both ways
AVERAGE = call("reduce", WIDE, WIDE, MEAN, peer=1, reduce_op="AVG")
MATRIX = [[0, 3 * MIB, 10], [MIB, 500, 2 * MIB], [0, 1.9 * MIB, 0]]
PICTURES = {
    "timeline_two_nodes": two_nodes,
    "timeline_crowded": crowded,
    "streams": device,
    "schedule": two_and_one_chunk,
    "collectives": lambda: collectives.steps(AVERAGE).figures[2],
    "messages": lambda: messages.steps(TREE).figures[1],
    "waits": all_kinds,
    "traffic": lambda: traffic.traffic(MATRIX, nodes=("north", "north", "south"), title="A step"),
    "charts": of_all_kinds,
    "lengths": lengths,
    "memory": lambda: (one_step(), two_ranks()),
    "layouts": layouts,
}


def as_kept(drawn) -> str:
    """The picture as its file has it: a mark per line, one below the other, the text twin as description."""
    marks, y, figures = [], 0.0, drawn if isinstance(drawn, tuple) else (drawn,)
    for figure in figures:
        marks.append(figure.svg.replace("<svg ", f'<svg y="{y:g}" ', 1))
        y += float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', figure.svg)[1])
    whole = f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{y:g}">{"".join(marks)}</svg>'
    whole = whole if len(marks) > 1 else drawn.svg
    twin = escape("\n\n".join(f.text for f in figures))
    svg = f"{whole.removesuffix('</svg>')}<desc>{twin}</desc></svg>"
    return re.sub(r">(?=<(?!/|title))", ">\n", svg) + "\n"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_was_looked_at(name):
    now, path = as_kept(PICTURES[name]()), KEPT / f"{name}.svg"
    ElementTree.fromstring(now)  # or a browser shows nothing
    assert {kept.stem for kept in KEPT.glob("*")} <= set(PICTURES)
    if os.environ.get("REDRAW"):
        path.write_text(now, encoding="utf-8", newline="\n")
    assert path.exists(), f"There is no tests/data/pictures/{name}.svg. {HOW}"
    lines = zip(path.read_text("utf-8").splitlines(), now.splitlines(), strict=False)
    for n, (kept, drawn) in enumerate(lines, 1):
        assert kept == drawn, f"line {n} of {name}.svg is the first to differ. {HOW}"
    assert path.read_text("utf-8") == now, f"{name}.svg is longer or shorter. {HOW}"


BOUND = dict.fromkeys(("memory", "compute", "storage", "network"), "187,000 hours of one GPU, if not aside")
LARGE = {
    "a large machine": lambda: maps.machine_map(example_machine(128, 8, 2)),
    "links of a server": lambda: maps.link_matrix(hw.parse_topology(hw.EXAMPLE_NVLINK_SERVER)),
    "memory of eight": lambda: memory.by_rank([{k: MIB * (r + 1) for k in memory.COLOURS} for r in range(8)]),
    "bottlenecks": lambda: schematics.bottlenecks(**BOUND),
    "a wide tree": lambda: schematics.fat_tree(leaves=6, down=8, ups=(8,)),
    "sixteen that wait": lambda: picture(*CASES["ranks 0-15 wait in a circle"]),
    "32 micro-batches": lambda: schedule.planned("interleaved", 8, 32, 4),
    "eight": lambda: starts.starts(2, 4, torchrun=True),
    "reduce_scatter": lambda: collectives.steps(EVERY["reduce_scatter"][0]).figures[1],
}


@pytest.mark.parametrize("name", [*PICTURES, *LARGE])
def test_every_picture_can_be_read_on_a_phone(name):
    drawn = (PICTURES | LARGE)[name]()
    for figure in drawn if isinstance(drawn, tuple) else (drawn,):
        root = ElementTree.fromstring(figure.svg)
        width, height = (float(v) for v in root.get("viewBox").split()[2:])
        assert width < 680 and len(figure.svg) < 100_000
        assert figure.alt.strip() and figure.alt == root.get("aria-label") and repr(figure).strip()
        spans = []
        for text in (found for found in marks(figure, "text") if found.get("font-size")):
            size, x, y = (number(text, k) for k in ("font-size", "x", "y"))
            assert size * 380 / width > 11, f"{text.text!r} is under 11 px on a phone"
            span = text_width(text.text, size)
            left = x - {"start": 0, "middle": span / 2, "end": span}[text.get("text-anchor", "start")]
            assert left >= -1 and left + span <= width + 4, f"{text.text!r} leaves the picture"
            assert size * 0.7 <= y <= height, f"{text.text!r} leaves the picture"
            spans.append((y, left, left + span * 0.92, text.text))  # the estimate is generous
        for (y1, _, end, first), (y2, begin, _, second) in pairwise(sorted(spans)):
            assert y1 != y2 or begin >= end - 4, f"{first!r} touches {second!r}"


APART = [Split("a", [{}]), Split("b", [{}, {}])]
LONG = {r: (1.0,) * 9 for r in (0, 1)}
BARE = [Event(r, "all_reduce", 0, 1, ranks=ALL, shape=(2,)) for r in ALL]
CUT = [replace(e, shape=(100,), values=Values(*(((1.0,) * 64,),) * 3)) for e in BARE]
CALLS = [e for r in ALL for e in (all_reduce()[r], all_to_all()[r], all_reduce()[r])]
MIXED = [event(0, "all_to_all", [[0, 1, 2, 3]], [[0] * 4], [[0, 20, 10, 30]]), *all_to_all()[1:]]
UNEVEN = call("all_gather", OWN, [[[0] * 3]] * 4, [[[0, 1, 2]]] * 4)
CUBE, MODEL = {"pp": 2, "dp": 2, "tp": 2}, torch.arange(4.0)[:, None].expand(4, 4).clone()


def part_of(**mine):
    splits.located("rows", [{"A": MODEL[:2]}, mine], whole={"A": MODEL})


def three_ways(x, w1, w2):
    splits.mlp_three_ways(x=x, w1=w1, w2=w2)


def axis(*points):
    charts.lines([Series("a", points)], x_label="", y_label="", alt="")


REFUSED = {
    "at least one rung": lambda: charts.ladder([], unit="s", alt=""),
    "no place for values of 0 or below: a": lambda: charts.ladder([Rung("a", 0.0)], unit="s", alt=""),
    "no place for x = 0. Use x_log=False.": lambda: axis((0, 1.0), (1, 2.0)),
    "every series is empty": axis,
    "1 figures and 2 labels. Give one label per figure": lambda: Frames((Figure("", ""),), ("a", "b")),
    "A row has 2 cells, the header 1": lambda: charts.Table(("a",), (("1", "2"),)),
    "no curve has a value": lambda: losses.losses({"a": []}),
    "no value is a finite number": lambda: losses.losses({"a": [float("nan")]}),
    "no place for a loss of 0. Use log=False.": lambda: losses.losses({"a": [1.0, 0.0]}, log=True),
    "memory was never looked at": lambda: memory.over_time([], {}, x_label="ms"),
    "rest has 1 values for 2 places. Give": lambda: memory.over_time([0, 1], {"rest": [1]}, x_label="ms"),
    "no rank was measured": lambda: memory.by_rank([]),
    "2 were measured, the formula is for 1": lambda: memory.by_rank([{"rest": 1}] * 2, [{"rest": 1}]),
    "2 were measured, 1 have names": lambda: memory.by_rank([{"rest": 1}] * 2, names=["a"]),
    "at least one row": lambda: bars.bars({"a": -1.0}, unit="s"),
    "at least one error": lambda: errors.signed_errors({"none": []}, unit="error"),
    "There is nothing to draw: no rank computed in a span or comm": lambda: timeline.timeline([]),
    "nothing was enqueued": lambda: streams.streams([]),
    'no event is named after an action, such as "1F0"': lambda: schedule.grid([span(0, "forward", 0, 1)]),
    "There is nothing to draw: no task was given.": lambda: jobs.schedule([]),
    "this run has no standstill": picture,
    "holds no send that was received": lambda: messages.steps([]),
    "No array was watched": lambda: messages.steps([replace(e, watched=None) for e in TREE]),
    "9 numbers, a picture has room for 8": lambda: messages.steps(message(0, 1, 0, LONG, LONG, (0, 1), (0, 1))),
    "Which collective? This run holds: all_reduce (2x), all_to_all (1x). Name one": lambda: collectives.steps(CALLS),
    "Which collective? This run holds: none.": lambda: collectives.steps([]),
    "holds no all_reduce number 9. Its collectives: all_": lambda: collectives.steps(CALLS, "all_reduce", call=9),
    "No picture for 'barrier'. There is one for: all_gather, all": lambda: collectives.steps(CALLS, "barrier"),
    "were not recorded. Run its cell with `--values`: `%%ranks 4 --values`.": lambda: collectives.steps(BARE),
    "0 is one of ranks 0-3, but this run has none of rank 3. Draw": lambda: collectives.steps(all_reduce()[:3]),
    "all_gather on 4 ranks is drawn from 4 tensors or one tensor in 4": lambda: collectives.steps(UNEVEN),
    "Part 1 of rank 0's output is not part 0 of rank 1's input: ": lambda: collectives.steps(MIXED),
    "Only the first 64 of 100 numbers were recorded. ": lambda: collectives.steps(CUT),
    "0 rows have lengths none": lambda: traffic.traffic([]),
    "2 rows have lengths 2, 1": lambda: traffic.traffic([[0, 1], [0]]),
    "fewer than 0 bytes": lambda: traffic.traffic([[0, -1], [0, 0]]),
    "needs the node of each of them; got 1 names": lambda: traffic.traffic([[0, 1], [1, 0]], nodes=("a",)),
    "hold ranks 0 to 7, not 8": lambda: routes.on_nodes({"ring": [(7, 8)]}, 4),
    "pp(2) * dp(2) * tp(2) = 8, but there are 4 ranks": lambda: mesh.bytes_by_axis([[0] * 4] * 4, CUBE),
    "there are 9 ranks": lambda: mesh.axes([comm(8, "all_reduce", 0, 1, ranks=(0, 8))], CUBE),
    "8 ranks do not fill nodes of 3": lambda: mesh.on_nodes(CUBE, per_node=3, colour="pp"),
    "no axis 'cp'": lambda: mesh.on_nodes(CUBE, per_node=4, colour="cp"),
    "Rank 1 holds a part of B, but whole has A. Add B there.": lambda: part_of(B=MODEL),
    "and the part is nowhere in it: at best its numbers are off by 5. A partial": lambda: part_of(A=MODEL[:2] * 0 + 7),
    "at best its numbers are off by nan.": lambda: part_of(A=torch.full((2, 4), torch.nan)),
    "A is 5 x 4, the whole is 4 x 4, and": lambda: part_of(A=torch.ones(5, 4)),
    "Rank 1's part of A has the shape (4,); only matrices with rows": lambda: part_of(A=torch.ones(4)),
    "needs the same number of ranks; these have [1, 2].": lambda: splits.side_by_side(APART, {"A": (1, 1)}),
    "x (8, 4), W1 (8, 4) and W2 (4, 8) cannot be multiplied": lambda: three_ways((8, 4), (8, 4), (4, 8)),
    "cannot share 7 rows and 8 hidden units evenly": lambda: three_ways((7, 4), (4, 8), (8, 4)),
    "their lengths differ: layers 9, shards 12.": lambda: splits.strips({"layers": [("a", 9)], "shards": [("b", 12)]}),
    "There is nothing to draw": lambda: splits.strips({}),
    "There is nothing to draw:": lambda: held.held({"a run": Comparison((), None)}),
    "no room for 4 nodes of 2 ranks: 3 nodes, 4 ranks on each": lambda: starts.starts(4, 2),
    "2 or 3 nodes of 1 to 4 ranks, not 1 of 2": lambda: starts.meeting(["node1"], 2),
    "Two nodes have one name: a, a": lambda: starts.meeting(["a", "a"], 2),
    "at least one pair": lambda: schematics.links({}),
    "room for 2, 4 or 6 leaves": lambda: schematics.fat_tree(leaves=3, down=4, ups=(4,)),
    "beginning and ending with a box": lambda: schematics.paths({"a": ["box", "arrow"]}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_picture_is_refused(said):
    with pytest.raises(ValueError, match=re.escape(said)):
        REFUSED[said]()
