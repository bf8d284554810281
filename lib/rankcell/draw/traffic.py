"""The traffic of a run as a matrix: how many bytes went from each rank to each other rank.

A row is a sender, a column a receiver, dark is much. It draws a matrix that it is given: what the kernel
counted (`run.wire`), what an algorithm sends by its formula, or both beside each other as two pictures.
"""

import itertools
from collections.abc import Sequence

from ..results import name_ranks
from .parts import EDGE, WIDTH, pale, text_width
from .svg import COLOURS, INK, LINE, MUTED, PAPER, Figure, drawing, format_bytes, label, rect

_LEFT, _TOTAL, _ROW = 84, 104, 46


def traffic(
    matrix: Sequence[Sequence[float]],
    *,
    title: str = "",
    predicted: bool = False,
    nodes: Sequence[str] = (),
) -> Figure:
    """Bytes from each rank (row) to each rank (column), with the sum that each rank sent.

    `matrix[i][j]` is the number of bytes from rank i to rank j; a predicted matrix is outlined. `nodes`, the
    name of each rank's node (`run.nodes`), frames what stays inside a node.

    Raises:
        ValueError: the matrix is not square, a number in it is negative, or there is not one node per rank.
    """
    rows = [[float(x) for x in row] for row in matrix]
    n = len(rows)
    if not n or any(len(row) != n for row in rows):
        lengths = ", ".join(str(len(row)) for row in rows) or "none"
        raise ValueError(f"Traffic needs one row and one column per rank; {n} rows have lengths {lengths}.")
    if any(not x >= 0 for row in rows for x in row):
        raise ValueError("A rank cannot send fewer than 0 bytes.")
    if nodes and len(nodes) != n:
        raise ValueError(f"Traffic of {n} ranks needs the node of each of them; got {len(nodes)} names.")
    finding = _finding(rows, predicted) + _crossing(rows, nodes)
    return _draw(rows, title, predicted, f"{title}. {finding}" if title else finding, nodes)


def _crossing(rows: Sequence[Sequence[float]], nodes: Sequence[str]) -> str:
    """A sentence that says how much goes from node to node."""
    if not nodes:
        return ""
    crossing = sum(x for i, row in enumerate(rows) for j, x in enumerate(row) if nodes[i] != nodes[j])
    total = sum(map(sum, rows)) or 1.0
    return f" {format_bytes(crossing)} ({crossing / total:.0%}) cross from node to node."


def _finding(rows: Sequence[Sequence[float]], predicted: bool) -> str:
    n, total = len(rows), sum(map(sum, rows))
    what = "Predicted traffic" if predicted else "Traffic"
    if not total:
        return f"{what} between {n} ranks: no rank sends anything."
    sent = [sum(row) for row in rows]
    least, most = min(sent), max(sent)
    links = [(x, i, j) for i, row in enumerate(rows) for j, x in enumerate(row)]
    busy = [(i, j) for x, i, j in links if x >= 0.05 * max(links)[0] and x]
    each = (
        f"each sends {format_bytes(most)}"
        if least >= 0.98 * most
        else f"rank {sent.index(most)} sends most, {format_bytes(most)}"
    )
    if len(busy) == n > 2 and all((i + 1) % n == j for i, j in busy):
        where = ", all of it to the next rank: a ring"
    elif len(busy) == n > 2 and all((i - 1) % n == j for i, j in busy):
        where = ", all of it to the rank before: a ring"
    else:
        where = f", over {len(busy)} of {n * (n - 1)} directed pairs"
    return f"{what} between {n} ranks, {format_bytes(total)} in all: {each}{where}."


def _draw(
    rows: Sequence[Sequence[float]], title: str, predicted: bool, alt: str, nodes: Sequence[str]
) -> Figure:
    n, marks, top = len(rows), [], 12.0
    if title:
        marks.append(label(EDGE, top + 18, title, bold=True))
        top += 34
    cell = (WIDTH - EDGE - _LEFT - _TOTAL) / n
    texts = [[format_bytes(x) if x else "" for x in row] for row in rows]
    widest = max(text_width(t) for row in texts for t in row)
    fits = widest + 4 <= cell
    marks.append(label(_LEFT + cell * n / 2, top + 18, "to rank", anchor="middle", fill=MUTED))
    marks.append(label(WIDTH - EDGE, top + 18, "sent in all", anchor="end", fill=MUTED))
    top += 50
    step = max(1, round(0.5 + 26 / cell))
    for j in range(0, n, step):
        marks.append(label(_LEFT + cell * (j + 0.5), top - 6, j, anchor="middle", fill=MUTED))
    most = max(x for row in rows for x in row) or 1.0
    for i, row in enumerate(rows):
        y = top + i * _ROW
        marks.append(label(_LEFT - 8, y + 30, f"rank {i}", anchor="end"))
        for j, x in enumerate(row):
            marks.append(_cell(_LEFT + j * cell, y, cell, x / most, predicted, diagonal=i == j))
            if fits and texts[i][j]:
                ink = PAPER if x > 0.6 * most and not predicted else INK
                marks.append(label(_LEFT + (j + 0.5) * cell, y + 30, texts[i][j], anchor="middle", fill=ink))
        marks.append(label(WIDTH - EDGE, y + 30, format_bytes(sum(row)), anchor="end", bold=True))
    bottom = top + n * _ROW + 10
    for name, block in itertools.groupby(range(len(nodes)), key=lambda i: nodes[i]):
        members = list(block)
        x, y, side = _LEFT + members[0] * cell, top + members[0] * _ROW, len(members)
        marks.append(rect(x, y, side * cell, side * _ROW, stroke=INK, radius=4))
        bottom += 28
        marks.append(label(EDGE, bottom - 14, f"{name}: {name_ranks(members)}, inside its frame", fill=MUTED))
    return drawing(WIDTH, bottom, *marks, alt=alt)


def _cell(x: float, y: float, width: float, share: float, predicted: bool, *, diagonal: bool) -> str:
    if diagonal and not share:
        return rect(x + 1, y + 1, width - 2, _ROW - 2, fill="#f4f4f4")
    colour = COLOURS["all_reduce"]
    if predicted:
        return rect(x + 2, y + 2, width - 4, _ROW - 4, fill=PAPER, stroke=colour if share else LINE)
    return rect(x + 1, y + 1, width - 2, _ROW - 2, fill=pale(colour, share), stroke=LINE)
