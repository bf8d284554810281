"""The grid of a pipeline: ranks from top to bottom, time from left to right, for each action a box with the number of
its micro-batch. Predicted boxes are outlined, measured ones solid; given both, each rank has its measured row right
under its predicted one. Later stages of a rank are paler.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .. import schedules
from ..results import Event, Run
from ..schedules import Action, Schedule
from .parts import WIDTH, Axis, Swatch, heading, pale, text_width, time_axis
from .svg import INK, MUTED, PAPER, Figure, drawing, format_seconds, label

# what the next rank waits for is blue or green, what nobody waits for yellow
_COLOURS = {"F": "#56b4e9", "B": "#009e73", "I": "#009e73", "W": "#f0e442"}
_IDLE = "#efefef"
_LEFT, _RIGHT, _BAR, _OUTLINE, _GAP = 84, 14, 34, 28, 12
_NUMBER = 18  # px; 11 px and more on a phone


class _Actions(NamedTuple):
    """The actions of one rank, measured or predicted, with times from the first of all."""

    rank: int
    predicted: bool
    boxes: Sequence[tuple[Action, float, float]]
    chunks: Mapping[int, int]  # stage -> which of this rank's stages it is

    @property
    def height(self) -> float:
        return _OUTLINE if self.predicted else _BAR


def grid(what: Schedule | Run | Iterable[Event], over: Iterable[Event] = (), *, title: str = "") -> Figure:
    """When each rank runs which action, and when it idles.

    grid(one_f_one_b(4, 8))  # as planned: a forward takes 1, a backward 2
    grid(predict(plan, forward=0.02, backward=0.04))  # in seconds
    grid(run, predicted)  # measured, under what was predicted

    What is no action of a pipeline is left out. `over` is what was predicted for it.
    """
    in_units = isinstance(what, Schedule)
    if isinstance(what, Schedule):
        what = schedules.predict(what, forward=1 / what.chunks, backward=2 / what.chunks)
    if not (found := schedules.actions_of([*(what.events if isinstance(what, Run) else what), *over])):
        how = "Mark each with `rankcell.span`."
        raise ValueError(f'There is nothing to draw: no event is named after an action, such as "1F0". {how}')
    return _draw(_rows(found), title, in_units, _finding(found, in_units))


def _rows(found: Sequence[tuple[Action, Event]]) -> list[_Actions]:
    """A row per rank and kind, measured and predicted each from a zero of its own."""
    rows = []
    zero = {e.predicted: e.start for _, e in reversed(found)}  # they are in order of time
    for rank, measured in sorted({(e.rank, not e.predicted) for _, e in found}):  # the predicted row is above
        begin, of_rank = zero[not measured], [(a, e) for a, e in found if e.rank == rank]
        boxes = [(a, e.start - begin, e.end - begin) for a, e in of_rank if e.predicted is not measured]
        chunks = {stage: i for i, stage in enumerate(sorted({a.stage for a, _ in of_rank}))}
        rows.append(_Actions(rank, not measured, boxes, chunks))
    return rows


def _finding(found: Sequence[tuple[Action, Event]], in_units: bool) -> str:
    ranks, microbatches = len({e.rank for _, e in found}), len({a.microbatch for a, _ in found})
    sentences = [f"{ranks} rank{'s' * (ranks != 1)}, {microbatches} micro-batch{'es' * (microbatches != 1)}"]
    for predicted, word in ((True, "predicted"), (False, "measured")):
        if chosen := [e for _, e in found if e.predicted == predicted]:
            length, idle = schedules.length(chosen), schedules.idle_share(chosen)
            time = f"{length:g} forwards" if in_units else format_seconds(length)
            sentences.append(f"{word}: done after {time}, ranks idle {100 * idle:.0f} %")
    return "; ".join(sentences) + "."


def _draw(rows: Sequence[_Actions], title: str, in_units: bool, finding: str) -> Figure:
    marks, below_key = heading(title, _entries(rows))
    x = Axis(0, max(stop for row in rows for *_, stop in row.boxes), _LEFT, WIDTH - _RIGHT)
    y, tops = below_key + 4, []
    for i, row in enumerate(rows):
        tops.append(y)
        y += row.height + (_GAP if i + 1 == len(rows) or rows[i + 1].rank != row.rank else 1)
    bottom = y - _GAP + 4
    unit = "time, in forwards of a rank's layers" if in_units else "time in ms"
    marks += time_axis(x, bottom - 2, bottom, unit, 1 if in_units else 1e3)
    paths: dict[tuple[str, str], list[str]] = {}  # fill, stroke: boxes that look alike are one mark
    numbers: list[str] = []
    for i, (row, y) in enumerate(zip(rows, tops, strict=True)):
        paths.setdefault((_IDLE, "none"), []).append(_box(_LEFT, y, x.end - x.start, row.height))
        if i == 0 or rows[i - 1].rank != row.rank:
            marks.append(label(12, y + row.height / 2 + 7, f"rank {row.rank}"))
        for action, start, stop in row.boxes:
            width, text = x(stop) - x(start), str(action.microbatch)
            inset = 1.0 if row.predicted and width > 5 else 0.0  # so that the outline stays inside
            box = _box(x(start) + inset, y + inset, max(width - 2 * inset, 0.5), row.height - 2 * inset)
            colour, share = _COLOURS[action.kind], (0.9, 0.5, 0.32, 0.2)[min(row.chunks[action.stage], 3)]
            look = (pale(colour, 0.45 * share), colour) if row.predicted else (pale(colour, share), PAPER)
            paths.setdefault(look, []).append(box)
            if text_width(text, _NUMBER) + 1 <= width:
                middle = f'x="{x(start) + width / 2:.1f}" y="{y + row.height / 2 + 6:.1f}"'
                numbers.append(f"<text {middle}>{text}</text>")
    for (fill, stroke), boxes in paths.items():
        marks.append(f'<path d="{"".join(boxes)}" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>')
    if numbers:
        marks.append(f'<g font-size="{_NUMBER}" text-anchor="middle" fill="{INK}">{"".join(numbers)}</g>')
    return drawing(WIDTH, bottom + 62, *marks, alt=f"{title}. {finding}" if title else finding)


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h-{width:.1f}z"


def _entries(rows: Sequence[_Actions]) -> list[tuple[str, Swatch | None]]:
    kinds = {a.kind for row in rows for a, *_ in row.boxes}
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    if {"B", "I"} <= kinds:
        names["B"] = "backward, input gradient"
        kinds.discard("I")
    predicted = {row.predicted for row in rows}
    looks = {kind: (pale(c, 0.45), c) if predicted == {True} else (c, "none") for kind, c in _COLOURS.items()}
    entries = [(name, _swatch(*looks[kind])) for kind, name in names.items() if kind in kinds]
    entries += [("predicted", _swatch(PAPER, MUTED))] if len(predicted) == 2 else []
    later = [("later stage: paler", None)] if any(len(row.chunks) > 1 for row in rows) else []
    return [*entries, *later, ("idle", _swatch(_IDLE, "none"))]


def _swatch(fill: str, stroke: str) -> Swatch:
    """The mark of an entry of the key: a box with sharp corners, as those of the grid."""
    at = 'width="16" height="14"'
    return lambda x, y: f'<rect x="{x + 1:.1f}" y="{y + 3:g}" {at} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
