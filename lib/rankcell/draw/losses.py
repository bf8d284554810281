"""Loss curves over each other: the parallel run's on top of the one it must equal.

A pure function from numbers to a `Figure`. The first curve is broad and pale where there are several, the
others thin on top of it, so that two equal curves are both seen. Nothing here trains.
"""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from .parts import EDGE, WIDTH, key_of_lines, log_ticks, point, round_ticks, text_width
from .svg import INK, MUTED, RANK_COLOURS, Figure, drawing, label, line

_MAX_POINTS = 400  # beyond, every n-th point is drawn


def losses(
    curves: Mapping[str, Sequence[float]],
    *,
    levels: Mapping[str, float] | None = None,
    x_label: str = "step",
    y_label: str = "loss",
    every: int | Mapping[str, int] = 1,
    log: bool = False,
    alt: str = "",
    height: float = 420,
) -> Figure:
    """Loss against step, one line per entry of `curves`, its first value at step 0.

    `levels` are dotted lines across, such as {"a guess, ln 49": 3.89}. `every` is the number of steps from
    one value to the next, for all curves or by name. `log` makes the loss axis logarithmic. A value that is
    not a number (NaN, infinity) leaves a gap, and the text says where the first one is.
    """
    if not any(len(values) for values in curves.values()):
        raise ValueError("There is nothing to draw: no curve has a value.")
    levels = dict(levels or {})
    strides = {name: every if isinstance(every, int) else every.get(name, 1) for name in curves}
    numbers = [v for values in curves.values() for v in values if math.isfinite(v)] + list(levels.values())
    if not numbers:
        raise ValueError("There is nothing to draw: no value is a finite number.")
    if log and min(numbers) <= 0:
        raise ValueError(f"A log axis has no place for a loss of {min(numbers):g}. Use log=False.")
    low, high = _bounds(numbers, log)
    ticks = _loss_ticks(low, high, log)
    last = max((len(values) - 1) * strides[name] for name, values in curves.items()) or 1
    entries = key_of_lines(list(curves))
    left = EDGE + max(text_width(f"{t:g}") for t in ticks) + 8
    top, bottom, right = 12 + 28 * (entries[-1][1] + 1) + 30, height - 66, WIDTH - EDGE - 8

    def px(step: float) -> float:
        return left + step / last * (right - left)

    def py(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return bottom - share * (bottom - top)

    marks = [line(left, py(t), right, py(t)) for t in ticks]
    marks += [label(left - 8, py(t) + 7, f"{t:g}", anchor="end", fill=MUTED) for t in ticks]
    marks.append(line(left, bottom, right, bottom, stroke=MUTED))
    for step in round_ticks(0.0, float(last), most=5):
        text = f"{step:g}"
        marks.append(line(px(step), bottom, px(step), bottom + 5, stroke=MUTED))
        x = min(px(step), WIDTH - 4 - text_width(text) / 2)
        marks.append(label(x, bottom + 26, text, anchor="middle", fill=MUTED))
    for name, value in levels.items():
        marks.append(line(left, py(value), right, py(value), stroke=INK, width=2, dash="2 5"))
        ends = [of[-1] for of in curves.values() if len(of) and math.isfinite(of[-1])]
        above = any(0 <= py(value) - py(end) < 32 for end in ends)  # there the curves end: below it is free
        marks.append(label(right, py(value) + (22 if above else -7), name, anchor="end", fill=INK))
    for k, (name, values) in enumerate(curves.items()):
        colour, width, opacity = _style(k, len(curves))
        for piece in _pieces(values, strides[name]):
            path = " ".join(f"{px(step):.1f},{py(value):.1f}" for step, value in piece)
            marks.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
                f'stroke-opacity="{opacity}" stroke-linejoin="round"><title>{escape(name)}</title></polyline>'
            )
        finite = [(i * strides[name], v) for i, v in enumerate(values) if math.isfinite(v)]
        if finite:
            step, value = finite[-1]
            marks.append(point(k, px(step), py(value), colour, True, f"{name}: {value:.4g} at {step}"))
        x, row = entries[k]
        y = 20 + 28 * row
        marks.append(line(x, y, x + 30, y, stroke=colour, width=width))
        marks.append(point(k, x + 15, y, colour, True, name))
        marks.append(label(x + 38, y + 6, name))
    scale = ", log scale" if log else ""
    marks.append(label(EDGE, top - 14, f"{y_label}{scale}", fill=MUTED))
    marks.append(label((left + right) / 2, height - 12, x_label, anchor="middle", fill=MUTED))
    text = f"{y_label} against {x_label}\n" + "\n".join(
        _in_words(name, values, strides[name]) for name, values in curves.items()
    )
    text += "".join(f"\n{name}: {value:.4g}" for name, value in levels.items())
    return drawing(WIDTH, height, *marks, alt=alt or _finding(curves, strides, y_label), text=text)


def _style(k: int, count: int) -> tuple[str, float, float]:
    """Colour, width and opacity of curve number k: the first of several is a broad pale band."""
    if k == 0 and count > 1:
        return RANK_COLOURS[1], 9, 0.55
    return RANK_COLOURS[0] if k < 2 else RANK_COLOURS[k % len(RANK_COLOURS)], 2.5, 1


def _bounds(numbers: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    if log:
        spread = math.log(high / low) or math.log(10)
        return low * math.exp(-0.06 * spread), high * math.exp(0.06 * spread)
    low = min(low, 0.0) if low < 0.5 * high else low
    spread = (high - low) or abs(high) or 1.0
    return (low if low == 0 else low - 0.06 * spread), high + 0.08 * spread


def _loss_ticks(low: float, high: float, log: bool) -> tuple[float, ...]:
    if not log:
        return round_ticks(low, high, most=6)
    ticks = log_ticks(low, high, most=6)
    if len(ticks) < 3:
        ticks = tuple(
            m * 10.0**e
            for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for m in (1, 2, 5)
            if low <= m * 10.0**e <= high
        ) or (low, high)
    return ticks


def _pieces(values: Sequence[float], stride: int) -> list[list[tuple[float, float]]]:
    """The finite stretches of a curve as (step, value); a long one thinned, its last point kept."""
    thin = max(1, math.ceil(len(values) / _MAX_POINTS))
    pieces: list[list[tuple[float, float]]] = [[]]
    for i, value in enumerate(values):
        if not math.isfinite(value):
            pieces.append([])
        elif i % thin == 0 or i == len(values) - 1:
            pieces[-1].append((i * stride, value))
    return [piece for piece in pieces if piece]


def _in_words(name: str, values: Sequence[float], stride: int) -> str:
    if not len(values):
        return f"{name}: no value"
    shown = sorted({round(k * (len(values) - 1) / 8) for k in range(9)})
    said = f"{name}: " + ", ".join(f"{i * stride}: {values[i]:.4g}" for i in shown)
    broken = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
    return said if broken is None else f"{said}; not a number from step {broken * stride}"


def _finding(curves: Mapping[str, Sequence[float]], strides: Mapping[str, int], y_label: str) -> str:
    parts = [
        f"{name} goes from {values[0]:.3g} to {values[-1]:.3g}"
        for name, values in curves.items()
        if len(values)
    ]
    said = f"{y_label[:1].upper()}{y_label[1:]}: {'; '.join(parts)}."
    (reference, first), *others = curves.items()
    same = [n for n, v in others if len(v) == len(first) and strides[n] == strides[reference]]
    if same and len(same) == len(others):
        apart = max(abs(a - b) for n in same for a, b in zip(curves[n], first, strict=True))
        said += f" They are at most {apart:.2g} apart."
    return said
