"""The calls that should have been alike and were not, among what the ranks called last: a pure function."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..results import Call, Event, Mismatch
from .records import RankRecord

_PAIRED = ("send", "recv")
_UNEVEN = {"all_to_all", "all_gather"}  # of these ranks may give different numbers of elements


def find(records: Sequence[RankRecord]) -> Mismatch | None:
    """The mismatch that a rank has noticed, with what every rank called there; else the earliest one in the last
    operations of the ranks. None if all are alike.
    """
    noticed = [r for r in records if r.failure is not None and r.failure.mismatch is not None]
    if not noticed:
        return _earliest(records)
    first = min(noticed, key=lambda r: r.at).failure
    assert first is not None and first.mismatch is not None
    calls = dict(first.mismatch.calls)
    one = next(iter(calls.values()))
    for record in records:
        if one.op in _PAIRED and record.rank not in calls:
            continue
        there = [
            call
            for call in _calls(record, calls)
            if (call.group, call.nth) == (one.group, one.nth) and (call.op in _PAIRED) == (one.op in _PAIRED)
        ]
        if there and record.rank not in calls:
            calls[record.rank] = there[0]
        elif there:  # who noticed knows its own file only
            calls[record.rank] = replace(calls[record.rank], line=there[0].line, file=there[0].file)
        elif record.rank in calls and not calls[record.rank].file:
            line = calls[record.rank].line
            file = next((e.file for e in record.events if e.line == line), "")
            calls[record.rank] = replace(calls[record.rank], file=file)
    return replace(first.mismatch, calls=calls)


def _calls(record: RankRecord, pair: Any) -> list[Call]:
    """What a rank called: its operations (of messages those between a `pair`), those without a tensor that it stands
    in, such as new_group, and the one that did not match.
    """
    found = [_call(e) for e in record.events if e.op not in _PAIRED or e.peer in pair]
    found += [Call(w.text, w.line, w.nth, w.group, w.op, w.file) for w in record.waits if w.op not in _PAIRED]
    if record.failure is not None and record.failure.mismatch is not None:
        found += [call for rank, call in record.failure.mismatch.calls.items() if rank == record.rank]
    return found


def _call(event: Event) -> Call:
    return Call(event.text, event.line, event.seq, event.group, event.op, event.file)


def _earliest(records: Sequence[RankRecord]) -> Mismatch | None:
    same: dict[Any, list[Event]] = {}
    for event in (event for record in records for event in record.events):
        key: Any = (event.group, event.ranks, event.seq)
        if event.op in _PAIRED:
            pair = (event.rank, event.peer) if event.op == "send" else (event.peer, event.rank)
            key = (event.group, pair, event.tag, event.seq)
        same.setdefault(key, []).append(event)
    for events in sorted(same.values(), key=lambda events: min(e.start for e in events)):
        if problem := _problem(events):
            return Mismatch(problem, {e.rank: _call(e) for e in events})
    return None


def _problem(events: Sequence[Event]) -> str:
    """What differs between events that should be alike; "" if nothing does."""

    def differ(values: Iterable[Any]) -> bool:
        return len({v for v in values if v not in ("", None)}) > 1

    ops = {e.op for e in events}
    paired = bool(ops & set(_PAIRED))
    if len(ops) > 1 and not paired:
        return "different operations"
    if differ(e.dtype for e in events if e.op != "barrier"):
        return "different dtypes"
    if not ops & _UNEVEN and differ(math.prod(e.shape) for e in events if e.dtype):
        return "different sizes" if paired else "different shapes"
    if paired:
        return ""
    if differ(e.peer for e in events):
        return "different roots"
    return "different reduce operations" if differ(e.reduce_op for e in events) else ""
