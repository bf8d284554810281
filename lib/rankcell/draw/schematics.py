"""Schematic pictures of what a run is made of: the four things that can run out, links, trees of switches, paths.

Pure functions from words and counts to a `Figure`. Nothing in them is to scale; what was measured, and what a
machine says of itself, is drawn elsewhere in this package.
"""

import math
from collections.abc import Mapping, Sequence

from .parts import EDGE, WIDTH, pale, rank_colour, text_width, wrap
from .svg import INK, MUTED, PAPER, Figure, drawing, label, line, rect

_SMALL = 18  # px of text inside boxes: 11.4 px on a phone
_STEP = 24  # px from one line of it to the next
_ORANGE, _BLUE, _GREEN, _PINK = "#e69f00", "#0072b2", "#009e73", "#cc79a7"


def bottlenecks(*, memory: str, compute: str, storage: str, network: str) -> Figure:
    """The four things that a run can run out of, where they are in a cluster; a few words for each."""
    inner, half = 250.0, (WIDTH - 3 * EDGE) / 2
    marks: list[str] = []
    heights = [_box_height(words, inner) for words in (memory, compute)]
    frame = 40 + sum(heights) + 3 * 12
    for k, title in enumerate(("one GPU", "all the other GPUs")):
        x = EDGE + k * (half + EDGE)
        marks += [rect(x, 8, half, frame, stroke=MUTED, radius=8), label(x + 14, 34, title, fill=MUTED)]
        y = 48.0
        for name, words, colour, height in zip(
            ("1 memory", "2 compute"), (memory, compute), (_BLUE, _ORANGE), heights, strict=True
        ):
            marks += _titled(x + 15, y, inner, height, name, words if k == 0 else "", colour)
            y += height + 12
        marks.append(line(x + half / 2, 8 + frame, x + half / 2, frame + 44, stroke=INK, width=2, arrow=True))
        marks.append(
            line(x + half / 2, frame + 40, x + half / 2, 10 + frame, stroke=INK, width=2, arrow=True)
        )
    y = frame + 46
    wide = WIDTH - 2 * EDGE
    for name, words, colour in (("4 network", network, _GREEN), ("3 storage", storage, _PINK)):
        height = _box_height(words, wide)
        marks += _titled(EDGE, y, wide, height, name, words, colour)
        y += height
        if colour is _GREEN:
            marks.append(line(WIDTH / 2, y, WIDTH / 2, y + 34, stroke=INK, width=2, arrow=True))
            y += 36
    said = {"memory": memory, "compute": compute, "storage": storage, "network": network}
    alt = "A GPU has memory and compute; a network joins it to the other GPUs and to the storage."
    return drawing(WIDTH, y + 10, *marks, alt=alt, text="\n".join(f"{k}: {v}" for k, v in said.items()))


def links(counts: Mapping[tuple[int, int], int], *, per_link: str = "") -> Figure:
    """GPUs in a circle, and between each two as many lines as they have links.

        links({(0, 1): 6, (0, 2): 6, (1, 2): 6})

    `per_link` says what one line carries. Raises ValueError where nothing is joined.
    """
    if not counts:
        raise ValueError("There is nothing to draw: give the number of links of at least one pair.")
    gpus = sorted({gpu for pair in counts for gpu in pair})
    turn = math.pi / len(gpus) - math.pi / 2 if len(gpus) % 2 == 0 else -math.pi / 2
    middle, radius = (WIDTH / 2, 190.0), 140.0
    at = {
        gpu: (
            middle[0] + 1.35 * radius * math.cos(turn + 2 * math.pi * k / len(gpus)),
            middle[1] + radius * math.sin(turn + 2 * math.pi * k / len(gpus)),
        )
        for k, gpu in enumerate(gpus)
    }
    wires, words = [], []
    for (i, j), n in counts.items():
        (xa, ya), (xb, yb) = at[i], at[j]
        length = math.hypot(xb - xa, yb - ya)
        across = (-(yb - ya) / length, (xb - xa) / length)
        for k in range(n):
            off = 5.0 * (k - (n - 1) / 2)
            dx, dy = off * across[0], off * across[1]
            wires.append(line(xa + dx, ya + dy, xb + dx, yb + dy, stroke=_GREEN, width=2))
        x, y = xa + 0.36 * (xb - xa), ya + 0.36 * (yb - ya)
        words += [rect(x - 14, y - 14, 28, 28, fill=PAPER, stroke=_GREEN, radius=14)]
        words += [label(x, y + 7, n, anchor="middle", bold=True)]
    for gpu, (x, y) in at.items():
        words.append(rect(x - 42, y - 24, 84, 48, fill=pale(rank_colour(gpu), 0.35), stroke=INK, radius=6))
        words.append(label(x, y + 7, f"GPU {gpu}", anchor="middle", bold=True))
    totals = {gpu: sum(n for pair, n in counts.items() if gpu in pair) for gpu in gpus}
    one = f"; one link carries {per_link}" if per_link else ""
    foot = f"{', '.join(sorted({str(n) for n in totals.values()}))} links leave each GPU{one}."
    for k, part in enumerate(wrap(foot, WIDTH - 2 * EDGE)):
        words.append(label(WIDTH / 2, 388 + 26 * k, part, anchor="middle", fill=MUTED))
    alt = f"{len(gpus)} GPUs, each pair joined by {', '.join(sorted({str(n) for n in counts.values()}))} links; {foot}"
    text = "\n".join(f"GPU {i} - GPU {j}: {n} links" for (i, j), n in counts.items())
    return drawing(WIDTH, 430, *wires, *words, alt=alt, text=f"{text}\n{foot}")


def fat_tree(*, leaves: int, down: int, ups: Sequence[int]) -> Figure:
    """Hosts under leaf switches under spine switches, once for each number of links up that a leaf has.

    The dashed line cuts the hosts in two halves; the links that it crosses are what the halves have between
    them: half of the leaves' links up. Each number of links up is drawn as that many spines, one link from
    every leaf to each.

    Raises:
        ValueError: there is no room, or no even number of leaves.
    """
    if leaves % 2 or not 2 <= leaves <= 6 or not 1 <= down <= 8 or not all(1 <= u <= 8 for u in ups):
        raise ValueError("There is room for 2, 4 or 6 leaves, 1 to 8 hosts on each and 1 to 8 links up.")
    marks, twin, y = [], [], 6.0
    wide = (WIDTH - 2 * EDGE) / leaves
    middle = WIDTH / 2
    for up in ups:
        crossing = leaves // 2 * up
        title = f"{down} down, {up} up: {_ratio(down, up)}; {crossing} links between the halves"
        marks.append(label(EDGE, y + 22, title, bold=True))
        spine_y, leaf_y, host_y = y + 40, y + 130, y + 206
        spine_x = [middle + (k - (up - 1) / 2) * min(130.0, (WIDTH - 60) / up) for k in range(up)]
        for leaf in range(leaves):
            x = EDGE + (leaf + 0.5) * wide
            colour = _BLUE if leaf < leaves // 2 else _ORANGE
            marks += [line(x, leaf_y, sx, spine_y + 30, stroke=colour, width=2) for sx in spine_x]
            for h in range(down):
                hx = x + (h - (down - 1) / 2) * (wide - 14) / down
                marks.append(line(x, leaf_y + 30, hx, host_y, stroke=colour, width=2))
                side = min(22.0, (wide - 14) / down - 3)
                marks.append(rect(hx - side / 2, host_y, side, 22, fill=pale(colour, 0.4), stroke=INK))
            marks.append(rect(x - wide / 2 + 8, leaf_y, wide - 16, 30, fill=PAPER, stroke=INK, radius=6))
            marks.append(label(x, leaf_y + 21, "leaf", anchor="middle", size=_SMALL))
        spread = min(100.0, (WIDTH - 60) / up - 6)
        for sx in spine_x:
            marks.append(rect(sx - spread / 2, spine_y, spread, 30, fill=PAPER, stroke=INK, radius=6))
            if text_width("spine", _SMALL) < spread:
                marks.append(label(sx, spine_y + 21, "spine", anchor="middle", size=_SMALL))
        marks.append(line(middle, spine_y + 34, middle, host_y + 30, stroke="#d55e00", width=3, dash="7 5"))
        twin.append(title)
        y = host_y + 44
    marks.append(label(EDGE, y + 14, "Squares: hosts. Dashed line: cuts them into halves.", fill=MUTED))
    alt = f"{leaves} leaf switches with {down} hosts each. " + "; ".join(twin) + "."
    return drawing(WIDTH, y + 28, *marks, alt=alt, text="\n".join(twin))


def paths(rows: Mapping[str, Sequence[str]], *, alt: str = "") -> Figure:
    """Rows of boxes with arrows between them: the ways that a byte can take.

        paths({"pinned": ["pinned memory", "the GPU reads it", "GPU memory"]})

    Of each row the first, third, fifth ... entry is a box, and what stands between two of them is written at
    the arrow. At most four boxes find room. Without `alt` the alternative text tells all rows.

    Raises:
        ValueError: a row does not end with a box, or has more than four.
    """
    if not rows or any(len(row) % 2 == 0 or len(row) > 7 for row in rows.values()):
        raise ValueError(
            "Give each row boxes and arrows in turn, beginning and ending with a box, four at most."
        )
    marks, twin, y = [], [], 6.0
    for name, row in rows.items():
        boxes, arrows = row[::2], row[1::2]
        box = 128.0 if len(boxes) == 4 else 140.0
        gap = (WIDTH - 2 * EDGE - box * len(boxes)) / max(len(boxes) - 1, 1)
        marks.append(label(EDGE, y + 22, name, bold=True))
        tall = 20 + _STEP * max(len(wrap(words, box - 12, _SMALL)) for words in boxes)
        top = y + 34
        room = gap + box - 14
        below = max((len(wrap(words, room, _SMALL)) for words in arrows), default=0)
        for k, words in enumerate(boxes):
            x = EDGE + k * (box + gap)
            marks.append(rect(x, top, box, tall, fill=pale(_BLUE, 0.12), stroke=INK, radius=6))
            parts = wrap(words, box - 12, _SMALL)
            first = top + tall / 2 + 6 - _STEP * (len(parts) - 1) / 2
            for i, part in enumerate(parts):
                marks.append(label(x + box / 2, first + _STEP * i, part, anchor="middle", size=_SMALL))
        for k, words in enumerate(arrows):
            x = EDGE + k * (box + gap) + box
            middle = top + tall / 2
            marks.append(line(x + 2, middle, x + gap - 2, middle, stroke=_ORANGE, width=4, arrow=True))
            for i, part in enumerate(wrap(words, room, _SMALL)):
                at = (x + gap / 2, top + tall + 20 + _STEP * i)
                marks.append(label(*at, part, anchor="middle", size=_SMALL, fill=MUTED))
        twin.append(f"{name}: " + " ".join(w if i % 2 == 0 else f"--({w})->" for i, w in enumerate(row)))
        y = top + tall + 14 + _STEP * below + 8
    return drawing(WIDTH, y + 4, *marks, alt=alt or "; ".join(twin) + ".", text="\n".join(twin))


def _ratio(down: int, up: int) -> str:
    """Down to up in lowest terms: 1:1, 4:1, 3:2."""
    common = math.gcd(down, up)
    return f"{down // common}:{up // common}"


def _box_height(words: str, width: float) -> float:
    return 36 + _STEP * len(wrap(words, width - 20, _SMALL))


def _titled(x: float, y: float, width: float, height: float, name: str, words: str, colour: str) -> list[str]:
    """A box with its name in bold and some words below."""
    marks = [rect(x, y, width, height, fill=pale(colour, 0.2), stroke=colour, radius=6)]
    marks.append(label(x + 10, y + 24, name, bold=True))
    lines = wrap(words, width - 20, _SMALL) if words else []
    return marks + [label(x + 10, y + 50 + _STEP * i, part, size=_SMALL) for i, part in enumerate(lines)]


__all__ = ["bottlenecks", "fat_tree", "links", "paths"]
