"""Who waits for whom: `run.standstill` as a graph, one circle per rank, an arrow from each rank that waits to the ranks
it waits for, in the colour of the operation that it stands in. Arrows that close a cycle are thick: nobody can go on.
"""

import math
from collections.abc import Mapping, Sequence, Set

from ..results import Run, Standing, at_line, grouped, name_ranks
from .parts import EDGE, SIZE, WIDTH, text_width
from .svg import COLOURS, INK, MUTED, PAPER, Figure, drawing, label, line

Point = tuple[float, float]
_RADIUS = 26  # px of a rank's circle
_GAP = 10  # px between a circle and its words, and between parallel arrows
_ROW = 27  # px from one line of text to the next
_BOLD = 1.12  # how much wider bold text is
_LABELLED = 8  # a larger world has no words beside the ranks
_OVER = {  # phase: what stands beside the rank, what is said of one and of several in the finding
    "finished": ("finished", "has finished", "have finished"),
    "error": ("failed", "has failed", "have failed"),
    "lost": ("lost", "was lost", "were lost"),
    "absent": ("not in this cell", "does not run this cell", "do not run this cell"),
}


def waits(run: Run) -> Figure:
    """Who waited for whom when the cell of `run` had to be ended: by a deadlock, an error, a timeout or you.

    A thick ring is a rank that waits, a thin one computes; grey: its cell is over, or runs on other ranks only. Raises
    ValueError: the cell came to its end by itself, so that nobody waits.
    """
    if not (standings := sorted(run.standstill, key=lambda s: s.rank)):
        how = "Keep the run of the cell that hangs: `%%ranks 4 -o run`, then waits(run)."
        raise ValueError(f"Nothing to draw: this run has no standstill, its cell came to an end by itself. {how}")
    edges = {s.rank: s.waits_for for s in standings}
    cycles = _cycles(edges)
    finding = _finding({s.rank: s for s in standings}, cycles)
    place, height, radius = _layout(standings)
    marks = []
    for s in standings:
        for peer in s.waits_for:
            both = s.rank in edges.get(peer, ())
            thick = any({s.rank, peer} <= cycle for cycle in cycles)
            marks.append(_arrow(place[s.rank], place[peer], radius, s, both, thick))
    marks += [_node(*place[s.rank], radius, s) for s in standings]
    if len(standings) <= _LABELLED:
        marks += [_words(*place[s.rank], s) for s in standings]
    for row in _wrapped(f"{finding[0].upper()}{finding[1:]}.", WIDTH - 2 * EDGE, SIZE * _BOLD):
        marks.append(label(WIDTH / 2, height + 20, row, anchor="middle", bold=True))
        height += _ROW
    return drawing(WIDTH, height + 12, *marks, alt=f"Who waits for whom: {finding}.")


def _cycles(edges: Mapping[int, Sequence[int]]) -> list[Set[int]]:
    """The sets of ranks that wait for one another, directly or through others."""
    reach = {rank: set(peers) for rank, peers in edges.items()}
    for middle in edges:
        for found in reach.values():
            if middle in found:
                found |= reach[middle]
    cycles = {frozenset(p for p in found if rank in reach.get(p, ())) for rank, found in reach.items()}
    return sorted(filter(None, cycles), key=min)


def _finding(by_rank: Mapping[int, Standing], cycles: Sequence[Set[int]]) -> str:
    """What the picture shows, without the full stop."""
    waiting = {rank for rank, s in by_rank.items() if s.waits_for}
    said: list[str] = []
    told: set[int] = set()
    for cycle in cycles:
        if len(cycle) > 2 and all(len(set(by_rank[r].waits_for) & cycle) == 1 for r in cycle):
            ring, rank = [], min(cycle)
            while rank not in ring:
                ring.append(rank)
                rank = next(p for p in by_rank[rank].waits_for if p in cycle)
            way = " → ".join(str(r) for r in (*ring, ring[0]))
            said.append(f"{_name(cycle)} wait in a circle" + (f": {way}" if len(ring) <= _LABELLED else ""))
        else:
            said.append(f"{_name(cycle)} wait for each other")
        told |= cycle
    left = ((rank, peer) for rank in sorted(waiting - told) for peer in by_rank[rank].waits_for)
    causes = grouped((_state(by_rank.get(peer)), (rank, peer)) for rank, peer in left if peer not in waiting)
    for state, ends in causes.items():
        waiters, peers = map(set, zip(*ends, strict=True))
        said.append(f"{_waiters(waiters)} for {_name(peers)}, which {state[len(peers) > 1]}")
        told |= waiters
    if rest := waiting - told:
        said.append(f"{_waiters(rest)} behind them")
    alone = "; ".join(f"rank {rank} {_state(s)[0]}" for rank, s in by_rank.items())
    return "; ".join(said) or f"{alone}; nobody waits for another"


def _state(standing: Standing | None) -> tuple[str, str]:
    """What is said of one rank, or of several, that others wait for."""
    phase, op = (standing.phase, standing.op) if standing else ("absent", "")
    if phase in _OVER:
        return _OVER[phase][1:]
    return (f"stands in {op}", f"stand in {op}") if op else ("computes", "compute")


def _waiters(ranks: Set[int]) -> str:
    return f"{_name(ranks)} wait{'s' * (len(ranks) == 1)}"


def _name(ranks: Set[int]) -> str:
    return "ranks {} and {}".format(*sorted(ranks)) if len(ranks) == 2 else name_ranks(list(ranks))


def _layout(standings: Sequence[Standing]) -> tuple[dict[int, Point], float, float]:
    """Where each rank's circle has its centre, the height used, the circles' radius: clockwise on an ellipse."""
    n, middle = len(standings), WIDTH / 2
    if n <= _LABELLED:
        radius = float(_RADIUS)
        widest = max(text_width(word) for s in standings for word in _label(s))
        rx = min(130.0, max(60.0, middle - EDGE - radius - _GAP - widest))
        rx = min(170.0, rx * 2**0.5) if n == 4 else rx  # four ranks stand at the corners
        ry = 0.0 if n <= 2 else 110.0 if n <= 4 else 170.0
    else:
        rx = ry = min(250.0, max(170.0, 7.5 * n))
        radius = min(float(_RADIUS), math.pi * rx / n - 3)
    angles = [2 * math.pi * k / n - math.pi / 2 - math.pi / n for k in range(n)]
    at = [(middle + rx * math.cos(a), ry * math.sin(a)) for a in angles] if n > 1 else [(middle, 0.0)]
    shift = EDGE + max(radius, _ROW) + 4 - min(y for _, y in at)
    place = {s.rank: (x, y + shift) for s, (x, y) in zip(standings, at, strict=True)}
    return place, max(y for _, y in place.values()) + max(radius, _ROW) + 14, radius


def _label(standing: Standing) -> list[str]:
    """What stands beside a rank: its operation and the line, or what became of it."""
    if standing.phase in _OVER:
        return [_OVER[standing.phase][0]]
    return [*filter(None, (standing.op or "computes", at_line(standing.line)))]


def _words(x: float, y: float, standing: Standing) -> str:
    words, side = _label(standing), -1 if x < WIDTH / 2 - 1 else 1
    top = y + 7 - _ROW / 2 * (len(words) - 1)
    rows = zip(words, (INK if standing.waits_for else MUTED, MUTED), (top, top + _ROW), strict=False)
    at, anchor = x + (_RADIUS + _GAP) * side, "start" if side > 0 else "end"
    return "".join(label(at, y, word, anchor=anchor, fill=ink) for word, ink, y in rows)


def _node(x: float, y: float, radius: float, standing: Standing) -> str:
    fill, stroke, width = PAPER, INK, 2
    if standing.phase in _OVER:
        fill = stroke = COLOURS["wait"]
    elif standing.op:
        stroke, width = _colour(standing), 5
    look = f'fill="{fill}" stroke="{stroke}" stroke-width="{width}"'
    circle = f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius - width / 2:.2f}" {look}/>'
    return circle + (label(x, y + 7, standing.rank, anchor="middle", bold=True) if radius >= 13 else "")


def _arrow(start: Point, end: Point, radius: float, standing: Standing, both: bool, thick: bool) -> str:
    """From circle to circle; two ranks that wait for each other have two arrows side by side."""
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    aside = _GAP if both else 0
    x1, y1, x2, y2 = x1 - uy * aside, y1 + ux * aside, x2 - uy * aside, y2 + ux * aside
    away = math.sqrt(max(radius**2 - aside**2, 0)) + 4
    ends = x1 + ux * away, y1 + uy * away, x2 - ux * away, y2 - uy * away
    # dashed: a receive without `src`, for which one of several would do
    dash = "7 5" if standing.op == "recv" and len(standing.waits_for) > 1 else ""
    return line(*ends, stroke=_colour(standing), width=5 if thick else 2.5, dash=dash, arrow=True)


def _colour(standing: Standing) -> str:
    """The operation's; a yellow arrow would not be seen on white, and new_group has no colour."""
    return "#b8a800" if standing.op == "all_to_all" else COLOURS.get(standing.op, MUTED)


def _wrapped(text: str, width: float, size: float) -> list[str]:
    """`text` in lines that fit `width` px, broken between words; a word that is wider stands alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
