"""Parts that several pictures share: sizes, paler colours, keys, axes, ticks, the marks of points.

Each stands here once, so that all pictures look alike. It draws no picture by itself; marks that know nothing
of the course (a bar, a line, a text) are in `svg`.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .svg import LINE, MUTED, PAPER, RANK_COLOURS, label, line, rect

WIDTH, WIDE = 600, 640  # px of a picture with an axis, and of one that shows numbers in boxes
EDGE = 10  # px left free at the sides
SIZE = 20  # px of text; 380/600 of it is over 12 px on a phone
ROW = 28  # px from one row of a key to the next

Swatch = Callable[[float, float], str]  # what draws the mark of an entry of a key, 18 x 20 px from (x, y)


def text_width(text: str, size: float = SIZE) -> float:
    """About how many px `text` takes: a little more than the fonts we name need."""
    widths = (0.3 if c in " .,:;il|'()[]/-" else 0.62 if c.islower() or c.isdigit() else 0.72 for c in text)
    return size * sum(widths)


def wrap(text: str, width: float, size: float = SIZE) -> list[str]:
    """`text` in lines that fit `width` px, broken between words; a word that is wider stands alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def pale(colour: str, share: float) -> str:
    """`colour` (#rrggbb) mixed with white; `share` of it is left."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def rank_colour(rank: int) -> str:
    """The colour of a rank, the same in every picture; after eight ranks they begin again."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def swatch(fill: str, stroke: str = "none") -> Swatch:
    """The mark of a key's entry: a small bar in its colour."""
    return lambda x, y: rect(x, y + 2, 18, 16, fill=fill, stroke=stroke)


def outlined_swatch(fill: str, stroke: str, *, stroke_width: float = 1, dash: str = "") -> Swatch:
    """The mark of a key's entry whose bars have an outline, such as what is predicted."""
    look: dict[str, Any] = {"fill": fill, "stroke": stroke, "stroke_width": stroke_width, "dash": dash}
    return lambda x, y: rect(x + 1, y + 3, 16, 14, **look)


def key(
    entries: Iterable[tuple[str, Swatch | None]], top: float, *, left: float = 12, gap: float = 18, ink: str = MUTED
) -> tuple[list[str], float]:
    """What the colours of a picture mean, in as many rows as it takes, and where the picture goes on below.

    An entry is its name and what draws the mark before it; `None` makes it a remark without a mark. `gap` is
    the room between two entries in px.
    """
    marks, x, y = [], left, top
    for name, swatch in entries:
        indent = 26 if swatch else 0
        width = indent + text_width(name)
        if x > left and x + width > WIDTH - 8:
            x, y = left, y + ROW
        if swatch:
            marks.append(swatch(x, y))
        marks.append(label(x + indent, y + 17, name, fill=ink))
        x += width + gap
    return marks, y + 32


def point(kind: int, x: float, y: float, colour: str, filled: bool, title: str) -> str:
    """A point of series number `kind`: circle, square, diamond or a triangle, so that colour is never alone.

    Five kinds: with the eight colours no two series are alike in one and nearly so in the other.
    """
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


@dataclass(frozen=True)
class Axis:
    """Values to px: `low` stands at `start`, `high` at `end`; with `log` by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def bounds(values: Sequence[float], log: bool, pad: float) -> tuple[float, float]:
    """The ends of an axis of `values`, with a share `pad` of their spread left free. A linear axis begins at 0 where
    the least value is under half of the largest.
    """
    low, high = min(values), max(values)
    if log:
        spread = math.log(high / low) or math.log(10)
        return low * math.exp(-pad * spread), high * math.exp(pad * spread)
    low = min(low, 0.0) if low < 0.5 * high else low
    spread = (high - low) or abs(high) or 1.0
    return (low if low == 0 else low - pad * spread), high + pad * spread


def round_ticks(low: float, high: float, *, most: int) -> tuple[float, ...]:
    """About `most` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of 10."""
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    return tuple(k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1))


def log_ticks(low: float, high: float, *, most: int, base: int = 10) -> tuple[float, ...]:
    """At most `most` powers of `base` from `low` to `high`; where there are fewer than two, round numbers."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    if last > first:
        step = max(1, math.ceil((last - first + 1) / most))
        return tuple(float(base) ** k for k in range(first, last + 1, step))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    return tuple(t for t in steps if low <= t <= high) or (low, high)


def ticks_below(
    ticks: Iterable[tuple[float, str]], top: float, bottom: float, y: float, *, stroke: str = LINE
) -> list[str]:
    """An upright line from `top` to `bottom` at the x of each tick, and its text at `y` where it has room."""
    marks, reach = [], -1e9
    for x, text in ticks:
        marks.append(line(x, top, x, bottom, stroke=stroke))
        half = text_width(text) / 2
        at = min(max(x, EDGE + half), WIDTH - 6 - half)
        if at - half > reach:
            marks.append(label(at, y, text, anchor="middle", fill=MUTED))
            reach = at + half + 6
    return marks


def ticks_beside(ticks: Iterable[tuple[float, str]], left: float, right: float) -> tuple[list[str], list[str]]:
    """Lines across from `left` to `right` at the y of each tick, and their texts, left of them."""
    ticks = list(ticks)
    lines = [line(left, y, right, y) for y, _ in ticks]
    return lines, [label(left - 8, y + 7, text, anchor="end", fill=MUTED) for y, text in ticks]


def heading(title: str) -> tuple[list[str], float]:
    """The title of a picture, where it has one, and where the picture goes on below."""
    return ([label(12, 30, title, bold=True)], 44.0) if title else ([], 12.0)


def time_axis(x: Axis, top: float, bottom: float, unit: str, factor: float) -> list[str]:
    """Upright lines at round times, their texts and the name of the axis below; `factor` turns seconds into units."""
    ticks = ((x(t / factor), f"{t:g}") for t in round_ticks(0.0, x.high * factor, most=6))
    name = label((x.start + x.end) / 2, bottom + 50, unit, anchor="middle", fill=MUTED)
    return [*ticks_below(ticks, top, bottom + 4, bottom + 24), name]


def union_length(stretches: Iterable[tuple[float, float]]) -> float:
    """How long at least one of some stretches lasts."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(stretches):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
