"""Charts from numbers: a ladder of rates or times, lines on linear or log axes, tables. Measured marks are solid,
published or predicted ones are outlined.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ..hardware import EACH_WAY, Speed
from . import parts
from .parts import EDGE, ROW, WIDTH, Axis, text_width
from .svg import COLOURS, LINE, MUTED, PAPER, RANK_COLOURS, Figure, drawing, format_bytes, format_seconds, label, line

# what notebooks import from here, the units of an axis included
__all__ = [
    "Rung", "Series", "Table", "format_bytes", "format_rate", "format_seconds", "ladder", "lines", "shares", "speeds"
]  # fmt: skip
_HEIGHT = 440  # px of a picture with lines
Format = Callable[[float], str]


def format_rate(bytes_per_s: float) -> str:
    """A rate with a decimal unit: 1 GB/s = 10^9 B/s. The one place that formats rates."""
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= 0.9995 * factor:  # three digits of less would round up to 1000 of the smaller unit
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


@dataclass(frozen=True)
class Table:
    """Rows under a header; a cell is text, or `(text, address)` for a link. Columns named in `right` hold numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str | tuple[str, str], ...], ...]
    right: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = [self.header, *(tuple(c if isinstance(c, str) else c[0] for c in row) for row in self.rows)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(self.header))]
        sides = [str.rjust if name in self.right else str.ljust for name in self.header]
        padded = ([side(text, w) for side, text, w in zip(sides, row, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(texts).rstrip() for texts in padded)

    def _repr_html_(self) -> str:
        def row_of(tag: str, cells: Iterable[str | tuple[str, str]]) -> str:
            row = ""
            for content, name in zip(cells, self.header, strict=True):
                text, address = (content, "") if isinstance(content, str) else content
                shown = f'<a href="{html.escape(address)}">{html.escape(text)}</a>' if address else html.escape(text)
                side = "right" if name in self.right else "left"
                row += f'<{tag} style="text-align:{side}">{shown}</{tag}>'
            return f"<tr>{row}</tr>"

        head, body = row_of("th", self.header), "".join(row_of("td", row) for row in self.rows)
        return f'<table class="dataframe"><thead>{head}</thead><tbody>{body}</tbody></table>'


def speeds(items: Iterable[Speed]) -> Table:
    """The facts of some speeds: rate, arithmetic, source and date; for links also both ways added."""
    items = tuple(items)
    links, noted = all(s.direction == EACH_WAY for s in items), any(s.note for s in items)
    rows: list[tuple[str | tuple[str, str], ...]] = []
    for s in items:
        rates = (s.bytes_per_s, s.both_ways) if links else (s.bytes_per_s,)
        source = f"{s.source.name} ({s.source.date})", s.source.url
        arithmetic = s.arithmetic or "as the source prints it"
        rows.append((s.name, *map(format_rate, rates), arithmetic, *(s.note,) * noted, source))
    numbers = ("each way", "both ways") if links else ("reads and writes",)
    return Table(("", *numbers, "arithmetic", *("note",) * noted, "source"), tuple(rows), right=numbers)


def shares(pairs: Iterable[tuple[Speed, Speed]]) -> Table:
    """What was measured beside the published rate of the same link, and the share of it that was reached."""
    numbers = ("measured", "published, each way", "share")
    rates = ((got.name, got.bytes_per_s, peak.bytes_per_s) for got, peak in pairs)
    rows = ((name, format_rate(got), format_rate(peak), f"{got / peak:.0%}") for name, got, peak in rates)
    return Table(("", *numbers), tuple(rows), right=numbers)


class Rung(NamedTuple):
    """One rung of a ladder, `value` in its unit."""

    name: str
    value: float


def ladder(rungs: Sequence[Rung], *, unit: str, alt: str, format_value: Format, outlined: str) -> Figure:
    """Values on a log axis, one rung each in the order given, and by what factor each differs from the last.

    `unit` names the axis ("bytes per second, each way"), `format_value` writes the numbers beside rungs and ticks,
    `outlined` says what the marks stand for ("published").
    A rung is a point: on a log axis no length can be compared, so there are no bars (`bars.bars` draws those).
    """
    low = math.floor(math.log10(min(r.value for r in rungs)) - 0.2)
    high = math.log10(max(r.value for r in rungs))
    high = math.ceil(high) if math.ceil(high) - high < 0.5 else high + 0.1
    right, top, row, colour = WIDTH - EDGE - 6, 44, 54, COLOURS["all_reduce"]
    bottom = top + row * len(rungs)
    x = Axis(10.0**low, 10.0**high, EDGE, right, log=True)
    marks = [_point(0, EDGE + 9, 21, colour, False, ""), label(EDGE + 26, 27, outlined, fill=MUTED)]
    powers = [10.0**p for p in range(low, math.floor(high) + 1)]
    marks += parts.ticks_below(((x(p), format_value(p)) for p in powers), top, bottom + 4, bottom + 24)
    places = [(x(rung.value), top + row * k + 36) for k, rung in enumerate(rungs)]
    marks += [line(*a, *b, stroke=LINE, width=1.5, dash="3 4") for a, b in pairwise(places)]
    for k, (rung, place) in enumerate(zip(rungs, places, strict=True)):
        y = top + row * k + 20
        shown, factor = format_value(rung.value), _factor(rungs[k - 1].value, rung.value) if k else ""
        marks += [label(EDGE, y, rung.name), label(right, y, shown, anchor="end", bold=True)]
        at = EDGE + text_width(rung.name) + 14
        if factor and at + text_width(factor) + 10 < right - text_width(shown):
            marks.append(label(at, y, factor, fill=MUTED))
        marks.append(_point(0, *place, colour, False, f"{rung.name}: {shown}"))
    marks.append(label(WIDTH / 2, bottom + 50, f"{unit}; each line is 10 times the last", anchor="middle", fill=MUTED))
    return drawing(WIDTH, bottom + 62, *marks, alt=alt)


def _factor(before: float, value: float) -> str:
    """By what `before` is divided or multiplied to give `value`, in two digits; "" if they are equal."""
    ratio = max(before / value, value / before)
    text = f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"
    return "" if text == "1" else f"{'÷' if value < before else '×'} {text}"


class Series(NamedTuple):
    """Points of one line. `measured` is solid, published or predicted is dashed with hollow marks."""

    name: str
    points: Sequence[tuple[float, float]]
    measured: bool = True


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    alt: str,
    x_log: bool = True,
    y_log: bool = True,
    x_base: int = 10,
    x_format: Format = "{:g}".format,
    y_format: Format = "{:g}".format,
    y_ticks: Sequence[float] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Lines with marks on linear or log axes; `marks` are dotted upright lines with a word on top.

    Ticks are powers of 10 (of `x_base` along x) on a log axis and round numbers on a linear one; `y_ticks` are others.
    """
    xs, ys = ([point[i] for s in series for point in s.points] for i in (0, 1))
    if not xs:
        raise ValueError("There is nothing to draw: every series is empty.")
    for name, values, log in (("x", xs, x_log), ("y", ys, y_log)):
        if log and min(values) <= 0:
            raise ValueError(f"A log axis has no place for {name} = {min(values):g}. Use {name}_log=False.")
    x_range, y_range = _bounds(xs, x_log, 0.03), _bounds([*ys, *y_ticks], y_log, 0.06)
    x_ticks = (partial(_log_ticks, base=x_base) if x_log else parts.round_ticks)(*x_range, most=5)
    y_ticks = tuple(y_ticks) or (_log_ticks if y_log else parts.round_ticks)(*y_range, most=6)
    places = _places_in_key([s.name for s in series])
    left = EDGE + max(text_width(y_format(t)) for t in y_ticks) + 8
    right, top = WIDTH - EDGE - 8, 12 + 28 * (places[-1][1] + 1) + 28 + (26 if marks else 0)
    bottom = _HEIGHT - 66
    px, py = Axis(*x_range, left, right, log=x_log), Axis(*y_range, bottom, top, log=y_log)
    grid, names = parts.ticks_beside(((py(t), y_format(t)) for t in y_ticks), left, right)
    out = [mark for pair in zip(grid, names, strict=True) for mark in pair]
    out += parts.ticks_below(((px(t), x_format(t)) for t in x_ticks), bottom, bottom + 5, bottom + 26, stroke=MUTED)
    out.append(line(left, bottom, right, bottom, stroke=MUTED))
    last = -1e9
    for x, word in sorted((px(x), word) for x, word in marks if x_range[0] <= x <= x_range[1]):
        out.append(line(x, top - 4, x, bottom, stroke=MUTED, dash="2 4"))
        half = text_width(word) / 2
        if x - half > last:  # a word without room is left out
            out.append(label(x, top - 10, word, anchor="middle", fill=MUTED))
            last = x + half + 6
    out.append(label(EDGE, top - (36 if marks else 10), y_label, fill=MUTED))
    out.append(label((left + right) / 2, _HEIGHT - 12, x_label, anchor="middle", fill=MUTED))
    for k, s in enumerate(series):
        colour, dash = RANK_COLOURS[k % len(RANK_COLOURS)], "" if s.measured else "7 5"
        points = [(px(x), py(y)) for x, y in s.points]
        out += [line(*a, *b, stroke=colour, width=3, dash=dash) for a, b in pairwise(points)]
        for at, (x, y) in zip(points, s.points, strict=True):
            out.append(_point(k, *at, colour, s.measured, f"{s.name}: {x_format(x)}, {y_format(y)}"))
        x, y = places[k][0], 20 + ROW * places[k][1]
        out.append(line(x, y, x + 30, y, stroke=colour, width=3, dash=dash))
        out += [_point(k, x + 15, y, colour, s.measured, s.name), label(x + 38, y + 6, s.name)]
    return drawing(WIDTH, _HEIGHT, *out, alt=alt)


def _places_in_key(names: Sequence[str]) -> list[tuple[float, int]]:
    """Where each entry of the key begins, with 38 px for its line: px from the left, and its row."""
    places, at, row = [], float(EDGE), 0
    for name in names:
        width = 38 + text_width(name)
        if at > EDGE and at + width > WIDTH - EDGE:
            at, row = float(EDGE), row + 1
        places.append((at, row))
        at += width + 22
    return places


def _point(kind: int, x: float, y: float, colour: str, filled: bool, title: str) -> str:
    """A point of series number `kind`, of five kinds: with eight colours no two series are alike."""
    tip = f"<title>{html.escape(title)}</title>"
    style = f'fill="{colour if filled else PAPER}" stroke="{colour}" stroke-width="2.5"'
    if kind % 5 == 0:
        return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="6" {style}>{tip}</circle>'
    corners = (
        ((-5.5, -5.5), (5.5, -5.5), (5.5, 5.5), (-5.5, 5.5)),
        ((0, -7.5), (7.5, 0), (0, 7.5), (-7.5, 0)),
        ((0, -7), (7, 6), (-7, 6)),
        ((0, 7), (7, -6), (-7, -6)),
    )[kind % 5 - 1]
    points = " ".join(f"{x + dx:.2f},{y + dy:.2f}" for dx, dy in corners)
    return f'<polygon points="{points}" {style}>{tip}</polygon>'


def _bounds(values: Sequence[float], log: bool, pad: float) -> tuple[float, float]:
    """The ends of an axis, a share `pad` left free; a linear one begins at 0 if the least is under half the most."""
    low, high = min(values), max(values)
    if log:
        spread = math.log(high / low) or math.log(10)
        return low * math.exp(-pad * spread), high * math.exp(pad * spread)
    low = min(low, 0.0) if low < 0.5 * high else low
    spread = (high - low) or abs(high) or 1.0
    return (low if low == 0 else low - pad * spread), high + pad * spread


def _log_ticks(low: float, high: float, *, most: int, base: int = 10) -> tuple[float, ...]:
    """At most `most` powers of `base` from `low` to `high`; where there are fewer than two, round numbers."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    if last > first:
        step = max(1, math.ceil((last - first + 1) / most))
        return tuple(float(base) ** k for k in range(first, last + 1, step))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    return tuple(t for t in steps if low <= t <= high) or (low, high)
