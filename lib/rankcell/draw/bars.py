"""Bars from zero on a linear axis: how long each is, of what it is made, and a limit that it may cross.

Pure functions from numbers to a `Figure`. Bars of bytes by rank, with the formula under each, are in `memory`;
lines and ladders are in `charts`.
"""

from collections.abc import Callable, Mapping

from .memory import colour_of
from .parts import EDGE, WIDTH, key, pale, round_ticks, swatch, text_width
from .svg import COLOURS, INK, LINE, MUTED, Figure, drawing, label, line, rect

_LIMIT = INK  # no bar has it
_ROW, _BAR = 60, 22  # px


def bars(
    rows: Mapping[str, float | Mapping[str, float]],
    *,
    unit: str,
    format_value: Callable[[float], str] = "{:g}".format,
    limit: tuple[str, float] | None = None,
    measured: bool = False,
    alt: str = "",
) -> Figure:
    """Horizontal bars, one per row, from zero, all to one scale; a row may be a pile of named parts.

        bars({"7 billion": {"weights": 14, "optimizer": 84}}, unit="GB", limit=("one GPU has", 80))

    `unit` names the axis; `limit` is a name and a value where an upright line stands. Bars that were measured
    are solid, others pale with an outline.

    Raises:
        ValueError: there are no rows, or a value is below zero.
    """
    parts = {name: row if isinstance(row, Mapping) else {"": row} for name, row in rows.items()}
    if not parts or any(value < 0 for row in parts.values() for value in row.values()):
        raise ValueError("Bars need at least one row, and values of zero or more.")
    totals = {name: sum(row.values()) for name, row in parts.items()}
    most = max([*totals.values(), *([limit[1]] if limit else [])]) or 1.0
    scale = (WIDTH - 2 * EDGE) / most
    kinds = list(dict.fromkeys(kind for row in parts.values() for kind in row if kind))
    colours = {kind: colour_of(kind, kinds) for kind in kinds} | {"": COLOURS["all_reduce"]}

    def inside(kind: str) -> str:
        return colours[kind] if measured else pale(colours[kind], 0.45)

    marks, top = (
        key([(k, swatch(inside(k), colours[k])) for k in kinds], 8, left=EDGE, gap=26) if kinds else ([], 8)
    )
    if limit:
        marks.append(label(EDGE + 26, top + 17, f"{limit[0]}: {format_value(limit[1])}", fill=INK))
        marks.append(line(EDGE + 9, top, EDGE + 9, top + 22, stroke=_LIMIT, width=3))
        top += 32
    bottom = top + _ROW * len(parts) + 2
    for tick in round_ticks(0, most, most=4):
        x = EDGE + tick * scale
        marks.append(line(x, bottom - 4, x, bottom + 5, stroke=MUTED))
        said = format_value(tick) if tick else "0"
        half = text_width(said) / 2
        at = min(max(x, EDGE + half), WIDTH - EDGE - half)
        marks.append(label(at, bottom + 26, said, anchor="middle", fill=MUTED))
    marks.append(line(EDGE, bottom, WIDTH - EDGE, bottom, stroke=LINE))
    for k, (name, row) in enumerate(parts.items()):
        y, x = top + _ROW * k, float(EDGE)
        marks.append(label(EDGE, y + 20, name))
        marks.append(label(WIDTH - EDGE, y + 20, format_value(totals[name]), anchor="end", bold=True))
        for kind, value in row.items():
            tip = f"{name}{', ' if kind else ''}{kind}: {format_value(value)}"
            width, edge = value * scale, colours[kind]
            marks.append(rect(x, y + 28, width, _BAR, fill=inside(kind), stroke=edge, radius=0, title=tip))
            x += value * scale
    if limit:
        x = EDGE + limit[1] * scale
        marks += [
            line(x, top + _ROW * k + 24, x, top + _ROW * k + 54, stroke=_LIMIT, width=3)
            for k in range(len(parts))
        ]
    marks.append(label(WIDTH / 2, bottom + 54, unit, anchor="middle", fill=MUTED))
    said = f"{max(totals, key=totals.__getitem__)} has the longest bar: {format_value(max(totals.values()))}."
    lines = [f"{unit}"] + [
        f"{name}: {format_value(totals[name])}"
        + "".join(f"{', ' if i else ' ('}{k} {format_value(v)}" for i, (k, v) in enumerate(row.items()) if k)
        + (")" if any(row) else "")
        for name, row in parts.items()
    ]
    if limit:
        lines.append(f"| {limit[0]}: {format_value(limit[1])}")
    return drawing(WIDTH, bottom + 66, *marks, alt=alt or said, text="\n".join(lines))
