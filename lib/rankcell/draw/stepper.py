"""A rank cell step by step: its source with a marker where every rank stands, and what it holds there.

`stepper` is a pure function of a run that was recorded with `%%ranks 4 --step x,grad`. Steps stand in order
of time; one picture moves on as many ranks as possible, but never past the end of an operation that another
rank has not yet begun. A line that a rank passes many times is shown twice and once more at its end.
"""

from collections.abc import Sequence

from ..results import Event, Run, Step
from .parts import WIDE, rank_colour
from .svg import INK, MUTED, PAPER, RANK_COLOURS, Figure, Frames, drawing, label, rect

MAX_FRAMES = 40
_ROW, _SIZE = 27, 19
_LIGHT = {RANK_COLOURS[i] for i in (1, 4, 6)}  # dark text on these
_CHARS, _ROW_CHARS = 43, 52  # characters that fit: of a source line, of a row of values
_MARKERS = 4  # more ranks than these at one line are counted


def stepper(run: Run) -> Frames:
    """The cell of `run` as a slider over its steps.

    Raises:
        ValueError: the run was recorded without `--step`.
    """
    ranks = [r for r in run.ran if r.steps]
    if not ranks:
        raise ValueError("This run has no steps. Record them with `%%ranks 4 --step NAMES`.")
    kept = {r.rank: fold(r.steps) for r in ranks}
    moments = _moments(kept, run.events)
    if len(moments) > MAX_FRAMES:
        head = MAX_FRAMES * 3 // 4
        moments = [*moments[:head], *moments[-(MAX_FRAMES - head) :]]
    lines = run.source.split("\n")
    first = next((i for i, text in enumerate(lines) if text.strip()), 0)
    figures, labels = [], []
    for number, (at, state) in enumerate(moments, 1):
        waiting = {r: e for r in kept if (e := _waits_in(run.events, r, at)) is not None}
        figures.append(_picture(lines, first, state, waiting))
        labels.append(f"{number} of {len(moments)}")
    return Frames(tuple(figures), tuple(labels), "step")


def fold(steps: Sequence[Step]) -> list[Step]:
    """`steps` of one rank, with every line at its first two visits and its last."""
    visits: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        visits.setdefault(step.line, []).append(i)
    keep = {i for found in visits.values() for i in (*found[:2], found[-1])}
    return [step for i, step in enumerate(steps) if i in keep]


def _moments(kept: dict[int, list[Step]], events: Sequence[Event]) -> list[tuple[float, dict[int, Step]]]:
    """What to draw: for each picture a time, and the step at which each rank then stands."""
    state = {rank: Step(rank, 0.0, -1) for rank in kept}
    moved: set[int] = set()
    found: list[tuple[float, dict[int, Step]]] = []
    last = 0.0
    for step in sorted((s for steps in kept.values() for s in steps), key=lambda s: (s.at, s.rank)):
        # a rank that comes out of an operation belongs to a later picture than one that goes into it
        ends_between = any(
            e.kind == "comm" and e.rank == step.rank and last < e.end <= step.at for e in events
        )
        if step.rank in moved or (moved and ends_between):
            found.append((last, dict(state)))
            moved.clear()
        state[step.rank] = step
        moved.add(step.rank)
        last = step.at
    found.append((last, dict(state)))
    return found


def _waits_in(events: Sequence[Event], rank: int, at: float) -> Event | None:
    """The communication that `rank` is in at the time `at`, if any."""
    return next((e for e in events if e.kind == "comm" and e.rank == rank and e.start <= at < e.end), None)


def _picture(lines: list[str], first: int, state: dict[int, Step], waiting: dict[int, Event]) -> Figure:
    marks, said = [], []
    code = lines[first:]
    while code and not code[-1].strip():
        code.pop()
    here: dict[int, list[int]] = {}
    for rank, step in sorted(state.items()):
        here.setdefault(step.line, []).append(rank)
    y = 8.0
    for number, text in enumerate(code, first + 1):
        ranks = here.get(number, [])
        if ranks:
            marks.append(rect(4, y, WIDE - 8, _ROW, fill="#f1f4fb"))
        if len(ranks) > _MARKERS:
            marks.append(label(8, y + 20, f"{len(ranks)} ranks", size=_SIZE))
        else:
            marks += [_marker(6 + 23 * k, y + 2, rank, rank in waiting) for k, rank in enumerate(ranks)]
        marks.append(label(128, y + 20, number, size=16, anchor="end", fill=MUTED))
        marks.append(
            label(140, y + 20, _cut(text, _CHARS), size=_SIZE, mono=True, fill=INK if ranks else MUTED)
        )
        y += _ROW
    y += 14
    for rank, step in sorted(state.items()):
        event = waiting.get(rank)
        if event:
            doing = f"waits in {event.text}"
        elif step.line < 0:
            doing = "has not begun"
        else:
            doing = f"at line {step.line}" if step.line else "is done"
        shown = [f"{name} = {value}" for name, value in step.values.items()]
        marks.append(_marker(8, y + 2, rank, event is not None))
        marks.append(label(40, y + 20, f"rank {rank} {doing}", size=_SIZE, bold=True))
        y += _ROW
        for row in _rows(shown):
            marks.append(label(40, y + 20, row, size=_SIZE, mono=True))
            y += _ROW
        said.append(f"rank {rank} {doing}" + (f": {', '.join(shown)}" if shown else ""))
    return drawing(WIDE, y + 10, *marks, alt="; ".join(said), text="\n".join(said))


def _rows(shown: list[str]) -> list[str]:
    """Values in as few rows as fit."""
    rows: list[str] = []
    for text in shown:
        text = _cut(text, _ROW_CHARS)
        if rows and len(rows[-1]) + 2 + len(text) <= _ROW_CHARS:
            rows[-1] += f"  {text}"
        else:
            rows.append(text)
    return rows


def _marker(x: float, y: float, rank: int, waits: bool) -> str:
    """A rank's number in its colour; an outline while it waits in an operation."""
    colour = rank_colour(rank)
    fill, ink = (PAPER, INK) if waits else (colour, INK if colour in _LIGHT else PAPER)
    box = rect(x, y, 22, 22, fill=fill, stroke=colour, radius=11)
    return box + label(x + 11, y + 17, rank, size=16, anchor="middle", fill=ink, bold=True)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
