"""The timeline of a run: one row per rank, time from left to right, a bar for all that the rank did. A bar in an
operation's colour means that its data could move; the lighter part before it that the rank stood in the call while
another had not come yet. An asynchronous operation is a thin bar under the row, from its call to its end, and the row
shows only the wait for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..results import Event, Run, grouped, name_ranks
from .parts import WIDTH, Axis, Swatch, heading, pale, swatch, text_width, time_axis, union_length
from .svg import COLOURS, INK, MUTED, PAPER, Figure, drawing, format_bytes, format_seconds, label, line, rect

_NAMES, _RIGHT, _BAR, _THIN, _LANE, _GAP = 82, 14, 32, 8, 11, 14
_MAX_LANES, _MAX_ARROWS = 3, 60
_ASYNC = {"isend", "irecv", "batch_isend_irecv"}  # the dispatcher does not mark these as asynchronous
_WAITING = 0.3  # share of the operation's colour in a bar that waits
_DARK = {"all_reduce", "barrier"}  # white text on these


class _Bar(NamedTuple):
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
    def colour(self) -> str:
        return COLOURS["compute"] if self.kind != "comm" else COLOURS.get(self.op, COLOURS["barrier"])


def timeline(run: Run | Iterable[Event], *, title: str = "") -> Figure:
    """What each rank computed and sent, and when: bars by rank, zero where the first of them begins.

    Give a `Run`, or any of its events: `timeline(e for e in run.events if e.line > 3)`. More than 60 arrows from
    sends to receives are not drawn. Raises ValueError: there are no events.
    """
    if not (events := sorted(run.events if isinstance(run, Run) else run, key=lambda e: (e.start, e.rank))):
        raise ValueError("There is nothing to draw: no rank computed in a span or communicated.")
    ranks = sorted({e.rank for e in events} | {r.rank for r in (run.ran if isinstance(run, Run) else ())})
    ready = {_meeting(e): e.start for e in events}  # of the last rank to call it: before that nobody can finish
    if isinstance(run, Run) and not any(r.dropped for r in run.ranks):
        came = grouped((_meeting(e), e.rank) for e in events)
        collectives = (e for e in events if e.op not in ("send", "recv"))
        missed = (_meeting(e) for e in collectives if set(e.ranks).difference(came[_meeting(e)]))
        ready |= dict.fromkeys(missed, float("inf"))  # some ranks never called these: whoever did only waited
    rows = {rank: _bars([e for e in events if e.rank == rank], ready) for rank in ranks}
    arrows = pairs(events)
    x = Axis(events[0].start, max(max(e.end for e in events), events[0].start + 1e-6), _NAMES, WIDTH - _RIGHT)
    return _draw(rows, x, arrows if len(arrows) <= _MAX_ARROWS else [], title)


def _meeting(e: Event) -> tuple | None:
    """What the events of one operation have in common on all its ranks, where that is known."""
    if e.op in ("send", "recv"):
        ends = (e.rank, e.peer) if e.op == "send" else (e.peer, e.rank)
        return None if e.peer is None else (e.group, *ends, e.tag, e.seq)
    return (e.group, e.ranks, e.op, e.seq) if e.kind == "comm" and e.seq else None


def pairs(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """The sends with the receives that took them: same ranks, tag and count."""
    sends = {_meeting(e): e for e in events if e.op == "send" and e.peer is not None}
    return [(sends[_meeting(e)], e) for e in events if e.op == "recv" and _meeting(e) in sends]


def _is_async(e: Event) -> bool:
    return e.kind == "comm" and (e.is_async or e.via in _ASYNC)


def _bars(events: Sequence[Event], ready: Mapping[tuple | None, float]) -> list[_Bar]:
    """The bars of one rank, in the order in which they are drawn: spans, then what happened inside them."""
    bars: list[_Bar] = []
    spans: list[Event] = []
    for e in sorted((e for e in events if e.kind != "comm"), key=lambda e: (e.start, -e.end)):
        spans = [s for s in spans if s.end > e.start]
        bars.append(_Bar(e.start, e.end, e.op, e.kind, text=e.op, depth=len(spans)))
        spans.append(e)
    free = [float("-inf")] * _MAX_LANES  # when each lane is free again
    for e in (e for e in events if e.kind == "comm"):
        begin = e.start
        if _is_async(e):
            lane = next((i for i, t in enumerate(free) if t <= e.start), _MAX_LANES - 1)
            free[lane] = max(e.end, free[lane])
            bars.append(_Bar(e.start, e.end, e.op, lane=lane))
            if e.wait_start is None:
                continue
            begin = min(e.wait_start, e.end)
        came = min(max(ready.get(_meeting(e) or (), begin), begin), e.end)
        if came > begin:
            bars.append(_Bar(begin, came, e.op, waiting=True))
        if e.end > came:
            bars.append(_Bar(came, e.end, e.op, text="" if _is_async(e) or not e.nbytes else format_bytes(e.nbytes)))
    return bars


def _finding(rows: Mapping[int, Sequence[_Bar]], total: float) -> str:
    """The sentence of the alt text: how long, and who waited most."""
    waits = {r: union_length((b.start, b.end) for b in bars if b.waiting) for r, bars in rows.items()}
    worst = max(waits, key=waits.__getitem__)
    head = f"Timeline of {name_ranks(list(rows))} over {format_seconds(total)}"
    if len(rows) == 1 and not waits[worst]:
        return f"{head}."
    if waits[worst] < 0.01 * total:
        return f"{head}: no rank waits for a late one."
    wait = f"{format_seconds(waits[worst])} ({waits[worst] / total:.0%})"
    return f"{head}: rank {worst} waits most for the others, {wait}."


def _draw(rows: Mapping[int, Sequence[_Bar]], x: Axis, arrows: Sequence[tuple[Event, Event]], title: str) -> Figure:
    marks, top = heading(title, _entries([bar for bars in rows.values() for bar in bars]))
    lanes = max((b.lane + 1 for bars in rows.values() for b in bars if b.lane is not None), default=0)
    pitch = _BAR + _LANE * lanes + _GAP
    at = {rank: top + 6 + i * pitch for i, rank in enumerate(rows)}
    bottom, length = top + 12 + len(rows) * pitch - _GAP, x.high - x.low
    factor, unit = next((f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "us")) if length * f >= 2 or u == "us")
    marks += time_axis(Axis(0, length, x.start, x.end), top, bottom, f"time in {unit}", factor)
    for rank, bars in rows.items():
        y = at[rank]
        marks.append(label(12, y + _BAR / 2 + 7, f"rank {rank}"))
        marks.append(line(_NAMES, y + _BAR, WIDTH - _RIGHT, y + _BAR))
        marks += [_bar(bar, x(bar.start), max(x(bar.end) - x(bar.start), 1.5), y) for bar in bars]
        for i, bar in enumerate(bars):
            if (middle := _room(bar, bars[i + 1 :], x)) is not None:
                ink = PAPER if bar.kind == "comm" and bar.op in _DARK else INK
                base = y + _BAR / 2 + 7 + 2 * min(bar.depth, 2)
                marks.append(label(middle, base, bar.text, anchor="middle", fill=ink))
    marks += [_arrow(send, recv, x, at) for send, recv in arrows]
    finding = _finding(rows, length)
    return drawing(WIDTH, bottom + 62, *marks, alt=f"{title}. {finding}" if title else finding)


def _bar(bar: _Bar, x: float, width: float, y: float) -> str:
    if bar.lane is not None:
        return rect(x, y + _BAR + 3 + bar.lane * _LANE, width, _THIN, fill=bar.colour)
    inset = 4 * min(bar.depth, 2)
    fill = pale(bar.colour, _WAITING) if bar.waiting else bar.colour
    edge = PAPER if width > 6 and not bar.waiting else "none"  # keeps bars that touch apart
    return rect(x, y + inset, width, _BAR - inset, fill=fill, stroke=edge)


def _room(bar: _Bar, after: Sequence[_Bar], x: Axis) -> float | None:
    """Where the middle of a bar's text goes, beside the bars drawn `after` it, on top; None if it has no room."""
    if not bar.text or bar.lane is not None:
        return None
    over = [b for b in after if b.lane is None and b.start < bar.end and b.end > bar.start]
    gaps, reach = [], bar.start
    for start, end in sorted((b.start, b.end) for b in over):
        gaps.append((reach, start))
        reach = max(reach, end)
    start, end = max([*gaps, (reach, bar.end)], key=lambda gap: gap[1] - gap[0])
    return (x(start) + x(end)) / 2 if x(end) - x(start) >= text_width(bar.text) + 6 else None


def _arrow(send: Event, recv: Event, x: Axis, at: Mapping[int, float]) -> str:
    """From where the sender called to where the receiver had it."""
    begin, end = at[send.rank], at[recv.rank]
    down = end > begin
    begin += _BAR if down or _is_async(send) else 0
    end += 0 if down else _BAR
    mark = line(x(send.start), begin, x(recv.end), end, stroke=INK, width=1.5, arrow=True)
    return f'<g opacity="0.7">{mark}</g>'


def _entries(bars: Sequence[_Bar]) -> list[tuple[str, Swatch]]:
    found = {b.op for b in bars if b.kind == "comm"}
    ops = [op for op in COLOURS if op in found] + sorted(found - set(COLOURS))
    entries = [("compute", swatch(COLOURS["compute"]))] if any(b.kind != "comm" for b in bars) else []
    names = {"send": "send, recv", "recv": ""} if {"send", "recv"} <= found else {}
    entries += [(name, swatch(COLOURS.get(op, COLOURS["barrier"]))) for op in ops if (name := names.get(op, op))]
    if any(b.waiting for b in bars):
        entries.append(("waits (lighter)", swatch(pale(COLOURS.get(ops[0], MUTED), _WAITING))))
    if any(b.lane is not None for b in bars):
        entries.append(("in the background", lambda x, y: rect(x, y + 6, 18, _THIN, fill=MUTED)))
    return entries
