"""The grid of a pipeline: ranks from top to bottom, time from left to right, a box for each action.

A box holds the number of its micro-batch. Predicted boxes are outlined, measured ones solid; given both, each
rank has its measured row right under its predicted one. Later chunks of a rank are paler. It reads events and
schedules and measures nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import schedules
from ..results import Event, Run
from ..schedules import SCHEDULES, Action, Schedule
from . import explorer
from .parts import WIDTH, Swatch, key, pale, round_ticks, text_width, ticks_below
from .svg import INK, MUTED, PAPER, Figure, Frames, drawing, format_seconds, label

# what the next rank waits for is blue or green, what nobody waits for yellow
COLOURS = {"F": "#56b4e9", "B": "#009e73", "I": "#009e73", "W": "#f0e442"}
_IDLE = "#efefef"
_LEFT, _RIGHT, _BAR, _OUTLINE, _GAP = 84, 14, 34, 28, 12
_COLUMNS = 66  # characters of a row of the text twin
_NUMBER = 18  # px; 11 px and more on a phone


@dataclass(frozen=True)
class _Row:
    """The actions of one rank, measured or predicted, with times from the first of all."""

    rank: int
    predicted: bool
    boxes: tuple[tuple[Action, float, float], ...]
    chunks: Mapping[int, int]  # stage -> which of this rank's stages it is

    def busy(self) -> float:
        return sum(end - start for _, start, end in self.boxes)


def grid(
    what: Schedule | Run | Iterable[Event], over: Schedule | Iterable[Event] = (), *, title: str = ""
) -> Figure:
    """When each rank runs which action, and when it idles.

    grid(one_f_one_b(4, 8))  # as planned: a forward takes 1, a backward 2
    grid(predict(plan, forward=0.02, backward=0.04))  # in seconds
    grid(run, predicted)  # measured, under what was predicted

    Args:
        what: a schedule, a run, or events; those that are no actions of a pipeline are left out.
        over: what was predicted for it, as events, or a schedule.
        title: stands above, and at the start of the alt text.

    Raises:
        ValueError: there is no action.
    """
    in_units = isinstance(what, Schedule)
    events = [*_events(what), *_events(over)]
    rows = _rows(events)
    if not rows:
        raise ValueError(
            'There is nothing to draw: no event is named after an action, such as "1F0". Give the engine '
            "`span=rankcell.span`."
        )
    end = max(stop for row in rows for *_, stop in row.boxes) or 1e-9
    alt = _finding(rows, in_units)
    alt = f"{title}. {alt}" if title else alt
    return _draw(rows, end, title, alt, in_units)


def cases(
    plans: Mapping[str, Schedule | Iterable[Event]], *, name: str = "schedule", still: int = 0
) -> Frames:
    """One grid per case under a slider, all with the same length of time and the same number of ranks.

    cases({"GPipe": predict(gpipe(4, 8)), "1F1B": predict(one_f_one_b(4, 8))})
    """
    rows = {case: _rows(_events(plan)) for case, plan in plans.items()}
    every = [row for found in rows.values() for row in found]
    end = max(stop for row in every for *_, stop in row.boxes)
    in_units = all(isinstance(plan, Schedule) for plan in plans.values())
    figures = tuple(
        _draw(found, end, case, f"{case}. {_finding(found, in_units)}", in_units, explain=every)
        for case, found in rows.items()
    )
    labels = tuple(f"{case}: idle {100 * _idle(found, measured=True):.0f} %" for case, found in rows.items())
    return Frames(figures, labels, name=name, still=still)


def explore() -> Any:
    """A panel with sliders for a running kernel: stages, micro-batches, chunks, backward and schedule.

    Raises:
        ModuleNotFoundError: ipywidgets is not installed.
    """
    return explorer.panel(
        planned,
        {
            "schedule": list(SCHEDULES),
            "ranks": list(range(1, 9)),
            "microbatches": list(range(1, 25)),
            "chunks": [1, 2, 3, 4],
            "backward": [1.0, 1.5, 2.0, 2.5, 3.0],
        },
        start={"schedule": "1F1B", "ranks": 4, "microbatches": 8, "chunks": 2, "backward": 2.0},
    )


def planned(
    schedule: str = "1F1B", ranks: int = 4, microbatches: int = 8, chunks: int = 2, backward: float = 2.0
) -> Figure:
    """The grid of one schedule of a model that takes each rank 1 for a forward, `backward` for a backward.

    `chunks` is looked at for the interleaved schedule only. The line under the title says ranks x
    micro-batches, and counts a chunk's activations as 1/`chunks`.
    """
    v = chunks if schedule == "interleaved" else 1
    plan = SCHEDULES[schedule](ranks, microbatches, *([v] if schedule == "interleaved" else []))
    events = schedules.predict(plan, forward=1 / v, backward=backward / v)
    rows = _rows(events)
    end, peak = schedules.length(events), max(schedules.peak_in_flight(plan)) / v
    idle = 100 * schedules.idle_share(events)
    plural = "es" if peak > 1 else ""
    note = f"{ranks} x {microbatches}: idle {idle:.0f} %, at most {peak:.3g} micro-batch{plural} held"
    return _draw(rows, end, plan.name, f"{plan.name}. {_finding(rows, True)}", True, note=note)


def _events(what: Schedule | Run | Iterable[Event]) -> list[Event]:
    if isinstance(what, Schedule):
        return list(schedules.predict(what, forward=1 / what.chunks, backward=2 / what.chunks))
    return list(what.events if isinstance(what, Run) else what)


def _rows(events: Sequence[Event]) -> list[_Row]:
    """A row per rank and kind, measured and predicted each from a zero of its own."""
    rows = []
    found = schedules.actions_of(events)
    zero = {p: min((e.start for _, e in found if e.predicted == p), default=0.0) for p in (True, False)}
    for rank in sorted({e.rank for _, e in found}):
        stages = sorted({a.stage for a, e in found if e.rank == rank})
        chunks = {stage: i for i, stage in enumerate(stages)}
        for p in (True, False):
            boxes = tuple(
                (a, e.start - zero[p], e.end - zero[p])
                for a, e in found
                if (e.rank, e.predicted) == (rank, p)
            )
            if boxes:
                rows.append(_Row(rank, p, boxes, chunks))
    return rows


def _idle(rows: Sequence[_Row], measured: bool) -> float:
    """Share of the time in which no action ran, of the rows of one kind."""
    chosen = [row for row in rows if row.predicted != measured] or list(rows)
    end = max(stop for row in chosen for *_, stop in row.boxes)
    return 1 - sum(row.busy() for row in chosen) / (len(chosen) * end) if end else 0.0


def _finding(rows: Sequence[_Row], in_units: bool) -> str:
    ranks = len({row.rank for row in rows})
    microbatches = len({a.microbatch for row in rows for a, *_ in row.boxes})
    sentences = [f"{ranks} rank{'s' * (ranks != 1)}, {microbatches} micro-batch{'es' * (microbatches != 1)}"]
    for measured, word in ((False, "predicted"), (True, "measured")):
        chosen = [row for row in rows if row.predicted != measured]
        if chosen:
            end = max(stop for row in chosen for *_, stop in row.boxes)
            time = f"{end:g} forwards" if in_units else format_seconds(end)
            sentences.append(f"{word}: done after {time}, ranks idle {100 * _idle(rows, measured):.0f} %")
    return "; ".join(sentences) + "."


def _draw(
    rows: Sequence[_Row],
    end: float,
    title: str,
    alt: str,
    in_units: bool,
    *,
    note: str = "",
    explain: Sequence[_Row] = (),
) -> Figure:
    """`note` stands under the title; the key says what occurs in the rows `explain`, by default these."""
    marks: list[str] = []
    top = 12.0
    if title:
        marks.append(label(12, top + 18, title, bold=True))
        top += 32
    if note:
        marks.append(label(12, top + 14, note))
        top += 28
    explained, bottom_of_key = key(_entries(explain or rows), top)
    top = max(bottom_of_key, top + 60) if note else bottom_of_key  # all with a note are of one height
    marks += explained
    span = WIDTH - _LEFT - _RIGHT
    y, at = top + 4, {}
    for i, row in enumerate(rows):
        at[i] = y
        last = i + 1 == len(rows) or rows[i + 1].rank != row.rank
        y += _height(row) + (_GAP if last else 1)
    bottom = y - _GAP + 2
    factor = 1 if in_units else 1e3
    ticks = ((_LEFT + span * t / factor / end, f"{t:g}") for t in round_ticks(0.0, end * factor, most=6))
    marks += ticks_below(ticks, bottom, bottom + 6, bottom + 26)
    unit = "time, in forwards of a rank's layers" if in_units else "time in ms"
    marks.append(label(_LEFT + span / 2, bottom + 52, unit, anchor="middle", fill=MUTED))
    paths: dict[tuple[str, str], list[str]] = {}
    numbers: list[str] = []
    for i, row in enumerate(rows):
        height = _height(row)
        paths.setdefault((_IDLE, "none"), []).append(_box(_LEFT, at[i], span, height))
        if i == 0 or rows[i - 1].rank != row.rank:
            marks.append(label(12, at[i] + height / 2 + 7, f"rank {row.rank}"))
        for action, start, stop in row.boxes:
            x, width = _LEFT + span * start / end, span * (stop - start) / end
            style = _style(action.kind, row.chunks[action.stage], row.predicted)
            inset = 1.0 if row.predicted and width > 5 else 0.0  # so that the outline stays inside
            inner = max(width - 2 * inset, 0.5)
            paths.setdefault(style, []).append(_box(x + inset, at[i] + inset, inner, height - 2 * inset))
            text = str(action.microbatch)
            if text_width(text, _NUMBER) + 1 <= width:
                numbers.append(
                    f'<text x="{x + width / 2:.1f}" y="{at[i] + height / 2 + 6:.1f}">{text}</text>'
                )
    marks += [
        f'<path d="{"".join(d)}" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
        for (fill, stroke), d in paths.items()
    ]
    if numbers:
        marks.append(f'<g font-size="{_NUMBER}" text-anchor="middle" fill="{INK}">{"".join(numbers)}</g>')
    return drawing(WIDTH, bottom + 64, *marks, alt=alt, text=_twin(rows, end, alt))


def _height(row: _Row) -> float:
    return _OUTLINE if row.predicted else _BAR


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h-{width:.1f}z"


def _style(kind: str, chunk: int, predicted: bool) -> tuple[str, str]:
    """Fill and stroke of a box."""
    share = (0.9, 0.5, 0.32, 0.2)[min(chunk, 3)]
    if predicted:
        return pale(COLOURS[kind], 0.45 * share), COLOURS[kind]
    return pale(COLOURS[kind], share), PAPER


def _entries(rows: Sequence[_Row]) -> list[tuple[str, Swatch | None]]:
    """What the key explains of these rows."""
    kinds = {a.kind for row in rows for a, *_ in row.boxes}
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    if {"B", "I"} <= kinds:
        names["B"] = "backward, input gradient"
        kinds.discard("I")
    predicted = {row.predicted for row in rows}
    entries: list[tuple[str, Swatch | None]] = []
    for kind in filter(kinds.__contains__, names):
        fill, stroke = COLOURS[kind], "none"
        if predicted == {True}:
            fill, stroke = pale(fill, 0.45), fill
        entries.append((names[kind], _swatch(fill, stroke)))
    if len(predicted) == 2:
        entries.append(("predicted", _swatch(PAPER, MUTED)))
    if any(len(row.chunks) > 1 for row in rows):
        entries.append(("later chunk: paler", None))
    return [*entries, ("idle", _swatch(_IDLE, "none"))]


def _swatch(fill: str, stroke: str) -> Swatch:
    """The mark of an entry of the key: a box with sharp corners, as those of the grid."""
    return lambda x, y: (
        f'<rect x="{x + 1:.1f}" y="{y + 3:g}" width="16" height="14" fill="{fill}" stroke="{stroke}" '
        f'stroke-width="1.5"/>'
    )


def _twin(rows: Sequence[_Row], end: float, alt: str) -> str:
    """The picture in characters: per column of time the action that took most of it, by kind."""
    kinds = {a.kind for row in rows for a, *_ in row.boxes}
    key = "   ".join(f"{k} {word}" for k, word in schedules.KINDS.items() if k in kinds)
    lines = [alt, f"{key}   . idle"]
    both = len({row.predicted for row in rows}) == 2
    for row in rows:
        name = f"rank {row.rank}" + (" predicted" if both and row.predicted else " measured " if both else "")
        own_end = max(stop for other in rows if other.predicted == row.predicted for *_, stop in other.boxes)
        share = 1 - row.busy() / (own_end or 1e-9)
        lines.append(f"{name}  |{_characters(row, end)}|  idle {100 * share:.0f} %")
    return "\n".join(lines)


def _characters(row: _Row, end: float) -> str:
    seconds = end / _COLUMNS
    text = []
    for column in range(_COLUMNS):
        taken: dict[str, float] = {}
        for action, start, stop in row.boxes:
            inside = min(stop, (column + 1) * seconds) - max(start, column * seconds)
            if inside > 1e-9 * end:
                taken[action.kind] = taken.get(action.kind, 0.0) + inside
        idle = seconds - sum(taken.values())
        best = max(taken, key=lambda kind: taken[kind], default=".")
        text.append(best if taken and taken[best] >= idle - 1e-9 * end else ".")
    return "".join(text)


__all__ = ["cases", "explore", "grid", "planned"]
