"""An algorithm made of sends and receives, step by step: who holds what, and which part goes to whom, from a run whose
ranks had their array watched. Collectives have pictures of their own in `collectives`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..results import Event, Run, Watched, grouped
from .collectives import CELL, MARGIN, NAMES, edge_of, fill_of, format_number, label, stripes
from .parts import WIDE, rank_colour
from .svg import INK, MUTED, Figure, Frames, drawing, line, rect
from .timeline import pairs

MAX_NUMBERS = 8  # numbers per rank that fit into the picture twice
_ARROWS, _TOP, _PITCH = 84, 78, CELL + 22


class _Delivery(NamedTuple):
    """One send with its receive, and its step, counted from 1."""

    sent: Event
    came: Event
    step: int


class _Array(NamedTuple):
    """The array of one rank at one moment: its numbers, and the ranks whose numbers are in each of them."""

    numbers: tuple[float, ...]
    sources: tuple[tuple[int, ...], ...]


def steps(run: Run | Iterable[Event], *, title: str = "") -> Frames:
    """One picture per step of messages: the arrays before it, what each rank sends, the arrays after it.

    What could travel together is in one step: a message comes later than those its sender had sent and received
    before, and those its receiver had received. Numbers that changed are striped in the colours of their ranks.
    """
    if not (found := _in_steps(pairs(list(run.events if isinstance(run, Run) else run)))):
        raise ValueError("This run holds no send that was received. Collectives: draw.collectives.steps.")
    longest = max(len(_watched(e).before) for m in found for e in (m.sent, m.came))
    if longest > MAX_NUMBERS:
        raise ValueError(f"The array has {longest} numbers, a picture has room for {MAX_NUMBERS}.")
    states = _states(found)
    title = title or f"{len(found)} messages in {len(states) - 1} steps"
    figures = tuple(_draw(states, found, step, title) for step in range(len(states)))
    labels = ("before", *(f"{step} of {len(states) - 1}" for step in range(1, len(states))))
    return Frames(figures, labels, still=1)


def _watched(event: Event) -> Watched:
    if event.watched is None:
        raise ValueError("No array was watched. Run the algorithm in `with rankcell.watch(x):` on every rank.")
    return event.watched


def _in_steps(found_pairs: Sequence[tuple[Event, Event]]) -> list[_Delivery]:
    found: list[_Delivery] = []
    for sent, came in sorted(found_pairs, key=lambda pair: pair[0].start):
        before = [
            m.step
            for m in found
            if m.sent.rank == sent.rank
            or (m.came.rank == sent.rank and m.came.end <= sent.start)
            or (m.came.rank == came.rank and m.came.start < came.start)
        ]
        found.append(_Delivery(sent, came, 1 + max(before, default=0)))
    return sorted(found, key=lambda m: (m.step, m.sent.rank))


def _states(found: Sequence[_Delivery]) -> list[dict[int, _Array]]:
    """What every rank held before the first step and after each, by step and rank."""
    calls = grouped((event.rank, (event, m)) for m in found for event in (m.sent, m.came))
    for own in calls.values():
        own.sort(key=lambda call: call[0].start)
    first = {rank: _watched(own[0][0]).before for rank, own in sorted(calls.items())}
    states = [{rank: _Array(numbers, ((rank,),) * len(numbers)) for rank, numbers in first.items()}]
    for step in range(1, found[-1].step + 1):
        old, new = states[-1], {}
        for rank in first:
            now = [(event, m) for event, m in calls[rank] if m.step == step]
            numbers = _watched(now[-1][0]).after if now else old[rank].numbers
            sources = list(old[rank].sources)
            for m in [m for event, m in now if event is m.came]:
                _take_in(sources, old, m, numbers)
            new[rank] = _Array(numbers, tuple(sources))
        states.append(new)
    return states


def _take_in(sources: list[tuple[int, ...]], old: dict[int, _Array], m: _Delivery, numbers: tuple[float, ...]) -> None:
    """Whose numbers are in the receiver's array once a message was received, and perhaps added to it."""
    part = _watched(m.sent).part
    theirs = old[m.sent.rank].sources[slice(*part)] if part else ((m.sent.rank,),)
    if place := _watched(m.came).part:
        begin, end = place
        for i in range(begin, end):
            sources[i] = theirs[(i - begin) % len(theirs)]
        return
    mine = old[m.came.rank].numbers
    changed = [i for i, (a, b) in enumerate(zip(mine, numbers, strict=True)) if a != b]
    for k, i in enumerate(changed):  # it went into a buffer, and from there into these
        added = theirs[k] if len(theirs) == len(changed) else tuple(r for s in theirs for r in s)
        sources[i] = tuple(sorted({*sources[i], *added}))


def _draw(states: Sequence[dict[int, _Array]], found: Sequence[_Delivery], step: int, title: str) -> Figure:
    ranks = list(states[0])
    before, after = states[max(step - 1, 0)], states[step]
    length = len(before[ranks[0]].numbers)
    cell = min((WIDE - NAMES - _ARROWS - MARGIN) / (2 * length), 58)
    left, right = NAMES, WIDE - MARGIN - length * cell
    y = {rank: _TOP + row * _PITCH for row, rank in enumerate(ranks)}
    marks = [
        stripes({s for state in (before, after) for held in state.values() for s in held.sources}),
        label(MARGIN, 28, title, bold=True),
        label(left, 64, "before" if step else "at the start", fill=MUTED),
    ]
    marks += [label(MARGIN, y[rank] + 27, f"rank {rank}") for rank in ranks]
    marks += [_array(before[rank], left, y[rank], cell) for rank in ranks]
    if step:
        marks.append(label(right, 64, "after", fill=MUTED))
        marks += [_array(after[rank], right, y[rank], cell) for rank in ranks]
    for m in (m for m in found if m.step == step):
        colour, source, target = rank_colour(m.sent.rank), y[m.sent.rank], y[m.came.rank]
        if part := _watched(m.sent).part:
            x, width = left + part[0] * cell, (part[1] - part[0]) * cell
            marks.append(rect(x - 1, source - 3, width + 2, CELL + 6, stroke=colour, stroke_width=4))
        ends = left + length * cell + 6, source + CELL / 2, right - 8, target + CELL / 2
        marks.append(line(*ends, stroke=colour, width=3, arrow=True))
    foot, bottom = _foot(states, found, step), _TOP + len(ranks) * _PITCH
    marks.append(label(MARGIN, bottom + 16, foot, fill=MUTED))
    held = (f"rank {r}: {' '.join(map(format_number, after[r].numbers))}" for r in ranks)
    return drawing(WIDE, bottom + 34, *marks, alt=f"{title}. {foot}. {'; '.join(held)}")


def _foot(states: Sequence[dict[int, _Array]], found: Sequence[_Delivery], step: int) -> str:
    if not step:
        return "Each rank holds its own numbers"
    sizes = [math.prod(m.sent.shape) for m in found if m.step == step]
    what = f"{sizes[0]} number{'s' if sizes[0] > 1 else ''}" if len(set(sizes)) == 1 else "several numbers"
    count = f"{len(sizes)} message{'s' if len(sizes) > 1 else ''}"
    return f"Step {step} of {len(states) - 1}: {count} of {what}"


def _array(state: _Array, x: float, y: float, cell: float) -> str:
    marks = []
    for i, (value, sources) in enumerate(zip(state.numbers, state.sources, strict=True)):
        marks.append(rect(x + i * cell, y, cell, CELL, fill=fill_of(sources), stroke=edge_of(sources)))
        text = format_number(value)
        size = min(20.0, (cell - 4) / (0.6 * len(text)))
        at = f'x="{x + (i + 0.5) * cell:.1f}" y="{y + 27:g}"'
        marks.append(f'<text {at} font-size="{size:.1f}" text-anchor="middle" fill="{INK}">{text}</text>')
    return "".join(marks)
