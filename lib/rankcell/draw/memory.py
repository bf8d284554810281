"""What memory holds, by kind: over the course of a step, and by rank beside the formula.

Pure functions from bytes, or from the samples of `rankcell.memory`, to a `Figure`. A kind has the same colour
in both pictures and in every notebook; measured is solid, by formula outlined. Nothing here measures.
"""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from ..results import KINDS, Memory
from .parts import EDGE, WIDTH, key, round_ticks, swatch, text_width
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
    alt: str = "",
    height: float = 420,
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
    if held is None:
        if by not in ("change", "time"):
            raise ValueError(f'by={by!r}: samples can be drawn by="change" or by="time".')
        samples = [sample for sample in at if isinstance(sample, Memory)]
        places, held, x_label, phases = _from_samples(samples, by, x_label, phases)
    else:
        places = [place for place in at if not isinstance(place, Memory)]
    for kind, values in held.items():
        if len(values) != len(places):
            raise ValueError(f"{kind} has {len(values)} values for {len(places)} places. Give one per place.")
    kinds = _in_order(held)
    total = [sum(held[kind][i] for kind in kinds) for i in range(len(places))]
    peak = max(range(len(places)), key=lambda i: total[i])
    top_bytes = total[peak] or 1.0
    ticks = _binary_ticks(top_bytes)
    low, high = places[0], places[-1] if places[-1] > places[0] else places[0] + 1

    marks, key_height = _key(kinds)
    names, rows = _phase_names(phases, low, high, left := EDGE + max(map(_width, ticks)) + 8)
    top, bottom, right = key_height + 26 * rows + 14, height - 62, WIDTH - EDGE - 8

    def px(x: float) -> float:
        return left + (x - low) / (high - low) * (right - left)

    def py(nbytes: float) -> float:
        return bottom - nbytes / max(top_bytes, ticks[-1]) * (bottom - top)

    marks += [line(left, py(t), right, py(t)) for t in ticks]
    below = [0.0] * len(places)
    for kind in kinds:
        above = [b + v for b, v in zip(below, held[kind], strict=True)]
        if any(held[kind]):
            path = _steps(places, above, px, py) + _steps(places, below, px, py)[::-1]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
            most = max(held[kind])
            tip = f"<title>{escape(kind)}: at most {format_bytes(most)}</title>"
            marks.append(f'<polygon points="{points}" fill="{colour_of(kind, kinds)}">{tip}</polygon>')
        below = above
    marks += [label(left - 8, py(t) + 7, format_bytes(t), anchor="end", fill=MUTED) for t in ticks]
    for (begin, _), (x, row, name) in zip(phases, names, strict=True):
        y = key_height + 26 * row + 20
        if px(begin) > left + 1:
            marks.append(line(px(begin), y - 16, px(begin), bottom, stroke=MUTED, dash="2 4"))
        if name:
            marks.append(label(x, y, name, fill=MUTED))
    if by == "time":
        for tick in round_ticks(low, high, most=5):
            marks.append(line(px(tick), bottom, px(tick), bottom + 5, stroke=MUTED))
            x = min(px(tick), WIDTH - 4 - text_width(f"{tick:g}") / 2)
            marks.append(label(x, bottom + 26, f"{tick:g}", anchor="middle", fill=MUTED))
    marks.append(line(left, bottom, right, bottom, stroke=MUTED))
    marks.append(label((left + right) / 2, height - 14, x_label, anchor="middle", fill=MUTED))
    where = _phase_at(phases, places[peak])
    parts = ", ".join(f"{k} {format_bytes(held[k][peak])}" for k in kinds if held[k][peak])
    said = alt or f"Memory is highest{f' in {where}' if where else ''}, {format_bytes(total[peak])}: {parts}."
    return drawing(
        WIDTH, height, *marks, alt=said, text=_twin_over_time(places, held, kinds, total, phases, x_label)
    )


def by_rank(
    measured: Sequence[Mapping[str, float] | Memory],
    formula: Sequence[Mapping[str, float]] = (),
    *,
    names: Sequence[str] = (),
    alt: str = "",
) -> Figure:
    """Bytes by kind, one bar per rank (or per name), and under each, outlined, what the formula says.

    All bars share one scale from zero. `names` stand in for "rank 0", "rank 1", ... `measured` may be samples
    of `rankcell.memory`: `by_rank([r.peak for r in run.ranks])`.
    """
    if not measured:
        raise ValueError("There is nothing to draw: no rank was measured.")
    rows = [row.by_kind if isinstance(row, Memory) else row for row in measured]
    if formula and len(formula) != len(rows):
        raise ValueError(f"{len(rows)} were measured, the formula is for {len(formula)}. Give one for each.")
    names = tuple(names) or tuple(f"rank {r}" for r in range(len(rows)))
    if len(names) != len(rows):
        raise ValueError(f"{len(rows)} were measured, {len(names)} have names. Give one name for each.")
    kinds = _in_order([kind for row in (*rows, *formula) for kind in row if row[kind]]) or ["rest"]
    most = max(sum(row.values()) for row in (*rows, *formula)) or 1.0
    marks, y = _key(kinds)
    if formula:
        marks.append(rect(EDGE, y + 4, 18, 16, fill=PAPER, stroke=INK))
        marks.append(label(EDGE + 26, y + 19, "outlined: by formula", fill=MUTED))
        y += 28
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        total = format_bytes(sum(row.values()))
        marks.append(label(EDGE, y + 28, name))
        marks.append(label(WIDTH - EDGE, y + 28, total, anchor="end", bold=True))
        marks += _bar(row, kinds, most, y + 36, 30, solid=True)
        y += 72
        if formula:
            marks += _bar(formula[i], kinds, most, y - 2, 16, solid=False)
            y += 20
    off = [
        abs(sum(m.values()) / sum(f.values()) - 1)
        for m, f in zip(rows, formula, strict=False)
        if sum(f.values())
    ]
    return drawing(
        WIDTH,
        y + 4,
        *marks,
        alt=alt or _said_by_rank(names, rows, kinds, off),
        text=_twin_by_rank(names, rows, formula, kinds),
    )


def _from_samples(
    samples: Sequence[Memory], by: str, x_label: str, phases: Sequence[tuple[float, str]]
) -> tuple[list[float], dict[str, list[float]], str, list[tuple[float, str]]]:
    """The places, the bytes by kind, the label of the axis and the phases of measured samples."""
    first = samples[0].at
    at = [float(i) if by == "change" else 1e3 * (s.at - first) for i, s in enumerate(samples)]
    begins = [i for i, s in enumerate(samples) if i == 0 or s.phase != samples[i - 1].phase]
    held = {kind: [getattr(s, kind) for s in samples] for kind in KINDS}
    x_label = x_label or ("changes of memory" if by == "change" else "time in ms")
    return at, held, x_label, list(phases) or [(at[i], samples[i].phase) for i in begins]


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
    for kind in kinds:
        nbytes = row.get(kind, 0)
        if not nbytes:
            continue
        colour, width, text = colour_of(kind, kinds), nbytes * scale, format_bytes(nbytes)
        tip = f"{kind}: {text}{'' if solid else ' by formula'}"
        if solid:
            bar = rect(x, y, width, height, fill=colour, stroke=PAPER, title=tip, radius=0)
        else:
            bar = rect(
                x + 1, y, width - 2, height, fill=PAPER, stroke=colour, stroke_width=2, title=tip, radius=0
            )
        marks.append(bar)
        if solid and text_width(text) + 6 <= width:
            ink = PAPER if colour in _WHITE_ON else INK
            marks.append(label(x + width / 2, y + height / 2 + 7, text, anchor="middle", fill=ink))
        x += width
    return marks


def _steps(at, values, px, py) -> list[tuple[float, float]]:
    """The corners of a staircase; places where nothing changes are left out."""
    corners = [(px(at[0]), py(values[0]))]
    for i in range(1, len(at)):
        if values[i] != values[i - 1]:
            corners += [(px(at[i]), py(values[i - 1])), (px(at[i]), py(values[i]))]
    return [*corners, (px(at[-1]), py(values[-1]))]


def _binary_ticks(most: float) -> list[float]:
    """From 0, at most six multiples of a power of two that do not exceed `most`."""
    step = 1.0
    while most / step > 5:
        step *= 2
    return [k * step for k in range(int(most // step) + 1)]


def _width(nbytes: float) -> float:
    return text_width(format_bytes(nbytes))


def _phase_names(
    phases: Sequence[tuple[float, str]], low: float, high: float, left: float
) -> tuple[list[tuple[float, int, str]], int]:
    """Where each phase's name stands, (px, row, name), in as few rows as keep the names apart.

    The name is "" where even three rows do not suffice.
    """
    right, ends, places = WIDTH - EDGE - 8, [-1e9] * 3, []
    for begin, name in phases:
        x = left + (begin - low) / (high - low) * (right - left) + 4
        x = min(x, WIDTH - 4 - text_width(name))
        row = next((r for r, end in enumerate(ends) if x >= end + 6), None)
        if row is None:
            places.append((x, 0, ""))
            continue
        ends[row] = x + text_width(name)
        places.append((x, row, name))
    return places, max((row for _, row, name in places if name), default=-1) + 1


def _phase_at(phases: Sequence[tuple[float, str]], place: float) -> str:
    return next((name for begin, name in reversed(list(phases)) if begin <= place), "")


def _twin_over_time(at, held, kinds, total, phases, x_label) -> str:
    """A table: what is held at the end of each phase, and the most that was held in it."""
    bounds = [begin for begin, _ in phases] or [at[0]]
    names = [name for _, name in phases] or ["all of it"]
    header, rows = [f"by {x_label}", *kinds, "together", "at most"], []
    for k, (begin, name) in enumerate(zip(bounds, names, strict=True)):
        end = bounds[k + 1] if k + 1 < len(bounds) else float("inf")
        inside = [i for i, x in enumerate(at) if begin <= x < end]
        if inside:
            last = inside[-1]
            sizes = [*(held[kind][last] for kind in kinds), total[last], max(total[i] for i in inside)]
            rows.append([f"end of {name}" if name else "between", *map(format_bytes, sizes)])
    return _aligned([header, *rows])


def _twin_by_rank(names, measured, formula, kinds) -> str:
    header, rows = ["", *kinds, "together"], []
    for i, (name, row) in enumerate(zip(names, measured, strict=True)):
        rows.append([name, *(format_bytes(row.get(k, 0)) for k in kinds), format_bytes(sum(row.values()))])
        if formula:
            theirs = formula[i]
            sizes = [*(theirs.get(k, 0) for k in kinds), sum(theirs.values())]
            rows.append(["  by formula", *map(format_bytes, sizes)])
    return _aligned([header, *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if k else cell.ljust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _said_by_rank(names, measured, kinds, off: Sequence[float]) -> str:
    totals = [sum(row.values()) for row in measured]
    first = max(range(len(totals)), key=lambda i: totals[i])
    largest = max(kinds, key=lambda kind: measured[first].get(kind, 0))
    share = measured[first].get(largest, 0) / (totals[first] or 1)
    each = format_bytes(totals[first])
    name = names[first][:1].upper() + names[first][1:]
    if len(totals) == 1:
        said = f"{name} holds {each}"
    elif len(set(totals)) == 1:
        said = f"Each of the {len(totals)} holds {each}"
    else:
        said = f"{name} holds the most, {each}"
    said = f"{said}, {share:.0%} of it {largest}."
    if not off:
        return said
    return f"{said} The formula is {'exact' if max(off) == 0 else f'at most {max(off):.2%} off'}."
