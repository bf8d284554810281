"""Charts from numbers: a ladder of rates or times, lines on linear or log axes, tables.

Pure functions from numbers to a `Figure` (or a `Table`). Measured marks are solid, published or predicted
ones are outlined. Nothing here measures; what the ranks did is drawn elsewhere in this package.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..hardware import EACH_WAY, Speed
from .parts import (
    EDGE,
    WIDTH,
    Axis,
    Swatch,
    bounds,
    key,
    key_of_lines,
    line_in_key,
    log_ticks,
    point,
    round_ticks,
    text_width,
    ticks_below,
    ticks_beside,
)
from .svg import (
    COLOURS,
    LINE,
    MUTED,
    RANK_COLOURS,
    Figure,
    drawing,
    format_bytes,
    format_seconds,
    label,
    line,
)

# what notebooks import from here, the units of an axis included
__all__ = [
    "Rung", "Series", "Table", "format_bytes", "format_rate", "format_seconds", "ladder", "lines", "shares", "speeds"
]  # fmt: skip


def format_rate(bytes_per_s: float) -> str:
    """A rate with a decimal unit: 1 GB/s = 10^9 B/s. The one place that formats rates."""
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= factor:
            return f"{_three(bytes_per_s / factor)} {unit}"
    return f"{_three(bytes_per_s)} B/s"


def _three(x: float) -> str:
    """Three digits, never in exponent form for what fits a chart."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    text = f"{x:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class Table:
    """Rows under a header, shown as a table on a page and as aligned text elsewhere.

    A cell is text, or `(text, address)` for a link. Columns named in `right` hold numbers and are set to the
    right.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str | tuple[str, str], ...], ...]
    right: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = [self.header, *(tuple(c if isinstance(c, str) else c[0] for c in row) for row in self.rows)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(self.header))]
        return "\n".join(
            "  ".join(
                text.rjust(w) if name in self.right else text.ljust(w)
                for text, w, name in zip(row, widths, self.header, strict=True)
            ).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        def cell(tag: str, content: str | tuple[str, str], name: str) -> str:
            side = "right" if name in self.right else "left"
            text, address = (content, "") if isinstance(content, str) else content
            shown = html.escape(text)
            if address:
                shown = f'<a href="{html.escape(address)}">{shown}</a>'
            return f'<{tag} style="text-align:{side}">{shown}</{tag}>'

        head = "".join(cell("th", name, name) for name in self.header)
        body = "".join(
            "<tr>" + "".join(cell("td", c, n) for c, n in zip(row, self.header, strict=True)) + "</tr>"
            for row in self.rows
        )
        return f'<table class="dataframe"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def speeds(items: Iterable[Speed]) -> Table:
    """The facts of some speeds: rate, arithmetic, source and date; for links also both ways added."""
    items = tuple(items)
    links = all(s.direction == EACH_WAY for s in items)
    rows = []
    for s in items:
        rate = (
            (format_rate(s.bytes_per_s), format_rate(s.both_ways)) if links else (format_rate(s.bytes_per_s),)
        )
        said = f"{s.source.name} ({s.source.date})"
        source: str | tuple[str, str] = (said, s.source.url) if s.source.url else said
        notes = (s.note,) if any(item.note for item in items) else ()
        rows.append((s.name, *rate, s.arithmetic or "as the source prints it", *notes, source))
    numbers = ("each way", "both ways") if links else ("reads and writes",)
    note = ("note",) if any(item.note for item in items) else ()
    return Table(("", *numbers, "arithmetic", *note, "source"), tuple(rows), right=numbers)


def shares(pairs: Iterable[tuple[Speed, Speed]]) -> Table:
    """What was measured beside the published rate of the same link, and the share of it that was reached."""
    rows = tuple(
        (
            got.name,
            *map(format_rate, (got.bytes_per_s, peak.bytes_per_s)),
            f"{got.bytes_per_s / peak.bytes_per_s:.0%}",
        )
        for got, peak in pairs
    )
    numbers = ("measured", "published, each way", "share")
    return Table(("", *numbers), rows, right=numbers)


@dataclass(frozen=True)
class Rung:
    """One rung of a ladder, `value` in its unit. `measured` is solid, published or predicted is outlined."""

    name: str
    value: float
    measured: bool = False


def ladder(
    rungs: Sequence[Rung],
    *,
    unit: str,
    alt: str,
    format_value: Callable[[float], str] = format_rate,
    outlined: str = "published",
) -> Figure:
    """Values on a log axis, one rung each in the order given, and by what factor each differs from the last.

    `unit` names the axis ("bytes per second, each way"), `format_value` writes the numbers beside the rungs
    and the ticks. A rung is a point: on a log axis no length can be compared, so there are no bars (`bars.bars`
    draws those, from zero).
    """
    if not rungs:
        raise ValueError("A ladder needs at least one rung.")
    if bad := [r.name for r in rungs if not r.value > 0]:
        raise ValueError(f"A log axis has no place for values of 0 or below: {', '.join(bad)}.")
    low = math.floor(math.log10(min(r.value for r in rungs)) - 0.2)
    high = math.log10(max(r.value for r in rungs))
    high = math.ceil(high) if math.ceil(high) - high < 0.5 else high + 0.1
    right, top, row, colour = WIDTH - EDGE - 6, 44, 54, COLOURS["all_reduce"]
    bottom = top + row * len(rungs)
    x = Axis(10.0**low, 10.0**high, EDGE, right, log=True)
    kinds = sorted({r.measured for r in rungs}, reverse=True)
    entries = [("measured here" if measured else outlined, _dot(colour, measured)) for measured in kinds]
    marks, _ = key(entries, 10, left=EDGE, gap=26)
    powers = [10.0**p for p in range(low, math.floor(high) + 1)]
    marks += ticks_below(((x(p), format_value(p)) for p in powers), top, bottom + 4, bottom + 24)
    places = [(x(rung.value), top + row * k + 36) for k, rung in enumerate(rungs)]
    marks += [line(*a, *b, stroke=LINE, width=1.5, dash="3 4") for a, b in pairwise(places)]
    for k, (rung, place) in enumerate(zip(rungs, places, strict=True)):
        y = top + row * k + 20
        shown, factor = format_value(rung.value), _factor(rungs[k - 1].value if k else 0, rung.value)
        marks += [label(EDGE, y, rung.name), label(right, y, shown, anchor="end", bold=True)]
        at = EDGE + text_width(rung.name) + 14
        if factor and at + text_width(factor) + 10 < right - text_width(shown):
            marks.append(label(at, y, factor, fill=MUTED))
        marks.append(point(0, *place, colour, rung.measured, f"{rung.name}: {shown}"))
    foot = f"{unit}; each line is 10 times the last"
    marks.append(label(WIDTH / 2, bottom + 50, foot, anchor="middle", fill=MUTED))
    return drawing(WIDTH, bottom + 62, *marks, alt=alt)


def _dot(colour: str, filled: bool) -> Swatch:
    """The mark of a key's entry for points."""
    return lambda x, y: point(0, x + 9, y + 11, colour, filled, "")


def _factor(before: float, value: float) -> str:
    """By what `before` is divided or multiplied to give `value`, in two digits; "" where there is no before."""
    if not before:
        return ""
    ratio = max(before / value, value / before)
    text = f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"
    return "" if text == "1" else f"{'÷' if value < before else '×'} {text}"


@dataclass(frozen=True)
class Series:
    """Points of one line. `measured` is solid, published or predicted is dashed with hollow marks."""

    name: str
    points: Sequence[tuple[float, float]]
    measured: bool = True
    colour: str = ""


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    alt: str,
    x_log: bool = True,
    y_log: bool = True,
    x_base: int = 10,
    x_format: Callable[[float], str] = "{:g}".format,
    y_format: Callable[[float], str] = "{:g}".format,
    x_ticks: Sequence[float] = (),
    y_ticks: Sequence[float] = (),
    marks: Sequence[tuple[float, str]] = (),
    height: float = 440,
) -> Figure:
    """Lines with marks on linear or log axes; `marks` are dotted upright lines with a word on top.

    Ticks that are not given are powers of 10 (of `x_base` along x) on a log axis and round numbers on a
    linear one.
    """
    if not any(s.points for s in series):
        raise ValueError("There is nothing to draw: every series is empty.")
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    for name, values, log in (("x", xs, x_log), ("y", ys, y_log)):
        if log and min(values) <= 0:
            raise ValueError(f"A log axis has no place for {name} = {min(values):g}. Use {name}_log=False.")
    x_range, y_range = bounds([*xs, *x_ticks], x_log, 0.03), bounds([*ys, *y_ticks], y_log, 0.06)
    if not x_ticks:
        x_ticks = log_ticks(*x_range, base=x_base, most=5) if x_log else round_ticks(*x_range, most=5)
    y_ticks = tuple(y_ticks) or (log_ticks if y_log else round_ticks)(*y_range, most=6)
    places = key_of_lines([s.name for s in series])
    left = EDGE + max(text_width(y_format(t)) for t in y_ticks) + 8
    right, top = WIDTH - EDGE - 8, 12 + 28 * (places[-1][1] + 1) + 28 + (26 if marks else 0)
    bottom = height - 66
    px, py = Axis(*x_range, left, right, log=x_log), Axis(*y_range, bottom, top, log=y_log)
    grid, names = ticks_beside(((py(t), y_format(t)) for t in y_ticks), left, right)
    out = [mark for pair in zip(grid, names, strict=True) for mark in pair]
    out += ticks_below(((px(t), x_format(t)) for t in x_ticks), bottom, bottom + 5, bottom + 26, stroke=MUTED)
    out.append(line(left, bottom, right, bottom, stroke=MUTED))
    last = -1e9
    for value, word in sorted(marks):  # from left to right: a word without room is left out
        if not x_range[0] <= value <= x_range[1]:
            continue
        out.append(line(px(value), top - 4, px(value), bottom, stroke=MUTED, dash="2 4"))
        half = text_width(word) / 2
        if px(value) - half > last:
            out.append(label(px(value), top - 10, word, anchor="middle", fill=MUTED))
            last = px(value) + half + 6
    out.append(label(EDGE, top - (36 if marks else 10), y_label, fill=MUTED))
    out.append(label((left + right) / 2, height - 12, x_label, anchor="middle", fill=MUTED))
    for k, s in enumerate(series):
        colour, dash = s.colour or RANK_COLOURS[k % len(RANK_COLOURS)], "" if s.measured else "7 5"
        points = [(px(x), py(y)) for x, y in s.points]
        out += [line(*a, *b, stroke=colour, width=3, dash=dash) for a, b in pairwise(points)]
        for at, (x, y) in zip(points, s.points, strict=True):
            out.append(point(k, *at, colour, s.measured, f"{s.name}: {x_format(x)}, {y_format(y)}"))
        out += line_in_key(k, places[k], s.name, colour, width=3, measured=s.measured)
    return drawing(WIDTH, height, *out, alt=alt)
