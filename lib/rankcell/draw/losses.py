"""Loss curves over each other: the parallel run's on top of the one it must equal.

A pure function from numbers to a `Figure`. The first curve is broad and pale where there are several, the
others thin on top of it, so that two equal curves are both seen. Nothing here trains.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from .parts import (
    EDGE,
    WIDTH,
    Axis,
    bounds,
    key_of_lines,
    line_in_key,
    log_ticks,
    point,
    round_ticks,
    text_width,
    ticks_below,
    ticks_beside,
)
from .svg import INK, MUTED, RANK_COLOURS, Figure, drawing, label, line

_MAX_POINTS = 400  # beyond, every n-th point is drawn


def losses(
    curves: Mapping[str, Sequence[float]],
    *,
    levels: Mapping[str, float] | None = None,
    x_label: str = "step",
    y_label: str = "loss",
    every: Mapping[str, int] | None = None,
    log: bool = False,
    alt: str = "",
) -> Figure:
    """Loss against step, one line per entry of `curves`, its first value at step 0.

    `levels` are dotted lines across, such as {"a guess, ln 49": 3.89}. `every` is the number of steps from
    one value to the next, by name, where it is not 1. `log` makes the loss axis logarithmic. A value that is
    not a number (NaN, infinity) leaves a gap, and the alt text says where the first one is.
    """
    if not any(len(values) for values in curves.values()):
        raise ValueError("There is nothing to draw: no curve has a value.")
    levels, every = dict(levels or {}), dict(every or {})
    numbers = [v for values in curves.values() for v in values if math.isfinite(v)] + list(levels.values())
    if not numbers:
        raise ValueError("There is nothing to draw: no value is a finite number.")
    if log and min(numbers) <= 0:
        raise ValueError(f"A log axis has no place for a loss of {min(numbers):g}. Use log=False.")
    low, high = bounds(numbers, log, 0.06, above=0.08)
    ticks = log_ticks(low, high, most=6, least=3) if log else round_ticks(low, high, most=6)
    last = max((len(values) - 1) * every.get(name, 1) for name, values in curves.items()) or 1
    places = key_of_lines(list(curves))
    left = EDGE + max(text_width(f"{t:g}") for t in ticks) + 8
    top, bottom, right = 12 + 28 * (places[-1][1] + 1) + 30, 354, WIDTH - EDGE - 8
    px, py = Axis(0, last, left, right), Axis(low, high, bottom, top, log=log)
    grid, names = ticks_beside(((py(t), f"{t:g}") for t in ticks), left, right)
    marks = [*grid, *names, line(left, bottom, right, bottom, stroke=MUTED)]
    steps = ((px(step), f"{step:g}") for step in round_ticks(0.0, float(last), most=5))
    marks += ticks_below(steps, bottom, bottom + 5, bottom + 26, stroke=MUTED)
    ends = [py(of[-1]) for of in curves.values() if len(of) and math.isfinite(of[-1])]
    for name, value in levels.items():
        y = py(value)
        marks.append(line(left, y, right, y, stroke=INK, width=2, dash="2 5"))
        below = any(0 <= y - end < 32 for end in ends)  # above it the curves end
        marks.append(label(right, y + (22 if below else -7), name, anchor="end", fill=INK))
    for k, (name, values) in enumerate(curves.items()):
        marks += _curve(k, len(curves), name, values, every.get(name, 1), px, py)
        colour, width, _ = _style(k, len(curves))
        marks += line_in_key(k, places[k], name, colour, width=width)
    marks.append(label(EDGE, top - 14, f"{y_label}{', log scale' * log}", fill=MUTED))
    marks.append(label((left + right) / 2, bottom + 54, x_label, anchor="middle", fill=MUTED))
    return drawing(WIDTH, bottom + 66, *marks, alt=alt or _finding(curves, every, y_label))


def _curve(
    k: int, count: int, name: str, values: Sequence[float], stride: int, px: Axis, py: Axis
) -> list[str]:
    """The line of curve number k, in pieces where it has gaps, and a point at its end; a long one is thinned."""
    colour, width, opacity = _style(k, count)
    thin = max(1, math.ceil(len(values) / _MAX_POINTS))
    style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
    marks = []
    for finite, piece in itertools.groupby(enumerate(values), key=lambda at: math.isfinite(at[1])):
        points = [
            (px(i * stride), py(v)) for i, v in piece if finite and (i % thin == 0 or i == len(values) - 1)
        ]
        if points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            tip = f"<title>{escape(name)}</title>"
            marks.append(f'<polyline points="{path}" {style} stroke-linejoin="round">{tip}</polyline>')
    finite_values = [(i * stride, v) for i, v in enumerate(values) if math.isfinite(v)]
    for step, value in finite_values[-1:]:
        marks.append(point(k, px(step), py(value), colour, True, f"{name}: {value:.4g} at {step}"))
    return marks


def _style(k: int, count: int) -> tuple[str, float, float]:
    """Colour, width and opacity of curve number k: the first of several is a broad pale band."""
    if k == 0 and count > 1:
        return RANK_COLOURS[1], 9, 0.55
    return RANK_COLOURS[0] if k < 2 else RANK_COLOURS[k % len(RANK_COLOURS)], 2.5, 1


def _finding(curves: Mapping[str, Sequence[float]], every: Mapping[str, int], y_label: str) -> str:
    parts = []
    for name, values in curves.items():
        if not len(values):
            continue
        broken = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
        gap = "" if broken is None else f", not a number from step {broken * every.get(name, 1)}"
        parts.append(f"{name} goes from {values[0]:.3g} to {values[-1]:.3g}{gap}")
    said = f"{y_label[:1].upper()}{y_label[1:]}: {'; '.join(parts)}."
    (reference, first), *others = curves.items()
    if others and all(len(v) == len(first) and every.get(n, 1) == every.get(reference, 1) for n, v in others):
        apart = max(abs(a - b) for _, v in others for a, b in zip(v, first, strict=True))
        said += f" They are at most {apart:.2g} apart."
    return said
