"""A device mesh, a panel per axis: the boxes are the ranks, the last axis from left to right; boxes of one colour are
one group of that axis. Beside them stands what the ranks really called in those groups, from the events of a run.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..results import Event, Run, grouped
from .parts import WIDE, pale, rank_colour, text_width
from .svg import COLOURS, INK, LINE, MUTED, Figure, drawing, format_bytes, label, rect

_BOX, _GAP, _EDGE, _LINE = 40, 5, 12, 27
_LIGHT = 0.5  # share of a group's colour, so that none looks like the mark of an operation
_REST = "all ranks"  # events in a group that is no axis of the mesh
_Groups = Sequence[tuple[int, ...]]
# An axis: its headline, its groups of ranks, and (operation, what each rank called of it).
_Panel = tuple[str, _Groups, Sequence[tuple[str, str]]]


def axes(run: Run | Iterable[Event], mesh: Mapping[str, int], *, title: str = "") -> Figure:
    """The groups of each axis of the mesh {name: degree}, and the calls and bytes of each rank in them.

    Calls and bytes of input tensors are those of one rank; where ranks differ, the least and the most. Raises
    ValueError: the run has another number of ranks than the mesh.
    """
    n = math.prod(mesh.values())
    if isinstance(run, Run) and n != run.world_size:
        sides = " * ".join(f"{name}({degree})" for name, degree in mesh.items())
        raise ValueError(f"{sides} = {n}, but there are {run.world_size} ranks. Give the mesh of that run.")
    ranks = torch.arange(n).view(*mesh.values())  # the last axis runs fastest
    along = {name: ranks.movedim(i, -1).reshape(-1, mesh[name]).tolist() for i, name in enumerate(mesh)}
    found = {name: [tuple(members) for members in rows] for name, rows in along.items()}
    calls = _calls(run.events if isinstance(run, Run) else run, found, n)
    heads = {name: f"{name}: {len(of)} group{'s' * (len(of) > 1)} of {len(of[0])}" for name, of in found.items()}
    panels = [(heads[name], of, calls.get(name, [])) for name, of in found.items()]
    if calls.get(_REST):
        panels.append((_REST, [tuple(range(n))], calls[_REST]))
    said = [f"{head}: {'; '.join(text for _, text in lines) or 'nothing sent'}." for head, _, lines in panels]
    return _draw(panels, mesh, title, " ".join([f"{title}."] * bool(title) + said))


def _calls(events: Iterable[Event], found: Mapping[str, _Groups], n: int) -> dict[str, list[tuple[str, str]]]:
    """By axis: (operation, what each rank called of it)."""
    of_group = {members: name for name, all_of in found.items() for members in all_of if len(members) > 1}
    sent = (e for e in events if e.kind == "comm" and len(e.ranks) > 1 and e.op != "recv")  # of a message its send
    calls = grouped(((of_group.get(tuple(sorted(e.ranks)), _REST), e.op), e) for e in sent)
    lines = []
    for (name, op), these in sorted(calls.items(), key=lambda item: -sum(e.nbytes for e in item[1])):
        sizes = [[e.nbytes for e in these if e.rank == rank] for rank in range(n)]
        text = f"{op} {_range([*map(len, sizes)], str)}×, {_range([*map(sum, sizes)], format_bytes)}"
        lines.append((name, (op, text)))
    return grouped(lines)


def _range(values: Sequence[int], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def _draw(panels: Sequence[_Panel], mesh: Mapping[str, int], title: str, alt: str) -> Figure:
    degrees = list(mesh.values())
    columns, rows = degrees[-1], degrees[-2] if len(degrees) > 1 else 1
    blocks = len(panels[0][1]) * len(panels[0][1][0]) // (columns * rows)
    block = columns * (_BOX + _GAP) + 12
    left = _EDGE + max(blocks * block, 60) + 8
    marks, top = ([label(_EDGE, 30, title, bold=True)], 48.0) if title else ([], 10.0)
    for headline, members, lines in panels:
        colours = {rank: pale(rank_colour(i), _LIGHT) for i, m in enumerate(members) for rank in m}
        for rank, fill in colours.items():
            place, column = divmod(rank, columns)
            number, row = divmod(place, rows)
            x, y = _EDGE + number * block + column * (_BOX + _GAP), top + row * (_BOX + _GAP)
            marks.append(rect(x, y, _BOX, _BOX, fill=fill, stroke=INK, title=f"rank {rank}", radius=4))
            marks.append(label(x + _BOX / 2, y + 27, rank, anchor="middle", bold=True))
        marks.append(label(left, top + 20, headline, bold=True))
        for i, (op, text) in enumerate(lines or [("", "nothing sent")], 1):
            y = top + i * _LINE
            size = 20 if left + 24 + text_width(text, 20) <= WIDE - 4 else 17
            marks.append(rect(left, y + 5, 14, 14, fill=COLOURS.get(op, LINE)))
            marks.append(label(left + 24, y + 19, text, size=size, fill=INK if op else MUTED))
        top += max(rows * (_BOX + _GAP), _LINE * (1 + max(len(lines), 1))) + 18
    return drawing(WIDE, top - 4, *marks, alt=alt)
