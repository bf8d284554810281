"""What several queues do by arithmetic: the host and the streams of a device; time from left to right. Thin dark bars
in the host's row are launches, a dashed light bar is the host standing still; an arrow leads from a stream to another
one that waited for it. It draws all events whose `group` names their row.
"""

from collections.abc import Iterable, Mapping, Sequence

from ..results import Event
from .parts import WIDTH, Axis, Swatch, heading, pale, text_width, time_axis, union_length
from .svg import COLOURS, INK, MUTED, PAPER, Figure, drawing, format_bytes, format_seconds, label, line, rect

_RIGHT, _BAR, _GAP = 14, 34, 14
# a copy moves bytes, as a send does; what the host does has the colour of computing
_COLOURS = COLOURS | {"copy": COLOURS["send"], "host": COLOURS["compute"]}
_INSIDE = 0.3  # share of the colour inside a bar, so that dark text reads on it
_MAX_LAUNCH_LINES = 8
_WORK = ("compute", "copy", "comm")


def streams(events: Iterable[Event], *, title: str = "") -> Figure:
    """One row for each `group` of the events, in the order of their ranks; time in ms."""
    return _draws({title: events})[0]


def stacked(named: Mapping[str, Iterable[Event]]) -> Figure:
    """The same picture for several runs, one under the other, with the same rows and the same length of time.

    stacked({"pageable": one.events, "pinned": other.events})
    """
    marks, y = [], 0.0
    figures = _draws(named)
    for figure in figures:
        marks.append(figure.svg.replace("<svg ", f'<svg y="{y:g}" ', 1))
        y += float(figure.svg.split('viewBox="', 1)[1].split('"', 1)[0].split()[-1])
    return drawing(WIDTH, y, *marks, alt=" ".join(f.alt.replace(". ", ": ", 1) for f in figures))


def _draws(named: Mapping[str, Iterable[Event]]) -> list[Figure]:
    """A picture by title, all with the same rows and the same length of time."""
    runs = {title: sorted(events, key=lambda e: (e.start, e.rank)) for title, events in named.items()}
    if not (every := [e for events in runs.values() for e in events]):
        raise ValueError("There is nothing to draw: nothing was enqueued.")
    names = dict(sorted({e.rank: e.group for e in reversed(every)}.items()))
    return [_draw(events, names, max(e.end for e in every), title) for title, events in runs.items()]


def _finding(events: Sequence[Event], end: float) -> str:
    """The sentence of the alt text: how long, how much at the same time, how long the host stood."""
    work = [e for e in events if e.kind in _WORK]
    # all work, less the time in which at least one job ran
    together = sum(e.seconds for e in work) - union_length((e.start, e.end) for e in work)
    stood = sum(e.seconds for e in events if e.kind == "wait")
    text = f"Simulated: done after {_ms(end)}"
    text += f"; {_ms(together)} of work overlap" if together > 1e-9 else "; nothing overlaps"
    if not any(e.group == "host" for e in events):
        return f"{text}."
    return text + (f"; the host stands for {_ms(stood)}." if stood > 1e-9 else "; the host never stands.")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if 1e-3 <= seconds < 2 or not seconds else format_seconds(seconds)


def _draw(events: Sequence[Event], names: Mapping[int, str], end: float, title: str) -> Figure:
    left = max(map(text_width, names.values())) + 24
    x = Axis(0, end or 1e-6, left, WIDTH - _RIGHT)
    marks, top = heading(title and f"simulated: {title}", _entries(events))
    y = {row: top + 6 + i * (_BAR + _GAP) for i, row in enumerate(names)}
    bottom = max(y.values()) + _BAR + 6
    marks += time_axis(x, top, bottom, "time in ms", 1e3)
    for row, name in names.items():
        marks.append(label(12, y[row] + _BAR / 2 + 7, name))
        marks.append(line(left, y[row] + _BAR, WIDTH - _RIGHT, y[row] + _BAR))
    launched = [e for e in events if e.kind in _WORK]
    for e in launched if 0 in y and len(launched) <= _MAX_LAUNCH_LINES else ():
        marks.append(line(x(e.issued), y[0] + _BAR, x(e.start) + 1, y[e.rank], stroke=MUTED, width=1, dash="2 3"))
    marks += [_mark(e, x(e.start), x(e.end), y[e.rank]) for e in events if e.kind != "order"]
    for e in events:
        if e.kind == "order" and e.peer in y:
            marks += _let_go(x(e.issued), x(e.start), y[e.peer], y[e.rank])
    finding = _finding(events, max(e.end for e in events))
    return drawing(WIDTH, bottom + 62, *marks, alt=f"{title}. {finding}" if title else finding)


def _let_go(done: float, start: float, y_from: float, y_to: float) -> list[str]:
    """From where a job was done, along its row, to the job of another row that waited for it."""
    middle = y_from + _BAR / 2
    start += 2
    along = [line(done, middle, start, middle, stroke=INK, width=1.5)] if start - done > 3 else []
    begin = middle if along else y_from + (_BAR if y_to > y_from else 0)
    end = y_to if y_to > y_from else y_to + _BAR
    return [*along, line(start, begin, start, end, stroke=INK, width=1.5, arrow=True)]


def _mark(e: Event, start: float, stop: float, y: float) -> str:
    """The bar of an event, with its name where it has room."""
    width = max(stop - start, 2.0)
    colour = _COLOURS.get(e.op if e.kind == "comm" else e.kind, _COLOURS["barrier"])
    tip = f"{e.op}, {_ms(e.start)} to {_ms(e.end)}" + (f", {format_bytes(e.nbytes)}" if e.nbytes else "")
    if e.kind == "wait":
        bar = rect(start + 1, y + 6, width - 2, _BAR - 8, fill="#f4f4f4", stroke=MUTED, dash="4 3", title=tip)
    elif e.kind == "host" and e.op.startswith("launch "):
        return rect(start, y, width, _BAR, fill=INK, stroke=PAPER if width > 4 else "none", title=tip)
    elif width > 6:
        at, fill = (start + 1, y + 1, width - 2, _BAR - 2), pale(colour, _INSIDE)
        bar = rect(*at, fill=fill, stroke=colour, stroke_width=2, title=tip)
    else:
        bar = rect(start, y, width, _BAR, fill=colour, title=tip)
    text = "waits" if e.kind == "wait" else e.op
    if text_width(text) + 4 <= width:
        bar += label((start + stop) / 2, y + _BAR / 2 + 7, text, anchor="middle")
    return bar


def _entries(events: Sequence[Event]) -> list[tuple[str, Swatch]]:
    kinds = {e.kind for e in events}
    launches = [e.op.startswith("launch ") for e in events if e.kind == "host"]
    names = ["compute"] if "compute" in kinds or not all(launches) else []
    names += ["copy"] if "copy" in kinds else []
    names += sorted({e.op for e in events if e.kind == "comm"})
    looks = ((name, _COLOURS.get(name, _COLOURS["barrier"])) for name in names)
    entries = [(name, _outlined(pale(colour, _INSIDE), colour, stroke_width=2)) for name, colour in looks]
    if any(launches):
        entries.append(("launch", lambda x, y: rect(x + 6, y + 2, 5, 16, fill=INK)))
    if "wait" in kinds:
        entries.append(("host waits", _outlined("#f4f4f4", MUTED, dash="4 3")))
    return entries


def _outlined(fill: str, stroke: str, *, stroke_width: float = 1, dash: str = "") -> Swatch:
    return lambda x, y: rect(x + 1, y + 3, 16, 14, fill=fill, stroke=stroke, stroke_width=stroke_width, dash=dash)
