"""Traffic as a matrix: how many bytes went from each rank (a row) to each other rank (a column), counted (`run.wire`)
or by a formula; dark is much.
"""

from collections.abc import Sequence

from .parts import EDGE, WIDTH, pale, text_width
from .svg import COLOURS, INK, LINE, MUTED, PAPER, Figure, drawing, format_bytes, label, rect

_LEFT, _TOTAL, _ROW = 84, 104, 46


def traffic(matrix: Sequence[Sequence[float]], *, title: str = "") -> Figure:
    """Bytes from each rank i (row) to each rank j (column), `matrix[i][j]`, with the sum that each rank sent."""
    rows = [[float(x) for x in row] for row in matrix]
    n = len(rows)
    marks, top = ([label(EDGE, 30, title, bold=True)], 46.0) if title else ([], 12.0)
    cell = (WIDTH - EDGE - _LEFT - _TOTAL) / n
    texts = [[format_bytes(x) if x else "" for x in row] for row in rows]
    fits = max(text_width(t) for row in texts for t in row) + 4 <= cell
    marks.append(label(_LEFT + cell * n / 2, top + 18, "to rank", anchor="middle", fill=MUTED))
    marks.append(label(WIDTH - EDGE, top + 18, "sent in all", anchor="end", fill=MUTED))
    top += 50
    shown = range(0, n, max(1, round(0.5 + 26 / cell)))
    marks += [label(_LEFT + cell * (j + 0.5), top - 6, j, anchor="middle", fill=MUTED) for j in shown]
    most = max(x for row in rows for x in row) or 1.0
    for i, row in enumerate(rows):
        y = top + i * _ROW
        marks.append(label(_LEFT - 8, y + 30, f"rank {i}", anchor="end"))
        for j, x in enumerate(row):
            fill, stroke = ("#f4f4f4", "none") if i == j and not x else (pale(COLOURS["all_reduce"], x / most), LINE)
            marks.append(rect(_LEFT + j * cell + 1, y + 1, cell - 2, _ROW - 2, fill=fill, stroke=stroke))
            if fits and texts[i][j]:
                ink = PAPER if x > 0.6 * most else INK
                marks.append(label(_LEFT + (j + 0.5) * cell, y + 30, texts[i][j], anchor="middle", fill=ink))
        marks.append(label(WIDTH - EDGE, y + 30, format_bytes(sum(row)), anchor="end", bold=True))
    return drawing(WIDTH, top + n * _ROW + 10, *marks, alt=f"{title}. " * bool(title) + _finding(rows))


def _finding(rows: Sequence[Sequence[float]]) -> str:
    """How much each rank sends, and over how many links."""
    n, total = len(rows), sum(map(sum, rows))
    if not total:
        return f"Traffic between {n} ranks: no rank sends anything."
    sent = [sum(row) for row in rows]
    links = {(i, j): x for i, row in enumerate(rows) for j, x in enumerate(row)}
    busy = [link for link, x in links.items() if x >= 0.05 * max(links.values())]
    each = f"rank {sent.index(max(sent))} sends most, {format_bytes(max(sent))}"
    if min(sent) >= 0.98 * max(sent):
        each = f"each sends {format_bytes(max(sent))}"
    where = f", over {len(busy)} of {n * (n - 1)} directed pairs"
    if n > 2 and busy == sorted((i, (i + 1) % n) for i in range(n)):
        where = ", all of it to the next rank: a ring"
    return f"Traffic between {n} ranks, {format_bytes(total)} in all: {each}{where}."
