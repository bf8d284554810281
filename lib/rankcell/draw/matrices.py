"""Collectives as the matrices that they are: zeros and ones, in the colours of the ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from .collectives import MARGIN, label
from .parts import WIDE, rank_colour
from .svg import Figure, drawing, line, rect

_CELL, _TOP, _RANKS = 13, 34, 4  # px of a number, and above a matrix for its name; the ranks that share it


def matrices(
    named: Mapping[str, Any],
    finding: str,
    *,
    by_row: bool = False,
    row: str = "a number of the output",
    column: str = "a number of the input",
) -> Figure:
    """Matrices of zeros and ones of four ranks, each column in the colour of the rank whose input it reads.

    `finding` says for those who do not see the picture what it shows. With `by_row` each row has its rank's
    colour instead. `row` and `column` say what one of them is.
    """
    marks, y = [], float(MARGIN)
    items = [(name, [[float(x) for x in row] for row in matrix]) for name, matrix in named.items()]
    for i in range(0, len(items), 2):
        for j, (name, matrix) in enumerate(items[i : i + 2]):
            x = MARGIN + j * WIDE / 2
            marks.append(label(x, y + 22, name, bold=True))
            marks += _matrix(x, y + _TOP, matrix, by_row)
        y += _TOP + _CELL * max(len(m) for _, m in items[i : i + 2]) + 22
    colour = ", in its rank's colour"
    marks.append(label(MARGIN, y + 12, f"row: {row}{colour if by_row else ''}"))
    marks.append(label(MARGIN, y + 40, f"column: {column}{'' if by_row else colour}"))
    for r in range(_RANKS):
        x = MARGIN + 110 * r
        marks.append(rect(x, y + 54, 18, 18, fill=rank_colour(r)) + label(x + 26, y + 70, f"rank {r}"))
    sizes = ", ".join(f"{name} {len(m)} x {len(m[0])}" for name, m in items)
    return drawing(WIDE, y + 84, *marks, alt=f"{finding} Matrices of zeros and ones, rows x columns: {sizes}.")


def _matrix(x: float, y: float, matrix: Sequence[Sequence[float]], by_row: bool) -> list[str]:
    height, width, marks = len(matrix) * _CELL, len(matrix[0]) * _CELL, []
    for i in range(_RANKS + 1):
        across, down = height * i / _RANKS, width * i / _RANKS
        marks += [line(x, y + across, x + width, y + across), line(x + down, y, x + down, y + height)]
    for i, numbers in enumerate(matrix):
        for j in (j for j, value in enumerate(numbers) if value):
            rank = i * _RANKS // len(matrix) if by_row else j * _RANKS // len(numbers)
            marks.append(rect(x + j * _CELL + 1, y + i * _CELL + 1, _CELL - 2, _CELL - 2, fill=rank_colour(rank)))
    return marks
