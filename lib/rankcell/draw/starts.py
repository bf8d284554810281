"""Who starts whom: sbatch the job's script, the script srun, srun the ranks or one torchrun per node.

One frame per machine, one row per kind of process, an arrow from each process to those that it starts. The
dashed line joins those who have to find each other. `meeting` draws how they do. Both draw what is asked for
and look at no job.
"""

from collections.abc import Sequence

from .parts import WIDTH, pale, rank_colour
from .svg import INK, LINE, MUTED, PAPER, Figure, drawing, label, line, rect

_EDGE, _GAP, _ROW, _BOX = 10, 16, 78, 38
_MEET = "#d55e00"


def starts(nodes: int = 2, ranks_per_node: int = 2, *, torchrun: bool = False) -> Figure:
    """The processes of a job of `nodes` x `ranks_per_node` ranks, from sbatch down to the ranks.

    Args:
        nodes, ranks_per_node: 1 to 3 nodes of 1 to 4 ranks find room.
        torchrun: srun starts one torchrun per node, which starts the ranks; else srun starts the ranks.

    Raises:
        ValueError: there is no room for so many.
    """
    if not (1 <= nodes <= 3 and 1 <= ranks_per_node <= 4 and nodes * ranks_per_node <= 8):
        raise ValueError(
            f"There is no room for {nodes} nodes of {ranks_per_node} ranks: 3 nodes, 4 ranks on each and "
            f"8 in all are the most."
        )
    wide = (WIDTH - 2 * _EDGE - (nodes - 1) * _GAP) / nodes
    left = [_EDGE + k * (wide + _GAP) for k in range(nodes)]
    rows = ["script", "srun", *(["torchrun"] if torchrun else []), "ranks"]
    top = {name: 110 + _ROW * k for k, name in enumerate(rows)}
    bottom = top["ranks"] + _BOX + 16
    first = left[0] + wide / 2
    each = wide / ranks_per_node
    rank_x = [
        left[r // ranks_per_node] + (r % ranks_per_node + 0.5) * each for r in range(nodes * ranks_per_node)
    ]

    marks = [label(first + min(wide - 16, 150) / 2 + 10, 36, "on the login node", fill=MUTED)]
    for k, x in enumerate(left):
        marks.append(rect(x, 72, wide, bottom - 72, stroke=LINE, radius=6))
        marks.append(label(x + wide - 8, 94, f"node{k + 1}", anchor="end", fill=MUTED))
    arrows = [(first, 10 + _BOX, first, top["script"]), (first, top["script"] + _BOX, first, top["srun"])]
    parents = [first] * nodes
    if torchrun:
        parents = [x + wide / 2 for x in left]
        arrows += [(first, top["srun"] + _BOX, x, top["torchrun"]) for x in parents]
    above = top["torchrun" if torchrun else "srun"] + _BOX
    arrows += [(parents[r // ranks_per_node], above, x, top["ranks"]) for r, x in enumerate(rank_x)]
    marks += [line(*ends, stroke=INK, width=1.5, arrow=True) for ends in arrows]
    # who has to find each other stands in one row: the line between them passes behind their boxes
    meeting = parents if torchrun else rank_x
    y = top["torchrun" if torchrun else "ranks"] + _BOX / 2
    marks.append(line(meeting[0], y, meeting[-1], y, stroke=_MEET, width=3, dash="7 5"))
    marks += [*_box(first, 10, min(wide - 16, 150), "sbatch")]
    marks += [*_box(first, top["script"], min(wide - 16, 150), "job script")]
    marks += [*_box(first, top["srun"], min(wide - 16, 150), "srun")]
    if torchrun:
        marks += [mark for x in parents for mark in _box(x, top["torchrun"], min(wide - 16, 150), "torchrun")]
    for r, x in enumerate(rank_x):
        named = f"rank {r}" if each >= 84 else str(r)
        marks += _box(x, top["ranks"], min(each - 10, 110), named, pale(rank_colour(r), 0.35), rank_colour(r))
    marks.append(line(_EDGE, bottom + 26, _EDGE + 44, bottom + 26, stroke=_MEET, width=3, dash="7 5"))
    where = (
        "the rendezvous: one torchrun listens on node1"
        if torchrun
        else "they meet at MASTER_ADDR: rank 0 listens"
    )
    marks.append(label(_EDGE + 56, bottom + 32, where))
    alt = f"sbatch starts the job script on the first of {nodes} nodes, the script starts srun, srun " + (
        f"one torchrun on each node, and each torchrun {ranks_per_node} ranks." if torchrun else "all ranks."
    )
    return drawing(
        WIDTH, bottom + 46, *marks, alt=alt, text=f"{alt}\n{_tree(nodes, ranks_per_node, torchrun)}"
    )


def meeting(nodes: Sequence[str], ranks_per_node: int) -> Figure:
    """The c10d rendezvous of one torchrun on each of `nodes`, from top to bottom.

    Args:
        nodes: their names, in the order in which they arrive at the store; torch sorts them by their text.
        ranks_per_node: how many ranks each of them starts, 1 to 4.

    Raises:
        ValueError: there is no room for so many, or two nodes have one name.
    """
    if not (2 <= len(nodes) <= 3 and 1 <= ranks_per_node <= 4):
        raise ValueError(
            f"There is room for 2 or 3 nodes of 1 to 4 ranks, not {len(nodes)} of {ranks_per_node}."
        )
    if len(set(nodes)) < len(nodes):
        raise ValueError(f"Two nodes have one name: {', '.join(nodes)}.")
    order = sorted(nodes)
    ranks = {name: range(k * ranks_per_node, (k + 1) * ranks_per_node) for k, name in enumerate(order)}
    wide = (WIDTH - 2 * _EDGE) / (len(nodes) + 1)
    x = {name: _EDGE + (k + 1.5) * wide for k, name in enumerate(order)}
    store, step, top = _EDGE + wide / 2, 62, 96
    agreed = top + step * len(nodes)
    told = agreed + 56
    bottom = told + step + 2 * _BOX + 20
    marks = [line(at, 50, at, bottom - _BOX - 12, stroke=LINE, width=2) for at in (store, *x.values())]
    marks += _box(store, 12, wide - 24, "store")
    marks += [mark for name in order for mark in _box(x[name], 12, wide - 24, "torchrun")]
    under = {store: "at the endpoint"} | {x[name]: f"on {name}" for name in order}
    for at, said in under.items():
        marks.append(rect(at - wide / 2 + 8, 52, wide - 16, 26, fill=PAPER))
        marks.append(label(at, 72, said, anchor="middle", size=17, fill=MUTED))
    for k, name in enumerate(nodes):
        y: float = top + step * k + 30
        marks.append(line(x[name], y, store + 3, y, stroke=_MEET, width=2, arrow=True))
        marks.append(label(store + 14, y - 8, f"{name} is here", size=18))
    marks += _box(store, agreed, wide - 24, f"{len(nodes)} of {len(nodes)}: sort")
    for k, name in enumerate(order):
        y = told + step * k / len(nodes) + 8
        marks.append(line(store, y, x[name] - 3, y, stroke=INK, width=1.5, arrow=True))
    marks.append(label(store + 14, told, f"{len(nodes) * ranks_per_node} ranks; yours:", size=18))
    for name in order:
        span = ranks[name]
        named = f"rank {span[0]}" if len(span) == 1 else f"ranks {span[0]}-{span[-1]}"
        colour = rank_colour(span[0])
        marks += _box(x[name], bottom - _BOX - 12, min(wide - 24, 150), named, pale(colour, 0.35), colour)
    lines = [f"{name} is here" for name in nodes] + [
        f"{name} gets ranks {', '.join(map(str, ranks[name]))}" for name in order
    ]
    alt = (
        f"{', then '.join(nodes)} come to the store. When all {len(nodes)} are there, they are sorted by name: "
        + "; ".join(lines[len(nodes) :])
        + "."
    )
    return drawing(WIDTH, bottom, *marks, alt=alt, text="\n".join([alt, *lines]))


def _box(
    middle: float, y: float, width: float, text: str, fill: str = "#f4f4f4", stroke: str = INK
) -> list[str]:
    return [
        rect(middle - width / 2, y, width, _BOX, fill=fill, stroke=stroke, radius=5),
        label(middle, y + 26, text, anchor="middle"),
    ]


def _tree(nodes: int, ranks_per_node: int, torchrun: bool) -> str:
    """The text twin: one line per process, indented under the one that started it."""
    lines = ["sbatch", "  job script on node1", "    srun"]
    for node in range(nodes):
        lines += [f"      torchrun on node{node + 1}"] if torchrun else []
        own = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        lines += [f"      {'  ' * torchrun}rank {r} on node{node + 1}" for r in own]
    return "\n".join(lines)
