"""Who is to blame, and where: a pure function of what is known of each rank of a job.

The proof of a deadlock is the one of rank cells (`engine/diagnose.py`), and so are the words of a mismatch and of an
exception (`errors.py`). What a script adds: a rank that has ended closes its connections, so that the others raise
errors that are only consequences; and a rank may stand still outside torch, in a file or a lock.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import errors
from ..engine import diagnose
from ..engine.diagnose import SCRIPT, State
from ..results import (
    Call,
    Event,
    Frame,
    Mismatch,
    RankFailure,
    RankResult,
    Run,
    Standing,
    at_line,
    name_ranks,
)
from . import apart, stacks
from .records import Record

SHOWN = 4  # last operations of a rank that are printed
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|to another rank)|socket closed|gloo/transport|tim(ed|e) ?out|"
    r"timeout|broken pipe|remote process exited|network error|peer closed",
    re.IGNORECASE,
)
_UNEVEN = {"all_to_all", "all_gather"}  # of these ranks may give different numbers of elements


@dataclass(frozen=True)
class Verdict:
    """What happened to a job. `culprits` are all ranks to blame that cannot be told apart, `places` the file and line
    of each stack that belongs to them, the most telling first.
    """

    kind: str  # "mismatch", "lost", "error", "hang", "still", "finished" or "unclear"
    culprits: tuple[int, ...]
    headline: str
    rows: tuple[str, ...] = ()
    advice: str = ""
    places: tuple[tuple[str, int], ...] = ()
    detail: str = ""  # of an exception: where it was raised
    unknown: tuple[str, ...] = ()  # what could not be known, in sentences

    def __str__(self) -> str:
        parts = [self.headline, *(f"  {row}" for row in self.rows)]
        parts += [self.detail] if self.detail else []
        return "\n".join([*parts, *filter(None, [self.advice]), *self.unknown])


def is_consequence(record: Record) -> bool:
    """Whether a rank only raised because another one, for which it waited, had gone."""
    failure = record.failure
    if failure is None or failure.mismatch is not None or record.phase != "error":
        return False
    return bool(_CONSEQUENCE.search(failure.message)) and failure.type not in (
        "ValueError",
        "KeyError",
        "OSError",
    )


def state_of(record: Record) -> State:
    """A record as `diagnose` reads it."""
    if is_consequence(record) and record.failed_in is not None:
        wait = replace(record.failed_in, thread=0, waiting=True)
        counts = {**(record.counts or {}), wait.key: max(wait.seq, (record.counts or {}).get(wait.key, 0))}
        return State(record.rank, "running", (wait,), counts, record.calls, wait.line, wait.file, what=SCRIPT)
    return State(
        rank=record.rank,
        phase={"unknown": "running"}.get(record.phase, record.phase),
        waits=record.waits,
        counts=record.counts,
        calls=record.calls,
        line=record.line,
        file=record.file,
        joins=record.joins,
        blocked_in_torch=record.blocked,
        other_threads=record.threads,
        why=record.why,
        what=SCRIPT,
    )


def judge(records: Sequence[Record]) -> Verdict | None:
    """What happened, as far as `records` prove it; None while somebody may still go on and nobody has failed."""
    records = sorted(records, key=lambda r: r.rank)
    states = [diagnose.left(state_of(r)) for r in records]
    proof = diagnose.diagnose(states)
    if (found := _mismatch(records, ended=proof is not None)) is not None:
        return found
    gone = [r for r in records if r.phase == "lost"]
    raised = [r for r in records if r.phase == "error" and not is_consequence(r)]
    first = min(gone + raised, key=lambda r: r.at, default=None)
    if first is not None and first.phase == "lost":
        together = [r for r in gone if r.why == first.why and r.at - first.at < 0.1]
        return _lost(records, states, together if len(together) < len(records) else [first], proof)
    if first is not None:
        return _raised(records, states, raised)
    if proof is not None:
        return _proved(records, states, proof)
    victims = [r for r in records if is_consequence(r)]
    if victims:
        return _raised(records, states, victims)
    return None


# --- each kind


def _mismatch(records: Sequence[Record], *, ended: bool) -> Verdict | None:
    found: Mismatch | None = None
    failed = [r for r in records if r.failure is not None and r.failure.mismatch is not None]
    if failed:
        first = min(failed, key=lambda r: r.at)
        assert first.failure is not None and first.failure.mismatch is not None
        found = _everybody(first.failure.mismatch, records)
    elif ended or any(r.phase in ("lost", "error", "unknown", "still") or r.waits for r in records):
        found = difference(records)
    if found is None:
        return None
    size = max([r.world_size for r in records] + [r.rank + 1 for r in records])
    results = [RankResult(r, "ok") for r in range(size)]
    noticed = min(found.calls)
    results[noticed] = replace(results[noticed], mismatch=found)
    head, *rows = str(errors.mismatch_error(Run("", tuple(results)))).split("\n")
    parties: dict[str, list[int]] = {}
    for rank, call in sorted(found.calls.items()):
        parties.setdefault(call.text, []).append(rank)
    least = min(map(len, parties.values()))
    odd = [rank for ranks in parties.values() if len(ranks) == least for rank in ranks]
    if len(parties) == 1:
        odd = sorted(found.calls)
    advice = rows.pop()
    if not failed:
        advice = advice.replace("The call that does not match was stopped before it sent anything. ", "")
    return Verdict(
        "mismatch", tuple(odd), head, tuple(r.strip() for r in rows), advice,
        tuple((found.calls[r].file, found.calls[r].line) for r in odd if found.calls[r].line),
    )  # fmt: skip


def _everybody(mismatch: Mismatch, records: Sequence[Record]) -> Mismatch:
    """A mismatch that two ranks have noticed, with what every rank of the group called there, and where."""
    calls = dict(mismatch.calls)
    one = next(iter(calls.values()))
    pair = one.op in ("send", "recv")
    for record in records:
        if pair and record.rank not in calls:
            continue
        for event in record.events:
            other = event.peer in calls if event.op in ("send", "recv") else not pair
            if (event.group, event.seq) == (one.group, one.nth) and other:
                text = calls[record.rank].text if record.rank in calls else event.text
                calls[record.rank] = Call(text, event.line, event.seq, event.group, event.op, event.file)
    for record in records:  # operations without a tensor, such as new_group, are no events
        for wait in record.waits:
            if record.rank not in calls and not pair and (wait.group, wait.nth) == (one.group, one.nth):
                calls[record.rank] = Call(wait.text, wait.line, wait.nth, wait.group, wait.op, wait.file)
        failure = record.failure
        if record.rank not in calls and not pair and failure is not None and failure.mismatch is not None:
            own = failure.mismatch.calls.get(record.rank)
            if own is not None and (own.group, own.nth) == (one.group, one.nth):
                calls[record.rank] = own
    for rank in mismatch.calls:  # who noticed knows its own file only
        seen = next(
            (e.file for r in records if r.rank == rank for e in r.events if e.line == calls[rank].line), ""
        )
        if seen:
            calls[rank] = replace(calls[rank], file=seen)
    return replace(mismatch, calls=calls)


def difference(records: Sequence[Record]) -> Mismatch | None:
    """The earliest calls that should have been alike and were not, among the last operations of the ranks."""
    found: list[tuple[float, Mismatch]] = []
    same: dict[Any, list[Event]] = {}
    for record in records:
        for event in record.events:
            if event.op in ("send", "recv"):
                pair = (event.rank, event.peer) if event.op == "send" else (event.peer, event.rank)
                same.setdefault((event.group, pair, event.tag, event.seq), []).append(event)
            else:
                same.setdefault((event.group, event.ranks, event.seq), []).append(event)
    for events in same.values():
        problem = _problem(events)
        if problem:
            calls = {e.rank: Call(e.text, e.line, e.seq, e.group, e.op, e.file) for e in events}
            found.append((min(e.start for e in events), Mismatch(problem, calls)))
    return min(found, key=lambda item: item[0])[1] if found else None


def _problem(events: Sequence[Event]) -> str:
    def differ(values: Iterable[Any]) -> bool:
        return len({v for v in values if v not in ("", None)}) > 1

    ops = {e.op for e in events}
    if ops == {"send", "recv"} or len(events) < 2:
        pass
    elif len(ops) > 1:
        return "different operations"
    if differ(e.dtype for e in events if e.op != "barrier"):
        return "different dtypes"
    if not ops & _UNEVEN and differ(_numel(e) for e in events if e.dtype):
        return "different sizes" if "send" in ops else "different shapes"
    if "send" in ops or "recv" in ops:
        return ""
    if differ(e.peer for e in events):
        return "different roots"
    if differ(e.reduce_op for e in events):
        return "different reduce operations"
    return ""


def _numel(event: Event) -> int:
    product = 1
    for n in event.shape:
        product *= n
    return product


def _lost(
    records: Sequence[Record],
    states: Sequence[State],
    lost: Sequence[Record],
    proof: diagnose.Diagnosis | None,
) -> Verdict:
    ranks = tuple(r.rank for r in lost)
    first = lost[0]
    head = f"{name_ranks(ranks)} of {len(records)} {first.why}"
    waiting = [s.rank for s in states if s.blocking]
    if waiting:
        call = next(s.blocking[0] for s in states if s.blocking)
        head += (
            f", and {name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {call.via or call.op}"
        )
    places = [_last_place(r) for r in lost]
    seen = at_line(first.line, first.file)
    detail = f"It was last seen at {seen}." if seen and len(lost) == 1 else ""
    advice = "Was it out of memory? `dmesg` on its node, or `sacct` under Slurm, say so."
    return Verdict(
        "lost", ranks, f"{head}.", _rows(states, ranks), " ".join(filter(None, [detail, advice])),
        tuple(p for p in places if p[1]),
    )  # fmt: skip


def _raised(records: Sequence[Record], states: Sequence[State], raised: Sequence[Record]) -> Verdict:
    by_rank = {r.rank: r for r in raised}
    size = max([r.world_size for r in records] + [r.rank + 1 for r in records])
    zero = min((r.at for r in raised), default=0.0)
    results = [
        RankResult(r, "error", error=replace(_failure(by_rank[r]), at=by_rank[r].at - zero))
        if r in by_rank
        else RankResult(r)
        for r in range(size)
    ]
    run = Run("", tuple(results))
    text = str(errors.rank_error(run))
    head, _, rest = text.partition("\n")
    first = run.failed[0]
    assert first.error is not None
    same = tuple(r.rank for r in run.failed if r.error and str(r.error) == str(first.error))
    own = [f for f in first.error.frames if stacks.is_own(f.filename)]
    places = tuple((f.filename, f.lineno) for f in reversed(own))
    shown = _rows(states, same) if any(s.phase != "error" for s in states) else ()
    return Verdict("error", same, head, shown, "", places, rest.strip("\n"))


def _failure(record: Record) -> RankFailure:
    return record.failure or RankFailure("Error", record.why)


def _proved(records: Sequence[Record], states: Sequence[State], proof: diagnose.Diagnosis) -> Verdict:
    by_rank = {r.rank: r for r in records}
    culprits = proof.culprits or (proof.blame,)
    places: list[tuple[str, int]] = []
    left = apart.departure(records, proof.suspects)
    if left is not None:
        culprits = (left.rank,)
        proof = replace(proof, **_departed(left, states, proof))
        places = [(left.call.file, left.call.line)] if left.call is not None else []
    elif all(by_rank[r].phase == "running" and by_rank[r].events for r in proof.suspects):
        culprits = proof.suspects or culprits  # what they called before does not tell: both sides are named
    waits = {s.rank: s.blocking[0] for s in states if s.blocking}
    for rank in culprits:
        record = by_rank[rank]
        if record.phase == "still":
            places += [(f.filename, f.lineno) for f in _telling(record)] or [_last_place(record)]
        elif rank in waits:
            places.append((waits[rank].file, waits[rank].line))
    if not places:  # it has finished: the line is the one that it left out
        of = {s.rank: s for s in states}
        places = [
            (w.file, w.line)
            for rank, w in waits.items()
            if set(diagnose.missing_peers(w, of, rank)) & set(culprits)
        ][:1]
    extra = [line for line in proof.lines if line not in {diagnose.describe(s, len(states)) for s in states}]
    kind = "still" if any(by_rank[r].phase == "still" for r in culprits) else "hang"
    return Verdict(
        kind, tuple(culprits), proof.headline, (*_rows(states, culprits), *extra), proof.advice,
        tuple(dict.fromkeys(p for p in places if p[1])),
    )  # fmt: skip


def _departed(left: apart.Departure, states: Sequence[State], proof: diagnose.Diagnosis) -> dict[str, Any]:
    """What a proof says once it is known which of its suspects has left the common order of calls."""
    if left.call is None:  # it has ended: the proof says so already
        return {"blame": left.rank}
    rest = [r for r in proof.suspects if r != left.rank]
    said = f"rank {left.rank} calls {_called(left.call, len(states))} where "
    if left.usual is None:
        said += (
            f"{name_ranks(left.others)} {'has' if len(left.others) == 1 else 'have'} ended"
            if left.others
            else ""
        )
    else:
        who = (
            f"{name_ranks(left.others)} {'calls' if len(left.others) == 1 else 'call'}"
            if left.others
            else "it called"
        )
        said += f"{who} {_called(left.usual, len(states), left.others)}{'' if left.others else ' before'}"
    ended = [s.rank for s in states if s.rank in rest and s.phase == "finished"]
    said += (
        f", and waits for {name_ranks(ended)}, which finished."
        if ended
        else f": it and {name_ranks(rest)} wait for each other."
    )
    advice = (
        "Every rank of a group must call the same operations in the same order: look at what this rank skips, or calls "
        "in addition, before that line."
    )
    return {"blame": left.rank, "headline": said, "advice": advice}


def _called(event: Event, world_size: int, ranks: Sequence[int] = ()) -> str:
    """A call, its group, and where; of `ranks` that may each have called it in a group of their own."""
    where = f" at {at_line(event.line, event.file)}" if event.line else ""
    group = "the world" if len(event.ranks) == world_size else f"the group of {name_ranks(event.ranks)}"
    if not set(ranks) <= set(event.ranks):
        group = "their groups"
    return f"{event.text} of {group}{where}" if event.op not in ("send", "recv") else f"{event.text}{where}"


def _telling(record: Record) -> list[Frame]:
    """The program's own lines in which a rank stands, its workers' first: the main thread waits for them."""
    found = [frames for name, frames in record.others if name.startswith("worker")] + [record.stack]
    own = [[f for f in frames if stacks.is_own(f.filename)] for frames in found]
    return [frames[-1] for frames in own if frames]


def _last_place(record: Record) -> tuple[str, int]:
    if record.line:
        return record.file, record.line
    last = max(record.events, key=lambda e: e.start, default=None)
    return (last.file, last.line) if last is not None else ("", 0)


def _rows(states: Sequence[State], culprits: Sequence[int]) -> tuple[str, ...]:
    """What each rank does, those that do the same together, the culprits first."""
    alike: dict[tuple[bool, str], list[State]] = {}
    for state in states:
        key = state.rank not in culprits, diagnose.doing(state, len(states))
        alike.setdefault(key, []).append(state)
    rows = [
        (name_ranks([s.rank for s in same]), diagnose.doing(same[0], len(states), many=len(same) > 1))
        for _, same in sorted(alike.items(), key=lambda item: (item[0][0], item[1][0].rank))
    ]
    width = max((len(name) for name, _ in rows), default=0)
    return tuple(f"{name:<{width}}  {text}" for name, text in rows)


def unclear(records: Sequence[Record], headline: str, advice: str = "") -> Verdict:
    """Where everybody is, when nothing is proved."""
    states = [state_of(r) for r in sorted(records, key=lambda r: r.rank)]
    return Verdict("unclear", (), headline, _rows(states, ()), advice)


def finished(records: Sequence[Record]) -> Verdict:
    """Nothing went wrong: what every rank has done."""
    states = [state_of(r) for r in sorted(records, key=lambda r: r.rank)]
    some = [s for s in states if s.phase == "finished"]
    head = f"{len(some)} of {len(states)} ranks have finished, and nothing went wrong before."
    if len(some) == len(states):
        head = f"all {len(states)} ranks have finished."
    return Verdict("finished", (), head, _rows(states, ()))


# --- for the report


def standings(records: Sequence[Record]) -> tuple[Standing, ...]:
    """Who stood where and waited for whom, as `draw.waits` takes it."""
    return diagnose.standings([state_of(r) for r in sorted(records, key=lambda r: r.rank)])


def details(records: Sequence[Record], found: Verdict) -> str:
    """The stack and the last operations of every rank, the culprits first; those that are alike together."""
    alike: dict[Any, list[Record]] = {}
    for record in sorted(records, key=lambda r: (r.rank not in found.culprits, r.rank)):
        main = tuple((f.filename, f.lineno, f.name) for f in stacks.own(_stood(record, found)))
        last = tuple(e.text for e in record.events[-SHOWN:])
        workers = tuple((n, f) for n, f in record.others)
        alike.setdefault((record.rank in found.culprits, main, last, workers), []).append(record)
    parts = []
    for same in alike.values():
        first = same[0]
        lines = [f"{name_ranks([r.rank for r in same])}:"]
        lines += _stack(_stood(first, found))
        for name, frames in first.others:
            shown = _stack(frames)
            lines += [f"  its {name}:", *(f"  {line}" for line in shown)] if shown else []
        if first.events:
            lines.append("  last operations:")
            lines += [f"    {_shown(e)}" for e in first.events[-SHOWN:]]
        if len(lines) > 1:
            parts.append("\n".join(lines))
    return "\n".join(parts)


def _stood(record: Record, found: Verdict) -> Sequence[Frame]:
    """Where a rank stands, or stood until who it waited for was gone: then its operation fails."""
    if record.failure is None or record.rank in found.culprits:
        return record.stack
    return record.stack or record.failure.frames


def _stack(frames: Sequence[Frame]) -> list[str]:
    if not frames:
        return []
    shown = stacks.own(frames)[-6:]
    text = errors.describe_frames(RankFailure("", "", tuple(shown)))
    lines = text.split("\n")
    if shown[-1] is not frames[-1]:
        lines.append(f"  (in {frames[-1].name})")
    return lines


def _shown(event: Event) -> str:
    where = f", {at_line(event.line, event.file)}" if event.line else ""
    return f"{event.text} (call {event.seq} of group {event.group!r}{where})"
