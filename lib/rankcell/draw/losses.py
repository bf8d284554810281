"""Loss curves over each other: the parallel run's on top of the one it must equal.

A pure function from numbers to a `Figure`. The first curve is broad and pale where there are several, the
others thin on top of it, so that two equal curves are both seen. Nothing here trains.
"""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from . import parts
from .parts import EDGE, WIDTH, Axis
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
    not a number (NaN, infinity) is left out.

    Raises:
        ValueError: there is no value, or one that is no number on a log axis.
    """
    levels, every = dict(levels or {}), dict(every or {})
    points = {
        name: [(i * every.get(name, 1), v) for i, v in enumerate(values) if math.isfinite(v)]
        for name, values in curves.items()
    }
    numbers = [v for of in points.values() for _, v in of] + list(levels.values())
    if not numbers:
        raise ValueError("There is nothing to draw: no value is a finite number.")
    if log and min(numbers) <= 0:
        raise ValueError(f"A log axis has no place for a loss of {min(numbers):g}. Use log=False.")
    low, high = parts.bounds(numbers, log, 0.06, above=0.08)
    ticks = parts.log_ticks(low, high, most=6, least=3) if log else parts.round_ticks(low, high, most=6)
    last = max((len(values) - 1) * every.get(name, 1) for name, values in curves.items()) or 1
    places = parts.key_of_lines(list(curves))
    left = EDGE + max(parts.text_width(f"{t:g}") for t in ticks) + 8
    top, bottom, right = 12 + 28 * (places[-1][1] + 1) + 30, 354, WIDTH - EDGE - 8
    px, py = Axis(0, last, left, right), Axis(low, high, bottom, top, log=log)
    grid, names = parts.ticks_beside(((py(t), f"{t:g}") for t in ticks), left, right)
    marks = [*grid, *names, line(left, bottom, right, bottom, stroke=MUTED)]
    steps = ((px(step), f"{step:g}") for step in parts.round_ticks(0.0, float(last), most=5))
    marks += parts.ticks_below(steps, bottom, bottom + 5, bottom + 26, stroke=MUTED)
    for name, value in levels.items():
        y = py(value)
        marks.append(line(left, y, right, y, stroke=INK, width=2, dash="2 5"))
        below = any(0 <= y - py(of[-1][1]) < 32 for of in points.values() if of)  # above it curves end
        marks.append(label(right, y + (22 if below else -7), name, anchor="end", fill=INK))
    for k, (name, of) in enumerate(points.items()):
        colour, width, opacity = RANK_COLOURS[0 if k < 2 else k % len(RANK_COLOURS)], 2.5, 1.0
        if k == 0 and len(curves) > 1:  # the first of several is a broad pale band
            colour, width, opacity = RANK_COLOURS[1], 9, 0.55
        thin = max(1, math.ceil(len(curves[name]) / _MAX_POINTS))
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in [*of[:-1:thin], *of[-1:]])
        style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity:g}"'
        tip = f"<title>{escape(name)}</title>"
        marks.append(f'<polyline points="{path}" {style} stroke-linejoin="round">{tip}</polyline>')
        for x, y in of[-1:]:
            marks.append(parts.point(k, px(x), py(y), colour, True, f"{name}: {y:.4g} at {x}"))
        marks += parts.line_in_key(k, places[k], name, colour, width=width)
    marks.append(label(EDGE, top - 14, f"{y_label}{', log scale' * log}", fill=MUTED))
    marks.append(label((left + right) / 2, bottom + 54, x_label, anchor="middle", fill=MUTED))
    return drawing(WIDTH, bottom + 66, *marks, alt=alt or _finding(points, y_label))


def _finding(points: Mapping[str, Sequence[tuple[float, float]]], y_label: str) -> str:
    ends = [f"{name} goes from {of[0][1]:.3g} to {of[-1][1]:.3g}" for name, of in points.items() if of]
    said = f"{y_label[:1].upper()}{y_label[1:]}: {'; '.join(ends)}."
    first, *others = points.values()
    if others and all([x for x, _ in of] == [x for x, _ in first] for of in others):
        apart = max(abs(a - b) for of in others for (_, a), (_, b) in zip(of, first, strict=True))
        said += f" They are at most {apart:.2g} apart."
    return said
