"""How the ranks hold each tensor of a step, in the order of computing: one box per tensor, one strip per run.

A pure function from the rows of `check.against` to a `Figure`. It says what each tensor is, and not what is wrong:
which one went wrong first, and why, is the verdict's. It compares nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from .parts import EDGE, WIDTH, key, swatch
from .svg import INK, MUTED, Figure, drawing, label, rect

GROUPS = {
    "output": "outputs",
    "grad_output": "their gradients",
    "grad": "weights' gradients",
    "parameter": "weights",
}
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
Row = Any  # a tensor as `check.against` describes it: against.Row, which no picture imports
_TALL, _STRIP, _GAP = 26, 66, 10  # px of a box, from one strip to the next, between two groups


def look(row: Row) -> str:
    """The kind of layout of one tensor: a key of `LOOKS`."""
    if row.status in ("skipped", "batch"):
        return "not compared"
    if row.layout == "the same on all":
        return "same on all"
    if row.layout.startswith("partial over"):
        return "partial sum"
    if "another multiple" in row.layout:
        return "another multiple on each"
    if row.status == "scaled" or row.layout.endswith("times it") or "multiple" in row.layout:
        return "multiple"
    if row.layout.startswith("each its own"):
        return "its own on each"
    return "parts" if row.status == "fits" else "something else"


def held(runs: Mapping[str, Any], *, kinds: Sequence[str] = tuple(GROUPS)[:3], alt: str = "") -> Figure:
    """One strip per result of `check.against`, one box per tensor of its first step, with its name and layout.

    `kinds` are those drawn: "output", "grad_output", "grad", "parameter".

    Raises:
        ValueError: no run, or one without a tensor of these kinds.
    """
    strips = {name: [r for r in run.rows if r.kind in kinds and _drawn(r)] for name, run in runs.items()}
    if not strips or not all(strips.values()):
        raise ValueError(f"There is nothing to draw: each run needs tensors of the kinds {', '.join(kinds)}.")
    used = [name for name in LOOKS if any(look(r) == name for rows in strips.values() for r in rows)]
    marks, y = key(((name, swatch(LOOKS[name][0])) for name in used), 8)
    for n, (name, rows) in enumerate(strips.items()):
        groups = [(GROUPS[kind], list(of)) for kind, of in groupby(rows, key=lambda r: r.kind)]
        box = (WIDTH - 2 * EDGE - _GAP * (len(groups) - 1)) / len(rows)
        marks.append(label(EDGE, y + 20, name, fill=INK, bold=True))
        x = float(EDGE)
        for group, of in groups:
            if n == len(strips) - 1:  # the words stand once, below the last strip
                marks.append(label(x, y + 28 + _TALL + 22, group, fill=MUTED))
            for row in of:
                tip = f"{row.title}, {group}: {row.layout}"
                marks.append(rect(x, y + 28, box - 1.5, _TALL, fill=LOOKS[look(row)][0], title=tip))
                x += box
            x += _GAP
        y += _STRIP
    return drawing(WIDTH, y + 22, *marks, alt=alt or _finding(strips))


def _drawn(row: Row) -> bool:
    return row.step == (1 if row.kind == "parameter" else 0)


def _finding(strips: Mapping[str, Sequence[Row]]) -> str:
    """Of each run how many tensors have which layout, by kind."""
    parts = []
    for name, rows in strips.items():
        groups = []
        for kind, of in groupby(rows, key=lambda r: r.kind):
            looks = [look(r) for r in of]
            counts = (f"{looks.count(n)} {LOOKS[n][1]}" for n in LOOKS if n in looks)
            groups.append(f"{GROUPS[kind]} {', '.join(counts)}")
        parts.append(f"{name}: {'; '.join(groups)}.")
    return " ".join(parts)
