"""The timeline of a run: one row per rank, time from left to right, a bar for all that the rank did.

A bar in an operation's colour means that its data could move; the lighter part before it that the rank stood
in the call while another had not come yet. An asynchronous operation is a thin bar under the row, from its
call to its end, and the row itself shows only the wait for it. Arrows lead from a send to its receive.
Predicted events are outlined. It reads events and measures nothing.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..results import Event, Run, name_ranks
from .parts import WIDTH, Swatch, key, outlined_swatch, pale, round_ticks, swatch, text_width, ticks_below
from .svg import COLOURS, INK, MUTED, PAPER, Figure, drawing, format_bytes, format_seconds, label, line, rect

_NAMES, _RIGHT, _BAR, _THIN, _LANE, _GAP = 82, 14, 32, 8, 11, 14
_NODE = 30  # px above the first rank of a node, for its name
_MAX_LANES = 3
_MAX_BARS = 400  # beyond, the time is cut into columns, filled as high as each kind takes a share of them
_MAX_COLUMN_PARTS = 500
_MAX_ARROWS = 60
_COLUMNS = 60  # characters of a row of the text twin
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
class _Row:
    """What one rank did, measured or predicted."""

    rank: int
    predicted: bool
    bars: tuple[_Bar, ...]

    def seconds(self, kind: str, waiting: bool = False) -> float:
        """Seconds in which the rank stood in calls of that kind, or waited for others in them.

        What a rank communicates inside a span is no computing: it counts as communication only.
        """
        mine = [b for b in self.bars if b.lane is None]
        parts = [(b.start, b.end) for b in mine if b.kind == kind and b.waiting == waiting]
        if kind == "comm":
            return _covered(parts)
        calls = [(b.start, b.end) for b in mine if b.kind == "comm"]
        return _covered(parts + calls) - _covered(calls)

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
    events = list(run.events if isinstance(run, Run) else run)
    if not events:
        raise ValueError("There is nothing to draw: no rank computed in a span or communicated.")
    ranks = sorted({e.rank for e in events} | {r.rank for r in (run.ran if isinstance(run, Run) else ())})
    events = [e for predicted in (False, True) for e in _from_zero(events, predicted)]
    ready = _ready(events)
    kinds = sorted({e.predicted for e in events})
    rows = [
        _Row(rank, p, _bars([e for e in events if e.rank == rank and e.predicted == p], ready))
        for rank in ranks
        for p in kinds
    ]
    end = max(e.end for e in events) or 1e-6
    pairs = _pairs(events) if arrows else []
    pairs = pairs if len(pairs) <= _MAX_ARROWS else []
    finding = _finding(rows, ranks, end)
    nodes = run.nodes if isinstance(run, Run) else ()
    return _draw(rows, end, pairs, title, f"{title}. {finding}" if title else finding, nodes)


def waiting(run: Run | Iterable[Event]) -> dict[int, float]:
    """Seconds that each rank stood in a call while another rank had not come yet, by rank."""
    events = [e for e in (run.events if isinstance(run, Run) else run) if not e.predicted]
    ready = _ready(events)
    ranks = sorted({e.rank for e in events} | {r.rank for r in (run.ran if isinstance(run, Run) else ())})
    rows = (_Row(r, False, _bars([e for e in events if e.rank == r], ready)) for r in ranks)
    return {row.rank: row.seconds("comm", waiting=True) for row in rows}


def _from_zero(events: Sequence[Event], predicted: bool) -> list[Event]:
    """The measured or the predicted events, counted from where the first of them begins."""
    chosen = [e for e in events if e.predicted == predicted]
    zero = min((e.start for e in chosen), default=0.0)
    return [
        replace(
            e,
            start=e.start - zero,
            end=e.end - zero,
            issued=e.issued - zero,
            wait_start=None if e.wait_start is None else e.wait_start - zero,
        )
        for e in sorted(chosen, key=lambda e: (e.start, e.rank))
    ]


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


def _pairs(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """Sends with their receives."""
    sends = {_message(e): e for e in events if e.op == "send"}
    recvs = [e for e in events if e.op == "recv" and _message(e) in sends]
    return [(sends[_message(e)], e) for e in recvs if _message(e) is not None]


def _is_async(e: Event) -> bool:
    return e.kind == "comm" and (e.is_async or e.via in _ASYNC)


def _bars(events: Sequence[Event], ready: Mapping[tuple, float]) -> tuple[_Bar, ...]:
    """The bars of one rank, in the order in which they are drawn: spans, then what happened inside them."""
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
    return tuple(bars)


def _covered(parts: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some stretches."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(parts):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def _finding(rows: Sequence[_Row], ranks: Sequence[int], end: float) -> str:
    """The sentence of the alt text: how long, and who waited most."""
    shown = [r for r in rows if not r.predicted] or list(rows)
    what = "Predicted timeline" if all(r.predicted for r in rows) else "Timeline"
    worst = max(shown, key=lambda r: r.seconds("comm", waiting=True))
    wait = worst.seconds("comm", waiting=True)
    total = max((b.end for r in shown for b in r.bars), default=end)
    head = f"{what} of {name_ranks(ranks)} over {format_seconds(total)}"
    if len(ranks) == 1 and not wait:
        return f"{head}."
    if wait < 0.01 * total:
        return f"{head}: no rank waits for another."
    return (
        f"{head}: rank {worst.rank} waits most for the others, {format_seconds(wait)} ({wait / total:.0%})."
    )


def _unit(end: float) -> tuple[float, str]:
    return next((f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "us")) if end * f >= 2 or u == "us")


def _step(rows: Sequence[_Row]) -> float:
    """Px of a column where there are too many bars to draw each, else 0."""
    if sum(len(r.bars) for r in rows) <= _MAX_BARS:
        return 0.0
    kinds = sum(len({(b.look, b.lane) for b in r.bars}) for r in rows)
    return max(4.0, (WIDTH - _RIGHT - _NAMES) * kinds / _MAX_COLUMN_PARTS)


@dataclass(frozen=True)
class _Scale:
    """Seconds to px."""

    end: float

    def x(self, seconds: float) -> float:
        return _NAMES + (WIDTH - _RIGHT - _NAMES) * seconds / self.end


def _draw(
    rows: Sequence[_Row],
    end: float,
    pairs: Sequence[tuple[Event, Event]],
    title: str,
    alt: str,
    nodes: Sequence[str],
) -> Figure:
    scale = _Scale(end)
    mixed = len({r.predicted for r in rows}) == 2
    marks: list[str] = []
    top = 12.0
    if title:
        marks.append(label(12, top + 18, title, bold=True))
        top += 32
    step = _step(rows)
    explained, top = key(_entries(rows, dense=bool(step)), top)
    marks += explained
    factor, unit = _unit(end)
    lanes = max(r.lanes for r in rows)
    heights = [(22 if mixed and r.predicted else _BAR) + _LANE * lanes for r in rows]
    gaps = [4 if mixed and not r.predicted else _GAP for r in rows]
    # a rank with the name of its node above it: the first one of each node
    first = [bool(nodes) and (not i or nodes[r.rank] != nodes[rows[i - 1].rank]) for i, r in enumerate(rows)]
    gaps = [g + _NODE * after for g, after in zip(gaps, [*first[1:], False], strict=True)]
    tops = list(
        itertools.accumulate(
            (h + g for h, g in zip(heights, gaps, strict=True)), initial=top + 6 + _NODE * first[0]
        )
    )
    bottom = tops[-1] - gaps[-1] + 6
    ticks = ((scale.x(t / factor), f"{t:g}") for t in round_ticks(0.0, end * factor, most=6))
    marks += ticks_below(ticks, top, bottom + 4, bottom + 24)
    marks.append(
        label((_NAMES + WIDTH - _RIGHT) / 2, bottom + 50, f"time in {unit}", anchor="middle", fill=MUTED)
    )
    at: dict[tuple[int, bool], tuple[float, float]] = {}
    for row, y, height, begins in zip(rows, tops, heights, first, strict=False):
        if begins:
            marks.append(line(12, y - _NODE, WIDTH - _RIGHT, y - _NODE, stroke=MUTED, dash="6 4"))
            marks.append(label(12, y - 9, nodes[row.rank], fill=MUTED))
        bar = height - _LANE * lanes
        at[row.rank, row.predicted] = (y, bar)
        if not (mixed and row.predicted):
            marks.append(label(12, y + bar / 2 + 7, f"rank {row.rank}"))
        marks.append(line(_NAMES, y + bar, WIDTH - _RIGHT, y + bar))
        marks += _dense_row(row, scale, y, bar, step) if step else _row(row, scale, y, bar)
    if not step:
        marks += [_arrow(s, r, scale, at) for s, r in pairs]
    return drawing(WIDTH, bottom + 62, *marks, alt=alt, text=_twin(rows, end, alt, nodes))


def _row(row: _Row, scale: _Scale, y: float, height: float) -> list[str]:
    """All bars of a rank, and the texts that have room."""
    marks = []
    for bar in row.bars:
        x, width = scale.x(bar.start), max(scale.x(bar.end) - scale.x(bar.start), 1.5)
        if bar.lane is not None:
            marks.append(_bar(bar, x, y + height + 3 + bar.lane * _LANE, width, _THIN, row.predicted))
        else:
            inset = 4 * min(bar.depth, 2)
            marks.append(_bar(bar, x, y + inset, width, height - inset, row.predicted))
    for bar in row.bars:
        middle = _room(bar, row, scale)
        if middle is not None:
            ink = PAPER if bar.kind == "comm" and bar.op in _DARK and not row.predicted else INK
            base = y + height / 2 + 7 + 2 * min(bar.depth, 2)
            marks.append(label(middle, base, bar.text, anchor="middle", fill=ink))
    return marks


def _dense_row(row: _Row, scale: _Scale, y: float, height: float, step: float) -> list[str]:
    """Columns that are filled as high as the share of the time that each kind of bar takes of them."""
    marks = []
    for column, lane, parts in _shares(row, scale, step):
        x = _NAMES + column * step
        width = min(step, WIDTH - _RIGHT - x)
        bottom, tall = (
            (y + height, height) if lane is None else (y + height + 3 + lane * _LANE + _THIN, _THIN)
        )
        for bar, share in parts:
            bottom -= share * tall
            fill = PAPER if row.predicted else pale(_colour(bar), _WAITING) if bar.waiting else _colour(bar)
            edge = _colour(bar) if row.predicted else "none"
            marks.append(rect(x, bottom, width, share * tall, fill=fill, stroke=edge, radius=0))
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


def _room(bar: _Bar, row: _Row, scale: _Scale) -> float | None:
    """Where the middle of a bar's text goes, beside the bars drawn on top of it; None if it has no room."""
    if not bar.text or bar.lane is not None:
        return None
    after = row.bars[row.bars.index(bar) + 1 :]
    over = [b for b in after if b.lane is None and b.start < bar.end and b.end > bar.start]
    gaps, reach = [], bar.start
    for start, end in sorted((b.start, b.end) for b in over):
        gaps.append((reach, start))
        reach = max(reach, end)
    start, end = max([*gaps, (reach, bar.end)], key=lambda gap: gap[1] - gap[0])
    if scale.x(end) - scale.x(start) < text_width(bar.text) + 6:
        return None
    return (scale.x(start) + scale.x(end)) / 2


def _shares(row: _Row, scale: _Scale, step: float) -> list[tuple[int, int | None, list[tuple[_Bar, float]]]]:
    """For each column of `step` px and each lane: how much of that time each kind of bar fills."""
    seconds = step / (scale.x(scale.end) - scale.x(0)) * scale.end
    filled: dict[tuple[int | None, int], dict[tuple, list]] = {}
    for bar in row.bars:
        for column in range(int(bar.start / seconds), int(bar.end / seconds) + 1):
            inside = min(bar.end, (column + 1) * seconds) - max(bar.start, column * seconds)
            entry = filled.setdefault((bar.lane, column), {}).setdefault(bar.look, [bar, 0.0])
            entry[1] += max(inside, 0.0)
    columns = []
    for (lane, column), found in filled.items():
        communicates = sum(v for bar, v in found.values() if bar.kind == "comm")
        parts = sorted(found.values(), key=lambda part: (part[0].kind == "comm", part[0].waiting))
        room = seconds - min(communicates, seconds)  # spans include the communication inside them
        shares = [(bar, (min(v, room) if bar.kind != "comm" else v) / seconds) for bar, v in parts]
        columns.append((column, lane, [(bar, min(share, 1.0)) for bar, share in shares if share > 0.02]))
    return columns


def _arrow(
    send: Event, recv: Event, scale: _Scale, at: Mapping[tuple[int, bool], tuple[float, float]]
) -> str:
    """From where the sender called to where the receiver had it."""
    (y1, h1), (y2, h2) = at[send.rank, send.predicted], at[recv.rank, recv.predicted]
    down = y2 > y1
    start = y1 + h1 if down or _is_async(send) else y1
    end = y2 if down else y2 + h2
    mark = line(scale.x(send.start), start, scale.x(recv.end), end, stroke=INK, width=1.5, arrow=True)
    return f'<g opacity="0.7">{mark}</g>'


def _entries(rows: Sequence[_Row], *, dense: bool) -> list[tuple[str, Swatch | None]]:
    """What the key explains of these rows."""
    bars = [b for r in rows for b in r.bars]
    ops = [op for op in COLOURS if any(b.kind == "comm" and b.op == op for b in bars)]
    ops += sorted({b.op for b in bars if b.kind == "comm"} - set(ops))
    entries: list[tuple[str, Swatch | None]] = []
    if any(b.kind != "comm" for b in bars):
        entries.append(("compute", swatch(COLOURS["compute"])))
    if "send" in ops and "recv" in ops:
        ops = [op for op in ops if op != "recv"]
    for op in ops:
        name = "send, recv" if op == "send" and any(b.op == "recv" for b in bars) else op
        entries.append((name, swatch(COLOURS.get(op, COLOURS["barrier"]))))
    if any(b.waiting for b in bars):
        entries.append(("waits (lighter)", swatch(pale(COLOURS.get(ops[0], MUTED), _WAITING))))
    if any(b.lane is not None for b in bars):
        entries.append(("in the background", lambda x, y: rect(x, y + 6, 18, _THIN, fill=MUTED)))
    if any(r.predicted for r in rows):
        entries.append(("predicted", outlined_swatch(PAPER, MUTED)))
    if dense:
        entries.append(("height: share of the time", None))
    return entries


def _twin(rows: Sequence[_Row], end: float, alt: str, nodes: Sequence[str]) -> str:
    """The picture in characters, and its seconds."""
    key = "= computes   # communicates   - waits   ~ in the background"
    lines = [alt, f"{key}   (0 to {format_seconds(end)})"]
    names = [
        f"rank {r.rank}" + (f" on {nodes[r.rank]}" if nodes else "") + (" predicted" if r.predicted else "")
        for r in rows
    ]
    width = max(map(len, names))
    for row, name in zip(rows, names, strict=True):
        times = {
            "computes": row.seconds("compute"),
            "communicates": row.seconds("comm"),
            "waits": row.seconds("comm", waiting=True),
        }
        told = ", ".join(f"{what} {format_seconds(t)}" for what, t in times.items())
        lines.append(f"{name:{width}}  |{_characters(row, end, lane=False)}|  {told}")
        if row.lanes:
            lines.append(f"{'':{width}}  |{_characters(row, end, lane=True)}|")
    return "\n".join(lines)


def _characters(row: _Row, end: float, *, lane: bool) -> str:
    """One character per column of time: what took most of it, where anything happened at all."""
    columns: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    seconds = end / _COLUMNS
    for bar in row.bars:
        if (bar.lane is not None) != lane:
            continue
        sign = "~" if lane else "=" if bar.kind != "comm" else "-" if bar.waiting else "#"
        for column in range(int(bar.start / seconds), min(int(bar.end / seconds), _COLUMNS - 1) + 1):
            inside = min(bar.end, (column + 1) * seconds) - max(bar.start, column * seconds)
            if inside > 1e-6 * seconds or bar.end - bar.start < 1e-6 * seconds:
                columns[column][sign] = columns[column].get(sign, 0.0) + max(inside, 0.0)
    for found in columns:
        if "=" in found:  # spans include the communication inside them
            found["="] = min(found["="], seconds) - sum(v for sign, v in found.items() if sign != "=")
    return "".join(max(found, key=lambda sign: found[sign]) if found else " " for found in columns)
