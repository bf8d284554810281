"""The calls that should have been alike and were not: what every rank called where some noticed it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..results import Call, Mismatch
from .records import RankRecord

_PAIRED = ("send", "recv")


def find(records: Sequence[RankRecord]) -> Mismatch | None:
    """The mismatch that a rank has noticed first, with what every rank called there; None if none has."""
    noticed = [r for r in records if r.failure is not None and r.failure.mismatch is not None]
    if not noticed:
        return None
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
    """What a rank called: operations (messages of a `pair`), what it stands in, and the call that did not match."""
    found = [
        Call(e.text, e.line, e.seq, e.group, e.op, e.file)
        for e in record.events
        if e.op not in _PAIRED or e.peer in pair
    ]
    found += [Call(w.text, w.line, w.nth, w.group, w.op, w.file) for w in record.waits if w.op not in _PAIRED]
    if record.failure is not None and record.failure.mismatch is not None:
        found += [call for rank, call in record.failure.mismatch.calls.items() if rank == record.rank]
    return found
