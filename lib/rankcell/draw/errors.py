"""How far predictions are from what was measured, case by case: a row of points per source, on one linear axis.

A pure function from signed errors to a `Figure`. It draws shares; what was predicted and measured stands elsewhere.
"""

import statistics
from collections.abc import Mapping, Sequence

from .parts import EDGE, SIZE, WIDTH, round_ticks, text_width
from .svg import COLOURS, INK, LINE, MUTED, Figure, drawing, label, line, rect

_ROW = 54  # px
_COLOUR, _FAR = COLOURS["all_reduce"], COLOURS["scatter"]


def signed_errors(
    groups: Mapping[str, Sequence[float]], *, unit: str, most: float = 0.5, alt: str = ""
) -> Figure:
    """A row per group: a point per error, a bar at their median, and its value at the right.

        signed_errors({"A": [0.02, -0.1]}, unit="predicted over measured, less 1")

    Errors are shares: 0.1 is ten percent too much. Those beyond plus or minus `most` stand at the edge, in
    another colour. `unit` names the axis.

    Raises:
        ValueError: there is no group, or an empty one.
    """
    if not groups or not all(len(errors) for errors in groups.values()):
        raise ValueError("Signed errors need at least one group, and at least one error in each.")
    left, right, top = EDGE + 8, WIDTH - EDGE - 8, 8
    bottom = top + _ROW * len(groups) + 4

    def x(error: float) -> float:
        return left + (min(max(error, -most), most) + most) / (2 * most) * (right - left)

    marks = []
    for tick in round_ticks(-most, most, most=6):
        said = f"{tick:+.0%}" if tick else "0"
        half = text_width(said) / 2
        at = min(max(x(tick), EDGE + half), WIDTH - EDGE - half)
        marks.append(
            line(x(tick), top, x(tick), bottom, stroke=LINE if tick else MUTED, width=1 if tick else 2)
        )
        marks.append(label(at, bottom + 26, said, anchor="middle", fill=MUTED))
    medians = {name: statistics.median(errors) for name, errors in groups.items()}
    for k, (name, errors) in enumerate(groups.items()):
        y = top + _ROW * k
        said = _signed(medians[name])
        for at, text, anchor in ((left, f"{name}, {len(errors)}", "start"), (right, said, "end")):
            # a white box, so that the words read over the lines of the axis
            width = text_width(text)
            marks.append(
                rect(at - 2 if anchor == "start" else at - width, y + 2, width + 2, SIZE, fill="#ffffff")
            )
            marks.append(label(at, y + 18, text, anchor=anchor, bold=anchor == "end", fill=INK))
        for error in errors:
            far = abs(error) > most
            tip = f"<title>{name}: {error:+.1%}</title>"
            style = f'fill="{_FAR if far else _COLOUR}" fill-opacity="0.35"'
            marks.append(f'<circle cx="{x(error):.1f}" cy="{y + 33:g}" r="5" {style}>{tip}</circle>')
        marks.append(rect(x(medians[name]) - 2, y + 24, 4, 18, fill=INK, radius=0))
    marks.append(label(WIDTH / 2, bottom + 54, unit, anchor="middle", fill=MUTED))
    worst = max(medians, key=lambda name: abs(medians[name]))
    found = f"{unit}: the median of {worst} is furthest from 0, {_signed(medians[worst])}."
    rows = [
        f"{name}: {len(errors)}, median {medians[name]:+.1%}, from {min(errors):+.1%} to {max(errors):+.1%}"
        for name, errors in groups.items()
    ]
    return drawing(WIDTH, bottom + 66, *marks, alt=alt or found, text="\n".join([unit, *rows]))


def _signed(share: float) -> str:
    """A share as whole percent with its sign; none for 0."""
    percent = round(100 * share)
    return f"{percent:+d}%" if percent else "0%"
