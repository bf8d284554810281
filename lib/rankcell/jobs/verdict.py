"""Who is to blame, and where: a pure function of what is known of each rank of a job.

The proof of a deadlock is the one of rank cells (`engine/diagnose.py`), and so are the words of a mismatch and of an
exception (`errors.py`). What a script adds: a rank that has ended closes its connections, so that the others raise
errors that are only consequences; and a rank may be blocked outside torch, in a file or a lock.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import Any

from .. import errors, results
from ..engine import diagnose, stacks
from ..engine.messages import Wait
from ..engine.states import SCRIPT, State, call_of, inside, late, missing_peers, rows
from ..results import FROM, Call, Event, Mismatch, RankFailure, RankResult, Run, at_line, name_ranks, name_some, placed
from .divergence import Divergence, came_again, crossed, find_divergent_rank, goes_round_more, met_before, what
from .records import RankRecord

SHOWN = 4  # last operations of a rank that are printed
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|to another rank)|socket closed|gloo/transport|tim(ed|e) ?out|"
    r"timeout|broken pipe|remote process exited|network error|peer closed|^MismatchError",
    re.IGNORECASE,
)
_CLOSED = re.compile("closed|reset|broken pipe", re.IGNORECASE)
# what a program calls: no private function, no wrapper, nothing of ours
_CALLED = re.compile(r"(\w+\.)*(__\w+__|[^\W_]\w*) of (?!rankcell\.)")
_FROM_WORKER = "_MultiProcessingDataLoaderIter._get_data of "
_BACKWARD = " inside backward"
_NOT_REDUCED = (
    "Usual reasons: one rank alone went on to save, evaluate or stop; it skipped the backward (a caught exception, a "
    "`continue`, one batch fewer); or this gave some parameters no gradient there (another way through the model)."
)
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
        return "\n".join([self.headline, *(f"  {row}" for row in self.rows), *filter(None, (self.detail, self.advice))])


def is_consequence(record: RankRecord) -> bool:
    """Whether a rank only raised because another one, for which it waited, had gone."""
    if (failure := record.failure) is None or failure.mismatch is not None or record.phase != "error":
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
    if (first := min(lost + raised, key=lambda r: r.at, default=None)) is not None and first.phase == "lost":
        together = [r for r in lost if r.why == first.why and r.at - first.at < 0.1]
        return _lost(states, together if len(together) < len(records) else [first])
    if first is not None:
        return _raised(states, raised)
    if proof is not None:
        return _deadlock({r.rank: r for r in records}, states, proof)
    victims = sorted((r for r in records if is_consequence(r)), key=lambda r: r.at)
    if not victims:
        return None
    told = _left_early(records, states, victims[0]) or _late(states, victims[0], _raised(states, victims))
    return _without_store(told, records, victims[0])


def _find_mismatch(records: Sequence[RankRecord]) -> Mismatch | None:
    """The mismatch that a rank has noticed first, with what every rank called there; None if none has."""
    noticed = [(r.at, r.failure.mismatch) for r in records if r.failure is not None and r.failure.mismatch is not None]
    if not noticed:
        return None
    _, first = min(noticed, key=lambda each: each[0])
    calls = dict(first.calls)
    one = next(iter(calls.values()))
    for record in records if one.op not in errors.PAIRED else ():
        if there := [c for c in _calls(record) if (c.group, c.nth) == (one.group, one.nth)]:
            calls.setdefault(record.rank, there[0])
    return replace(first, calls=calls)


def _calls(record: RankRecord) -> list[Call]:
    """The collectives that a rank called, with the one that it stands in and the one that did not match."""
    found = [Call(e.text, e.line, e.seq, e.group, e.op, e.file) for e in record.events]
    found += [Call(w.text, w.line, w.nth, w.group, w.op, w.file) for w in record.waits]
    if record.failure is not None and record.failure.mismatch is not None:
        found += [call for rank, call in record.failure.mismatch.calls.items() if rank == record.rank]
    return [call for call in found if call.op not in errors.PAIRED]


def _mismatched(records: Sequence[RankRecord], found: Mismatch) -> JobVerdict:
    run = Run("", tuple(RankResult(r, mismatch=found) for r in range(_size(records))))
    parted = _parted(records, found.calls, _size(records))
    head, *lines = str(errors.mismatch_error(run, parted)).split("\n")
    rows = tuple(line.strip() for line in lines if line.startswith("  "))
    texts = [call.text for call in found.calls.values()]
    least = min(map(texts.count, texts))
    odd = [rank for rank, call in sorted(found.calls.items()) if texts.count(call.text) == least]
    if pair := re.match(r"rank (\d+) sends .* to rank (\d+),", found.problem):
        odd = sorted(map(int, pair.groups()))
    places = tuple((found.calls[r].file, found.calls[r].line) for r in odd if found.calls[r].line)
    return JobVerdict("mismatch", tuple(odd), head, rows, "\n".join(lines[len(rows) :]), places)


def _size(records: Sequence[RankRecord]) -> int:
    return max([r.world_size for r in records] + [r.rank + 1 for r in records])


def _lost(states: Sequence[State], lost: Sequence[RankRecord]) -> JobVerdict:
    ranks, first = tuple(r.rank for r in lost), lost[0]
    head = f"{name_ranks(ranks)} of {len(states)} {first.why}"
    if waiting := [s for s in states if s.blocking]:
        wait, verb = waiting[0].blocking[0], "waits" if len(waiting) == 1 else "wait"
        head += f", and {name_ranks([s.rank for s in waiting])} {verb} in {wait.via or wait.op}"
    seen = at_line(first.line, first.file)
    advice = f"It was last seen at {seen}. " if seen and len(lost) == 1 else ""
    why = "A C++ error ends a process so: see what it printed. Gloo's does if a message is longer than its tensor."
    advice += (
        why if "Aborted" in first.why else "Was it out of memory? `dmesg` on its node, or `sacct` under Slurm, say so."
    )
    places = tuple((r.file, r.line) for r in lost if r.line)
    return JobVerdict("lost", ranks, f"{head}.", rows(states, len(states), ranks), advice, places)


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
    told = rows(states, len(states), same) if any(s.phase != "error" for s in states) else ()
    return JobVerdict("error", same, head, told, "", places, detail.strip("\n"))


def _without_store(found: JobVerdict, records: Sequence[RankRecord], first: RankRecord) -> JobVerdict:
    """Where rank 0 has ended, and with it the store that others still ask, that is told first."""
    of_store = first.failure is not None and first.failure.type in ("DistNetworkError", "DistStoreError")
    if not of_store or not any((r.rank, r.phase) == (0, "finished") for r in records):
        return found
    advice = "Whose process serves the store stays until all others are through: let all meet in a barrier at the end."
    head = f"rank 0 finished, and with it went the store that it served: {found.headline}"
    return replace(found, culprits=(0,), headline=head, advice=advice)


def _left_early(records: Sequence[RankRecord], states: Sequence[State], victim: RankRecord) -> JobVerdict | None:
    """Where ranks have done their part of what `victim` waits for, and ended before it had come."""
    wait, closed = victim.failed_in, victim.failure is not None and bool(_CLOSED.search(victim.failure.message))
    peers = () if wait is None else (wait.peer,) if wait.op in errors.PAIRED else wait.ranks
    gone = [r for r in records if closed and r.rank in peers and r.phase == "finished"]
    if wait is None or not gone:
        return None
    sent = [e for r in gone for e in r.events if (e.op, e.peer) == ("send", victim.rank) and wait.op == "recv"]
    where = f" (sent in {at_line(sent[-1].line, sent[-1].file)})" if sent and sent[-1].line else ""
    ranks, places = tuple(r.rank for r in gone), tuple((e.file, e.line) for e in sent[-1:] if e.line)
    head = f"{name_ranks(ranks)} finished before {wait.text}{where} of rank {victim.rank} was through."
    advice = (
        "A process that ends, or destroys its group, closes its connections: wait for the Work of every isend and "
        "async_op=True, and let all ranks meet in a barrier before the end."
    )
    return JobVerdict("hang", ranks, head, rows(states, len(states), ranks), advice, places)


def _late(states: Sequence[State], first: RankRecord, found: JobVerdict) -> JobVerdict:
    """Where a call has waited until its timeout, the verdict names who computes meanwhile."""
    who, said = late(first.failed_in, states, first.rank) if first.failed_in else ([], "")
    if not who or not found.headline.endswith(errors.LATE):
        return found
    head, places = found.headline.replace(errors.LATE, said), tuple((s.file, s.line) for s in who if s.line)
    return replace(found, culprits=tuple(s.rank for s in who), headline=head, places=places)


def _deadlock(records: dict[int, RankRecord], states: Sequence[State], proof: diagnose.Diagnosis) -> JobVerdict:
    culprits = proof.culprits or (proof.blame,)
    head, advice, places = proof.headline, proof.advice, []
    divergence = find_divergent_rank(list(records.values()), proof.suspects)
    if divergence is not None:
        culprits = (divergence.rank,)
        if divergence.call is not None:  # if it has ended the proof says so already
            head = _diverges(divergence, divergence.call, states, proof)
            places = [(divergence.call.file, divergence.call.line)]
            look = "look at what this rank skips, calls in addition or in another order before that line"
            advice = f"Every rank of a group must call the same operations in the same order: {look}. What decides "
            advice += "about it must be the same on all."
    elif all(records[r].phase == "running" and records[r].events for r in proof.suspects):
        culprits = proof.suspects or culprits  # what they called before does not tell: both sides are named
    waits = {s.rank: s.blocking[0] for s in states if s.blocking}
    pair = proof.culprits if len(proof.culprits) == 2 else proof.suspects
    if divergence is None and (again := came_again(records, waits, pair)):
        culprits, advice = again
    elif divergence is None and (more := goes_round_more(records, waits)):
        advice = more
    at: dict[int, Any] = {**waits, **{rank: record for rank, record in records.items() if record.phase == "still"}}
    places += [(at[rank].file, at[rank].line) for rank in culprits if rank in at]
    if not places:  # it has finished: the line is the one that it left out
        by_rank, missed = {s.rank: s for s in states}, set(culprits)
        places = [(w.file, w.line) for r, w in waits.items() if missed.intersection(missing_peers(w, by_rank, r))][:1]
    kind = "still" if any(records[r].phase == "still" for r in culprits) else "hang"
    advice = _of_workers([records[r] for r in culprits]) or advice
    places = list(dict.fromkeys(p for p in places if p[1]))
    return JobVerdict(kind, tuple(culprits), head, rows(states, len(states), culprits), advice, tuple(places))


def _diverges(found: Divergence, call: Event, states: Sequence[State], proof: diagnose.Diagnosis) -> str:
    """The headline once it is known which of the suspects made a `call` that the others do not make there."""
    size, others, one = len(states), found.others, len(found.others) == 1
    here, there = ("", "") if found.usual is None else _from_lines(call, found.usual)
    if found.usual is None:
        where = f"{name_ranks(others)} {'has' if one else 'have'} ended" if others else ""
    elif others:
        where = f"{name_ranks(others)} {'calls' if one else 'call'} {call_of(found.usual, size, others)}{there}"
    else:
        where = f"it called {call_of(found.usual, size)}{there} before"
    rest = [r for r in proof.suspects if r != found.rank]
    ended = [s.rank for s in states if s.rank in rest and s.phase == "finished"]
    waits = f": it and {name_ranks(rest)} wait for each other."
    if ended:
        waits = f", and waits for {name_ranks(ended)}, which finished."
    return f"rank {found.rank} calls {call_of(call, size)}{here} where {where}{waits}"


def parted_before(run: Run) -> str:
    """Of a cell whose calls in one line do not match: how it came to that, or ""."""
    calls = {rank: call for r in run.ran if r.mismatch for rank, call in r.mismatch.calls.items()}
    calls = {rank: replace(call, file=call.file.partition(FROM)[0]) for rank, call in calls.items()}
    return _parted([RankRecord(r.rank, events=r.events) for r in run.ran if r.events], calls, run.world_size)


def _parted(records: Sequence[RankRecord], calls: Mapping[int, Call], size: int) -> str:
    """Where the ranks had parted before, or since when they call nothing else."""
    one = next(iter(calls.values()))
    if asks := _asks_for_group(records, one, size):
        return asks
    found = {r.rank: {e.seq: e for e in r.events if e.group == one.group and e.seq < one.nth} for r in records}
    before = {rank: events for rank, events in found.items() if events}
    if one.op in errors.PAIRED:
        return met_before(records, calls)
    if not before.keys() >= calls.keys():
        return ""
    common = set.intersection(*map(set, before.values()))
    alike = [n for n in common if len({what(events[n]) for events in before.values()}) == 1]
    if alike and (first := max(alike) + 1) in common:
        ways: dict[Any, dict[int, Event]] = {}
        for rank, events in before.items():
            ways.setdefault(what(events[first]), {})[rank] = events[first]
        (odd, own), *_, (others, usual) = sorted(
            ((tuple(w), next(iter(w.values()))) for w in ways.values()), key=lambda way: len(way[0])
        )
        here, there = _from_lines(own, usual)
        usually = f"{name_ranks(others)} called {call_of(usual, size, others)}{there}"
        return f"They had parted before: {name_ranks(odd)} called {call_of(own, size, odd)}{here} where {usually}."
    if len({(c.file, c.line) for c in calls.values()}) > 1:
        new = find_divergent_rank(records, sorted(calls))
        if new is not None and new.call is not None and new.usual is not None:
            now, until = (call_of(e, size) + inside(e) for e in (new.call, new.usual))
            whose = f"{name_ranks(new.others)} went" if new.others else "before it went"
            said = f"After the same call only rank {new.rank} went on to {now}; {whose} on to {until}."
            if not (until.endswith(_BACKWARD) and not now.endswith(_BACKWARD)):
                return said
            without = next(r.without for r in records if r.rank == new.rank)
            have = f" Parameters of rank {new.rank} without a gradient now: {name_some(without, 6)}." if without else ""
            return f"{said} {_NOT_REDUCED}{have}"
        within = results.grouped((inside(r.events[-1]), r.rank) for r in records if r.rank in calls and r.events)
        made = {via: "make these calls" if len(ranks) > 1 else "makes this call" for via, ranks in within.items()}
        said = " and ".join(f"{name_ranks(ranks)} {made[via]}{via}" for via, ranks in within.items() if via)
        why = f" {_NOT_REDUCED}" if {"", _BACKWARD} == within.keys() else ""
        return f"{said[0].upper()}{said[1:]}.{why}" if said else ""
    if came := _came_from(records, one):
        return came
    at = one.file, one.line
    last = [[*takewhile(lambda e: (e.file, e.line) == at, reversed(es.values()))] for es in before.values()]
    if not all(last):
        return ""
    return (
        f"At least since call {max(events[-1].seq for events in last)} they call {at_line(one.line, one.file)} only: "
        "does it go through the same things, in the same order, on every rank?"
    )


def _came_from(records: Sequence[RankRecord], one: Call) -> str:
    """From which lines the ranks came to a call in one line, where not all came from the same."""
    here = {r.rank: e for r in records for e in r.events if (e.group, e.seq) == (one.group, one.nth)}
    ways = sorted(results.grouped((e.outer[::-1], r) for r, e in here.items()).items(), key=lambda way: len(way[1]))
    (some, few), (others, many) = (ways[0], ways[-1]) if ways else (((), ()), ((), ()))
    for mine, theirs in zip(some, others, strict=False):
        if mine != theirs:
            came = [f"{name_ranks(r)} from {at_line(n, file)}" for r, (file, n) in ((few, mine), (many, theirs))]
            left = "Has one of them left a loop, or passed over a call, before?"
            return f"{errors.CAME}{', '.join(came)}. {left}"
    return ""


def _asks_for_group(records: Sequence[RankRecord], one: Call, size: int) -> str:
    """A question, where calls of the world differ between the smaller groups of the calls just before, not within."""
    alike: dict[tuple[int, ...], set[str]] = {}
    for events in (r.events for r in records if one.group == "0"):
        before = [*takewhile(lambda e: (e.group, e.seq) != (one.group, one.nth), events)]
        for call in events[len(before) :][:1]:
            known = any((e.group, e.file, e.line) == (call.group, call.file, call.line) for e in before)
            alike.setdefault(before[-1].ranks if before and not known else (), set()).add(call.text)
    if len(set().union(*alike.values())) < 2 or not all(
        0 < len(r) < size and len(texts) == 1 for r, texts in alike.items()
    ):
        return ""
    groups = "; ".join(map(name_ranks, sorted(alike)))
    return f"These calls are of the world, those just before were of smaller groups ({groups}): was `group=` left out?"


def _from_lines(one: Event, other: Event) -> tuple[str, str]:
    """Of two calls in one line: ", called from line 4" of each, where they came there on different ways; else ""."""
    if (one.file, one.line) != (other.file, other.line):
        return "", ""
    ways = next(((a, b) for a, b in zip_longest(one.outer, other.outer) if a != b), (None, None))
    here, there = (f", called from {at_line(way[1], way[0])}," if way else "" for way in ways)
    return here, there.rstrip(",")


def unclear(records: Sequence[RankRecord], headline: str, advice: str = "") -> JobVerdict:
    """Where everybody is, when nothing is proved."""
    return JobVerdict("unclear", (), headline, rows([state_of(r) for r in records], len(records)), advice)


def stalled(records: Sequence[RankRecord], limit: float) -> JobVerdict:
    """Where nothing has moved for `limit` seconds, and nobody waits for another rank."""
    head = f"nothing has moved for {limit:.0f} s"
    waits = [*filter(None, map(waits_for, records))]
    if waits and all(wait.op == "init_process_group" for wait in waits):
        names = [re.search(r"rank=(\d+)", w.text) or (0, r.rank) for r in records for w in [waits_for(r)] if w]
        lost = sorted({*range(_size(records))}.difference(int(n[1]) for n in names))
        asks = f"Nobody calls it as {name_ranks(lost)}. " if lost else ""
        asks += "Does each call it by a number of its own (rank=0, 1, ...), with the same world_size= and address?"
        if len({address for w in waits for address in re.findall(r"[^ (]*:[^ )]*", w.text)}) > 1:
            asks = (
                "They look for each other at different addresses: MASTER_ADDR and MASTER_PORT, or init_method=, must "
            )
            asks += "be the same on all. Does each process set its own?"
        return unclear(records, f"{head}: the ranks wait in init_process_group for others to join.", asks)
    if waits:
        advice = "Everybody has come to the operation that it stands in: what does not end is the transfer itself."
        return unclear(records, f"{head}.", f"{advice} Look at the network and at what the backend logs.")
    if parted := crossed(records):
        return unclear(records, f"{head}.", parted)
    advice = _of_workers(records) or "Look at what they wait for: a file, a lock, input, another process?"
    return unclear(records, f"{head}, and no rank waits in a communication.", advice)


def _of_workers(records: Sequence[RankRecord]) -> str:
    """What to do where ranks stand still in their data loader, or at the end for a thread, else ""."""
    if all(r.stack and r.stack[0].name.endswith("_bootstrap of threading") for r in records):
        return "The script is over, and Python waits for a thread that it started: end it, or make it with daemon=True."
    loads = [r.rank for r in records if any(f.name.startswith(_FROM_WORKER) for f in stacks.below(r.stack))]
    wait = f"{name_ranks(loads)} wait{'s' * (len(loads) == 1)} for a worker of the data loader".capitalize()
    may = "What does that wait for: a file, a lock that was held when it was forked, another process?"
    return f"{wait}. {may}" if loads else ""


def finished(records: Sequence[RankRecord]) -> JobVerdict:
    """Nothing went wrong: what every rank has done."""
    states = [state_of(r) for r in records]
    n = sum(s.phase == "finished" for s in states)
    head = f"{n} of {len(states)} ranks have finished, and nothing went wrong before."
    if n == len(states):
        head = f"all {n} ranks have finished."
    return JobVerdict("finished", (), head, rows(states, len(states)))


def text(found: JobVerdict, records: Sequence[RankRecord]) -> str:
    """The verdict, and under it stack and last operations of every rank: the culprits first, those alike together."""
    in_order = sorted(records, key=lambda r: (r.rank not in found.culprits, r.rank))
    alike = results.grouped(((record.rank in found.culprits, *_details(record)), record) for record in in_order)
    parts = [
        "\n".join([f"{name_ranks([r.rank for r in same])}:", *lines]) for (_, *lines), same in alike.items() if lines
    ]
    # of one that failed the exceptions behind its own are told anyway, and how one ended is
    here = [r for r in records if r.handles and r.phase != "finished" and (found.kind != "error" or not r.over)]
    after = results.grouped((r.handles, r.rank) for r in here if not _CONSEQUENCE.search(r.handles))
    who = {error: name_ranks(ranks).capitalize() for error, ranks in after.items()}
    came = [f"{who[error]} came here after {error} (in an `except` or a `finally`)." for error in after]
    came = came if sum(map(len, after.values())) < len(records) else []  # else the whole program stands in one
    found = replace(found, advice="") if came and found.kind == "hang" else found  # that is why
    return "\n".join([f"rankcell: {found}", *came, *([""] if parts else []), *parts])


def _details(record: RankRecord) -> list[str]:
    lines: list[str] = []
    frames = tuple(f for f in record.stack if not f.filename.startswith("<frozen"))
    if not stacks.own(frames) and record.failure is not None and record.failure.mismatch is not None:
        frames = stacks.own(record.failure.frames)  # it has left the call that did not match
    if frames:
        shown = (stacks.own(frames) or frames)[-6:]
        lines = errors.describe_frames(RankFailure("", "", shown)).split("\n")
        if shown[-1] is not frames[-1]:
            inner = stacks.below(frames)
            called = next(filter(lambda f: _CALLED.match(f.name), inner), inner[0])
            last = inner[-1].name.partition(" of ")[0].rpartition(".")[2]
            lines.append(f"  (in {called.name}{'' if called is inner[-1] else f', in {last}'})")
    if record.events:
        lines.append("  last operations:")
    for event in record.events[-SHOWN:]:
        group = "the world" if event.group in errors.OF_WORLD else f"group {event.group!r}"
        group = "this pair" if event.op in errors.PAIRED else group
        lines.append(f"    {event.text} (call {event.seq} of {group}{placed(event.line, event.file, ', ')})")
    return lines
