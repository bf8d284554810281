"""Each kind of picture as it was looked at: whole, mark by mark, from small fixed data.

The other tests of `draw` look at a few numbers of a picture; a sign in a position passes them. Here the SVG text, and
the text twin as its `desc`, is compared with tests/data/pictures/NAME.svg. After a change that is meant:

    REDRAW=1 python -m pytest tests/test_draw_whole.py    # writes what differs; look at it, then commit it
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

from rankcell import hardware as hw
from rankcell import schedules
from rankcell.against import Comparison
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
    stepper,
    streams,
    timeline,
    traffic,
    waits,
)
from rankcell.draw.charts import Rung, Series
from rankcell.draw.jobs import Task
from rankcell.draw.splits import Split
from rankcell.draw.svg import Figure, format_seconds
from rankcell.results import Event, Memory, RankResult, Run, Standing, Step
from test_draw_charts import example_machine
from test_draw_collectives import event, gather, reduce_scatter, scatter
from test_draw_held import row
from test_draw_memory import one_step
from test_draw_messages import DONE, TREE, message
from test_draw_schedule import span
from test_draw_stepper import two_ranks as stepped
from test_draw_streams import overlapped
from test_draw_waits import finished, waiting

KEPT = Path(__file__).parent / "data" / "pictures"
HOW = "If the change is meant: REDRAW=1 python -m pytest tests/test_draw_whole.py, look at the picture, commit it."
NAN, MIB = float("nan"), 2**20
PICTURES: dict[str, Callable[[], Figure]] = {}


def picture(make):
    """Enter an example into the table, under its name."""
    PICTURES[make.__name__] = make
    return make


def below_one_another(figures: Sequence[Figure]) -> Figure:
    """The pictures of a slider, all in one."""
    marks, y, widest = [], 0.0, 0.0
    for figure in figures:
        width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', figure.svg).groups())
        marks.append(figure.svg.replace("<svg ", f'<svg y="{y:g}" ', 1))
        y, widest = y + height, max(widest, width)
    size = f'viewBox="0 0 {widest:g} {y:g}" width="{widest:g}" height="{y:g}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(marks)}</svg>'
    return Figure(svg, "", "\n\n".join(f.text for f in figures))


def as_kept(figure: Figure) -> str:
    """The picture as its file has it: a mark per line, the text twin as description."""
    twin = f"<desc>{escape(figure.text)}</desc>" if figure.text else ""
    svg = figure.svg.removesuffix("</svg>") + twin + "</svg>"
    return re.sub(r">(?=<(?!/|title))", ">\n", svg) + "\n"


def first_difference(kept: str, now: str) -> str:
    """Which line is the first to differ, and the two around the place where they do."""
    old, new = kept.split("\n"), now.split("\n")
    n = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    a, b = ("".join(lines[n : n + 1]) for lines in (old, new))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    at = max(0, same - 60)
    return f"line {n + 1} is the first to differ:\n  kept: {a[at : at + 160]}\n  now:  {b[at : at + 160]}"


# Over time


def call(rank, op, start, end, *, ranks=(0, 1, 2, 3), seq=1, nbytes=4 * MIB, **more):
    return Event(rank, op, start, end, ranks=ranks, seq=seq, nbytes=nbytes, **more)


@picture
def timeline_two_nodes():
    """Spans, one of them in another, calls that wait, messages both ways, and a rank that did nothing."""
    of_rank = {
        0: [
            span(0, "step", 0.000, 0.050),
            span(0, "forward", 0.001, 0.020),
            call(0, "send", 0.021, 0.030, peer=2, seq=1),
            call(0, "all_reduce", 0.050, 0.080),
            call(0, "recv", 0.081, 0.092, peer=3),
        ],
        1: [span(1, "forward", 0.0, 0.07), call(1, "all_reduce", 0.07, 0.08), call(1, "recv", 0.081, 0.09)],
        2: [
            call(2, "recv", 0.002, 0.030, peer=0, seq=1),
            call(2, "all_reduce", 0.031, 0.080),
            call(2, "barrier", 0.085, 0.100, ranks=(2, 3), nbytes=0),
        ],
        3: [
            span(3, "a name that has no room", 0.0, 0.010),
            call(3, "all_reduce", 0.0305, 0.080),
            call(3, "send", 0.081, 0.084, peer=0),
            call(3, "barrier", 0.090, 0.100, ranks=(2, 3), nbytes=0),
        ],
        4: [],
    }
    results = (
        RankResult(r, node="north" if r < 2 else "south", events=tuple(found)) for r, found in of_rank.items()
    )
    return timeline.timeline(Run("", tuple(results)), title="A step on two nodes")


@picture
def timeline_in_the_background():
    """Operations in lanes, more at a time than there are lanes, and an operation of an unknown name."""
    events = [span(0, "backward", 0.0, 8.0), span(1, "backward", 0.0, 7.0)]
    for r in (0, 1):
        for k in range(5):
            events.append(call(r, "reduce_scatter", 1.0 + k + r / 4, 5.5 + k, seq=k + 1, is_async=True))
        more = {"is_async": True, "issued": 8.0, "wait_start": 11.0 + r, "ranks": (0, 1)}
        events.append(call(r, "all_gather", 10.5 - 2 * r, 13.0, **more))
    events += [
        call(0, "send", 13.0, 15.0, peer=1, via="isend", wait_start=14.0),
        call(1, "recv", 13.5, 15.5, peer=0, via="irecv"),
        call(1, "send", 14.0, 16.0, peer=0, via="isend", tag=1),
        call(0, "recv", 15.5, 16.0, peer=1, tag=1),
        call(0, "exchange", 16.0, 20.0, seq=9, nbytes=0),
        call(1, "exchange", 17.0, 20.0, seq=9, nbytes=0),
    ]
    return timeline.timeline(events)


@picture
def timeline_predicted_and_measured():
    events = []
    for predicted, zero, late in ((True, 0.0, 2e-4), (False, 5.0, 3e-4)):
        for r in (0, 1):
            came = zero + 1e-4 + r * late
            events.append(Event(r, "forward", zero, came, kind="compute", predicted=predicted))
            events.append(call(r, "all_reduce", came, zero + 8e-4, ranks=(0, 1), predicted=predicted))
        events.append(call(0, "send", zero + 8e-4, zero + 9e-4, peer=1, predicted=predicted))
        events.append(call(1, "recv", zero + 8e-4, zero + 9e-4, peer=0, predicted=predicted))
        events.append(call(1, "all_gather", zero + 4e-4, zero + 6e-4, is_async=True, predicted=predicted))
    return timeline.timeline(events, title="Predicted and measured")


@picture
def timeline_crowded():
    """Too many bars to draw each: columns, filled by the share of the time, where anything happened."""
    events = []
    for k in range(140):
        t = 0.001 * k
        events.append(span(0, "step", t, t + 0.0008))
        events.append(call(0, "all_reduce", t + 0.0003, t + 0.0009, ranks=(0, 1), seq=k + 1))
        events.append(call(1, "all_reduce", t + 0.0006, t + 0.0009, ranks=(0, 1), seq=k + 1))
        if k % 3 == 0:
            events.append(call(1, "recv", t, t + 0.002, seq=k, via="irecv"))
            events.append(call(1, "reduce", t, t + 0.001, peer=0, is_async=True))
    events += [Event(r, "end", 3.99, 4.0, kind="compute") for r in (0, 1)]
    events += [call(1, "broadcast", 1.9, 1.91, predicted=True)]
    events += [call(1, "broadcast", 0.9, 0.91, predicted=True)]
    return timeline.timeline(events)


@picture
def streams_simulated():
    return streams.streams(overlapped(), title="Two streams")


@picture
def streams_measured_and_simulated():
    """A host that launches and waits, a communication, a copy, both ways to wait, short and long names."""

    def events(predicted):
        def made(row, name, op, start, end, kind, **more):
            return Event(row, op, start, end, kind=kind, group=name, predicted=predicted, **more)

        return [
            made(0, "host", "launch matmul", 0.000, 0.0001, "host"),
            made(0, "host", "launch all_reduce", 0.0001, 0.0004, "host"),
            made(0, "host", "data loader", 0.0004, 0.00207, "host"),
            made(0, "host", "synchronize", 0.00207, 0.0080, "wait"),
            made(1, "compute stream", "matmul", 0.0002, 0.0030, "compute", issued=0.0001),
            made(1, "compute stream", "a kernel with a long name", 0.0055, 0.0060, "compute", issued=0.0020),
            made(1, "compute stream", "tiny", 0.0061, 0.00611, "compute", issued=0.0020),
            made(2, "comm", "all_reduce", 0.0030, 0.0055, "comm", issued=0.0004, nbytes=8 * MIB),
            made(2, "comm", "wait", 0.0030, 0.0030, "order", peer=1, issued=0.0030),
            made(1, "compute stream", "wait", 0.0058, 0.0058, "order", peer=2, issued=0.0055),
            made(1, "compute stream", "wait", 0.0058, 0.0058, "order", peer=9, issued=0.0035),
            made(2, "comm", "all_gather", 0.0062, 0.0070, "comm", issued=0.0004),
            made(3, "copies", "copy D2H", 0.0040, 0.0080, "copy", issued=0.0004, nbytes=MIB),
        ]

    return streams.stacked(
        {
            "one layer": events(True),
            "as it was": [e for e in events(False) if e.rank in (0, 2) and e.op != "data loader"],
        }
    )


@picture
def schedule_predicted_and_measured():
    """A rank with two chunks and one with one, whose backward comes in two halves."""
    plan = schedules.schedule("mine", [["0F0", "2F0", "2B0", "0B0"], ["1F0", "1I0", "1W0"]])
    found = [
        span(0, "0F0", 10.0, 10.1),
        span(1, "1F0", 10.1, 10.25),
        span(0, "2F0", 10.25, 10.35),
        span(0, "2B0", 10.35, 10.6),
        span(1, "1I0", 10.6, 10.7),
        span(1, "1W0", 10.7, 10.85),
        span(0, "0B0", 10.72, 11.0),
        span(0, "optimizer", 11.0, 11.5),
    ]
    return schedule.grid(
        found, schedules.predict(plan, forward=0.1, backward=0.2), title="As planned, and as it was"
    )


@picture
def schedule_planned():
    return schedule.planned("zero bubble", 2, 3)


@picture
def schedule_planned_interleaved():
    return schedule.planned("interleaved", 2, 2, 4, 1.5)


@picture
def schedule_cases():
    plans = {"1F1B": schedules.one_f_one_b(2, 3), "one rank": schedules.gpipe(1, 1)}
    timed = {name: schedules.predict(plan, forward=10, backward=20) for name, plan in plans.items()}
    return below_one_another(schedule.cases(timed, still=1).figures)


@picture
def jobs_of_an_array():
    tasks = [
        Task(1, 5.0, 6.0),
        Task(2, 6.5, 11.0, -9),
        Task(10, 6.0, 7.4, 137),
        Task(11, 7.0, 7.001),
        Task(12, 8.0, 8.4, 1),
    ]
    return jobs.schedule(tasks, title="A sweep")


@picture
def routes_of_pieces():
    return routes.pieces(
        {
            "whole": [(1, 0, 0.0, 4.0), (3, 0, 4.0, 7.5)],
            "in pieces": [
                (3, 1, 2.0, 3.5),
                (1, 0, 0.0, 1.0),
                (1, 1, 1.0, 2.0),
                (1, 12, 2.0, 2.1),
                (3, 0, 1.0, 2.0),
            ],
        },
        unit="ms",
        title="A chain",
    )


# Memory, bytes, rates


@picture
def memory_over_time():
    return one_step(
        phases=[(0, "forward"), (1, "a phase with a name that is long"), (2, "backward"), (4, "step")]
    )


@picture
def memory_of_one_s_own():
    """Kinds of one's own, no phases, something that holds nothing."""
    held = {"cache": [3, 3, 70], "rest": [5, 6, 6], "optimizer": [0, 0, 0], "buffers": [0, 2, 2]}
    return memory.over_time([1, 2, 4], held, x_label="steps", height=300)


@picture
def memory_sampled():
    samples = [
        Memory(2.000, parameters=3 * MIB, rest=100, phase="load"),
        Memory(2.001, parameters=4 * MIB, activations=MIB, phase="forward"),
        Memory(2.002, parameters=4 * MIB, activations=9 * MIB, phase="forward"),
        Memory(2.005, parameters=4 * MIB, gradients=4 * MIB, phase=""),
        Memory(2.009, parameters=4 * MIB, gradients=4 * MIB, optimizer=8 * MIB, phase="step"),
    ]
    figures = [memory.over_time(samples, by=by) for by in ("change", "time")]
    return below_one_another(figures)


@picture
def memory_crowded():
    """More names of phases than three rows have room for."""
    phases = [(1000 + 40 * k, n) for k, n in enumerate(("forward", "backward", "step") * 4)]
    held = {"parameters": [MIB] * 500, "activations": [MIB * (i // 100) for i in range(500)]}
    return memory.over_time(range(1000, 1500), held, x_label="operations", phases=phases)


@picture
def memory_by_name():
    rows = [{"parameters": 3 * MIB, "cache": 900.0}, Memory(0.0, rest=2 * MIB, gradients=2 * MIB)]
    return memory.by_rank(rows, names=["SGD", "another optimizer"])


@picture
def memory_exact():
    return memory.by_rank(
        [{"optimizer": 12.0, "gradients": 4.0}] * 2, [{"gradients": 4.0, "optimizer": 12.0}] * 2
    )


@picture
def bars_in_parts():
    needs = {
        "small": {"weights": 2, "optimizer": 12},
        "a large model": {"weights": 14, "gradients": 14, "optimizer": 72},
    }
    return bars.bars(needs, unit="GB", format_value="{:g} GB".format, limit=("one GPU has", 80))


@picture
def bars_measured():
    return bars.bars(
        {"a": 0.0004, "b": 0.0, "c": 0.0013}, unit="time", format_value=format_seconds, measured=True
    )


@picture
def traffic_between_nodes():
    matrix = [[0, 3 * MIB, 10, 0], [MIB, 500, 0, 2 * MIB], [0, 0, 0, 1.9 * MIB], [5 * MIB, 0, 0.1 * MIB, 0]]
    return traffic.traffic(matrix, nodes=("north", "north", "south", "south"), title="A step")


@picture
def traffic_predicted():
    ring = [[MIB if j == (i + 1) % 3 else 0 for j in range(3)] for i in range(3)]
    return traffic.traffic(ring, predicted=True)


@picture
def traffic_of_many():
    """Numbers that have no room."""
    return traffic.traffic([[1000 * abs(i - j) for j in range(5)] for i in range(5)], title="Without numbers")


@picture
def charts_log_lines():
    """Points of all four kinds, measured and predicted, marks of which one has no room and one is outside."""
    series = [
        Series("measured", [(2**10, 1e9), (2**20, 1e10), (2**30, 1e11)]),
        Series("published", [(2**10, 1e11), (2**30, 1.2e11)], measured=False),
        Series("a third one with a long name", [(2**15, 3e9)]),
        Series("4", [(2**12, 4e9), (2**29, 5e10)], colour="#5d3a9b"),
        Series("the fifth", [(2**14, 2e9)], measured=False),
    ]
    marks = [(2**25, "L3"), (2**15, "L1d"), (2**16.2, "L2"), (2**50, "outside")]
    return charts.by_size(series, alt="It grows.", marks=marks)


@picture
def charts_linear_lines():
    """Below zero and above it, on linear axes."""
    series = [
        Series("gain", [(0, -2.0), (10, 1.5), (25, 3.0)]),
        Series("loss", [(5, 0.5), (25, -1.0)], False),
    ]
    axes = {"x_label": "step", "y_label": "change", "x_log": False, "y_log": False, "height": 300}
    return charts.lines(series, alt="One gains.", **axes)


@picture
def charts_lines_with_ticks():
    """Ticks that are given, a log axis within one power of ten, marks above a linear one."""
    figures = [
        charts.lines(
            [Series("few", [(1, 610.0), (8, 1150.0)])],
            x_label="ranks",
            y_label="tokens",
            alt="More.",
            x_base=2,
            x_ticks=(1, 2, 4, 8, 16),
            height=240,
        ),
        charts.lines(
            [Series("flat", [(2, 900.0), (4, 1000.0)])],
            x_label="x",
            y_label="y",
            alt="Flat.",
            x_log=False,
            y_log=False,
            x_ticks=(2, 2.05, 4),
            y_ticks=(900, 950),
            marks=[(3, "here")],
            height=240,
        ),
        charts.lines(
            [Series("from zero", [(1, 2.0), (3, 9.0)])],
            x_label="x",
            y_label="y",
            alt="Up.",
            x_log=False,
            y_log=False,
            height=240,
        ),
    ]
    return below_one_another(figures)


@picture
def charts_generations():
    source = hw.Source("a table", "", "2026-01-01")

    def gpu(name, year, hbm, link, bus, port):
        rates = [hw.Speed(name, rate, source) for rate in (hbm, link, bus)]
        return hw.GPU(name, year, 80e9, *rates, 1e15, hw.Speed("port", port, source) if port else None)

    gpus = [gpu("A1 SXM", 2017, 0.9e12, 150e9, 16e9, 0), gpu("C3 SXM", 2024, 8e12, 900e9, 63e9, 50e9)]
    return charts.generations(gpus)


@picture
def charts_ladder_of_times():
    rungs = [
        Rung("a", 4e-6, measured=True),
        Rung("b", 4e-6),
        Rung("a rung whose factor has no room at all", 2.3e-3),
        Rung("d", 3.0),
        Rung("e", 0.5),
    ]
    return charts.ladder(
        rungs,
        unit="seconds",
        alt="d is slowest.",
        format_value=format_seconds,
        outlined="by formula",
        solid="here",
    )


@picture
def losses_of_two():
    curves = {
        "one process": [4.0, 2.0, 1.0, 0.8],
        "2 ranks": [4.0, 2.0, 1.25, 0.8],
        "4 ranks": [3.0, 2.5, 1.5, 1.0],
    }
    return losses.losses(curves, levels={"a guess: ln 49": 3.89})


@picture
def losses_on_a_log_axis():
    curves = {"training": [40 / (1 + 4 * i) for i in range(9)], "held out": [30.0, 9.0, NAN, 2.9, 2.7]}
    return losses.losses(
        curves, log=True, every={"held out": 2}, x_label="epoch", y_label="error", height=300
    )


@picture
def losses_far_from_zero():
    figures = [
        losses.losses({"one <b>": [10.0, 9.5, float("inf"), 9.0, NAN], "none": []}, every=5, height=260),
        losses.losses({"narrow": [3.0, 2.9, 3.1]}, log=True, height=260),
        losses.losses({"long": [0.5 + (i % 90) / 30 for i in range(401)]}, log=True, height=260),
    ]
    return below_one_another(figures)


@picture
def errors_signed():
    groups = {"collectives": [0.02, -0.1, 0.31], "a training step": [-0.2, -0.7, -0.24, 0.6], "none": [0.001]}
    return errors.signed_errors(groups, unit="predicted over measured, less 1", most=0.4)


# Who sends what to whom


@picture
def messages_of_a_tree():
    again = message(1, 0, 2.0, DONE, DONE, (0, 2), (0, 2))
    return below_one_another(messages.steps(TREE + again).figures[::2])


@picture
def messages_side_by_side():
    """Messages of unlike sizes in one step, copies, and sums of what others had sent before."""
    start = {0: (1.0, 2.0, 3.0, 9.0), 1: (10.0, 20.0, 30.0, 9.0), 2: (0.5, 1500.5, -7.0, 9.0)}
    copied = start | {1: (1.0, 20.0, 30.0, 9.0)}
    added = copied | {2: (0.5, 1501.5, 13.0, 9.0)}
    last = added | {0: (1.0, 0.5, 1501.5, 13.0)}
    events = message(2, 0, 1.2, added, last, (0, 3), (1, 4))
    events += message(0, 1, 0.6, copied, added, (3, 4), (3, 4))
    events += message(1, 2, 0.5, copied, added, (0, 2), None)
    events += message(0, 1, 0.0, start, copied, (0, 1), (0, 1))
    return below_one_another(messages.steps(events, title="By hand").figures[2:])


def of_standings(*standings):
    return waits.waits(Run("", (), standstill=standings))


@picture
def waits_of_all_kinds():
    """Every phase, an arrow that closes a cycle, one that does not."""
    return of_standings(
        waiting(0, "all_to_all", 12, 1),
        waiting(1, "recv", 3, 0),
        waiting(2, "barrier", 8, 3, 4),
        Standing(3, "error", "failed: ZeroDivisionError"),
        Standing(4, "lost", "was killed (SIGKILL)"),
        Standing(5, "absent", "does not run this cell"),
        finished(6),
        Standing(7, "running", "computes at line 7", line=7),
    )


@picture
def waits_in_a_ring():
    return of_standings(*(waiting(r, "send", 2, (r + 1) % 3) for r in range(3)))


@picture
def waits_for_any():
    return of_standings(
        waiting(0, "recv", 0, 1, 2), finished(1), finished(2), waiting(3, "monitored_barrier", 1, 0)
    )


@picture
def waits_of_many():
    first = [waiting(r, "send", 3, (r + 1) % 3) for r in range(3)]
    return of_standings(*first, waiting(3, "recv", 4, 10, 2), *(finished(r) for r in range(4, 20)))


@picture
def waits_of_two_and_of_one():
    alone = of_standings(Standing(0, "running", "computes at line 1", line=1))
    return below_one_another([of_standings(waiting(0, "recv", 4, 1), waiting(1, "recv", 5, 0)), alone])


@picture
def collectives_reduce_scatter():
    return collectives.steps(reduce_scatter()).figures[1]


@picture
def collectives_gather():
    return below_one_another(collectives.steps(gather()).figures[::2])


@picture
def collectives_scatter():
    return collectives.steps(scatter()).figures[1]


@picture
def collectives_in_groups():
    """Two groups side by side, of more numbers than have room."""
    events = []
    for r in range(4):
        mine, both = [10 + r] * 11, [20 + 2 * (r % 2) + 2] * 11
        group = (r % 2, r % 2 + 2)
        events.append(event(r, "all_reduce", [mine], [mine], [both], ranks=group, reduce_op="SUM"))
    return collectives.steps(events).figures[2]


@picture
def collectives_cut():
    """Long numbers in long blocks, and an average."""
    long = [[1000.25 * (r + 1)] * 12 for r in range(4)]
    mean = [
        event(r, "reduce", [long[r]], [long[r]], [[2500.625] * 12], peer=1, reduce_op="AVG") for r in range(4)
    ]
    return collectives.steps(mean).figures[2]


@picture
def collectives_unequal():
    goes = {0: [0, 2], 1: [2, 2], 2: [1, 2], 3: [0, 3]}
    came = {t: [10 * s + i for s in goes for i, to in enumerate(goes[s]) if to == t] for t in goes}
    parts = [event(r, "all_to_all", [[10 * r, 10 * r + 1]], [[NAN] * len(came[r])], [came[r]]) for r in goes]
    return collectives.steps(parts).figures[2]


@picture
def collectives_as_matrices():
    named = {"A": [[1, 0, 0], [1, 0, 1]], "B": [[1, 1, 1], [0, 0, 1], [0, 1, 0]], "C": [[1, 1], [1, 0]]}
    owners = {"A": [1, 1, 0]}
    return collectives.matrices(named, "Three of them.", world_size=2, owners=owners)


@picture
def collectives_as_rows():
    named = {"mask": [[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 0]]}
    return collectives.matrices(
        named, "", world_size=3, columns=1, by_row=True, row="a query", column="a key"
    )


@picture
def routes_on_nodes():
    ring = [(r, r + 1) for r in range(6)]
    phases = {"a chain": ring, "inside, then across with words that wrap": [(0, 1), (5, 0), (6, 8), (3, 9)]}
    return routes.on_nodes(phases, 6, title="Two nodes")


@picture
def routes_in_trees():
    return routes.trees({"one": {1: 0, 2: 1, 3: 1}, "other": {0: 1, 2: 1}}, title="Trees")


# Who holds what, where


CUBE = {"pp": 2, "dp": 2, "tp": 3}


@picture
def mesh_axes():
    events = [
        call(r, "all_reduce", 0, 1, ranks=m) for m in mesh.groups(CUBE)["tp"] for r in m for _ in range(3)
    ]
    events += [call(r, "barrier", 0, 1, ranks=tuple(range(12)), nbytes=0) for r in range(12)]
    events += [
        call(0, "send", 0, 1, ranks=(0, 6), nbytes=9000),
        call(6, "recv", 0, 1, ranks=(0, 6), nbytes=9000),
    ]
    events += [call(r, "all_gather", 0, 1, ranks=(0, 6), nbytes=5000 + 200 * r) for r in (0, 6)]
    events += [span(0, "forward", 0, 1), call(3, "all_reduce", 0, 1, ranks=(3,))]
    return mesh.axes(events, CUBE, title="A step")


@picture
def mesh_of_one_axis():
    return mesh.axes([], {"dp": 3})


@picture
def mesh_on_nodes():
    return mesh.on_nodes(CUBE, per_node=4, colour="tp", title="Three nodes")


@picture
def splits_side_by_side():
    """Parts, nothing, a partial sum; messages down, up and both ways; words that are made smaller."""
    shapes = {"A": (2, 4), "B": (1, 3), "C": (2, 3)}
    whole = {name: splits.part(slice(None), slice(None), of=of) for name, of in shapes.items()}
    rows = [whole | {"A": ((r, r + 1), (0, 4)), "C": ((r, r + 1), (1, 3))} for r in range(2)]
    some = [whole | {"B": None}, {"A": whole["A"], "B": ((0, 1), (1, 2))}]
    return splits.side_by_side(
        [
            Split("rows", rows, ("all-reduce",), partial=("C",), backward="both"),
            Split("stages", some, ("activations of this layer,", "once"), forward="down", backward="up"),
        ],
        shapes,
    )


@picture
def splits_fine():
    """Too many numbers for lines between them, no arrows, no partial sums."""
    held = [{"x": splits.part(slice(20 * r, 20 * r + 20), slice(None), of=(60, 40))} for r in range(3)]
    return splits.side_by_side([Split("batch", held, ("nothing",))], {"x": (60, 40)}, alt="Three parts.")


@picture
def splits_in_strips():
    return splits.strips(
        {
            "3 layers": [("layer 0", 50), ("a name too long for its piece", 10), ("layer 2", 40)],
            "3 shards": [("rank 0", 34), ("rank 1", 33), ("rank 2: mine", 33)],
            "2 halves": [("rank x", 50), ("right", 50)],
        },
        unit="parameters",
    )


@picture
def splits_dealt():
    cards = {
        "who": [("rank 0", 6), ("rank 1", 6)],
        "dealt": [(f"rank {k % 2}: {9 - k}", 2) for k in range(6)],
    }
    return splits.strips(cards, across=False, alt="Dealt in turn.")


@picture
def held_in_two_runs():
    rows = (
        row("up", "output", "sharded on dim 2"),
        row("down", "output", "partial over ranks 0-1", "partial"),
        row("loss", "output", "each its own part of the batch (over ranks 0-1)", "partial"),
        row("down", "grad_output", "the same on all"),
        row("up", "grad_output", "parts of a sum", "batch"),
        row("up", "grad", "4 times it", "scaled"),
        row("down", "grad", "each rank another multiple of it", "none"),
        row("down", "grad", "other numbers (3% off)", "none"),
        row("up", "grad", "sharded on dim 0", step=1),
        row("up", "parameter", "sharded on dim 0"),
        row("up", "parameter", "sharded on dim 0", step=1),
    )
    return held.held({"as it was": Comparison(rows, None), "repaired": Comparison(rows[:4], None)})


@picture
def held_weights():
    rows = (row("up", "parameter", "the same on all", step=1), row("up", "output", "the same on all"))
    return held.held({"one": Comparison(rows, None)}, kinds=("output", "parameter"))


# Machines and jobs


@picture
def maps_machine():
    return maps.machine_map(example_machine(15, 3, 2))


@picture
def maps_small_machines():
    figures = [
        maps.machine_map(hw.Machine("x", ((0,), (1,)), (), (), None)),
        maps.machine_map(hw.Machine("x", ((0,), (1,)), (hw.Cache(1, "Data", 2**16),), (), 2**34)),
        maps.machine_map(example_machine(2, 2)),
    ]
    return below_one_another(figures)


@picture
def maps_links():
    names = ("GPU0", "GPU1", "GPU2", "NIC0", "NIC1")
    kinds = ("X", "NV4", "PXB", "NODE", "SYS")
    codes = tuple(tuple(kinds[abs(i - j)] for j in range(5)) for i in range(5))
    return maps.link_matrix(hw.Topology(names, codes))


@picture
def maps_cluster():
    source = hw.Source("a table", "", "2026-01-01")
    rates = {"nvlink": 450e9, "pcie": 63e9, "network": 50e9}
    speeds = {name: hw.Speed(name, rate, source) for name, rate in rates.items()}
    return maps.cluster_map(**speeds, per_node=4, nodes=2)


@picture
def maps_copies():
    return maps.copy_paths(pageable="returns after 27 ms", pinned="returns after 1 ms")


@picture
def schematics_bottlenecks():
    return schematics.bottlenecks(
        memory="112 GB of state do not fit into 80 GB",
        compute="187,000 hours of one GPU",
        storage="49 s per checkpoint, and while it is written nobody computes if it is not done aside",
        network="1 s",
    )


@picture
def schematics_links():
    odd = schematics.links({(0, 1): 2, (1, 2): 1, (0, 2): 3})
    even = schematics.links({(0, 1): 2, (1, 2): 1, (2, 3): 1}, per_link="25 GB/s each way, as its table says")
    return below_one_another([odd, even])


@picture
def schematics_fat_tree():
    return schematics.fat_tree(leaves=4, down=2, ups=(1, 5))


@picture
def schematics_paths():
    pageable = [
        "pageable memory",
        "a core copies",
        "pinned buffer",
        "over PCIe",
        "GPU memory",
        "then",
        "a fourth box",
    ]
    return schematics.paths(
        {"pageable": pageable, "pinned": ["pinned memory", "the GPU reads it", "GPU"], "one": ["a"]}
    )


@picture
def starts_by_srun():
    return starts.starts(2, 3)


@picture
def starts_by_torchrun():
    return starts.starts(3, 1, torchrun=True)


@picture
def starts_of_a_meeting():
    return below_one_another([starts.meeting(["n2", "n10", "n1"], 2), starts.meeting(["b", "a"], 1)])


@picture
def stepper_of_two_ranks():
    return stepper.stepper(stepped()).figures[1]


@picture
def stepper_of_many():
    """More ranks at one line than have room, long lines and values, a rank that has not begun."""
    source = "\nfor i in range(3):\n    x = torch.ones(1000)  # a line that is longer than it may be\n\n"
    values = {0: {"x": "ones" * 14, "i": "0", "a": "one" * 7, "b": "two" * 8}}
    steps = {r: (Step(r, 0.1 * r, 2), Step(r, 1.0 + r, 3, values.get(r, {"i": str(r)}))) for r in range(6)}
    steps[4] = (Step(4, 9.0, 0, {"i": "2", "j": "3"}),)
    events = {1: (Event(1, "recv", 0.2, 1.5),), 2: (span(2, "work", 0.0, 2.5),)}
    ranks = (RankResult(r, steps=steps[r], events=events.get(r, ())) for r in range(6))
    figures = stepper.stepper(Run(source, tuple(ranks))).figures
    return below_one_another([figures[1], figures[-1]])


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_was_looked_at(name):
    now, path = as_kept(PICTURES[name]()), KEPT / f"{name}.svg"
    ElementTree.fromstring(now)  # or a browser shows nothing
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if os.environ.get("REDRAW") and kept != now:
        path.parent.mkdir(exist_ok=True)
        path.write_text(now, encoding="utf-8", newline="\n")
        return
    if not kept:
        pytest.fail(f"There is no tests/data/pictures/{name}.svg. {HOW}", pytrace=False)
    if kept != now:
        pytest.fail(f"{name}.svg: {first_difference(kept, now)}\n{HOW}", pytrace=False)


def test_every_kept_picture_has_its_example():
    assert sorted(path.stem for path in KEPT.glob("*")) == sorted(PICTURES)


def test_a_difference_is_said_shortly():
    said = first_difference("<a/>\n<b x='1'/>\n", "<a/>\n<b x='2'/>\n")
    assert said == "line 2 is the first to differ:\n  kept: <b x='1'/>\n  now:  <b x='2'/>"
    assert len(first_difference("x" * 900 + "1", "x" * 900 + "2")) < 300
    assert first_difference("a", "a\nb").startswith("line 2 ")
