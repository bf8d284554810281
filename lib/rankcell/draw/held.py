"""How the ranks hold each tensor of a step, in the order of computing: one box per tensor, one strip per run. Which one
went wrong first, and why, is said by the verdict of `check.against`.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from .parts import EDGE, WIDTH, key, swatch
from .svg import INK, MUTED, Figure, drawing, label, rect

GROUPS = {"output": "outputs", "grad_output": "their gradients", "grad": "weights' gradients"}
# Okabe and Ito's colours, and how a count goes on: "4 in parts".
LOOKS = {
    "same on all": ("#0072b2", "the same on all"),
    "parts": ("#56b4e9", "in parts"),
    "multiple": ("#f0e442", "a multiple of it"),
    "another multiple on each": ("#5d3a9b", "another multiple on each"),
    "partial sum": ("#e69f00", "as partial sums"),
    "its own on each": ("#cc79a7", "its own on each"),
    "something else": ("#d55e00", "something else"),
    "not compared": ("#e3e3e3", "not compared"),
}
_TALL, _STRIP, _GAP = 26, 66, 10  # px of a box, from one strip to the next, between two groups


def look(row: Any) -> str:
    """The kind of layout of one tensor, as a row of `check.against` describes it: a key of `LOOKS`."""
    layout, status = row.layout, row.status
    holds = {
        "not compared": status in ("skipped", "batch"),
        "same on all": layout == "the same on all",
        "partial sum": layout.startswith("partial over"),
        "another multiple on each": "another multiple" in layout,
        "multiple": status == "scaled" or layout.endswith("times it") or "multiple" in layout,
        "its own on each": layout.startswith("each its own"),
        "parts": status == "fits",
    }
    return next((kind for kind, is_so in holds.items() if is_so), "something else")


def held(runs: Mapping[str, Any]) -> Figure:
    """One strip per result of `check.against`, one box per tensor of its first step, with its name and layout. Raises
    ValueError: no run, or one without outputs and gradients.
    """
    strips = {name: [r for r in run.rows if r.kind in GROUPS and r.step == 0] for name, run in runs.items()}
    if not strips or not all(strips.values()):
        raise ValueError("There is nothing to draw: each run needs outputs, or gradients.")
    used = [name for name in LOOKS if any(look(r) == name for rows in strips.values() for r in rows)]
    marks, y = key(((name, swatch(LOOKS[name][0])) for name in used), 8)
    said = []
    for n, (name, rows) in enumerate(strips.items()):
        groups = [(GROUPS[kind], list(of)) for kind, of in groupby(rows, key=lambda r: r.kind)]
        box = (WIDTH - 2 * EDGE - _GAP * (len(groups) - 1)) / len(rows)
        marks.append(label(EDGE, y + 20, name, fill=INK, bold=True))
        x, counts = float(EDGE), []
        for group, of in groups:
            if n == len(strips) - 1:  # the words stand once, below the last strip
                marks.append(label(x, y + 28 + _TALL + 22, group, fill=MUTED))
            looks = [look(row) for row in of]
            for row, kind in zip(of, looks, strict=True):
                tip = f"{row.title}, {group}: {row.layout}"
                marks.append(rect(x, y + 28, box - 1.5, _TALL, fill=LOOKS[kind][0], title=tip))
                x += box
            each = (f"{looks.count(kind)} {LOOKS[kind][1]}" for kind in LOOKS if kind in looks)
            counts.append(f"{group} {', '.join(each)}")
            x += _GAP
        said.append(f"{name}: {'; '.join(counts)}.")
        y += _STRIP
    return drawing(WIDTH, y + 22, *marks, alt=" ".join(said))
