"""Who is to blame, and where: a pure function of what is known of each rank of a job.

The proof of a deadlock is the one of rank cells (`engine/diagnose.py`), and so are the words of a mismatch and of an
exception (`errors.py`). What a script adds: a rank that has ended closes its connections, so that the others raise
errors that are only consequences; and a rank may be blocked outside torch, in a file or a lock.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import errors
from ..engine import diagnose
from ..engine.messages import Wait
from ..engine.states import SCRIPT, State, describe, doing, missing_peers
from ..results import Call, Event, Mismatch, RankFailure, RankResult, Run, at_line, name_ranks
from . import stacks
from .divergence import Divergence, find_divergent_rank
from .records import RankRecord

SHOWN = 4  # last operations of a rank that are printed
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|to another rank)|socket closed|gloo/transport|tim(ed|e) ?out|"
    r"timeout|broken pipe|remote process exited|network error|peer closed",
    re.IGNORECASE,
)
_PAIRED = ("send", "recv")
_OWN_ERRORS = ("ValueError", "KeyError", "OSError")  # of the program, whatever their text says


@dataclass(frozen=True)
class JobVerdict:
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

    def __str__(self) -> str:
        rows = (f"  {row}" for row in self.rows)
        return "\n".join([self.headline, *rows, *filter(None, (self.detail, self.advice))])


def is_consequence(record: RankRecord) -> bool:
    """Whether a rank only raised because another one, for which it waited, had gone."""
    failure = record.failure
    if failure is None or failure.mismatch is not None or record.phase != "error":
        return False
    return bool(_CONSEQUENCE.search(failure.message)) and failure.type not in _OWN_ERRORS


def state_of(record: RankRecord) -> State:
    """A record as `diagnose` reads it."""
    if is_consequence(record) and record.failed_in is not None:
        wait = replace(record.failed_in, thread=0, waiting=True)
        counts = {**record.counts, wait.key: max(wait.seq, record.counts.get(wait.key, 0))}
        return State(record.rank, "running", (wait,), counts, record.calls, wait.line, wait.file, what=SCRIPT)
    return State(
        record.rank, record.phase, record.waits, record.counts, record.calls, record.line, record.file, record.joins,
        blocked_in_torch=record.blocked, other_threads=record.threads, why=record.why, what=SCRIPT,
    )  # fmt: skip


def waits_for(record: RankRecord) -> Wait | None:
    """The operation that a rank cannot leave by itself; None if it can still go on, or is over."""
    return next(iter(state_of(record).blocking), None)


def judge(records: Sequence[RankRecord]) -> JobVerdict | None:
    """What happened, as far as `records` prove it; None while somebody may still go on and nobody has failed."""
    records = sorted(records, key=lambda r: r.rank)
    states = [diagnose.finished_if_leaving(state_of(r)) for r in records]
    proof = diagnose.diagnose(states)
    if (found := _find_mismatch(records)) is not None:
        return _mismatched(records, found)
    lost = [r for r in records if r.phase == "lost"]
    raised = [r for r in records if r.phase == "error" and not is_consequence(r)]
    first = min(lost + raised, key=lambda r: r.at, default=None)
    if first is not None and first.phase == "lost":
        together = [r for r in lost if r.why == first.why and r.at - first.at < 0.1]
        return _lost(states, together if len(together) < len(records) else [first])
    if first is not None:
        return _raised(states, raised)
    if proof is not None:
        return _deadlock({r.rank: r for r in records}, states, proof)
    victims = [r for r in records if is_consequence(r)]
    return _raised(states, victims) if victims else None


def _find_mismatch(records: Sequence[RankRecord]) -> Mismatch | None:
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


def _mismatched(records: Sequence[RankRecord], found: Mismatch) -> JobVerdict:
    results = [RankResult(r) for r in range(_size(records))]
    noticed = min(found.calls)
    results[noticed] = replace(results[noticed], mismatch=found)
    head, *rows, advice = str(errors.mismatch_error(Run("", tuple(results)))).split("\n")
    texts = [call.text for call in found.calls.values()]
    least = min(map(texts.count, texts))
    odd = [rank for rank, call in sorted(found.calls.items()) if texts.count(call.text) == least]
    places = tuple((found.calls[r].file, found.calls[r].line) for r in odd if found.calls[r].line)
    advice = "\n".join(filter(None, (advice, _parted(records, found.calls, _size(records)))))
    return JobVerdict("mismatch", tuple(odd), head, tuple(r.strip() for r in rows), advice, places)


def _size(records: Sequence[RankRecord]) -> int:
    return max([r.world_size for r in records] + [r.rank + 1 for r in records])


def _lost(states: Sequence[State], lost: Sequence[RankRecord]) -> JobVerdict:
    ranks, first = tuple(r.rank for r in lost), lost[0]
    head = f"{name_ranks(ranks)} of {len(states)} {first.why}"
    waiting = [s for s in states if s.blocking]
    if waiting:
        wait, verb = waiting[0].blocking[0], "waits" if len(waiting) == 1 else "wait"
        head += f", and {name_ranks([s.rank for s in waiting])} {verb} in {wait.via or wait.op}"
    seen = at_line(first.line, first.file)
    advice = f"It was last seen at {seen}. " if seen and len(lost) == 1 else ""
    advice += "Was it out of memory? `dmesg` on its node, or `sacct` under Slurm, say so."
    places = tuple((r.file, r.line) for r in lost if r.line)
    return JobVerdict("lost", ranks, f"{head}.", _rows(states, ranks), advice, places)


def _raised(states: Sequence[State], raised: Sequence[RankRecord]) -> JobVerdict:
    results = [RankResult(rank) for rank in range(_size(raised))]
    for record in raised:
        failure = record.failure or RankFailure("Error", record.why)
        results[record.rank] = RankResult(record.rank, "error", error=replace(failure, at=record.at))
    run = Run("", tuple(results))
    head, _, detail = str(errors.rank_error(run)).partition("\n")
    first = run.failed[0].error
    assert first is not None
    same = tuple(r.rank for r in run.failed if str(r.error) == str(first))
    places = tuple((f.filename, f.lineno) for f in reversed(stacks.own(first.frames)))
    rows = _rows(states, same) if any(s.phase != "error" for s in states) else ()
    return JobVerdict("error", same, head, rows, "", places, detail.strip("\n"))


def _deadlock(records: dict[int, RankRecord], states: Sequence[State], proof: diagnose.Diagnosis) -> JobVerdict:
    culprits = proof.culprits or (proof.blame,)
    head, advice, places = proof.headline, proof.advice, []
    divergence = find_divergent_rank(list(records.values()), proof.suspects)
    if divergence is not None:
        culprits = (divergence.rank,)
        if divergence.call is not None:  # if it has ended the proof says so already
            head = _diverges(divergence, divergence.call, states, proof)
            places = [(divergence.call.file, divergence.call.line)]
            advice = (
                "Every rank of a group must call the same operations in the same order: look at what this rank skips, "
                "or calls in addition, before that line."
            )
    elif all(records[r].phase == "running" and records[r].events for r in proof.suspects):
        culprits = proof.suspects or culprits  # what they called before does not tell: both sides are named
    waits = {s.rank: s.blocking[0] for s in states if s.blocking}
    for rank in culprits:
        record = records[rank]
        if record.phase == "still":
            places.append((record.file, record.line))
        elif rank in waits:
            places.append((waits[rank].file, waits[rank].line))
    if not places:  # it has finished: the line is the one that it left out
        by_rank = {s.rank: s for s in states}
        places = [
            (wait.file, wait.line)
            for rank, wait in waits.items()
            if set(missing_peers(wait, by_rank, rank)) & set(culprits)
        ][:1]
    extra = [line for line in proof.lines if line not in {describe(s, len(states)) for s in states}]
    kind = "still" if any(records[r].phase == "still" for r in culprits) else "hang"
    places = list(dict.fromkeys(p for p in places if p[1]))
    return JobVerdict(kind, tuple(culprits), head, (*_rows(states, culprits), *extra), advice, tuple(places))


def _diverges(found: Divergence, call: Event, states: Sequence[State], proof: diagnose.Diagnosis) -> str:
    """The headline once it is known which of the suspects made a `call` that the others do not make there."""
    size, others, one = len(states), found.others, len(found.others) == 1
    if found.usual is None:
        where = f"{name_ranks(others)} {'has' if one else 'have'} ended" if others else ""
    elif others:
        where = f"{name_ranks(others)} {'calls' if one else 'call'} {_call_of(found.usual, size, others)}"
    else:
        where = f"it called {_call_of(found.usual, size)} before"
    rest = [r for r in proof.suspects if r != found.rank]
    ended = [s.rank for s in states if s.rank in rest and s.phase == "finished"]
    waits = f": it and {name_ranks(rest)} wait for each other."
    if ended:
        waits = f", and waits for {name_ranks(ended)}, which finished."
    return f"rank {found.rank} calls {_call_of(call, size)} where {where}{waits}"


def parted_before(run: Run) -> str:
    """Of calls in one line that do not match: where the ranks of the cell had parted, or since when they call nothing
    else; "" where that cannot be told.
    """
    calls = {rank: call for r in run.ran if r.mismatch for rank, call in r.mismatch.calls.items()}
    return _parted([_of_cell(r) for r in run.ran if r.events], calls, run.world_size)


def _parted(records: Sequence[RankRecord], calls: Mapping[int, Call], size: int) -> str:
    one = next(iter(calls.values()))
    if one.op in _PAIRED or len({(c.file, c.line) for c in calls.values()}) > 1:
        return ""
    found = find_divergent_rank(records, [r.rank for r in records])
    if found and found.call and found.usual and found.others:
        if (found.call.group, found.call.seq) != (one.group, one.nth):
            usual = f"{name_ranks(found.others)} called {_call_of(found.usual, size, found.others)}"
            return f"They had parted before: rank {found.rank} called {_call_of(found.call, size)} where {usual}."
    since = set()
    for record in records:
        first = one.nth
        for event in reversed(record.events):
            if event.group == one.group and event.seq < one.nth:
                if (event.file, event.line) != (one.file, one.line):
                    break
                first = event.seq
        since.add(first)
    if max(since, default=one.nth) == one.nth:
        return ""
    return (
        f"At least since call {max(since)} they call {at_line(one.line, one.file)} only: does it go through the same "
        "things, in the same order, on every rank?"
    )


def _of_cell(result: RankResult) -> RankRecord:
    phase, calls = "finished" if result.state == "ok" else "running", len(result.events) + result.dropped
    return RankRecord(result.rank, phase=phase, calls=calls, events=result.events)


def _call_of(event: Event, world_size: int, ranks: Sequence[int] = ()) -> str:
    """A call, its group, and where; of `ranks` that may each have called it in a group of their own."""
    where = f" at {at_line(event.line, event.file)}" if event.line else ""
    group = "the world" if len(event.ranks) == world_size else f"the group of {name_ranks(event.ranks)}"
    if not set(ranks) <= set(event.ranks):
        group = "their groups"
    return f"{event.text} of {group}{where}" if event.op not in ("send", "recv") else f"{event.text}{where}"


def unclear(records: Sequence[RankRecord], headline: str, advice: str = "") -> JobVerdict:
    """Where everybody is, when nothing is proved."""
    return JobVerdict("unclear", (), headline, _rows([state_of(r) for r in records], ()), advice)


def finished(records: Sequence[RankRecord]) -> JobVerdict:
    """Nothing went wrong: what every rank has done."""
    states = [state_of(r) for r in records]
    n = sum(s.phase == "finished" for s in states)
    head = f"{n} of {len(states)} ranks have finished, and nothing went wrong before."
    if n == len(states):
        head = f"all {n} ranks have finished."
    return JobVerdict("finished", (), head, _rows(states, ()))


def _rows(states: Sequence[State], culprits: Sequence[int]) -> tuple[str, ...]:
    """What each rank does, those that do the same together, the culprits first."""
    alike: dict[tuple[bool, str], list[State]] = {}
    for state in sorted(states, key=lambda s: (s.rank not in culprits, s.rank)):
        key = state.rank not in culprits, doing(state, len(states))
        alike.setdefault(key, []).append(state)
    rows = [
        (name_ranks([s.rank for s in same]), doing(same[0], len(states), many=len(same) > 1)) for same in alike.values()
    ]
    width = max((len(name) for name, _ in rows), default=0)
    return tuple(f"{name:<{width}}  {text}" for name, text in rows)


def text(found: JobVerdict, records: Sequence[RankRecord]) -> str:
    """The verdict, and under it stack and last operations of every rank: the culprits first, those alike together."""
    alike: dict[Any, list[RankRecord]] = {}
    for record in sorted(records, key=lambda r: (r.rank not in found.culprits, r.rank)):
        alike.setdefault((record.rank in found.culprits, *_details(record)), []).append(record)
    parts = [
        "\n".join([f"{name_ranks([r.rank for r in same])}:", *lines]) for (_, *lines), same in alike.items() if lines
    ]
    return "\n".join([f"rankcell: {found}", *([""] if parts else []), *parts])


def _details(record: RankRecord) -> list[str]:
    lines: list[str] = []
    frames = record.stack
    if frames:
        shown = (stacks.own(frames) or frames)[-6:]
        lines = errors.describe_frames(RankFailure("", "", shown)).split("\n")
        lines += [] if shown[-1] is frames[-1] else [f"  (in {frames[-1].name})"]
    if record.events:
        lines.append("  last operations:")
    for event in record.events[-SHOWN:]:
        where = f", {at_line(event.line, event.file)}" if event.line else ""
        lines.append(f"    {event.text} (call {event.seq} of group {event.group!r}{where})")
    return lines
