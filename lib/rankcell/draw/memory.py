"""What memory holds, by kind, over the course of a step, from the samples of `rankcell.memory`. A kind has the same
colour in every notebook, also in the piles of `bars`.
"""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from ..results import KINDS, Memory
from .parts import EDGE, WIDTH, Axis, key, swatch, text_width, ticks_beside
from .svg import INK, MUTED, Figure, drawing, format_bytes, label, line

COLOURS = dict(zip(KINDS, ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#bbbbbb"), strict=True))
_HEIGHT = 420  # px, of a picture without a title


def over_time(samples: Sequence[Memory], *, title: str = "") -> Figure:
    """Bytes held, piled up by kind, one place for each change of memory, with the names of the phases above.

    over_time(run.ranks[0].memory)  # what rankcell.memory measured
    """
    if not samples:
        raise ValueError("There is nothing to draw: memory was never looked at.")
    held = {kind: [getattr(sample, kind) for sample in samples] for kind in KINDS}
    phases = [(i, s.phase) for i, s in enumerate(samples) if i == 0 or s.phase != samples[i - 1].phase]
    peak = max(range(len(samples)), key=lambda i: samples[i].total)
    most = samples[peak].total or 1
    step = 2.0 ** max(0, math.ceil(math.log2(most / 5)))  # at most six ticks, at multiples of a power of two
    ticks = [k * step for k in range(int(most // step) + 1)]
    marks, top = ([label(12, 30, title, bold=True)], 44.0) if title else ([], 12.0)
    height = _HEIGHT + top - 12
    explained, below_key = key([(k, swatch(COLOURS[k])) for k in KINDS], top - 2, left=EDGE, gap=34, ink=INK)
    marks += explained
    left = EDGE + max(text_width(format_bytes(t)) for t in ticks) + 8
    right, bottom, top = WIDTH - EDGE - 8, height - 62, below_key + 2
    px = Axis(0, max(len(samples) - 1, 1), left, right)
    names, rows = _phase_names(phases, px)
    py = Axis(0, max(most, ticks[-1]), bottom, top + 26 * rows + 14)
    grid, sizes = ticks_beside(((py(t), format_bytes(t)) for t in ticks), left, right)
    marks += [*grid, *_piles(held, px, py), *sizes]
    for (begin, _), (x, row, name) in zip(phases, names, strict=True):
        y = top + 26 * row + 20
        if px(begin) > left + 1:
            marks.append(line(px(begin), y - 16, px(begin), bottom, stroke=MUTED, dash="2 4"))
        if name:
            marks.append(label(x, y, name, fill=MUTED))
    marks.append(line(left, bottom, right, bottom, stroke=MUTED))
    marks.append(label((left + right) / 2, height - 14, "changes of memory", anchor="middle", fill=MUTED))
    parts = ", ".join(f"{kind} {format_bytes(held[kind][peak])}" for kind in KINDS if held[kind][peak])
    finding = f"Memory is highest in {samples[peak].phase}, {format_bytes(samples[peak].total)}: {parts}."
    return drawing(WIDTH, height, *marks, alt=f"{title}. {finding}" if title else finding)


def _piles(held: Mapping[str, Sequence[int]], px: Axis, py: Axis) -> list[str]:
    """A staircase for each kind that is ever held, on those below it."""
    marks: list[str] = []
    below = [0] * len(held["rest"])
    for kind, sizes in held.items():
        above = [b + size for b, size in zip(below, sizes, strict=True)]
        if any(sizes):
            path = _steps(above, px, py) + _steps(below, px, py)[::-1]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
            tip = f"<title>{escape(kind)}: at most {format_bytes(max(sizes))}</title>"
            marks.append(f'<polygon points="{points}" fill="{COLOURS[kind]}">{tip}</polygon>')
        below = above
    return marks


def _steps(values: Sequence[int], px: Axis, py: Axis) -> list[tuple[float, float]]:
    """The corners of a staircase; places where nothing changes are left out."""
    corners = [(px(0), py(values[0]))]
    for i in range(1, len(values)):
        if values[i] != values[i - 1]:
            corners += [(px(i), py(values[i - 1])), (px(i), py(values[i]))]
    return [*corners, (px(len(values) - 1), py(values[-1]))]


def _phase_names(phases: Sequence[tuple[int, str]], px: Axis) -> tuple[list[tuple[float, int, str]], int]:
    """Where each phase's name stands, (px, row, name), in few rows; "" where even three do not keep them apart."""
    ends, places = [-1e9] * 3, []
    for begin, name in phases:
        x = min(px(begin) + 4, WIDTH - 4 - text_width(name))
        row = next((r for r, end in enumerate(ends) if x >= end + 6), None)
        places.append((x, row or 0, "" if row is None else name))
        if row is not None:
            ends[row] = x + text_width(name)
    return places, sum(end > 0 for end in ends)
