"""The timeline of a run: one row per rank, time from left to right, a bar for all that the rank did.

A bar in an operation's colour means that its data could move; the lighter part before it that the rank stood
in the call while another had not come yet. An asynchronous operation is a thin bar under the row, from its
call to its end, and the row itself shows only the wait for it. Arrows lead from a send to its receive.
Predicted events are outlined. It reads events and measures nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..results import Event, Run, name_ranks
from .parts import (
    WIDTH,
    Axis,
    Swatch,
    heading,
    key,
    outlined_swatch,
    pale,
    swatch,
    text_width,
    time_axis,
    union_length,
)
from .svg import COLOURS, INK, MUTED, PAPER, Figure, drawing, format_bytes, format_seconds, label, line, rect

_NAMES, _RIGHT, _BAR, _THIN, _LANE, _GAP = 82, 14, 32, 8, 11, 14
_MAX_LANES = 3
_MAX_BARS = 400  # beyond, a bar is left out that would lie, to a px, on others of its look
_MAX_ARROWS = 60
_ASYNC = {"isend", "irecv", "batch_isend_irecv"}  # the dispatcher does not mark these as asynchronous
_WAITING = 0.3  # share of the operation's colour in a bar that waits
_DARK = {"all_reduce", "barrier"}  # white text on these


@dataclass(frozen=True)
class _Bar:
    """A stretch of time of one rank: in its row, or in lane 0, 1, ... under it."""

    start: float
    end: float
    op: str
    kind: str = "comm"
    waiting: bool = False
    text: str = ""
    lane: int | None = None
    depth: int = 0  # spans around it

    @property
    def look(self) -> tuple[str, str, bool]:
        return self.op if self.kind == "comm" else "", self.kind, self.waiting


@dataclass(frozen=True)
class _RankTime:
    """What one rank did, measured or predicted."""

    rank: int
    predicted: bool
    bars: tuple[_Bar, ...]

    @property
    def waits(self) -> float:
        """Seconds in which the rank stood in calls in which another rank was missing."""
        return union_length((b.start, b.end) for b in self.bars if b.waiting)

    @property
    def lanes(self) -> int:
        return max((b.lane + 1 for b in self.bars if b.lane is not None), default=0)


def timeline(run: Run | Iterable[Event], *, title: str = "", arrows: bool = True) -> Figure:
    """What each rank computed and sent, and when: bars by rank, zero where the first of them begins.

    Give a `Run`, or any of its events: `timeline(e for e in run.events if e.line > 3)`. Measured and
    predicted events together make two rows per rank, each kind with a zero of its own. `arrows=False` leaves
    out the arrows from sends to receives; more than 60 are never drawn.

    Raises:
        ValueError: there are no events.
    """
    events = sorted(run.events if isinstance(run, Run) else run, key=lambda e: (e.predicted, e.start, e.rank))
    if not events:
        raise ValueError("There is nothing to draw: no rank computed in a span or communicated.")
    ranks = sorted({e.rank for e in events} | {r.rank for r in (run.ran if isinstance(run, Run) else ())})
    ready = _ready(events)
    zero = {
        e.predicted: e.start for e in reversed(events)
    }  # when the first measured and predicted ones began
    rows = [
        _RankTime(rank, p, _bars([e for e in events if (e.rank, e.predicted) == (rank, p)], ready, begin))
        for rank in ranks
        for p, begin in sorted(zero.items())
    ]
    end = max(e.end - zero[e.predicted] for e in events) or 1e-6
    found = pairs(events) if arrows else []
    found = found if len(found) <= _MAX_ARROWS else []
    finding = _finding(rows, ranks, end)
    return _draw(rows, end, found, zero, title, f"{title}. {finding}" if title else finding)


def _message(e: Event) -> tuple | None:
    """What a send and its receive have in common; None where the sender is not known."""
    if e.op not in ("send", "recv") or e.peer is None:
        return None
    source, target = (e.rank, e.peer) if e.op == "send" else (e.peer, e.rank)
    return (e.predicted, e.group, source, target, e.tag, e.seq)


def _meeting(e: Event) -> tuple | None:
    """What the events of one operation have in common on all its ranks."""
    if e.kind != "comm":
        return None
    if e.op in ("send", "recv"):
        return _message(e)
    return (e.predicted, e.group, e.ranks, e.op, e.seq) if e.seq else None


def _ready(events: Iterable[Event]) -> dict[tuple, float]:
    """When the last rank had called each operation: before that nobody can finish it."""
    last: dict[tuple, float] = {}
    for e in events:
        if (key := _meeting(e)) is not None:
            last[key] = max(last.get(key, e.start), e.start)
    return last


def pairs(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """The sends with the receives that took them: same ranks, tag and count."""
    sends = {_message(e): e for e in events if e.op == "send"}
    recvs = [e for e in events if e.op == "recv" and _message(e) in sends]
    return [(sends[_message(e)], e) for e in recvs if _message(e) is not None]


def _is_async(e: Event) -> bool:
    return e.kind == "comm" and (e.is_async or e.via in _ASYNC)


def _bars(events: Sequence[Event], ready: Mapping[tuple, float], zero: float) -> tuple[_Bar, ...]:
    """The bars of one rank, in the order in which they are drawn: spans, then what happened inside them.

    Their times are counted from `zero`.
    """
    bars: list[_Bar] = []
    spans: list[Event] = []
    for e in sorted((e for e in events if e.kind != "comm"), key=lambda e: (e.start, -e.end)):
        spans = [s for s in spans if s.end > e.start]
        bars.append(_Bar(e.start, e.end, e.op, e.kind, text=e.op, depth=len(spans)))
        spans.append(e)
    free: list[float] = []  # when each lane is free again
    for e in events:
        if e.kind != "comm":
            continue
        begin = e.start
        if _is_async(e):
            lane = next((i for i, t in enumerate(free) if t <= e.start), len(free))
            lane = min(lane, _MAX_LANES - 1)
            free[lane : lane + 1] = [max(e.end, *free[lane : lane + 1], e.end)]
            bars.append(_Bar(e.start, e.end, e.op, lane=lane))
            if e.wait_start is None:
                continue
            begin = min(e.wait_start, e.end)
        came = min(max(ready.get(_meeting(e) or (), begin), begin), e.end)
        if came > begin:
            bars.append(_Bar(begin, came, e.op, waiting=True))
        if e.end > came:
            text = "" if _is_async(e) or not e.nbytes else format_bytes(e.nbytes)
            bars.append(_Bar(came, e.end, e.op, text=text))
    return tuple(replace(bar, start=bar.start - zero, end=bar.end - zero) for bar in bars)


def _finding(rows: Sequence[_RankTime], ranks: Sequence[int], end: float) -> str:
    """The sentence of the alt text: how long, and who waited most."""
    shown = [r for r in rows if not r.predicted] or list(rows)
    what = "Predicted timeline" if all(r.predicted for r in rows) else "Timeline"
    worst = max(shown, key=lambda r: r.waits)
    wait = worst.waits
    total = max((b.end for r in shown for b in r.bars), default=end)
    head = f"{what} of {name_ranks(ranks)} over {format_seconds(total)}"
    if len(ranks) == 1 and not wait:
        return f"{head}."
    if wait < 0.01 * total:
        return f"{head}: no rank waits for another."
    return (
        f"{head}: rank {worst.rank} waits most for the others, {format_seconds(wait)} ({wait / total:.0%})."
    )


def _draw(
    rows: Sequence[_RankTime],
    end: float,
    arrows: Sequence[tuple[Event, Event]],
    zero: Mapping[bool, float],
    title: str,
    alt: str,
) -> Figure:
    x = Axis(0, end, _NAMES, WIDTH - _RIGHT)
    marks, top = heading(title)
    crowded = sum(len(r.bars) for r in rows) > _MAX_BARS
    remark: list[tuple[str, Swatch | None]] = [("short bars lie on one another", None)] if crowded else []
    explained, top = key([*_entries(rows), *remark], top)
    marks += explained
    pitch = _BAR + _LANE * max(r.lanes for r in rows) + _GAP
    at = {(row.rank, row.predicted): top + 6 + i * pitch for i, row in enumerate(rows)}
    bottom = top + 12 + len(rows) * pitch - _GAP
    factor, unit = next(
        (f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "us")) if end * f >= 2 or u == "us"
    )
    marks += time_axis(x, top, bottom, f"time in {unit}", factor)
    for row in rows:
        y = at[row.rank, row.predicted]
        marks.append(label(12, y + _BAR / 2 + 7, f"rank {row.rank}"))
        marks.append(line(_NAMES, y + _BAR, WIDTH - _RIGHT, y + _BAR))
        marks += _row(row, x, y, crowded)
    if not crowded:
        marks += [_arrow(send, recv, x, at, zero[send.predicted]) for send, recv in arrows]
    return drawing(WIDTH, bottom + 62, *marks, alt=alt)


def _row(row: _RankTime, x: Axis, y: float, crowded: bool) -> list[str]:
    """All bars of a rank, and the texts that have room."""
    marks = []
    reach: dict[tuple, float] = {}
    for bar in row.bars:
        start, width = x(bar.start), max(x(bar.end) - x(bar.start), 1.5)
        place = (bar.look, bar.lane)
        if crowded and start + width < reach.get(place, -1e9) + 1:
            continue
        reach[place] = start + width
        if bar.lane is not None:
            marks.append(_bar(bar, start, y + _BAR + 3 + bar.lane * _LANE, width, _THIN, row.predicted))
        else:
            inset = 4 * min(bar.depth, 2)
            marks.append(_bar(bar, start, y + inset, width, _BAR - inset, row.predicted))
    for bar in row.bars:
        middle = _room(bar, row, x)
        if middle is not None:
            ink = PAPER if bar.kind == "comm" and bar.op in _DARK and not row.predicted else INK
            base = y + _BAR / 2 + 7 + 2 * min(bar.depth, 2)
            marks.append(label(middle, base, bar.text, anchor="middle", fill=ink))
    return marks


def _bar(bar: _Bar, x: float, y: float, width: float, height: float, predicted: bool) -> str:
    colour = _colour(bar)
    if predicted:
        dash = "4 3" if bar.waiting else ""
        return rect(x + 1, y + 1, width - 2, height - 2, fill=PAPER, stroke=colour, stroke_width=2, dash=dash)
    if bar.waiting:
        return rect(x, y, width, height, fill=pale(colour, _WAITING))
    # a thin white edge keeps bars that touch apart
    return rect(x, y, width, height, fill=colour, stroke=PAPER if width > 6 and bar.lane is None else "none")


def _colour(bar: _Bar) -> str:
    return COLOURS["compute"] if bar.kind != "comm" else COLOURS.get(bar.op, COLOURS["barrier"])


def _room(bar: _Bar, row: _RankTime, x: Axis) -> float | None:
    """Where the middle of a bar's text goes, beside the bars drawn on top of it; None if it has no room."""
    if not bar.text or bar.lane is not None or x(bar.end) - x(bar.start) < text_width(bar.text) + 6:
        return None
    after = row.bars[row.bars.index(bar) + 1 :]
    over = [b for b in after if b.lane is None and b.start < bar.end and b.end > bar.start]
    gaps, reach = [], bar.start
    for start, end in sorted((b.start, b.end) for b in over):
        gaps.append((reach, start))
        reach = max(reach, end)
    start, end = max([*gaps, (reach, bar.end)], key=lambda gap: gap[1] - gap[0])
    if x(end) - x(start) < text_width(bar.text) + 6:
        return None
    return (x(start) + x(end)) / 2


def _arrow(send: Event, recv: Event, x: Axis, at: Mapping[tuple[int, bool], float], zero: float) -> str:
    """From where the sender called to where the receiver had it."""
    begin, end = at[send.rank, send.predicted], at[recv.rank, recv.predicted]
    down = end > begin
    begin += _BAR if down or _is_async(send) else 0
    end += 0 if down else _BAR
    ends = x(send.start - zero), begin, x(recv.end - zero), end
    mark = line(*ends, stroke=INK, width=1.5, arrow=True)
    return f'<g opacity="0.7">{mark}</g>'


def _entries(rows: Sequence[_RankTime]) -> list[tuple[str, Swatch | None]]:
    """What the key explains of these rows."""
    bars = [b for r in rows for b in r.bars]
    found = {b.op for b in bars if b.kind == "comm"}
    ops = [op for op in COLOURS if op in found] + sorted(found - set(COLOURS))
    entries: list[tuple[str, Swatch | None]] = []
    if any(b.kind != "comm" for b in bars):
        entries.append(("compute", swatch(COLOURS["compute"])))
    both = {"send", "recv"} <= found
    for op in ops:
        if not (both and op == "recv"):
            name = "send, recv" if both and op == "send" else op
            entries.append((name, swatch(COLOURS.get(op, COLOURS["barrier"]))))
    if any(b.waiting for b in bars):
        entries.append(("waits (lighter)", swatch(pale(COLOURS.get(ops[0], MUTED), _WAITING))))
    if any(b.lane is not None for b in bars):
        entries.append(("in the background", lambda x, y: rect(x, y + 6, 18, _THIN, fill=MUTED)))
    if any(r.predicted for r in rows):
        entries.append(("predicted", outlined_swatch(PAPER, MUTED)))
    return entries
