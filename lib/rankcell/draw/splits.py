"""Who holds what: matrices under several splits, side by side. A matrix is an outline; the part that a rank holds is
filled, or hatched where its numbers are only its share of a sum. Between the ranks stands what they tell each other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .parts import WIDTH, rank_colour
from .svg import INK, MUTED, PAPER, Figure, drawing, label, line, rect

_LEFT, _TITLE, _HEAD, _GAP = 74, 34, 28, 12
_EQUAL = 1e-6  # how far the numbers of a part may be from those of the whole: rounding
Shapes = Mapping[str, tuple[int, int]]  # rows and columns, by name
Part = tuple[tuple[int, int], tuple[int, int]]  # rows from, to; columns from, to


class Split(NamedTuple):
    """One way to split a computation over ranks.

    `held` is per rank the part of each matrix that it holds; `exchange` says in a few short lines what the ranks tell
    each other. `partial` names the matrices of which a rank holds partial sums only.
    """

    name: str
    held: Sequence[Mapping[str, Part]]
    exchange: Sequence[str]
    partial: Sequence[str]


def located(
    name: str, parts: Sequence[Mapping[str, Any]], *, whole: Mapping[str, Any], exchange: Sequence[str] = ()
) -> Split:
    """The split in which every rank holds its `parts`, each found by its numbers in the whole matrix of its name.

        A = torch.randn(8, 8)
        located("columns", [{"A": part} for part in A.chunk(4, 1)], whole={"A": A})
        # parts of (8, 2), held as ((0, 8), (0, 2)), ((0, 8), (2, 4)), ...

    `parts` are per rank its matrices by name, `(rows, columns)`. A part is looked for at multiples of its own shape,
    to within 1e-6. What has the shape of the whole and other numbers is `partial`.
    """
    held: list[dict[str, Part]] = [{} for _ in parts]
    partial = set()
    for rank, own in enumerate(parts):
        for matrix, mine in own.items():
            (rows, columns), of = mine.shape, tuple(whole[matrix].shape)
            if (place := _place(mine, whole[matrix])) is None and (rows, columns) != of:
                sizes = f"Rank {rank}'s part of {matrix} is {rows} x {columns}, the whole is {of[0]} x {of[1]}"
                why = "the part is nowhere in it. A partial sum would have the shape of the whole."
                raise ValueError(f"{sizes}, and {why}")
            if place is None:
                partial.add(matrix)
            held[rank][matrix] = place or ((0, rows), (0, columns))
    return Split(name, held, exchange, tuple(matrix for matrix in whole if matrix in partial))


def _place(part: Any, whole: Any) -> Part | None:
    """Where in the whole the numbers of a part are; None if nowhere."""
    h, w = part.shape
    for top in range(0, whole.shape[0] - h + 1, h):
        for left in range(0, whole.shape[1] - w + 1, w):
            if float(abs(whole[top : top + h, left : left + w] - part).max()) <= _EQUAL:
                return (top, top + h), (left, left + w)
    return None


def side_by_side(splits: Sequence[Split], shapes: Shapes, *, alt: str) -> Figure:
    """The matrices in `shapes`, drawn to scale, once per split (across) and rank (down)."""
    n_ranks = len(splits[0].held)
    panel = (WIDTH - _LEFT - 8) / len(splits)
    across = sum(columns for _, columns in shapes.values())
    tall = max(rows for rows, _ in shapes.values())
    unit = min((panel - 18 - _GAP * (len(shapes) - 1)) / across, 80 / tall)
    box = _HEAD + unit * tall + 14
    between = 26.0 * max(len(s.exchange) for s in splits) + 16
    tops = [_TITLE + 8 + r * (box + between) for r in range(n_ranks)]
    hatched = any(s.partial for s in splits)
    patterns = (  # slanted lines in the colour of each rank, for what is only a share of a sum
        f'<pattern id="partial{r}" width="8" height="8" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="8" height="8" fill="{PAPER}"/>'
        f'<rect width="3" height="8" fill="{rank_colour(r)}"/></pattern>'
        for r in range(n_ranks)
    )
    marks = [f"<defs>{''.join(patterns)}</defs>"] if hatched else []
    marks += [label(10, top + box / 2 + 8, f"rank {r}") for r, top in enumerate(tops)]
    for k, split in enumerate(splits):
        x0 = _LEFT + k * panel
        marks.append(label(x0 + panel / 2, 26, split.name, anchor="middle", bold=True))
        for r, top in enumerate(tops):
            marks.append(rect(x0 + 3, top, panel - 6, box, stroke=MUTED, radius=6))
            marks += _matrices(split, shapes, r, x0 + panel / 2, top, unit)
        rows = ((top - between + 26 * i, words) for top in tops[1:] for i, words in enumerate(split.exchange, 1))
        marks += [label(x0 + panel / 2, y, words, anchor="middle") for y, words in rows]
    bottom = tops[-1] + box + 8
    if hatched:
        swatch = rect(10, bottom + 6, 18, 16, fill="url(#partial0)", stroke=rank_colour(0), radius=0)
        marks += [swatch, label(36, bottom + 21, "hatched: a partial sum")]
        bottom += 32
    return drawing(WIDTH, bottom, *marks, alt=alt)


def _matrices(split: Split, shapes: Shapes, rank: int, centre: float, top: float, unit: float) -> list[str]:
    """Outlines of all matrices, filled where the rank holds them."""
    total = sum(c for _, c in shapes.values()) * unit + _GAP * (len(shapes) - 1)
    tall = max(rows for rows, _ in shapes.values()) * unit
    marks, x = [], centre - total / 2
    for name, (rows, columns) in shapes.items():
        y = top + _HEAD + 4 + (tall - rows * unit) / 2
        marks.append(label(x + columns * unit / 2, y - 6, name, anchor="middle", fill=INK))
        (r0, r1), (c0, c1) = split.held[rank][name]
        fill = f"url(#partial{rank})" if name in split.partial else rank_colour(rank)
        marks.append(rect(x + c0 * unit, y + r0 * unit, (c1 - c0) * unit, (r1 - r0) * unit, fill=fill, radius=0))
        # lines between the numbers
        marks += [line(x, y + i * unit, x + columns * unit, y + i * unit, stroke=PAPER) for i in range(1, rows)]
        marks += [line(x + j * unit, y, x + j * unit, y + rows * unit, stroke=PAPER) for j in range(1, columns)]
        marks.append(rect(x, y, columns * unit, rows * unit, stroke=INK, radius=0))
        x += columns * unit + _GAP
    return marks
