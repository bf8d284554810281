"""Parts that several pictures share: sizes, paler colours, keys, axes, ticks."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .svg import LINE, MUTED, RANK_COLOURS, label, line, rect

WIDTH, WIDE = 600, 640  # px of a picture with an axis, and of one that shows numbers in boxes
EDGE = 10  # px left free at the sides
SIZE = 20  # px of text; 380/600 of it is over 12 px on a phone
ROW = 28  # px from one row of a key to the next

Swatch = Callable[[float, float], str]  # what draws the mark of an entry of a key, 18 x 20 px from (x, y)
Legend = Iterable[tuple[str, Swatch | None]]  # of a key: names, and what draws the marks before them
Ticks = Iterable[tuple[float, str]]  # px, and a text


def text_width(text: str, size: float = SIZE) -> float:
    """About how many px `text` takes: a little more than the fonts we name need."""
    widths = (0.3 if c in " .,:;il|'()[]/-" else 0.62 if c.islower() or c.isdigit() else 0.72 for c in text)
    return size * sum(widths)


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


def key(entries: Legend, top: float, *, left: float = 12, gap: float = 18, ink: str = MUTED) -> tuple[list[str], float]:
    """What the colours of a picture mean, in as many rows as it takes, and where the picture goes on below.

    An entry with `None` is a remark without a mark. `gap` is the room between two entries in px.
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


class Axis(NamedTuple):
    """Values to px: `low` stands at `start`, `high` at `end`; with `log` by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        at, low, high = (math.log(x) if self.log else x for x in (value, self.low, self.high))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def round_ticks(low: float, high: float, *, most: int) -> tuple[float, ...]:
    """About `most` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of 10."""
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    return tuple(k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1))


def ticks_below(ticks: Ticks, top: float, bottom: float, y: float, *, stroke: str = LINE) -> list[str]:
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


def ticks_beside(ticks: Ticks, left: float, right: float) -> tuple[list[str], list[str]]:
    """Lines across from `left` to `right` at the y of each tick, and their texts, left of them."""
    ticks = list(ticks)
    lines = [line(left, y, right, y) for y, _ in ticks]
    return lines, [label(left - 8, y + 7, text, anchor="end", fill=MUTED) for y, text in ticks]


def heading(title: str, entries: Legend) -> tuple[list[str], float]:
    """The title of a picture, where it has one, and its `key`, and where the picture goes on below."""
    marks, below = key(entries, 44 if title else 12)
    return [*([label(12, 30, title, bold=True)] if title else []), *marks], below


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
