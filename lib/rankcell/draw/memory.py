"""What memory holds, by kind: over the course of a step, and by rank beside the formula.

Pure functions from bytes, or from the samples of `rankcell.memory`, to a `Figure`. A kind has the same colour
in both pictures and in every notebook; measured is solid, by formula outlined. Nothing here measures.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from xml.sax.saxutils import escape

from ..results import KINDS, Memory
from .parts import EDGE, WIDTH, Axis, key, round_ticks, swatch, text_width, ticks_below, ticks_beside
from .svg import INK, MUTED, PAPER, RANK_COLOURS, Figure, drawing, format_bytes, label, line, rect

# From the bottom of the pile to its top.
COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "rest": "#bbbbbb",
}
_OTHERS = tuple(c for c in (*RANK_COLOURS, "#444444") if c not in COLOURS.values())
_WHITE_ON = {"#0072b2"}
_HEIGHT = 420  # px of the picture over time


def colour_of(kind: str, kinds: Sequence[str] = ()) -> str:
    """The colour of a kind: the course's own, or the next free one for a kind that only `kinds` knows."""
    if kind in COLOURS:
        return COLOURS[kind]
    others = [k for k in kinds if k not in COLOURS] or [kind]
    return _OTHERS[others.index(kind) % len(_OTHERS)]


def over_time(
    at: Sequence[float] | Sequence[Memory],
    held: Mapping[str, Sequence[float]] | None = None,
    *,
    x_label: str = "",
    phases: Sequence[tuple[float, str]] = (),
    by: str = "change",
) -> Figure:
    """Bytes held, piled up by kind; `held[kind][i]` were held from `at[i]` until the next place.

        over_time(run.ranks[0].memory)  # what rankcell.memory measured, with its phases
        over_time([0, 1, 2], {"parameters": [4, 4, 4], "gradients": [0, 4, 0]}, x_label="step")

    `phases` are the places where a part of the step begins, and its name. Samples stand side by side, one
    place for each change of memory, or with `by="time"` where they were taken, in ms from the first. Kinds
    are piled in the order parameters, gradients, optimizer, activations, rest, others.
    """
    if not at:
        raise ValueError("There is nothing to draw: memory was never looked at.")
    places = [place for place in at if not isinstance(place, Memory)]
    if samples := [sample for sample in at if isinstance(sample, Memory)]:
        begin = samples[0].at
        places = [float(i) if by == "change" else 1e3 * (s.at - begin) for i, s in enumerate(samples)]
        starts = [i for i, s in enumerate(samples) if i == 0 or s.phase != samples[i - 1].phase]
        phases = phases or [(places[i], samples[i].phase) for i in starts]
        x_label = x_label or ("changes of memory" if by == "change" else "time in ms")
        held = {kind: [getattr(s, kind) for s in samples] for kind in KINDS}
    held = held or {}
    kinds = _in_order(held)
    total = [sum(held[kind][i] for kind in kinds) for i in range(len(places))]
    peak = max(range(len(places)), key=lambda i: total[i])
    ticks = _binary_ticks(total[peak] or 1.0)
    marks, below_key = _key(kinds)
    left = EDGE + max(text_width(format_bytes(t)) for t in ticks) + 8
    right, bottom = WIDTH - EDGE - 8, _HEIGHT - 62
    px = Axis(places[0], max(places[-1], places[0] + (places[-1] <= places[0])), left, right)
    names, rows = _phase_names(phases, px)
    py = Axis(0, max(total[peak] or 1.0, ticks[-1]), bottom, below_key + 26 * rows + 14)
    grid, sizes = ticks_beside(((py(t), format_bytes(t)) for t in ticks), left, right)
    marks += [*grid, *_piles(places, held, kinds, px, py), *sizes]
    for (begin, _), (x, row, name) in zip(phases, names, strict=True):
        y = below_key + 26 * row + 20
        if px(begin) > left + 1:
            marks.append(line(px(begin), y - 16, px(begin), bottom, stroke=MUTED, dash="2 4"))
        if name:
            marks.append(label(x, y, name, fill=MUTED))
    if by == "time":
        times = ((px(t), f"{t:g}") for t in round_ticks(px.low, px.high, most=5))
        marks += ticks_below(times, bottom, bottom + 5, bottom + 26, stroke=MUTED)
    marks.append(line(left, bottom, right, bottom, stroke=MUTED))
    marks.append(label((left + right) / 2, _HEIGHT - 14, x_label, anchor="middle", fill=MUTED))
    where = next((f" in {name}" for start, name in reversed(list(phases)) if start <= places[peak]), "")
    parts = ", ".join(f"{k} {format_bytes(held[k][peak])}" for k in kinds if held[k][peak])
    alt = f"Memory is highest{where}, {format_bytes(total[peak])}: {parts}."
    return drawing(WIDTH, _HEIGHT, *marks, alt=alt)


def by_rank(
    measured: Sequence[Mapping[str, float]],
    formula: Sequence[Mapping[str, float]] = (),
    *,
    names: Sequence[str] = (),
    alt: str = "",
) -> Figure:
    """Bytes by kind, one bar per rank (or per name), and under each, outlined, what the formula says.

        by_rank([r.peak.by_kind for r in run.ranks])  # what rankcell.memory measured

    All bars share one scale from zero. `names` stand in for "rank 0", "rank 1", ...
    """
    if not measured:
        raise ValueError("There is nothing to draw: no rank was measured.")
    names = tuple(names) or tuple(f"rank {r}" for r in range(len(measured)))
    kinds = _in_order([kind for row in (*measured, *formula) for kind in row if row[kind]]) or ["rest"]
    most = max(sum(row.values()) for row in (*measured, *formula)) or 1.0
    marks, y = _key(kinds)
    if formula:
        marks.append(rect(EDGE, y + 4, 18, 16, fill=PAPER, stroke=INK))
        marks.append(label(EDGE + 26, y + 19, "outlined: by formula", fill=MUTED))
        y += 28
    for i, (name, row) in enumerate(zip(names, measured, strict=True)):
        total = format_bytes(sum(row.values()))
        marks.append(label(EDGE, y + 28, name))
        marks.append(label(WIDTH - EDGE, y + 28, total, anchor="end", bold=True))
        marks += _bar(row, kinds, most, y + 36, 30, solid=True)
        y += 72
        if formula:
            marks += _bar(formula[i], kinds, most, y - 2, 16, solid=False)
            y += 20
    return drawing(WIDTH, y + 4, *marks, alt=alt or _said_by_rank(names, measured, kinds, formula))


def _in_order(kinds: Mapping[str, object] | Sequence[str]) -> list[str]:
    """The course's kinds from bottom to top, then the others as they came; each once."""
    given = list(dict.fromkeys(kinds))
    return [k for k in COLOURS if k in given] + [k for k in given if k not in COLOURS]


def _key(kinds: Sequence[str]) -> tuple[list[str], float]:
    """One square and name per kind, in the order of the pile, and where the picture goes on below."""
    entries = [(kind, swatch(colour_of(kind, kinds))) for kind in kinds]
    marks, bottom = key(entries, 10, left=EDGE, gap=34, ink=INK)
    return marks, bottom + 2


def _bar(
    row: Mapping[str, float], kinds: Sequence[str], most: float, y: float, height: float, *, solid: bool
) -> list[str]:
    scale, x, marks = (WIDTH - 2 * EDGE) / most, float(EDGE), []
    for kind in filter(row.get, kinds):
        colour, width, text = colour_of(kind, kinds), row[kind] * scale, format_bytes(row[kind])
        if not solid:
            outline = partial(rect, fill=PAPER, stroke=colour, stroke_width=2, radius=0)
            marks.append(outline(x + 1, y, width - 2, height, title=f"{kind}: {text} by formula"))
        else:
            solid_bar = partial(rect, fill=colour, stroke=PAPER, radius=0)
            marks.append(solid_bar(x, y, width, height, title=f"{kind}: {text}"))
            if text_width(text) + 6 <= width:
                ink = PAPER if colour in _WHITE_ON else INK
                marks.append(label(x + width / 2, y + height / 2 + 7, text, anchor="middle", fill=ink))
        x += width
    return marks


def _piles(
    places: Sequence[float], held: Mapping[str, Sequence[float]], kinds: Sequence[str], px: Axis, py: Axis
) -> list[str]:
    """A staircase for each kind that is ever held, on those below it."""
    marks, below = [], [0.0] * len(places)
    for kind in kinds:
        above = [b + v for b, v in zip(below, held[kind], strict=True)]
        if any(held[kind]):
            path = _steps(places, above, px, py) + _steps(places, below, px, py)[::-1]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
            tip = f"<title>{escape(kind)}: at most {format_bytes(max(held[kind]))}</title>"
            marks.append(f'<polygon points="{points}" fill="{colour_of(kind, kinds)}">{tip}</polygon>')
        below = above
    return marks


def _steps(places: Sequence[float], values: Sequence[float], px: Axis, py: Axis) -> list[tuple[float, float]]:
    """The corners of a staircase; places where nothing changes are left out."""
    corners = [(px(places[0]), py(values[0]))]
    for place, before, now in zip(places[1:], values, values[1:], strict=False):
        if now != before:
            corners += [(px(place), py(before)), (px(place), py(now))]
    return [*corners, (px(places[-1]), py(values[-1]))]


def _binary_ticks(most: float) -> list[float]:
    """From 0, at most six multiples of a power of two that do not exceed `most`."""
    step = 1.0
    while most / step > 5:
        step *= 2
    return [k * step for k in range(int(most // step) + 1)]


def _phase_names(phases: Sequence[tuple[float, str]], px: Axis) -> tuple[list[tuple[float, int, str]], int]:
    """Where each phase's name stands, (px, row, name), in as few rows as keep the names apart.

    The name is "" where even three rows do not suffice.
    """
    ends, places = [-1e9] * 3, []
    for begin, name in phases:
        x = min(px(begin) + 4, WIDTH - 4 - text_width(name))
        row = next((r for r, end in enumerate(ends) if x >= end + 6), None)
        places.append((x, row or 0, "" if row is None else name))
        if row is not None:
            ends[row] = x + text_width(name)
    return places, sum(end > 0 for end in ends)


def _said_by_rank(
    names: Sequence[str],
    rows: Sequence[Mapping[str, float]],
    kinds: Sequence[str],
    formula: Sequence[Mapping[str, float]],
) -> str:
    totals = [sum(row.values()) for row in rows]
    first = max(range(len(totals)), key=lambda i: totals[i])
    largest = max(kinds, key=lambda kind: rows[first].get(kind, 0))
    name, holds = names[first][:1].upper() + names[first][1:], "holds the most,"
    if len(totals) == 1:
        holds = "holds"
    elif len(set(totals)) == 1:
        name, holds = f"Each of the {len(totals)}", "holds"
    share = rows[first].get(largest, 0) / (totals[first] or 1)
    said = f"{name} {holds} {format_bytes(totals[first])}, {share:.0%} of it {largest}."
    if formula:
        expected = [sum(row.values()) for row in formula]
        off = max(abs(total / by - 1) for total, by in zip(totals, expected, strict=True))
        said += f" The formula is {'exact' if off == 0 else f'at most {off:.2%} off'}."
    return said
