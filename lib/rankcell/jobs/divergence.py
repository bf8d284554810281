"""Which of several ranks that wait for each other called something else than the others do: a pure function of their
last operations.

Ranks that wait for each other are alike to blame as far as the waiting goes. What tells them apart is what they called
before: one of them has gone from one line to another as nobody else did, nor itself before; or most ranks that did the
same so far went on in another way. It names nobody where ranks lawfully do different things, or where no one is odd.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, takewhile

from ..engine import stacks
from ..engine.messages import Wait
from ..errors import PAIRED
from ..results import Call, Event, at_line, grouped, name_ranks, placed
from .records import RankRecord

_BEGIN, _END = "begin", "end"  # of a program, among its calls
_Paths = dict[int, list[Hashable]]  # by rank
_Events = dict[int, tuple[Event, ...]]


@dataclass(frozen=True)
class Divergence:
    """`rank` made a `call` (None: its program ended) where `others` made the `usual` one (None: theirs ended)."""

    rank: int
    call: Event | None
    usual: Event | None
    others: tuple[int, ...]  # none where only the rank itself had made the usual one, before


def find_divergent_rank(records: Sequence[RankRecord], suspects: Sequence[int]) -> Divergence | None:
    """The one of `suspects` that called what the others do not call there; None where that cannot be told."""
    paths = {r.rank: _path(r) for r in records if r.events}
    events = {r.rank: r.events for r in records}
    if len(set(suspects)) < 2 or not set(suspects) <= paths.keys():
        return None
    found = _by_new_turn(paths, events, suspects) or _by_majority(records, paths, events, suspects)
    if found and found.call and found.usual and found.usual.op in PAIRED:
        return None  # who sends and who receives may differ lawfully
    return found


def _by_new_turn(paths: _Paths, events: _Events, suspects: Sequence[int]) -> Divergence | None:
    """By a turn from one call to another that nobody else has made, nor the rank itself before."""
    # (call, next call) -> by rank, the places in its path where it made that turn
    turns: dict[tuple[Hashable, Hashable], dict[int, list[int]]] = {}
    for rank, path in paths.items():
        for at in range(1, len(path)):
            if path[at - 1] is not None:
                turns.setdefault((path[at - 1], path[at]), {}).setdefault(rank, []).append(at)
    found: dict[int, int] = {}
    for rank in suspects:
        path = paths[rank]
        for at in range(max(_last_together(events, suspects, rank), 1), len(path)):
            if path[at - 1] is not None and turns[path[at - 1], path[at]] == {rank: [at]}:
                found.setdefault(rank, at)
    if len(found) != 1:
        return None
    ((rank, at),) = found.items()
    before = paths[rank][at - 1]
    ways = {turn[1]: by for turn, by in turns.items() if turn[0] == before and turn[1] != paths[rank][at]}
    if not ways:
        return None  # nobody has ever gone on from there: it may be ahead, and right
    # the way of most others, of several the latest
    way = max(ways, key=lambda w: (len(ways[w].keys() - {rank}), max(map(max, ways[w].values()))))
    others = tuple(sorted(ways[way].keys() - {rank}))
    seen = others[0] if others else rank
    return Divergence(rank, _event(events[rank], at), _event(events[seen], ways[way][seen][-1]), others)


def _by_majority(
    records: Sequence[RankRecord], paths: _Paths, events: _Events, suspects: Sequence[int]
) -> Divergence | None:
    """By the first call in which a rank differs from most of those that had called the same until then."""
    first = {r.rank: r.calls - len(r.events) for r in records}  # calls that are not kept
    start = max(first[rank] for rank in paths)
    calls = {rank: path[1 + start - first[rank] :] for rank, path in paths.items()}
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    todo = [tuple(sorted(calls))]  # ranks that called the same so far
    while todo:
        alike = todo.pop()
        for at in range(max(len(calls[rank]) for rank in alike)):
            ways = grouped((calls[rank][at], rank) for rank in alike if at < len(calls[rank]))
            if len(ways) > 1:
                most = max(ways.values(), key=len)
                if 2 * len(most) > sum(map(len, ways.values())):
                    odd = [r for ranks in ways.values() if ranks is not most for r in ranks if r in suspects]
                    found |= {rank: (at, tuple(most)) for rank in odd}
                todo += [tuple(ranks) for ranks in ways.values() if len(ranks) > 1]
                break
    if len(found) != 1:
        return None
    ((rank, (at, others)),) = found.items()
    own, theirs = (1 + start - first[r] + at for r in (rank, others[0]))
    return Divergence(rank, _event(events[rank], own), _event(events[others[0]], theirs), others)


def came_again(
    records: Mapping[int, RankRecord], waits: Mapping[int, Wait], pair: Sequence[int]
) -> tuple[tuple[int, ...], str] | None:
    """The one that is a round ahead, of two ranks that wait for each other, one for a message; and what to ask."""
    known = all(records[r].calls == len(records[r].events) for r in pair)  # none of their calls is forgotten
    ends = [(r, w) for r in pair if (w := waits.get(r)) and w.line]
    if len(ends) != 2 or len(pair) != 2 or not known or not any(w.op in PAIRED for _, w in ends):
        return None
    times = {r: sum((e.op, e.file, e.line) == (w.op, w.file, w.line) for e in records[r].events) for r, w in ends}
    (behind, wait), (ahead, there) = sorted(ends, key=lambda end: times[end[0]])
    other = {"send": "recv", "recv": "send"}
    part, due = other.get(wait.op, wait.via or wait.op), other.get(there.op, "")
    here, first = at_line(there.line, there.file), at_line(wait.line, wait.file)
    if (times[behind], times[ahead]) == (1, 2) and here != first:
        came = f"Rank {ahead} has come to {here} again, and rank {behind} to {first} for the first time"
        return (ahead,), f"{came}: has rank {ahead} left out the {part} for which rank {behind} waits?"
    done = [e for e in records[behind].events if (e.op, e.peer) == (due, ahead)]
    if times[behind] == 1 and wait.op not in PAIRED and done:
        came = f"Rank {behind} has come to {first} for the first time, and {'sent to' if due == 'send' else 'heard of'}"
        asks = f"does its {part} come too early, before the next {due}, or has rank {ahead} gone a round further?"
        return (behind, ahead), f"{came} rank {ahead} before: {asks}"
    ours, theirs = (stacks.own(records[r].stack) for r, _ in ends)
    for a, b in takewhile(lambda at: at[0].name == at[1].name, zip(ours, theirs, strict=False)):
        if a.lineno != b.lineno and a.filename == b.filename:
            (at, (r, wait)), (past, (late, _)) = sorted(((a, ends[0]), (b, ends[1])), key=lambda end: end[0].lineno)
            where = f"In {a.name} rank {r} stands at line {at.lineno} and rank {late} at line {past.lineno}"
            part = other.get(wait.op, wait.via or wait.op)
            asks = f"has rank {late} passed the first of them without the {part} for which rank {r} waits?"
            return (late,), f"{where}: {asks}"
    return None


def goes_round_more(records: Mapping[int, RankRecord], waits: Mapping[int, Wait]) -> str:
    """Which ranks have come to a line once more than the others, who have gone on to one where the first were never."""
    places = [*grouped(((w.op, w.file, w.line), rank) for rank, w in waits.items()).items()]
    if len(places) != 2 or any(records[r].calls != len(records[r].events) for r in waits):
        return ""
    for (here, ranks), (there, others) in permutations(places):
        seen = {
            r: tuple(sum((e.op, e.file, e.line) == at for e in records[r].events) for at in (here, there))
            for r in waits
        }
        n, first, second = seen[ranks[0]][0], {seen[r] for r in ranks}, {seen[r] for r in others}
        if n > 1 and first == {(n, 0)} and second == {(n - 1, 1)}:
            came = f"{name_ranks(ranks)} came to {at_line(here[2], here[1])} once more than {name_ranks(others)}"
            went = f"which went on to {at_line(there[2], there[1])}"
            return f"{came}, {went}: do all ranks go through a loop equally often (batches, steps)?"
    return ""


def met_before(records: Sequence[RankRecord], calls: Mapping[int, Call]) -> str:
    """How the same message of a pair was met earlier, where one of the two calls is as it was, and the other is not."""
    events = {r.rank: [e for e in r.events if e.line == calls[r.rank].line] for r in records if r.rank in calls}
    old = {r: [e for e in of if e.text == calls[r].text and e.seq < calls[r].nth] for r, of in events.items()}
    for rank, other in permutations(events, 2):
        if old[rank] or not old[other]:
            continue
        last = old[other][-1]
        if met := [e.text for e in events[rank] if (e.seq, e.peer) == (last.seq, other)]:
            same = f"In call {last.seq} {last.text} of rank {other} was met by {met[0]} in the same line"
            return f"{same}: what has made rank {rank} call it otherwise now?"
    return ""


def crossed(records: Sequence[RankRecord]) -> str:
    """The first call of a group that is another operation on some ranks than on others."""
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, Event]] = {}
    for record in records:
        for e in record.events:
            if e.op not in PAIRED:
                calls.setdefault((e.group, e.ranks, e.seq), {})[record.rank] = e
    for (_, _, seq), by_rank in sorted(calls.items(), key=lambda item: item[0][2]):
        ways = grouped((f"{e.text}{placed(e.line, e.file)}", rank) for rank, e in by_rank.items())
        if len({e.op for e in by_rank.values()}) > 1:
            each = " and ".join(f"{way} on {name_ranks(ranks)}" for way, ranks in ways.items())
            asks = "All ranks must call the same in the same order: do two threads of a rank use this group?"
            return f"In one group call {seq} is {each}. {asks} Then give each a group of its own."
    return ""


def _path(record: RankRecord) -> list[Hashable]:
    """What a rank called, as far as ranks that run the same program have it in common, with its begin and its end."""
    path: list[Hashable] = [_BEGIN if record.calls == len(record.events) else None, *map(what, record.events)]
    return [*path, _END] if record.phase == "finished" else path


def what(event: Event) -> Hashable:
    """A call, as far as ranks that run the same program have it in common."""
    where: Hashable = (event.file, event.line, event.outer) if event.line else event.text
    return event.op, event.dtype, where, 0 if event.op in ("send", "recv") else len(event.ranks)


def _last_together(events: Mapping[int, Sequence[Event]], suspects: Sequence[int], rank: int) -> int:
    """The place in its path of the last call of `rank` that all suspects have made together; 0 if there is none."""
    reached = [{(e.group, e.ranks, e.seq) for e in events[r]} for r in suspects]
    for at, e in reversed(list(enumerate(events[rank], 1))):
        if set(suspects) <= set(e.ranks) and all((e.group, e.ranks, e.seq) in calls for calls in reached):
            return at
    return 0


def _event(events: tuple[Event, ...], at: int) -> Event | None:
    return events[at - 1] if at <= len(events) else None
