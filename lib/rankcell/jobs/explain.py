"""`rankcell explain`: a folder of reports, dumps and stacks, mixed and incomplete -> records, and a verdict.

It reads reports of `rankcell run`, dumps of torch's flight recorder, and what py-spy and faulthandler print. It tells
which is what by the content, and the rank by the file's name. Pickles are read as plain data only.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.messages import Wait
from ..results import Event, Frame, RankResult, Run, at_line, name_ranks
from . import flight, records, stacks, verdict
from .records import RankRecord

_STACKS_DO_NOT_TELL = (
    "Stacks do not number operations: whether two ranks in the same line stand in the same call, and who is "
    "ahead, is not known. `rankcell run`, or TORCH_FR_BUFFER_SIZE=2000 in the job's environment, tells it."
)


@dataclass(frozen=True)
class Evidence:
    """What a folder holds: a record of each rank of which it tells something, and the files that could not be read."""

    records: tuple[RankRecord, ...]
    skipped: tuple[str, ...] = ()

    @property
    def events(self) -> tuple[Event, ...]:
        """The last operations of all ranks; times begin at 0."""
        found = [e for r in self.records for e in r.events]
        zero = min((e.start for e in found), default=0.0)
        moved = [records.later(e, -zero) for e in found]
        return tuple(sorted(moved, key=lambda e: (e.start, e.rank)))

    @property
    def run(self) -> Run:
        """The same as `draw.timeline` and `draw.waits` take it."""
        size = max(r.world_size for r in self.records)
        ranks = tuple(RankResult(r, events=tuple(e for e in self.events if e.rank == r)) for r in range(size))
        return Run("", ranks, standstill=verdict.standings(_blocked_outside(self.records)))


def read(folder: Path | str) -> Evidence:
    """What the files in `folder`, and in the folders in it, tell of a job.

    Raises:
        ValueError: there is no such folder, or nothing in it that can be read.
    """
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    found: list[RankRecord] = []
    dumps: list[flight.Dump] = []
    skipped: list[str] = []
    for path in files:
        rank = flight.rank_in(path.name)
        try:
            content = _content(path)
            if isinstance(content, RankRecord):
                found.append(content)
            elif rank is None and path.name != "verdict.txt":
                raise ValueError("its name tells no rank, as in rank-0.txt")
            elif flight.is_dump(content):
                dumps.append(flight.Dump(rank or 0, content))
            elif isinstance(content, str):
                main, *workers = stacks.by_process(content) or [(0, ())]
                if main[1]:
                    found.append(of_threads(rank or 0, main[1], workers))
        except ValueError as error:
            skipped.append(f"{path.name}: {error}")
    found += flight.records(dumps)
    if not found:
        what = "\n".join(skipped[:10])
        raise ValueError(
            f"in {folder} is nothing that tells of a job. It may hold reports of `rankcell run`, dumps of torch's "
            f"flight recorder, and what py-spy prints of each rank.\n{what}".rstrip()
        )
    return Evidence(tuple(merged(found)), tuple(skipped))


def _content(path: Path) -> Any:
    """A file as the plain data of a pickle, as JSON, or as text."""
    data = path.read_bytes()
    if data[:1] == b"\x80":
        return records.load(data)
    return json.loads(data) if data[:1] == b"{" else data.decode(errors="replace")


def of_threads(
    rank: int,
    threads: Sequence[stacks.ThreadStack],
    workers: Sequence[tuple[int, Sequence[stacks.ThreadStack]]] = (),
    *,
    size: int = 0,
    idle: float | None = None,
) -> RankRecord:
    """A rank of which only the stacks are known. The operation that it stands in has no number."""
    frames = threads[0].frames
    file, line = stacks.place(frames)
    called = _operation(frames)
    wait = None if called is None else Wait(called, f"{called}(...)", "", (), None, 0, line=line, file=file)
    others = [(f"thread {t.name}".strip(), t.frames) for t in threads[1:] if stacks.own(t.frames)]
    others += [(f"worker process {pid}", each[0].frames) for pid, each in workers if each]
    return RankRecord(
        rank, size, "unknown", line=line, file=file, waits=(wait,) if wait else (), stack=frames,
        others=tuple(others), idle=idle, origin=("stack",),
    )  # fmt: skip


def _operation(frames: Sequence[Frame]) -> str | None:
    """The function of torch.distributed that the program stands in."""
    last = max((n for n, f in enumerate(frames) if stacks.is_own(f.filename)), default=-1)
    inside = [f.name for f in frames[last + 1 :] if "/torch/distributed/" in f"/{f.filename}"]
    return next((name for name in inside if name not in ("wrapper", "__call__")), None)


def merged(parts: Sequence[RankRecord]) -> list[RankRecord]:
    """One record for each rank from all that tells of it: counts and operations from who has them, the stack from who
    has looked.
    """
    size = max(max(p.world_size, p.rank + 1) for p in parts)
    found: dict[int, RankRecord] = {}
    for part in parts:
        one = found.setdefault(part.rank, part)
        numbered, seen = (one, part) if one.counts is not None else (part, one)
        if numbered is seen or not seen.stack:
            continue
        waits = numbered.waits
        if waits and not waits[0].line:
            waits = (replace(waits[0], line=seen.line, file=seen.file), *waits[1:])
        found[part.rank] = replace(
            numbered, stack=seen.stack, others=seen.others, waits=waits, line=seen.line, file=seen.file,
            idle=seen.idle, origin=(*numbered.origin, *seen.origin),
        )  # fmt: skip
    return [replace(r, world_size=size) for _, r in sorted(found.items())]


# --- the verdict


def explain(found: Sequence[RankRecord]) -> verdict.JobVerdict:
    """What happened, as far as records of a job that has ended, or hangs, can tell; and what they cannot."""
    size = max(r.world_size for r in found)
    missing = sorted(set(range(size)) - {r.rank for r in found})
    here = _blocked_outside(found)
    counts: dict[Any, int] = {}  # of the ranks that are ahead
    for record in here:
        counts |= {key: max(n, counts.get(key, 0)) for key, n in (record.counts or {}).items()}
    present = [RankRecord(r, size, counts=counts, threads=True) for r in missing]
    absent = [RankRecord(r, size, "absent", "has left nothing", counts={}) for r in missing]
    concluded = verdict.finished(here) if all(r.phase == "finished" for r in here) and not missing else None
    # first as if those of whom nothing is known had come to all that the others have
    concluded = concluded or verdict.judge([*here, *present])
    if concluded is None and missing and any(r.waits for r in here):
        concluded = verdict.judge([*here, *absent])
    concluded = concluded or _by_stacks(here)
    if concluded is None:
        everybody = all(r.waits for r in here)
        concluded = verdict.unclear(
            here,
            "every rank has come to the operation that it waits in."
            if everybody
            else "nothing here proves who is to blame.",
            "If all stand in the same operation, the transfer itself does not end: look at network and backend.",
        )
    unknown = [f"Of {name_ranks(missing)} there is nothing."] if missing else []
    if any(r.origin == ("stack",) for r in here):
        unknown.append(_STACKS_DO_NOT_TELL)
    return replace(concluded, unknown=tuple(unknown))


def _blocked_outside(found: Sequence[RankRecord]) -> list[RankRecord]:
    """Who waits in nothing, when the job does not go on any more, stands somewhere else: in words."""
    placed = []
    for record in found:
        if record.phase == "unknown" and record.counts is not None and not record.waits:
            place = at_line(record.line, record.file) if record.stack else ""
            last = max(record.events, key=lambda e: (e.start, e.seq), default=None)
            after = f" after {last.text} (call {last.seq})" if last is not None else ""
            why = f"still at {place}" if place else f"outside torch.distributed{after}"
            record = replace(record, phase="still", why=why)
        placed.append(record)
    return placed


def _by_stacks(found: Sequence[RankRecord]) -> verdict.JobVerdict | None:
    """What stacks alone say: who is not where the others wait. None if they all wait in the same place."""
    places: dict[Any, list[RankRecord]] = {}
    for record in found:
        key = (record.waits[0].op, record.file, record.line) if record.waits else None
        places.setdefault(key, []).append(record)
    if len(places) < 2 or not all(r.stack for r in found):
        return None
    rows = tuple(f"rank {r.rank}  {_does([r])}" for r in sorted(found, key=lambda r: bool(r.waits)))
    outside = places.pop(None, [])
    *rest, most = sorted(places.values(), key=len)
    odd = outside or rest[0]
    head = f"{name_ranks([r.rank for r in odd])} {_does(odd)}"
    if any(r.idle == 0.0 for r in outside):
        return verdict.unclear(found, f"{head}, and the others wait: slow, or an endless loop.")
    others = name_ranks([r.rank for r in most])
    if outside:
        head += f", and {others} {'waits' if len(most) == 1 else 'wait'} for it in {most[0].waits[0].op}."
    else:
        head += f" where {others} {_does(most)}."
        odd = list(found) if len(odd) == len(most) else odd
    return verdict.JobVerdict(
        "still" if outside else "mismatch", tuple(r.rank for r in odd), head, rows,
        "Every rank of a group must call the same operations in the same order.",
        tuple((r.file, r.line) for r in odd if r.line),
    )  # fmt: skip


def _does(alike: Sequence[RankRecord]) -> str:
    first, s = alike[0], "s" if len(alike) == 1 else ""
    place = at_line(first.line, first.file) or "an unknown line"
    if first.waits:
        return f"wait{s} in {first.waits[0].op} at {place}"
    return f"compute{s} at {place}" if first.idle == 0.0 else f"stand{s} at {place}"


# --- the command


def text(found: Evidence) -> str:
    """What the command prints."""
    skipped = [f"Not read: {line}" for line in found.skipped[:10]]
    return "\n".join([*skipped, verdict.text(explain(found.records), found.records)])


def main(options: Any) -> int:
    """Explain the folder as the options say; 0 if something could be read."""
    try:
        print(text(read(options.folder)))
    except ValueError as error:
        print(f"rankcell explain: {error}", file=sys.stderr)
        return 1
    return 0
