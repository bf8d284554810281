"""A dozen pictures as they were looked at, mark by mark; that all can be read; what is refused.

They are compared with tests/data/pictures/NAME.svg. After a change that is meant:

    REDRAW=1 python -m pytest tests/test_draw_whole.py    # writes what differs; look at it, then commit it
"""

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from rankcell import schedules
from rankcell.compare.judge import Comparison
from rankcell.draw import (
    bars,
    charts,
    collectives,
    held,
    memory,
    mesh,
    messages,
    schedule,
    splits,
    streams,
    timeline,
    traffic,
)
from rankcell.draw.charts import Rung, Series
from rankcell.draw.parts import text_width
from rankcell.draw.splits import Split
from rankcell.draw.svg import format_bytes, format_seconds
from rankcell.results import Event, RankResult, Run, Standing, Values
from test_draw_charts import marks, number, one_step
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


def a_step():
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
    found = (RankResult(r, events=tuple(events)) for r, events in enumerate(of_rank))
    return timeline.timeline(Run("", tuple(found)), title="A step")


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
    lists = ["0F0", "2F0", "2B0", "0B0"], ["1F0", "1I0", "1W0"]
    plan = schedules.schedule("mine", [map(schedules.Action.parse, texts) for texts in lists])
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
        Series("4", [(2**12, 4e9), (2**29, 5e10)]),
        Series("the fifth", [(2**14, 2e9)], measured=False),
    ]
    places = [(2**25, "L3"), (2**15, "L1d"), (2**16.2, "L2"), (2**50, "outside")]
    size, rate = {"x_base": 2, "x_format": format_bytes}, {"y_format": charts.format_rate}
    return charts.lines(series, x_label="size", y_label="rate", **size, **rate, alt="It grows.", marks=places)


def lengths():
    rungs = [Rung("a", 4e-6), Rung("a rung whose factor has no room", 2.3e-3), Rung("d", 3.0)]
    named = {"unit": "seconds", "outlined": "by formula", "format_value": format_seconds}
    needs = {"small": {"weights": 2, "optimizer": 12}, "a large model": {"weights": 84}}
    return (
        charts.ladder(rungs, alt="d is slowest.", **named),
        bars.bars(needs, unit="GB", format_value="{:g} GB".format, limit=("one GPU has", 80)),
    )


def layouts():
    """Parts, nothing, a partial sum; layouts of tensors."""
    shapes = {"A": (2, 2), "C": (2, 1)}
    rows = [{"A": ((r, r + 1), (0, 2)), "C": ((0, 2), (0, 1))} for r in range(2)]
    whole = {"A": ((0, 2), (0, 2)), "C": ((0, 1), (0, 1))}
    found = [row("up", "output", "sharded on dim 2"), row("down", "output", "partial over 0-1", "partial")]
    found += [row("up", "grad", "4 times it", "scaled"), row("down", "grad", "others (3% off)", "none")]
    split = Split("rows", rows, ("all-reduce",), ("C",))
    words = ("activations of this layer,", "once")
    stages = Split("stages", [whole, rows[1]], words, ())
    return (
        splits.side_by_side([split, stages], shapes, alt="Halves."),
        held.held({"as it was": Comparison(tuple(found), None), "one": Comparison(tuple(found[:1]), None)}),
    )


LONG_ONES, MEAN = [[[1000.25 * (r + 1)] * 2] for r in range(4)], [[[2500.625] * 2]] * 4
AVERAGE = call("reduce", LONG_ONES, LONG_ONES, MEAN, peer=1, reduce_op="AVG")
MATRIX = [[0, 3 * MIB, 10], [MIB, 500, 2 * MIB], [0, 1.9 * MIB, 0]]
PICTURES = {
    "timeline": a_step,
    "streams": device,
    "schedule": two_and_one_chunk,
    "collectives": lambda: collectives.steps(AVERAGE).figures[2],
    "messages": lambda: messages.steps(TREE).figures[1],
    "waits": all_kinds,
    "traffic": lambda: traffic.traffic(MATRIX, title="A step"),
    "charts": of_all_kinds,
    "lengths": lengths,
    "memory": one_step,
    "layouts": layouts,
}


def as_kept(drawn) -> str:
    """The picture as its file has it: a mark per line, one below the other."""
    marks, y, figures = [], 0.0, drawn if isinstance(drawn, tuple) else (drawn,)
    for figure in figures:
        marks.append(figure.svg.replace("<svg ", f'<svg y="{y:g}" ', 1))
        y += float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', figure.svg)[1])
    whole = f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{y:g}">{"".join(marks)}</svg>'
    return re.sub(r">(?=<(?!/|title))", ">\n", whole if len(marks) > 1 else drawn.svg) + "\n"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_equals_its_golden_file(name):
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


LARGE = {
    "sixteen that wait": lambda: picture(*CASES["ranks 0-15 wait in a circle"]),
    "32 micro-batches": lambda: schedule.grid(schedules.interleaved(8, 32, 4)),
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


LONG = {r: (1.0,) * 9 for r in (0, 1)}
BARE = [Event(r, "all_reduce", 0, 1, ranks=ALL, shape=(2,)) for r in ALL]
CUT = [replace(e, shape=(100,), values=Values(*(((1.0,) * 64,),) * 3)) for e in BARE]
CALLS = [e for r in ALL for e in (all_reduce()[r], all_to_all()[r], all_reduce()[r])]
MIXED = [event(0, "all_to_all", [[0, 1, 2, 3]], [[0] * 4], [[0, 20, 10, 30]]), *all_to_all()[1:]]
FAR = call("all_gather", [[[1.5] * 8]] * 4, [[[0] * 32]] * 4, [[[1.5] * 32]] * 4)
UNEVEN = call("all_gather", OWN, [[[0] * 3]] * 4, [[[0, 1, 2]]] * 4)
FOUR = Run("", tuple(map(RankResult, range(4))))
CUBE, MODEL = {"pp": 2, "dp": 2, "tp": 2}, torch.arange(4.0)[:, None].expand(4, 4).clone()


def part_of(**mine):
    splits.located("rows", [{"A": MODEL[:2]}, mine], whole={"A": MODEL})


def axis(*points):
    charts.lines([Series("a", points)], x_label="", y_label="", alt="")


REFUSED = {
    "no place for x = 0. Use x_log=False.": lambda: axis((0, 1.0), (1, 2.0)),
    "every series is empty": axis,
    "memory was never looked at": lambda: memory.over_time([]),
    "There is nothing to draw: no rank computed in a span or comm": lambda: timeline.timeline([]),
    "nothing was enqueued": lambda: streams.streams([]),
    'no event is named after an action, such as "1F0"': lambda: schedule.grid([span(0, "forward", 0, 1)]),
    "this run has no standstill": picture,
    "holds no send that was received": lambda: messages.steps([]),
    "No array was watched": lambda: messages.steps([replace(e, watched=None) for e in TREE]),
    "9 numbers, a picture has room for 8": lambda: messages.steps(message(0, 1, 0, LONG, LONG, (0, 1), (0, 1))),
    "Which collective? This run holds: all_reduce, all_to_all. Name one": lambda: collectives.steps(CALLS),
    "Which collective? This run holds: none.": lambda: collectives.steps([]),
    "holds no all_gather. Its collectives: all_": lambda: collectives.steps(CALLS, "all_gather"),
    "were not recorded. Run its cell with `--values`: `%%ranks 4 --values`.": lambda: collectives.steps(BARE),
    "rank 0 is one of ranks 0-3, but this run has none of rank 3.": lambda: collectives.steps(all_reduce()[:3]),
    "all_gather on 4 ranks is drawn from 4 tensors, or from one tensor in 4": lambda: collectives.steps(UNEVEN),
    "Part 1 of rank 0's output is not part 0 of rank 1's input: ": lambda: collectives.steps(MIXED),
    "no room for all the numbers: draw all_gather with smaller": lambda: collectives.steps(FAR),
    "Only the first 64 of 100 numbers were recorded. ": lambda: collectives.steps(CUT),
    "pp(2) * dp(2) * tp(2) = 8, but there are 4 ranks": lambda: mesh.axes(FOUR, CUBE),
    "A is 5 x 4, the whole is 4 x 4, and": lambda: part_of(A=torch.ones(5, 4)),
    "There is nothing to draw:": lambda: held.held({"a run": Comparison((), None)}),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_picture_is_refused(said):
    with pytest.raises(ValueError, match=re.escape(said)):
        REFUSED[said]()
