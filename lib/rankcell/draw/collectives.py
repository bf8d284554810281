"""Pictures of collectives: what each rank held before, who sends what to whom, what each rank holds after.

`steps` draws one collective of a run recorded with `%%ranks 4 --values`: one row per rank, its tensors with
their literal numbers, in the colour of the rank that a number came from, striped where numbers of several
ranks were combined. The arrows follow the meaning of the operation, not the route that the bytes took: a ring
or a tree is another picture. `matrices` draws collectives as the matrices that they are.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..results import Event, Run, Values, name_ranks
from .parts import WIDE, pale, rank_colour
from .svg import INK, LINE, MUTED, Figure, Frames, drawing, line, rect
from .svg import label as label_of_any_size

# px: the height of a block of numbers, the room for the ranks' names, and what is left free at the sides
CELL, NAMES, MARGIN = 40, 86, 12
_TEXT, _ARROWS = 21, 118
_LEGIBLE = 0.42  # share of a rank's colour behind its numbers, so that black stays legible
_LANE = 5  # px between the lines that leave the blocks of one row
_GAP = 6  # px between two blocks
_ROW = {"broadcast", "reduce", "all_reduce", "gather", "all_gather"}  # a rank sends its tensor as a whole
_IN_PLACE = {"broadcast", "reduce", "all_reduce"}  # one tensor is input and output
label = partial(label_of_any_size, size=_TEXT)  # 11 px on a phone, where the picture is 340 px wide
_COMBINES = {"SUM": " + ", "PRODUCT": " * ", "AVG": " + ", "MIN": ", ", "MAX": ", "}


@dataclass(frozen=True)
class _Block:
    """Numbers side by side that share their origin: the ranks in `sources`, none if they mean nothing."""

    numbers: tuple[float, ...]
    sources: tuple[int, ...] = ()

    @property
    def untouched(self) -> bool:
        return bool(self.numbers) and all(math.isnan(x) for x in self.numbers)


_Held = dict[int, tuple[_Block, ...]]  # what each rank holds


@dataclass(frozen=True)
class _Move:
    """Numbers of one rank that another needs: block `part` of the sender, or all of its tensor if None."""

    source: int
    target: int
    part: int | None
    port: int  # which of the senders to this target, in group order


@dataclass(frozen=True)
class _Scene:
    """One collective on all the ranks that called it: blocks by rank, and the moves between them."""

    op: str
    reduce_op: str
    groups: tuple[tuple[int, ...], ...]
    roots: tuple[int | None, ...]
    before: Mapping[int, tuple[_Block, ...]]
    empty: Mapping[int, tuple[_Block, ...]]  # the output tensors before the call
    after: Mapping[int, tuple[_Block, ...]]
    moves: tuple[_Move, ...]

    @property
    def ranks(self) -> list[int]:
        return sorted(r for group in self.groups for r in group)


def steps(run: Run | Iterable[Event], op: str = "", *, call: int = 1) -> Frames:
    """The `call`-th `op` of a run in three steps: before, who sends what to whom, after.

    `op` may be left out if the run holds one kind of collective. Groups that made the call side by side stand
    in one picture.

    Raises:
        ValueError: the run holds no such call, or it was recorded without values.
    """
    scene = _scene(_select(run, op, call))
    title = scene.op + (f", {scene.reduce_op}" if scene.reduce_op not in ("", "SUM") else "")
    title += f" on {' and '.join(name_ranks(g) for g in scene.groups)}"
    send, found = _sentences(scene)
    figures = tuple(_draw(scene, title, step, foot) for step, foot in enumerate(("", send, found)))
    return Frames(figures, ("before", "who sends what to whom", "after"), still=2)


def matrices(
    named: Mapping[str, Any],
    finding: str,
    *,
    world_size: int = 4,
    columns: int = 2,
    owners: Mapping[str, Sequence[int]] | None = None,
    by_row: bool = False,
    row: str = "a number of the output",
    column: str = "a number of the input",
) -> Figure:
    """Matrices of zeros and ones side by side, each column in the colour of the rank whose input it reads.

    `finding` says for those who do not see the picture what it shows. `owners` names the rank of each column
    where the ranks do not have equal shares of them. With `by_row` each row has its rank's colour instead,
    and `owners` names the rank of each row. `row` and `column` say what one of them is.
    """
    cell, top, width = 13, 34, WIDE / columns
    marks, text, y = [], [], MARGIN
    items = [(name, [[float(x) for x in row] for row in matrix]) for name, matrix in named.items()]
    for i in range(0, len(items), columns):
        side_by_side = items[i : i + columns]
        for j, (name, matrix) in enumerate(side_by_side):
            coloured = len(matrix) if by_row else len(matrix[0])
            ranks = (owners or {}).get(name) or [i * world_size // coloured for i in range(coloured)]
            x = MARGIN + j * width
            picture = _matrix(x, y + top, matrix, cell, ranks, world_size, by_row)
            marks += [label(x, y + 22, name, bold=True), picture]
            text.append(f"{name}\n" + "\n".join(" ".join("1" if x else "." for x in row) for row in matrix))
        y += top + cell * max(len(m) for _, m in side_by_side) + 22
    colour = ", in its rank's colour"
    marks.append(label(MARGIN, y + 12, f"row: {row}{colour if by_row else ''}"))
    marks.append(label(MARGIN, y + 40, f"column: {column}{'' if by_row else colour}"))
    for r in range(world_size):
        x = MARGIN + 110 * r
        marks.append(rect(x, y + 54, 18, 18, fill=rank_colour(r)) + label(x + 26, y + 70, f"rank {r}"))
    sizes = ", ".join(f"{name} {len(m)} x {len(m[0])}" for name, m in items)
    alt = f"{finding} Matrices of zeros and ones, rows x columns: {sizes}."
    return drawing(WIDE, y + 84, *marks, alt=alt, text="\n\n".join(text))


def _matrix(
    x: float,
    y: float,
    matrix: Sequence[Sequence[float]],
    cell: int,
    ranks: Sequence[int],
    world_size: int,
    by_row: bool,
) -> str:
    height, width = len(matrix) * cell, len(matrix[0]) * cell
    marks = []
    for i in range(world_size + 1):
        across, down = height * i / world_size, width * i / world_size
        marks += [line(x, y + across, x + width, y + across), line(x + down, y, x + down, y + height)]
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            if value:
                fill = rank_colour(ranks[i if by_row else j])
                marks.append(rect(x + j * cell + 1, y + i * cell + 1, cell - 2, cell - 2, fill=fill))
    return "".join(marks)


def _select(run: Run | Iterable[Event], op: str, call: int) -> list[Event]:
    """The event of each rank for the `call`-th `op`, complete groups only."""
    known = {o for o in _BUILD}
    events = [e for e in (run.events if isinstance(run, Run) else run) if e.kind == "comm"]
    calls: dict[str, dict[int, list[Event]]] = {}
    for event in events:
        if event.op in known:
            calls.setdefault(event.op, {}).setdefault(event.rank, []).append(event)
    held = (
        ", ".join(f"{o} ({max(map(len, by_rank.values()))}x)" for o, by_rank in sorted(calls.items()))
        or "none"
    )
    if not op:
        if len(calls) != 1:
            raise ValueError(f"Which collective? This run holds: {held}. Name one: steps(run, 'all_reduce').")
        op = next(iter(calls))
    if op not in known:
        raise ValueError(f"No picture for {op!r}. There is one for: {', '.join(sorted(known))}.")
    by_rank = calls.get(op, {})
    chosen = [own[call - 1] for own in by_rank.values() if 1 <= call <= len(own)]
    if not chosen:
        raise ValueError(f"This run holds no {op} number {call}. Its collectives: {held}.")
    for event in chosen:
        _values(event)
    by_group = {e.rank: e for e in chosen}
    for event in chosen:
        missing = [r for r in event.ranks if r not in by_group or by_group[r].ranks != event.ranks]
        if missing:
            raise ValueError(
                f"{op} number {call} of rank {event.rank} is one of {name_ranks(event.ranks)}, but this run "
                f"has none of {name_ranks(missing)}. Draw a call that the whole group made."
            )
    return sorted(chosen, key=lambda e: e.rank)


def _values(event: Event) -> Values:
    if event.values is None:
        raise ValueError(
            f"The numbers of this {event.op} were not recorded. "
            "Run its cell with `--values`: `%%ranks 4 --values`."
        )
    return event.values


def _root(event: Event) -> int:
    """The rank that a rooted collective sends from or to."""
    assert event.peer is not None, f"{event.op} without a root"
    return event.peer


def _parts(event: Event, tensors: tuple[tuple[float, ...], ...]) -> list[tuple[float, ...]]:
    """One piece per rank of the group: the tensors of a list, or equal parts of the one tensor."""
    n = len(event.ranks)
    if len(tensors) == n:
        return list(tensors)
    flat = tensors[0] if len(tensors) == 1 else ()
    if not flat or len(flat) % n:
        shapes = ", ".join(str(len(t)) for t in tensors) or "none"
        raise ValueError(
            f"{event.op} on {n} ranks is drawn from {n} tensors or one tensor in {n} equal parts; "
            f"rank {event.rank} gave tensors of {shapes} numbers. "
            "For unequal parts use the form with a list of tensors."
        )
    size = len(flat) // n
    return [flat[i * size : (i + 1) * size] for i in range(n)]


def _whole(tensors: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    return tuple(x for tensor in tensors for x in tensor)


def _scene(events: list[Event]) -> _Scene:
    groups = {e.ranks: e for e in events}
    by_rank = {e.rank: e for e in events}
    for event in events:
        recorded = max(
            (len(t) for t in _values(event).input_before + _values(event).output_before), default=0
        )
        size = math.prod(event.shape)
        if _values(event).input_before and recorded < size:
            raise ValueError(
                f"Only the first {recorded} of {size} numbers were recorded. "
                f"Draw this {event.op} with a smaller tensor."
            )
    before: _Held = {}
    empty: _Held = {}
    after: _Held = {}
    moves: list[_Move] = []
    for group, some in groups.items():
        _BUILD[some.op]([by_rank[r] for r in group], before, empty, after, moves)
    first = events[0]
    return _Scene(
        first.op,
        first.reduce_op,
        tuple(groups),
        tuple(e.peer for e in groups.values()),
        before,
        empty,
        after,
        tuple(moves),
    )


def _blank(numbers: tuple[float, ...]) -> _Block:
    """A place for as many numbers, nothing in it yet."""
    return _Block((math.nan,) * len(numbers))


def _build_in_place(
    events: list[Event], before: _Held, empty: _Held, after: _Held, moves: list[_Move]
) -> None:
    """broadcast, reduce, all_reduce: one tensor, overwritten where the operation says so."""
    op, group, root = events[0].op, events[0].ranks, events[0].peer
    for e in events:
        mine, result = _whole(_values(e).input_before), _whole(_values(e).output_after)
        reads, writes = op != "broadcast" or e.rank == root, op != "reduce" or e.rank == root
        sources = (_root(e),) if op == "broadcast" else group
        before[e.rank] = (_Block(mine, (e.rank,) if reads else ()),)
        empty[e.rank] = (_blank(result),)
        after[e.rank] = (_Block(result, sources if writes else ()),)
        if writes:
            moves += [_Move(s, e.rank, None, i) for i, s in enumerate(sources)]


def _build_scatter(
    events: list[Event], before: _Held, empty: _Held, after: _Held, moves: list[_Move]
) -> None:
    root = _root(events[0])
    for i, e in enumerate(events):
        sent = _parts(e, _values(e).input_before) if e.rank == root else []
        before[e.rank] = tuple(_Block(p, (root,)) for p in sent)
        empty[e.rank] = (_Block(_whole(_values(e).output_before)),)
        after[e.rank] = (_Block(_whole(_values(e).output_after), (root,)),)
        moves.append(_Move(root, e.rank, i, 0))


def _build_gather(events: list[Event], before: _Held, empty: _Held, after: _Held, moves: list[_Move]) -> None:
    """gather and all_gather: one place per rank, on the root or on all."""
    group, root = events[0].ranks, events[0].peer
    for e in events:
        before[e.rank] = (_Block(_whole(_values(e).input_before), (e.rank,)),)
        if root is not None and e.rank != root:
            empty[e.rank] = after[e.rank] = ()
            continue
        empty[e.rank] = tuple(_Block(p) for p in _parts(e, _values(e).output_before))
        pieces = zip(_parts(e, _values(e).output_after), group, strict=True)
        after[e.rank] = tuple(_Block(p, (s,)) for p, s in pieces)
        moves += [_Move(s, e.rank, None, i) for i, s in enumerate(group)]


def _build_parts(events: list[Event], before: _Held, empty: _Held, after: _Held, moves: list[_Move]) -> None:
    """reduce_scatter and all_to_all: part i of every rank goes to the i-th rank of the group."""
    group, combines = events[0].ranks, events[0].op == "reduce_scatter"
    parts = {} if combines else _unequal(events)
    if parts:
        for e in events:
            sent = [(t, parts[e.rank, t]) for t in group if parts[e.rank, t]]
            came = [(s, parts[s, e.rank]) for s in group if parts[s, e.rank]]
            before[e.rank] = tuple(_Block(p, (e.rank,)) for _, p in sent)
            after[e.rank] = tuple(_Block(p, (s,)) for s, p in came)
            empty[e.rank] = tuple(_blank(p) for _, p in came)
            moves += [_Move(e.rank, t, i, group.index(e.rank)) for i, (t, _) in enumerate(sent)]
        ports = {t: [m.source for m in moves if m.target == t] for t in group}
        moves[:] = [_Move(m.source, m.target, m.part, ports[m.target].index(m.source)) for m in moves]
        return
    for i, e in enumerate(events):
        before[e.rank] = tuple(_Block(p, (e.rank,)) for p in _parts(e, _values(e).input_before))
        if combines:
            empty[e.rank] = (_Block(_whole(_values(e).output_before)),)
            after[e.rank] = (_Block(_whole(_values(e).output_after), group),)
        else:
            empty[e.rank] = tuple(_Block(p) for p in _parts(e, _values(e).output_before))
            pieces = zip(_parts(e, _values(e).output_after), group, strict=True)
            after[e.rank] = tuple(_Block(p, (s,)) for p, s in pieces)
        moves += [_Move(s, e.rank, i, j) for j, s in enumerate(group)]
    if not combines:
        _check_parts(group, before, after)


def _unequal(events: list[Event]) -> dict[tuple[int, int], tuple[float, ...]]:
    """What each rank sent to each in an `all_to_all_single` with unequal parts, told from its numbers.

    Empty where the parts are equal, or where a number occurs twice, so that one cannot tell.
    """
    group = events[0].ranks
    sent = {e.rank: _whole(_values(e).input_before) for e in events}
    came = {e.rank: _whole(_values(e).output_after) for e in events}
    home = {x: rank for rank, numbers in sent.items() for x in numbers}
    if len(home) < sum(map(len, sent.values())):
        return {}
    parts = {(s, t): tuple(x for x in came[t] if home.get(x) == s) for s in group for t in group}
    fits = all(
        sent[r] == tuple(x for t in group for x in parts[r, t])
        and came[r] == tuple(x for s in group for x in parts[s, r])
        for r in group
    )
    return parts if fits and len(set(map(len, parts.values()))) > 1 else {}


def _check_parts(group: tuple[int, ...], before: _Held, after: _Held) -> None:
    """Equal parts are a guess for `all_to_all_single`: with unequal ones the colours would be wrong."""
    for i, target in enumerate(group):
        for j, source in enumerate(group):
            sent, came = before[source][i].numbers, after[target][j].numbers
            same = len(sent) == len(came) and all(
                x == y or (x != x and y != y) for x, y in zip(sent, came, strict=True)
            )
            if not same:
                raise ValueError(
                    f"Part {j} of rank {target}'s output is not part {i} of rank {source}'s input: "
                    "the parts are not equal. For unequal parts use the form with a list of tensors."
                )


_BUILD: dict[str, Callable[..., None]] = {
    "broadcast": _build_in_place,
    "reduce": _build_in_place,
    "all_reduce": _build_in_place,
    "scatter": _build_scatter,
    "gather": _build_gather,
    "all_gather": _build_gather,
    "reduce_scatter": _build_parts,
    "all_to_all": _build_parts,
}


def _sentences(scene: _Scene) -> tuple[str, str]:
    """Who sends what, and what came of it."""
    root = f"rank {scene.roots[0]}" if len(scene.groups) == 1 else "the root"
    every = "every rank" if len(scene.groups) == 1 else "every rank of a group"
    words = {
        "broadcast": (f"{root} sends its tensor to {every}", f"{every} holds {root}'s tensor"),
        "scatter": (f"{root} sends part i to rank i", "each rank holds its part"),
        "gather": (f"{every} sends its tensor to {root}", f"{root} holds one tensor per rank, in rank order"),
        "reduce": (f"{every} sends its tensor to {root}", f"only {root}'s tensor has a meaning"),
        "all_reduce": (f"the tensor of {every} goes to all of them", ""),
        "all_gather": (
            f"{every} sends its tensor to all of them",
            f"{every} holds one tensor per rank, in rank order",
        ),
        "reduce_scatter": (f"part i of {every} goes to rank i", ""),
        "all_to_all": (f"part i of {every} goes to rank i", "part j of the output came from rank j"),
    }
    send, found = words[scene.op]
    if scene.op == "all_to_all" and any(len(scene.before[r]) < len(g) for g in scene.groups for r in g):
        send, found = (
            "each number goes to the rank that it is for",
            "what came stands in the order of the ranks",
        )
    if scene.op in ("reduce", "all_reduce", "reduce_scatter"):
        found = "; ".join(filter(None, (_arithmetic(scene), found)))
    return send, found


def _arithmetic(scene: _Scene) -> str:
    """How the first number of a result came about: "first number: 0 + 1 + 2 + 3 = 6"."""
    group = scene.groups[0]
    target = scene.roots[0] if scene.roots[0] is not None else group[0]
    part = group.index(target) if scene.op == "reduce_scatter" else 0
    terms = [scene.before[r][part].numbers[:1] for r in group]
    result = scene.after[target][0].numbers[:1]
    if not result or not all(terms):
        return ""
    joined = _COMBINES.get(scene.reduce_op or "SUM", ", ").join(format_number(t[0]) for t in terms)
    if scene.reduce_op == "AVG":
        joined = f"({joined}) / {len(group)}"
    elif scene.reduce_op not in ("", "SUM", "PRODUCT"):
        joined = f"{scene.reduce_op.lower()}({joined})"
    said = format_number(result[0])
    exact = format_number(math.fsum(t[0] for t in terms)) if scene.reduce_op in ("", "SUM") else said
    end = f" = {said}" if said == exact else f" gave {said}, not {exact}"
    return f"first number of rank {target}: {joined}{end}"


def format_number(x: float) -> str:
    """A number of a tensor as the pictures write it: at most four digits, or ten of a large one."""
    if isinstance(x, bool) or x is None:
        return str(x)
    return "nan" if x != x else f"{x:.10g}" if abs(x) >= 1000 else f"{x:.4g}"


def _say(blocks: Sequence[_Block]) -> str:
    return " | ".join(" ".join(map(format_number, b.numbers)) for b in blocks) if blocks else "-"


def _twin(scene: _Scene, title: str, step: int, foot: str) -> str:
    """The picture as text."""
    if step == 1:
        lines = []
        for r in scene.ranks:
            for part in sorted({m.part for m in scene.moves if m.source == r}, key=lambda p: p or 0):
                to = [m.target for m in scene.moves if m.source == r and m.part == part]
                numbers = _say(scene.before[r] if part is None else scene.before[r][part : part + 1])
                lines.append(f"rank {r}: {numbers}  ->  {name_ranks(to)}")
    else:
        right = scene.empty if step == 0 else scene.after
        width = max(len(_say(scene.before[r])) for r in scene.ranks)
        show = step == 2 or scene.op not in _IN_PLACE  # in place there is no output to show before
        lines = [
            f"rank {r}   {_say(scene.before[r]):<{width}}" + (f"   =>   {_say(right[r])}" if show else "")
            for r in scene.ranks
        ]
    return "\n".join([title, *lines, *([foot] if foot else [])])


@dataclass(frozen=True)
class _Layout:
    """Where things stand: the same in the three steps, so that only the contents change."""

    cell: float  # px per number
    limit: int  # numbers of a block that are spelt out
    left: float
    right: float
    top: float
    pitch: float
    width: float

    def y(self, row: int) -> float:
        return self.top + row * self.pitch

    def shown(self, block: _Block) -> list[str]:
        texts = [format_number(x) for x in block.numbers]
        return texts if len(texts) <= self.limit else [*texts[: self.limit - 1], "…"]

    def block_width(self, block: _Block) -> float:
        return self.cell * len(self.shown(block))

    def blocks_width(self, blocks: Sequence[_Block]) -> float:
        return sum(self.block_width(b) for b in blocks) + _GAP * max(len(blocks) - 1, 0)


def _layout(scene: _Scene) -> _Layout:
    sides = [scene.before, scene.after]
    longest = max(len(b.numbers) for side in sides for blocks in side.values() for b in blocks)
    widest = max(
        len(format_number(x))
        for side in sides
        for blocks in side.values()
        for b in blocks
        for x in b.numbers
        if x == x
    )
    need = max(0.64 * _TEXT * widest + 6, 28)
    room = WIDE - NAMES - _ARROWS - MARGIN
    limit = longest
    while True:
        count, gaps = 0, 0
        for side in sides:
            count += max(sum(min(len(b.numbers), limit) for b in blocks) for blocks in side.values())
            gaps += _GAP * max(max(len(blocks) - 1, 0) for blocks in side.values())
        if limit <= 2 or (room - gaps) / max(count, 1) >= need:
            break
        limit -= 1
    cell = max(min((room - gaps) / max(count, 1), 56), need)
    lanes = 0 if scene.op in _ROW else max(len(g) for g in scene.groups) * _LANE + 8
    pitch = CELL + max(lanes, 16)
    layout = _Layout(cell, limit, NAMES, 0, 84 + lanes, pitch, WIDE)
    left = max(layout.blocks_width(b) for b in scene.before.values())
    right = max(layout.blocks_width(b) for b in scene.after.values())
    arrows = max(_ARROWS, min(200, room - left - right + _ARROWS))
    start = NAMES + left + arrows
    return _Layout(cell, limit, NAMES, start, 84 + lanes, pitch, max(WIDE, start + right + MARGIN))


def _draw(scene: _Scene, title: str, step: int, foot: str) -> Figure:
    at = _layout(scene)
    ranks = scene.ranks
    in_place = scene.op in _IN_PLACE
    marks = [
        _stripes(scene),
        label(MARGIN, 28, title, bold=True),
        label(at.left, 62, "tensor before" if in_place else "input", fill=MUTED),
        label(at.right, 62, "after" if in_place else "output", fill=MUTED),
    ]
    for row, rank in enumerate(ranks):
        y = at.y(row)
        marks.append(label(MARGIN, y + 27, f"rank {rank}"))
        marks.append(_blocks(at, at.left, y, scene.before[rank], "no input"))
        right = (scene.after if step == 2 else scene.empty)[rank]
        marks.append(_blocks(at, at.right, y, right, "no output", "" if in_place and step < 2 else "nan"))
    if step:
        arrows = "".join(_arrow(scene, at, m) for m in scene.moves)
        marks.append(f'<g opacity="{1 if step == 1 else 0.3}">{arrows}</g>')
    bottom = at.y(len(ranks) - 1) + CELL
    feet = _wrap(foot)
    marks += [label(MARGIN, bottom + 34 + 26 * i, text) for i, text in enumerate(feet)]
    alt = f"{title}. {_alt(scene, step, foot)}"
    height = bottom + 34 + 26 * max(len(_wrap(f)) for f in _sentences(scene))
    return drawing(at.width, height, *marks, alt=alt, text=_twin(scene, title, step, foot))


def _alt(scene: _Scene, step: int, foot: str) -> str:
    if step == 1:
        return f"Arrows: {foot}."
    side, what = (scene.before, "Before") if step == 0 else (scene.after, "After")
    held: dict[str, list[int]] = {}
    for r in scene.ranks:
        held.setdefault(_say(side[r]).replace(" | ", ", then "), []).append(r)
    lines = [f"{name_ranks(rs)}: {'nothing' if text == '-' else text}" for text, rs in held.items()]
    end = f" {foot[0].upper()}{foot[1:]}." if foot else ""
    return f"{what}: {'; '.join(lines)}.{end}"


def _wrap(text: str, width: int = 52) -> list[str]:
    """A foot note in lines that fit the picture, a new line for each part."""
    lines: list[str] = []
    for part in text.split("; "):
        lines.append("")
        for word in part.split():
            if len(lines[-1]) + 1 + len(word) > width:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _blocks(
    at: _Layout, x: float, y: float, blocks: Sequence[_Block], none: str, untouched: str = "nan"
) -> str:
    if not blocks:
        return label(x, y + 27, none, fill=MUTED)
    marks = []
    for block in blocks:
        width = at.block_width(block)
        if block.untouched:
            marks.append(rect(x, y, width, CELL, stroke=MUTED, dash="4 4"))
            texts, step = [untouched], width
        else:
            marks.append(rect(x, y, width, CELL, fill=fill_of(block.sources), stroke=edge_of(block.sources)))
            texts, step = at.shown(block), at.cell
        middle = "".join(
            f'<text x="{x + (i + 0.5) * step:.1f}" y="{y + 27:g}">{t}</text>' for i, t in enumerate(texts)
        )
        ink = MUTED if block.untouched or not block.sources else INK
        marks.append(f'<g font-size="{_TEXT}" text-anchor="middle" fill="{ink}">{middle}</g>')
        x += width + _GAP
    return "".join(marks)


def _arrow(scene: _Scene, at: _Layout, move: _Move) -> str:
    """From the sender's tensor, or from one block of it over the row, to the receiver's row."""
    ranks = scene.ranks
    source_y, target_y = at.y(ranks.index(move.source)), at.y(ranks.index(move.target))
    blocks = scene.before[move.source]
    edge = at.left + at.blocks_width(blocks)
    senders = sum(m.target == move.target for m in scene.moves)
    end = (at.right - 4, target_y + CELL * (move.port + 0.5) / senders)
    dash = "5 4" if move.source == move.target else ""
    colour = rank_colour(move.source)
    if move.part is None:
        start, lead = (edge + 4, source_y + CELL / 2), ""
    else:
        y = source_y - 4 - (len(blocks) - 1 - move.part) * _LANE
        before = at.blocks_width(blocks[: move.part]) + (_GAP if move.part else 0)
        x = at.left + before + at.block_width(blocks[move.part]) / 2
        start = (edge + 6, y)
        lead = (
            f'<polyline points="{x:.1f},{source_y:.1f} {x:.1f},{y:.1f} {start[0]:.1f},{y:.1f}" fill="none" '
            f'stroke="{colour}" stroke-width="2.5"/>'
        )
    return lead + line(*start, *end, stroke=colour, width=2.5, dash=dash, arrow=True)


def fill_of(sources: tuple[int, ...]) -> str:
    """The fill of a number that came from one rank, or the pattern (see `stripes`) of several combined."""
    if len(sources) > 1:
        return f"url(#s{'-'.join(map(str, sources))})"
    return pale(rank_colour(sources[0]), _LEGIBLE) if sources else "none"


def edge_of(sources: tuple[int, ...]) -> str:
    """The outline of a number that came from these ranks."""
    return rank_colour(sources[0]) if len(sources) == 1 else INK if sources else LINE


def _stripes(scene: _Scene) -> str:
    return stripes({b.sources for blocks in scene.after.values() for b in blocks})


def stripes(sets: Iterable[tuple[int, ...]]) -> str:
    """The patterns that `fill_of` names: one per set of ranks whose numbers were combined."""
    patterns = []
    for sources in sorted(s for s in sets if len(s) > 1):
        bands = "".join(
            f'<rect x="{8 * i}" width="8" height="8" fill="{pale(rank_colour(r), _LEGIBLE)}"/>'
            for i, r in enumerate(sources)
        )
        patterns.append(
            f'<pattern id="s{"-".join(map(str, sources))}" width="{8 * len(sources)}" height="8" '
            f'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">{bands}</pattern>'
        )
    return f"<defs>{''.join(patterns)}</defs>" if patterns else ""
