"""Bars from zero on a linear axis: how long each is, of what it is made, and a limit that it may cross."""

import itertools
from collections.abc import Callable, Mapping

from .memory import COLOURS as OF_MEMORY
from .parts import EDGE, WIDTH, key, pale, round_ticks, swatch, ticks_below
from .svg import COLOURS, INK, LINE, MUTED, RANK_COLOURS, Figure, drawing, label, line, rect

_ROW, _BAR = 60, 22  # px
_OTHERS = tuple(c for c in (*RANK_COLOURS, "#444444") if c not in OF_MEMORY.values())


def bars(
    rows: Mapping[str, float | Mapping[str, float]],
    *,
    unit: str,
    format_value: Callable[[float], str] = "{:g}".format,
    limit: tuple[str, float] | None = None,
    alt: str = "",
) -> Figure:
    """Horizontal bars, one per row, from zero, all to one scale; a row may be a pile of named parts.

        bars({"7 billion": {"weights": 14, "optimizer": 84}}, unit="GB", limit=("one GPU has", 80))

    `unit` names the axis; `format_value` writes values and ticks; `limit` is a name and a value where an upright
    line stands. Parts named as `rankcell.memory` names them have its colours.
    """
    parts = {name: row if isinstance(row, Mapping) else {"": row} for name, row in rows.items()}
    totals = {name: sum(row.values()) for name, row in parts.items()}
    most = max([*totals.values(), *([limit[1]] if limit else [])]) or 1.0
    scale = (WIDTH - 2 * EDGE) / most
    kinds = list(dict.fromkeys(kind for row in parts.values() for kind in row if kind))
    free = itertools.cycle(_OTHERS)
    edges = {kind: OF_MEMORY.get(kind) or next(free) for kind in kinds} | {"": COLOURS["all_reduce"]}
    fills = {kind: pale(edge, 0.45) for kind, edge in edges.items()}
    entries = [(kind, swatch(fills[kind], edges[kind])) for kind in kinds]
    marks, top = key(entries, 8, left=EDGE, gap=26) if kinds else ([], 8)
    if limit:
        marks.append(label(EDGE + 26, top + 17, f"{limit[0]}: {format_value(limit[1])}", fill=INK))
        marks.append(line(EDGE + 9, top, EDGE + 9, top + 22, stroke=INK, width=3))
        top += 32
    bottom = top + _ROW * len(parts) + 2
    ticks = ((EDGE + t * scale, format_value(t) if t else "0") for t in round_ticks(0, most, most=4))
    marks += ticks_below(ticks, bottom - 4, bottom + 5, bottom + 26, stroke=MUTED)
    marks.append(line(EDGE, bottom, WIDTH - EDGE, bottom, stroke=LINE))
    for k, (name, row) in enumerate(parts.items()):
        y, x = top + _ROW * k, float(EDGE)
        marks.append(label(EDGE, y + 20, name))
        marks.append(label(WIDTH - EDGE, y + 20, format_value(totals[name]), anchor="end", bold=True))
        for kind, value in row.items():
            tip, width = f"{name}{', ' if kind else ''}{kind}: {format_value(value)}", value * scale
            marks.append(rect(x, y + 28, width, _BAR, fill=fills[kind], stroke=edges[kind], radius=0, title=tip))
            x += width
    if limit:
        x, starts = EDGE + limit[1] * scale, (top + _ROW * k for k in range(len(parts)))
        marks += [line(x, y + 24, x, y + 54, stroke=INK, width=3) for y in starts]
    marks.append(label(WIDTH / 2, bottom + 54, unit, anchor="middle", fill=MUTED))
    said = f"{max(totals, key=totals.__getitem__)} has the longest bar: {format_value(max(totals.values()))}."
    return drawing(WIDTH, bottom + 66, *marks, alt=alt or said)
