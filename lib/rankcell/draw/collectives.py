"""Pictures of collectives: what each rank held before, who sends what to whom, what each rank holds after. One row per
rank, its tensors with their literal numbers, in the colour of the rank that a number came from, striped where numbers
of several ranks were combined. The arrows follow the meaning of the operation, not the route of the bytes.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from ..results import Event, Run, Values, grouped, name_ranks
from .parts import WIDE, pale, rank_colour
from .svg import INK, LINE, MUTED, Figure, Frames, drawing, line, rect
from .svg import label as label_of_any_size

# px: the height of a block of numbers, the room for the ranks' names, and what is left free at the sides
CELL, NAMES, MARGIN = 40, 86, 12
_TEXT, _ARROWS = 21, 118
_LEGIBLE = 0.42  # share of a rank's colour behind its numbers, so that black stays legible
_LANE = 5  # px between the lines that leave the blocks of one row
_GAP = 6  # px between two blocks
_FROM_ROOT, _TO_ROOT = {"broadcast", "scatter"}, {"reduce", "gather"}
_IN_PLACE = {"broadcast", "reduce", "all_reduce"}  # one tensor is input and output
_SENDS_PARTS = {"scatter", "reduce_scatter", "all_to_all"}  # part i goes to the i-th rank of the group
_GETS_PARTS = {"gather", "all_gather", "all_to_all"}  # part j came from the j-th rank
_UNEQUAL = "For unequal parts use the form with a list of tensors."
_KNOWN = _IN_PLACE | _SENDS_PARTS | _GETS_PARTS
label = partial(label_of_any_size, size=_TEXT)  # 11 px on a phone, where the picture is 340 px wide


class _Block(NamedTuple):
    """Numbers side by side that share their origin: the ranks in `sources`, none if they mean nothing."""

    numbers: tuple[float, ...]
    sources: tuple[int, ...] = ()


class _Held(NamedTuple):
    """What one rank holds: its input, and its output before the call and after it."""

    before: tuple[_Block, ...]
    empty: tuple[_Block, ...]
    after: tuple[_Block, ...]


class _Move(NamedTuple):
    """Numbers that one rank sends to another."""

    source: int
    target: int
    part: int | None  # which block of the sender; all of its tensor if None
    port: int  # which of the senders to this target, in group order


class _Scene(NamedTuple):
    """One collective on all the ranks that called it: what each holds, and the moves between them."""

    op: str
    reduce_op: str
    groups: tuple[tuple[int, ...], ...]
    root: int | None
    held: Mapping[int, _Held]  # in the order of the ranks
    moves: Sequence[_Move]


def steps(run: Run | Iterable[Event], op: str = "") -> Frames:
    """The first `op` of a run of `%%ranks --values` in three steps: before, who sends what to whom, after.

    `op` may be left out if the run holds one kind of collective. Groups side by side stand in one picture. Raises
    ValueError: the run holds no such call, or it was recorded without values.
    """
    scene = _scene(_select(run, op))
    title = scene.op + (f", {scene.reduce_op}" if scene.reduce_op not in ("", "SUM") else "")
    title += f" on {' and '.join(name_ranks(g) for g in scene.groups)}"
    feet = ("", *_sentences(scene))
    figures = tuple(_draw(scene, title, step, feet) for step in range(3))
    return Frames(figures, ("before", "who sends what to whom", "after"), still=2)


def _select(run: Run | Iterable[Event], op: str) -> list[Event]:
    """The event of each rank for the first `op`, complete groups only."""
    events = [e for e in (run.events if isinstance(run, Run) else run) if e.kind == "comm" and e.op in _KNOWN]
    first: dict[str, dict[int, Event]] = {}
    for event in events:
        first.setdefault(event.op, {}).setdefault(event.rank, event)
    held = ", ".join(sorted(first)) or "none"
    if not op and len(first) != 1:
        raise ValueError(f"Which collective? This run holds: {held}. Name one: steps(run, 'all_reduce').")
    op = op or next(iter(first))
    if not (chosen := first.get(op, {})):
        raise ValueError(f"This run holds no {op}. Its collectives: {held}.")
    for rank, event in chosen.items():
        if missing := [r for r in event.ranks if r not in chosen or chosen[r].ranks != event.ranks]:
            whose, others = name_ranks(event.ranks), name_ranks(missing)
            raise ValueError(f"The first {op} of rank {rank} is one of {whose}, but this run has none of {others}.")
    return [chosen[rank] for rank in sorted(chosen)]


def _values(event: Event) -> Values:
    if event.values is None:
        how = "Run its cell with `--values`: `%%ranks 4 --values`."
        raise ValueError(f"The numbers of this {event.op} were not recorded. {how}")
    recorded = max(map(len, event.values.input_before + event.values.output_before), default=0)
    if event.values.input_before and recorded < math.prod(event.shape):
        found = f"Only the first {recorded} of {math.prod(event.shape)} numbers were recorded."
        raise ValueError(f"{found} Draw this {event.op} with a smaller tensor.")
    return event.values


def _parts(event: Event, tensors: tuple[tuple[float, ...], ...]) -> list[tuple[float, ...]]:
    """One piece per rank of the group: the tensors of a list, or equal parts of the one tensor."""
    n, flat = len(event.ranks), tuple(chain(*tensors))
    if len(tensors) == n:
        return list(tensors)
    if len(tensors) != 1 or len(flat) % n:
        forms = f"{n} tensors, or from one tensor in {n} equal parts"
        gave = f"rank {event.rank} gave {len(flat)} numbers. {_UNEQUAL}"
        raise ValueError(f"{event.op} on {n} ranks is drawn from {forms}; {gave}")
    size = len(flat) // n
    return [flat[i * size : (i + 1) * size] for i in range(n)]


def _scene(events: Sequence[Event]) -> _Scene:
    first = events[0]
    groups = tuple(dict.fromkeys(e.ranks for e in events))
    found = {e.rank: _exchange(e) for e in events}
    held = {rank: of_rank for rank, (of_rank, _) in found.items()}
    moves = [move for group in groups for rank in group for move in found[rank][1]]
    for m in moves if first.op == "all_to_all" else ():
        sent, got = held[m.source].before[m.part or 0].numbers, held[m.target].after[m.port].numbers
        if repr(sent) != repr(got):  # as texts, so that NaN is NaN
            where = f"Part {m.port} of rank {m.target}'s output is not part {m.part} of rank {m.source}'s input"
            raise ValueError(f"{where}: the parts are not equal. {_UNEQUAL}")
    return _Scene(first.op, first.reduce_op, groups, first.peer, held, moves)


def _exchange(e: Event) -> tuple[_Held, list[_Move]]:
    """What the rank of this event holds, and the moves to it."""
    op, group, root, values = e.op, e.ranks, e.peer, _values(e)
    gives = op not in _FROM_ROOT or e.rank == root
    gets = op not in _TO_ROOT or e.rank == root
    senders = (root,) if op in _FROM_ROOT and root is not None else group
    pieces = [tuple(chain(*values.input_before))]
    if op in _SENDS_PARTS:
        pieces = _parts(e, values.input_before) if gives else []
    before = tuple(_Block(piece, (e.rank,) if gives else ()) for piece in pieces)
    if op == "gather" and not gets:
        return _Held(before, (), ()), []
    old, new = [tuple(chain(*values.output_before))], [tuple(chain(*values.output_after))]
    sources: list[tuple[int, ...]] = [senders if gets else ()]
    if op in _GETS_PARTS:
        old, new = _parts(e, values.output_before), _parts(e, values.output_after)
        sources = [(s,) for s in group]
    empty = tuple(_Block((math.nan,) * len(piece) if op in _IN_PLACE else piece) for piece in old)
    after = tuple(_Block(piece, s) for piece, s in zip(new, sources, strict=True))
    part = group.index(e.rank) if op in _SENDS_PARTS else None
    return _Held(before, empty, after), [_Move(s, e.rank, part, j) for j, s in enumerate(senders) if gets]


def _sentences(scene: _Scene) -> tuple[str, str]:
    """Who sends what, and what came of it."""
    alone = len(scene.groups) == 1
    root, every = (f"rank {scene.root}", "every rank") if alone else ("the root", "every rank of a group")
    words = {
        "broadcast": (f"{root} sends its tensor to {every}", f"{every} holds {root}'s tensor"),
        "scatter": (f"{root} sends part i to rank i", "each rank holds its part"),
        "gather": (f"{every} sends its tensor to {root}", f"{root} holds one tensor per rank, in rank order"),
        "reduce": (f"{every} sends its tensor to {root}", f"only {root}'s tensor has a meaning"),
        "all_reduce": (f"the tensor of {every} goes to all of them", ""),
        "all_gather": (f"{every} sends its tensor to all of them", f"{every} holds one tensor per rank, in rank order"),
        "reduce_scatter": (f"part i of {every} goes to rank i", ""),
        "all_to_all": (f"part i of {every} goes to rank i", "part j of the output came from rank j"),
    }
    send, found = words[scene.op]
    if scene.reduce_op == "SUM":
        found = "; ".join(filter(None, (_sum(scene), found)))
    return send, found


def _sum(scene: _Scene) -> str:
    """How the first number of a sum came about: "first number of rank 0: 0 + 1 + 2 + 3 = 6"."""
    group = scene.groups[0]
    target = scene.root if scene.root is not None else group[0]
    part = group.index(target) if scene.op == "reduce_scatter" else 0
    terms = [scene.held[r].before[part].numbers[0] for r in group]
    said = format_number(scene.held[target].after[0].numbers[0])
    exact = format_number(math.fsum(terms))
    end = f" = {said}" if said == exact else f" gave {said}, not {exact}"
    return f"first number of rank {target}: {' + '.join(map(format_number, terms))}{end}"


def format_number(x: float) -> str:
    """A number of a tensor as the pictures write it: at most four digits, or ten of a large one."""
    return "nan" if x != x else f"{x:.10g}" if abs(x) >= 1000 else f"{x:.4g}"


class _Places(NamedTuple):
    """Where things stand: the same in the three steps, so that only the contents change."""

    cell: float  # px per number
    right: float  # px from the left of the outputs; the inputs begin at NAMES
    top: float
    pitch: float
    width: float

    def blocks_width(self, blocks: Sequence[_Block]) -> float:
        return self.cell * sum(len(b.numbers) for b in blocks) + _GAP * max(len(blocks) - 1, 0)


def _places(scene: _Scene) -> _Places:
    sides = [h.before for h in scene.held.values()], [h.after for h in scene.held.values()]
    numbers = [x for side in sides for blocks in side for b in blocks for x in b.numbers]
    need = max(0.64 * _TEXT * max((len(format_number(x)) for x in numbers if x == x), default=1) + 6, 28)
    room = WIDE - NAMES - _ARROWS - MARGIN
    gaps = sum(_GAP * max(max(len(blocks) - 1, 0) for blocks in side) for side in sides)
    count = sum(max(sum(len(b.numbers) for b in blocks) for blocks in side) for side in sides)
    cell = max(min((room - gaps) / max(count, 1), 56), need)
    lanes = max(map(len, scene.groups)) * _LANE + 8 if scene.op in _SENDS_PARTS else 0
    at = _Places(cell, 0, 84 + lanes, CELL + max(lanes, 16), WIDE)
    left, right = (max(map(at.blocks_width, side)) for side in sides)
    start = NAMES + left + max(_ARROWS, min(200, room - left - right + _ARROWS))
    if start + right > 1.05 * WIDE:
        raise ValueError(f"A picture has no room for all the numbers: draw {scene.op} with smaller tensors.")
    return at._replace(right=start, width=max(WIDE, start + right + MARGIN))


def _draw(scene: _Scene, title: str, step: int, feet: Sequence[str]) -> Figure:
    at, in_place = _places(scene), scene.op in _IN_PLACE
    rows = {rank: at.top + i * at.pitch for i, rank in enumerate(scene.held)}
    marks = [
        stripes({b.sources for held in scene.held.values() for b in held.after}),
        label(MARGIN, 28, title, bold=True),
        label(NAMES, 62, "tensor before" if in_place else "input", fill=MUTED),
        label(at.right, 62, "after" if in_place else "output", fill=MUTED),
    ]
    for rank, held in scene.held.items():
        y, right = rows[rank], held.after if step == 2 else held.empty
        marks.append(label(MARGIN, y + 27, f"rank {rank}"))
        marks.append(_blocks(at, NAMES, y, held.before, "no input"))
        marks.append(_blocks(at, at.right, y, right, "no output", "" if in_place and step < 2 else "nan"))
    if step:
        arrows = "".join(_arrow(scene, at, rows, m) for m in scene.moves)
        marks.append(f'<g opacity="{1 if step == 1 else 0.3}">{arrows}</g>')
    bottom = max(rows.values()) + CELL + 34
    marks += [label(MARGIN, bottom + 26 * i, text) for i, text in enumerate(_wrap(feet[step]))]
    height = bottom + 26 * max(len(_wrap(f)) for f in feet)
    return drawing(at.width, height, *marks, alt=f"{title}. {_alt(scene, step, feet[step])}")


def _alt(scene: _Scene, step: int, foot: str) -> str:
    if step == 1:
        return f"Arrows: {foot}."
    held = ((rank, of_rank.after if step else of_rank.before) for rank, of_rank in scene.held.items())
    said = ((rank, ", then ".join(" ".join(map(format_number, b.numbers)) for b in blocks)) for rank, blocks in held)
    alike = grouped((text or "nothing", rank) for rank, text in said)
    lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in alike.items()]
    end = f" {foot[0].upper()}{foot[1:]}." if foot else ""
    return f"{'After' if step else 'Before'}: {'; '.join(lines)}.{end}"


def _wrap(foot: str) -> list[str]:
    """A foot note in lines that fit the picture, a new line for each part."""
    return [row for part in foot.split("; ") for row in textwrap.wrap(part, 52) or [""]]


def _blocks(at: _Places, x: float, y: float, blocks: Sequence[_Block], none: str, nothing: str = "nan") -> str:
    if not blocks:
        return label(x, y + 27, none, fill=MUTED)
    marks = []
    for block in blocks:
        width = at.cell * len(block.numbers)
        if untouched := block.numbers and all(map(math.isnan, block.numbers)):
            marks.append(rect(x, y, width, CELL, stroke=MUTED, dash="4 4"))
            texts, step = [nothing], width
        else:
            marks.append(rect(x, y, width, CELL, fill=fill_of(block.sources), stroke=edge_of(block.sources)))
            texts, step = [format_number(x) for x in block.numbers], at.cell
        middle = "".join(f'<text x="{x + (i + 0.5) * step:.1f}" y="{y + 27:g}">{t}</text>' for i, t in enumerate(texts))
        ink = MUTED if untouched or not block.sources else INK
        marks.append(f'<g font-size="{_TEXT}" text-anchor="middle" fill="{ink}">{middle}</g>')
        x += width + _GAP
    return "".join(marks)


def _arrow(scene: _Scene, at: _Places, rows: Mapping[int, float], move: _Move) -> str:
    """From the sender's tensor, or from one block of it over the row, to the receiver's row."""
    blocks, colour, y = scene.held[move.source].before, rank_colour(move.source), rows[move.source]
    edge = NAMES + at.blocks_width(blocks)
    senders = sum(m.target == move.target for m in scene.moves)
    end = (at.right - 4, rows[move.target] + CELL * (move.port + 0.5) / senders)
    start, lead = (edge + 4, y + CELL / 2), ""
    if move.part is not None:
        over = y - 4 - (len(blocks) - 1 - move.part) * _LANE
        before = at.blocks_width(blocks[: move.part]) + (_GAP if move.part else 0)
        x = NAMES + before + at.blocks_width([blocks[move.part]]) / 2
        start = (edge + 6, over)
        corners = f"{x:.1f},{y:.1f} {x:.1f},{over:.1f} {start[0]:.1f},{over:.1f}"
        lead = f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
    dash = "5 4" if move.source == move.target else ""
    return lead + line(*start, *end, stroke=colour, width=2.5, dash=dash, arrow=True)


def fill_of(sources: tuple[int, ...]) -> str:
    """The fill of a number that came from one rank, or the pattern (see `stripes`) of several combined."""
    if len(sources) > 1:
        return f"url(#s{'-'.join(map(str, sources))})"
    return pale(rank_colour(sources[0]), _LEGIBLE) if sources else "none"


def edge_of(sources: tuple[int, ...]) -> str:
    """The outline of a number that came from these ranks."""
    return rank_colour(sources[0]) if len(sources) == 1 else INK if sources else LINE


def stripes(sets: Iterable[tuple[int, ...]]) -> str:
    """The patterns that `fill_of` names: one per set of ranks whose numbers were combined."""
    patterns = []
    for sources in sorted({s for s in sets if len(s) > 1}):
        fills = enumerate(pale(rank_colour(r), _LEGIBLE) for r in sources)
        bands = "".join(f'<rect x="{8 * i}" width="8" height="8" fill="{fill}"/>' for i, fill in fills)
        size = f'width="{8 * len(sources)}" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
        patterns.append(f'<pattern id="s{"-".join(map(str, sources))}" {size}>{bands}</pattern>')
    return f"<defs>{''.join(patterns)}</defs>" if patterns else ""
