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
        ValueError: the matrix is not square.
    """
    rows = [[float(x) for x in row] for row in matrix]
    n, marks, top = len(rows), [], 12.0
    if not n or any(len(row) != n for row in rows):
        lengths = ", ".join(str(len(row)) for row in rows) or "none"
        raise ValueError(f"Traffic needs one row and one column per rank; {n} rows have lengths {lengths}.")
    if title:
        marks.append(label(EDGE, top + 18, title, bold=True))
        top += 34
    cell = (WIDTH - EDGE - _LEFT - _TOTAL) / n
    texts = [[format_bytes(x) if x else "" for x in row] for row in rows]
    fits = max(text_width(t) for row in texts for t in row) + 4 <= cell
    marks.append(label(_LEFT + cell * n / 2, top + 18, "to rank", anchor="middle", fill=MUTED))
    marks.append(label(WIDTH - EDGE, top + 18, "sent in all", anchor="end", fill=MUTED))
    top += 50
    for j in range(0, n, max(1, round(0.5 + 26 / cell))):
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
    alt = f"{title}. " * bool(title) + _finding(rows, predicted, nodes)
    return drawing(WIDTH, bottom, *marks, alt=alt)


def _finding(rows: Sequence[Sequence[float]], predicted: bool, nodes: Sequence[str]) -> str:
    """How much each rank sends, over how many links, and how much goes from node to node."""
    n, total = len(rows), sum(map(sum, rows))
    what = "Predicted traffic" if predicted else "Traffic"
    if not total:
        return f"{what} between {n} ranks: no rank sends anything."
    sent = [sum(row) for row in rows]
    links = {(i, j): x for i, row in enumerate(rows) for j, x in enumerate(row)}
    busy = [link for link, x in links.items() if x >= 0.05 * max(links.values())]
    each = f"rank {sent.index(max(sent))} sends most, {format_bytes(max(sent))}"
    if min(sent) >= 0.98 * max(sent):
        each = f"each sends {format_bytes(max(sent))}"
    where = f", over {len(busy)} of {n * (n - 1)} directed pairs"
    if n > 2 and busy == sorted((i, (i + 1) % n) for i in range(n)):
        where = ", all of it to the next rank: a ring"
    said = f"{what} between {n} ranks, {format_bytes(total)} in all: {each}{where}."
    if nodes:
        crossing = sum(x for (i, j), x in links.items() if nodes[i] != nodes[j])
        said += f" {format_bytes(crossing)} ({crossing / total:.0%}) cross from node to node."
    return said


def _cell(x: float, y: float, width: float, share: float, predicted: bool, *, diagonal: bool) -> str:
    if diagonal and not share:
        return rect(x + 1, y + 1, width - 2, _ROW - 2, fill="#f4f4f4")
    colour = COLOURS["all_reduce"]
    if predicted:
        return rect(x + 2, y + 2, width - 4, _ROW - 4, fill=PAPER, stroke=colour if share else LINE)
    return rect(x + 1, y + 1, width - 2, _ROW - 2, fill=pale(colour, share), stroke=LINE)
