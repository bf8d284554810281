"""Routes of messages, drawn from a list of who sends to whom: on nodes, in trees, and in pieces against time.

`on_nodes` puts ranks into their nodes and marks the arrows that leave one, `trees` draws trees side by side,
`pieces` when each rank sends which piece. They draw what they are given: nothing here is measured.
"""

from collections.abc import Iterable, Mapping, Sequence

from .parts import WIDTH, pale, rank_colour, text_width, wrap
from .svg import INK, LINE, MUTED, Figure, drawing, label, line, rect

_RADIUS, _EDGE, _TEXT = 17, 10, 26
_INSIDE, _ACROSS = "#0072b2", "#d55e00"
Arrow = tuple[int, int]  # from rank, to rank
Sent = tuple[int, int, float, float]  # rank, piece, start, end


def on_nodes(phases: Mapping[str, Sequence[Arrow]], per_node: int, *, title: str = "") -> Figure:
    """A panel per phase, side by side: two nodes of `per_node` ranks, one under the other, and who sends whom.

    on_nodes({"flat ring": [(r, (r + 1) % 8) for r in range(8)]}, per_node=4)

    Raises:
        ValueError: an arrow names a rank that two nodes do not have.
    """
    for a, b in (arrow for arrows in phases.values() for arrow in arrows):
        if not (0 <= a < 2 * per_node and 0 <= b < 2 * per_node):
            raise ValueError(f"Two nodes of {per_node} hold ranks 0 to {2 * per_node - 1}, not {max(a, b)}.")
    width = (WIDTH - 2 * _EDGE) / len(phases)
    top = 44.0 if title else 10.0
    step = min(60.0, 300 / per_node)
    lines = max(len(wrap(name, width - 8)) for name in phases)
    start = top + lines * _TEXT + 14
    marks = [label(_EDGE, 26, title, bold=True)] if title else []
    told = []
    for k, (name, arrows) in enumerate(phases.items()):
        left = _EDGE + k * width
        xs = left + 0.26 * width, left + 0.74 * width
        places = {
            rank: (xs[rank // per_node], start + 34 + (rank % per_node + 0.5) * step)
            for rank in range(2 * per_node)
        }
        for n, text in enumerate(wrap(name, width - 8)):
            marks.append(label(left + width / 2, top + 20 + n * _TEXT, text, anchor="middle", bold=True))
        half = min(38.0, 0.22 * width)
        for node, x in enumerate(xs):
            marks.append(
                rect(x - half, start, 2 * half, per_node * step + 42, stroke=MUTED, radius=8, dash="4 3")
            )
            marks.append(label(x, start + 24, f"node {node}", anchor="middle", fill=MUTED, size=18))
        for a, b in arrows:
            across = a // per_node != b // per_node
            marks += _arrow(
                places[a], places[b], _ACROSS if across else _INSIDE, abs(a - b) > 1 and not across
            )
        marks += [_dot(rank, *at) for rank, at in places.items()]
        leaving = sum(a // per_node != b // per_node for a, b in arrows)
        told.append(f"{name}: {len(arrows)} arrows, {leaving} of them between the nodes")
    bottom = start + per_node * step + 50
    marks.append(line(_EDGE, bottom + 18, _EDGE + 30, bottom + 18, stroke=_INSIDE, width=3, arrow=True))
    marks.append(label(_EDGE + 40, bottom + 25, "inside a node", fill=MUTED))
    marks.append(
        line(_EDGE + 210, bottom + 18, _EDGE + 240, bottom + 18, stroke=_ACROSS, width=3, arrow=True)
    )
    marks.append(label(_EDGE + 250, bottom + 25, "between nodes", fill=MUTED))
    return _figure(bottom + 40, marks, title, told)


def trees(parents: Mapping[str, Mapping[int, int]], *, title: str = "") -> Figure:
    """Trees side by side, by the parent of each rank but the root: the root above, arrows upwards.

    trees({"tree": {1: 0, 2: 0}})
    """
    width = (WIDTH - 2 * _EDGE) / len(parents)
    top = 44.0 if title else 10.0
    marks = [label(_EDGE, 26, title, bold=True)] if title else []
    told, bottom = [], top
    for k, (name, parent) in enumerate(parents.items()):
        left = _EDGE + k * width
        ranks = sorted({*parent, *parent.values()})
        column = (width - 16) / len(ranks)  # ranks in order from left to right: no arrow crosses another
        places = {
            rank: (left + 8 + (i + 0.5) * column, top + 64 + 62 * _depth(rank, parent))
            for i, rank in enumerate(ranks)
        }
        marks.append(label(left + width / 2, top + 20, name, anchor="middle", bold=True))
        for child, of in parent.items():
            marks += _arrow(places[child], places[of], _INSIDE, False)
        marks += [_dot(rank, *at) for rank, at in places.items()]
        bottom = max([bottom, *(y for _, y in places.values())])
        inner = sorted(set(parent.values()))
        leaves = [r for r in ranks if r not in inner]
        told.append(f"{name}: ranks {_listed(inner)} take in, ranks {_listed(leaves)} are leaves")
    return _figure(bottom + 34, marks, title, told)


def pieces(programs: Mapping[str, Iterable[Sent]], *, unit: str = "", title: str = "") -> Figure:
    """When each rank sends which piece: one block of rows per program, all on the same axis of time.

    pieces({"whole": [(1, 0, 0.0, 4.0)], "in two": [(1, 0, 0.0, 2.0), (1, 1, 2.0, 4.0)]})
    """
    found = {name: sorted(sent) for name, sent in programs.items()}
    end = max(stop for sent in found.values() for *_, stop in sent)
    left, y = 84.0, 44.0 if title else 8.0
    marks = [label(_EDGE, 26, title, bold=True)] if title else []
    told = []

    def x(t: float) -> float:
        return left + t / end * (WIDTH - left - 14)

    for name, sent in found.items():
        last = max(stop for *_, stop in sent)
        said = f"{name}: done after {last:.3g} {unit}".rstrip()
        marks.append(label(_EDGE, y + 22, said, bold=True))
        told.append(said)
        y += 34
        for rank in sorted({r for r, *_ in sent}):
            marks.append(label(_EDGE, y + 20, f"rank {rank}", size=18))
            marks.append(line(left, y + 14, WIDTH - 14, y + 14, stroke=LINE))
            for _, piece, start, stop in (s for s in sent if s[0] == rank):
                fill, wide = pale(rank_colour(piece), 0.75), x(stop) - x(start)
                marks.append(rect(x(start), y + 2, wide, 24, fill=fill, stroke=INK, title=f"piece {piece}"))
                if wide > text_width(str(piece), 17) + 4:
                    marks.append(label(x(start) + wide / 2, y + 20, piece, anchor="middle", size=17))
            y += 30
        y += 10
    return _figure(y + 4, marks, title, told)


def _arrow(a: tuple[float, float], b: tuple[float, float], colour: str, around: bool) -> list[str]:
    """A line with a head from rank to rank; `around` bends it past the ranks that stand between."""
    (xa, ya), (xb, yb) = a, b
    if around:
        side = xa + 33
        return [
            line(xa + _RADIUS - 2, ya, side, ya, stroke=colour, width=3),
            line(side, ya, side, yb, stroke=colour, width=3),
            line(side, yb, xb + _RADIUS, yb, stroke=colour, width=3, arrow=True),
        ]
    length = ((xb - xa) ** 2 + (yb - ya) ** 2) ** 0.5
    ux, uy = (xb - xa) / length * _RADIUS, (yb - ya) / length * _RADIUS
    return [line(xa + ux, ya + uy, xb - ux, yb - uy, stroke=colour, width=3, arrow=True)]


def _dot(rank: int, x: float, y: float) -> str:
    fill = pale(rank_colour(rank), 0.5)
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" fill="{fill}" stroke="{INK}"/>'
    return circle + label(x, y + 7, rank, anchor="middle", bold=True)


def _depth(rank: int, parent: Mapping[int, int]) -> int:
    depth = 0
    while rank in parent:
        rank, depth = parent[rank], depth + 1
    return depth


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _figure(height: float, marks: Sequence[str], title: str, told: Sequence[str]) -> Figure:
    alt = "; ".join(told) + "."
    return drawing(WIDTH, height, *marks, alt=f"{title}. {alt}" if title else alt)
