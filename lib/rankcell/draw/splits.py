"""Who holds what: matrices under several splits, side by side; one row of numbers cut in several ways.

A matrix is an outline; the part that a rank holds is filled, or hatched where its numbers are only its share
of a sum. Between the ranks stands what they must tell each other. It draws what it is given (which part of
which matrix) and computes no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .parts import WIDTH, pale, rank_colour, text_width
from .svg import INK, MUTED, PAPER, Figure, drawing, label, line, rect

_LEFT, _TITLE, _HEAD, _GAP = 74, 34, 28, 12
_EDGE, _STRIP = 10, 40  # px beside and across a strip
_FINEST = 5  # px for one number, below which lines between them would hide it
_EQUAL = 1e-6  # how far the numbers of a part may be from those of the whole: rounding
Part = tuple[tuple[int, int], tuple[int, int]]  # rows from, to; columns from, to


@dataclass(frozen=True)
class Split:
    """One way to split a computation over ranks.

    `held` is per rank the part of each matrix that it holds (`None`: nothing of it); `exchange` says in a few
    short lines what the ranks tell each other, and how often. `partial` names the matrices of which a rank
    holds partial sums only.
    """

    name: str
    held: Sequence[Mapping[str, Part | None]]
    exchange: Sequence[str] = ()
    partial: Sequence[str] = ()


def part(rows: slice | int, columns: slice | int, *, of: tuple[int, int]) -> Part:
    """A part of a matrix of shape `of`, from slices: `part(slice(0, 4), slice(None), of=(8, 4))`."""

    def ends(chosen: slice | int, length: int) -> tuple[int, int]:
        return (chosen, chosen + 1) if isinstance(chosen, int) else chosen.indices(length)[:2]

    return ends(rows, of[0]), ends(columns, of[1])


def located(
    name: str,
    parts: Sequence[Mapping[str, Any | None]],
    *,
    whole: Mapping[str, Any],
    exchange: Sequence[str] = (),
) -> Split:
    """The split in which every rank holds its `parts`, each found by its numbers in the whole matrix of its name.

        A = torch.randn(8, 8)
        located("columns", [{"A": part} for part in A.chunk(4, 1)], whole={"A": A})
        # parts of (8, 2), held as ((0, 8), (0, 2)), ((0, 8), (2, 4)), ...

    `parts` are per rank its matrices by name, `(rows, columns)`, or None for nothing; `whole` has all matrices
    by name. A part is looked for at multiples of its own shape, to within 1e-6. What has the shape of the whole
    and other numbers is `partial`.

    Raises:
        ValueError: a part is nowhere in the whole and does not have its shape.
    """
    held: list[dict[str, Part | None]] = [{} for _ in parts]
    partial = set()
    for rank, of_rank in enumerate(parts):
        for matrix, mine in of_rank.items():
            place = None if mine is None else _place(mine, whole[matrix])
            if mine is not None and place is None:
                (rows, columns), of = mine.shape, tuple(whole[matrix].shape)
                if (rows, columns) != of:
                    raise ValueError(
                        f"Rank {rank}'s part of {matrix} is {rows} x {columns}, the whole is {of[0]} x {of[1]}, "
                        f"and the part is nowhere in it. A partial sum would have the shape of the whole."
                    )
                place = (0, rows), (0, columns)
                partial.add(matrix)
            held[rank][matrix] = place
    return Split(name, held, exchange, partial=tuple(matrix for matrix in whole if matrix in partial))


def _place(part: Any, whole: Any) -> Part | None:
    """Where in the whole the numbers of a part are; None if nowhere."""
    h, w = part.shape
    for top in range(0, whole.shape[0] - h + 1, h):
        for left in range(0, whole.shape[1] - w + 1, w):
            if float(abs(whole[top : top + h, left : left + w] - part).max()) <= _EQUAL:
                return (top, top + h), (left, left + w)
    return None


def side_by_side(splits: Sequence[Split], shapes: Mapping[str, tuple[int, int]], *, alt: str = "") -> Figure:
    """The matrices in `shapes`, drawn to scale, once per split (across) and rank (down).

    Raises:
        ValueError: there is no split, or the splits have different numbers of ranks.
    """
    counts = {len(s.held) for s in splits}
    if len(counts) != 1:
        raise ValueError(f"Every split needs the same number of ranks; these have {sorted(counts)}.")
    n_ranks = counts.pop()
    panel = (WIDTH - _LEFT - 8) / len(splits)
    across = sum(columns for _, columns in shapes.values())
    tall = max(rows for rows, _ in shapes.values())
    unit = min((panel - 18 - _GAP * (len(shapes) - 1)) / across, 80 / tall)
    box = _HEAD + unit * tall + 14
    between = 26.0 * max(len(s.exchange) for s in splits) + 16
    tops = [_TITLE + 8 + r * (box + between) for r in range(n_ranks)]
    hatched = any(s.partial for s in splits)
    marks = [_hatches(n_ranks)] if hatched else []
    marks += [label(10, top + box / 2 + 8, f"rank {r}") for r, top in enumerate(tops)]
    for k, split in enumerate(splits):
        x0 = _LEFT + k * panel
        marks.append(label(x0 + panel / 2, 26, split.name, anchor="middle", bold=True))
        for r, top in enumerate(tops):
            marks.append(rect(x0 + 3, top, panel - 6, box, stroke=MUTED, radius=6))
            marks += _matrices(split.held[r], shapes, r, x0 + panel / 2, top, unit, split.partial)
        for top in tops[1:]:
            for i, words in enumerate(split.exchange):
                at = top - between + 26 * (i + 1)
                size = min(20.0, 20 * (panel - 4) / max(text_width(words), 1))
                marks.append(label(x0 + panel / 2, at, words, anchor="middle", size=size))
    alt = alt or "; ".join(f"{s.name}: {' '.join(s.exchange)}" for s in splits) + "."
    bottom = tops[-1] + box + 8
    if hatched:
        swatch = rect(10, bottom + 6, 18, 16, fill="url(#partial0)", stroke=rank_colour(0), radius=0)
        marks += [swatch, label(36, bottom + 21, "hatched: a partial sum")]
        bottom += 32
    return drawing(WIDTH, bottom, *marks, alt=alt)


def _hatches(n_ranks: int) -> str:
    """One pattern of slanted lines per rank, in its colour, for what is only a share of a sum."""
    patterns = (
        f'<pattern id="partial{r}" width="8" height="8" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="8" height="8" fill="{PAPER}"/>'
        f'<rect width="3" height="8" fill="{rank_colour(r)}"/></pattern>'
        for r in range(n_ranks)
    )
    return f"<defs>{''.join(patterns)}</defs>"


def strips(
    cuts: Mapping[str, Sequence[tuple[str, float]]],
    *,
    unit: str = "numbers",
    across: bool = True,
    alt: str = "",
) -> Figure:
    """One long row of numbers, drawn once for every way to cut it, all to the same scale.

        strips({"3 layers": [("layer 0", 961), ...], "4 shards": [("rank 0", 721), ...]})

    A piece is its name and its length in `unit`; a piece called "rank 2" has the colour of that rank, and so has
    "rank 2: 7", which says 7. With `across` the cuts of each strip go on, dashed, through the ones above, so
    that one sees what they cross.

    Raises:
        ValueError: there is nothing to draw, or one strip is longer than another.
    """
    lengths = {name: sum(length for _, length in pieces) for name, pieces in cuts.items()}
    if not lengths or not all(lengths.values()):
        raise ValueError("There is nothing to draw: give every strip pieces that have a length.")
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length:,.0f}" for name, length in lengths.items())
        raise ValueError(f"All strips cut the same row of {unit}, but their lengths differ: {said}.")
    scale = (WIDTH - 2 * _EDGE) / next(iter(lengths.values()))
    marks, dashed, names, y = [], [], [], 8.0
    first_top = y + 34
    for name, pieces in cuts.items():
        if across and y > 8:  # paper under the name, where cuts go through its row
            names.append(rect(_EDGE, y + 5, min(1.1 * text_width(name), WIDTH - 2 * _EDGE), 22, fill=PAPER))
        names.append(label(_EDGE, y + 22, name, bold=True))
        top, x = y + 34, float(_EDGE)
        for index, (words, length) in enumerate(pieces):
            fill, tip = _colour_of(words, index), f"{words}: {length:,.0f} {unit}"
            marks.append(rect(x, top, length * scale, _STRIP, fill=fill, stroke=INK, title=tip))
            said = words.partition(": ")[2] or words
            if text_width(said) + 6 < length * scale:
                marks.append(label(x + length * scale / 2, top + 27, said, anchor="middle"))
            x += length * scale
            if across and index < len(pieces) - 1 and top > first_top:
                dashed.append(line(x, first_top, x, top, stroke=INK, dash="5 4"))
        y = top + _STRIP + 8
    counts = "; ".join(f"{name}: {len(pieces)} pieces" for name, pieces in cuts.items())
    return drawing(WIDTH, y + 4, *marks, *dashed, *names, alt=alt or f"{counts}, to one scale.")


def _colour_of(words: str, index: int) -> str:
    """The colour of a rank for "rank 2" and "rank 2: 7"; for other pieces two greys in turn."""
    kind, _, number = words.partition(": ")[0].partition(" ")
    if kind == "rank" and number.isdigit():
        return pale(rank_colour(int(number)), 0.6)
    return pale(MUTED, 0.15 if index % 2 else 0.35)


def _matrices(
    held: Mapping[str, Part | None],
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
    centre: float,
    top: float,
    unit: float,
    partial: Sequence[str],
) -> list[str]:
    """Outlines of all matrices, filled where the rank holds them."""
    total = sum(c for _, c in shapes.values()) * unit + _GAP * (len(shapes) - 1)
    tall = max(rows for rows, _ in shapes.values()) * unit
    marks, x = [], centre - total / 2
    for name, (rows, columns) in shapes.items():
        y = top + _HEAD + 4 + (tall - rows * unit) / 2
        marks.append(label(x + columns * unit / 2, y - 6, name, anchor="middle", fill=INK))
        if (mine := held.get(name)) is not None:
            (r0, r1), (c0, c1) = mine
            fill = f"url(#partial{rank})" if name in partial else rank_colour(rank)
            marks.append(
                rect(x + c0 * unit, y + r0 * unit, (c1 - c0) * unit, (r1 - r0) * unit, fill=fill, radius=0)
            )
        grid = unit >= _FINEST  # lines between the numbers
        for i in range(1, rows if grid else 0):
            marks.append(line(x, y + i * unit, x + columns * unit, y + i * unit, stroke=PAPER))
        for j in range(1, columns if grid else 0):
            marks.append(line(x + j * unit, y, x + j * unit, y + rows * unit, stroke=PAPER))
        marks.append(rect(x, y, columns * unit, rows * unit, stroke=INK, radius=0))
        x += columns * unit + _GAP
    return marks
