"""`rankcell explain`: a folder of reports of `rankcell run`, or of what py-spy prints of each rank -> a verdict.

It tells which is which by the content, and the rank of a stack by the file's name, as in rank-3.txt. Dumps of torch's
flight recorder are compared by torch's own `torchfrtrace`, traces are shown by Perfetto.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.messages import Wait
from ..results import Event, Frame, RankResult, Run, at_line, name_ranks
from . import records, stacks, verdict
from .records import RankRecord


@dataclass(frozen=True)
class Evidence:
    """What a folder holds: a record of each rank."""

    records: tuple[RankRecord, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        """The last operations of all ranks; times begin at 0."""
        found = sorted((e for r in self.records for e in r.events), key=lambda e: (e.start, e.rank))
        return tuple(records.later(e, -found[0].start) for e in found)

    @property
    def run(self) -> Run:
        """The same as `draw.timeline` and `draw.waits` take it."""
        ranks = [
            RankResult(r.rank, events=tuple(e for e in self.events if e.rank == r.rank)) for r in self.records
        ]
        return Run("", tuple(ranks), standstill=verdict.standings(self.records))


def read(folder: Path | str) -> Evidence:
    """What the files in `folder` tell of a job.

    Raises:
        ValueError: there is nothing in it that tells something, or a pickle that is no report.
    """
    found: dict[int, RankRecord] = {}
    for path in sorted(p for p in Path(folder).glob("*") if p.is_file()):
        data, rank = path.read_bytes(), re.search(r"(\d+)\D*$", path.name)
        if data[:1] == b"\x80":
            record = records.load(data)
            found[record.rank] = record
        elif rank is not None and (threads := stacks.printed(data.decode(errors="replace"))):
            found[int(rank[1])] = of_threads(int(rank[1]), threads)
    if not found:
        raise ValueError(
            f"in {folder} is nothing that tells of a job: no report of `rankcell run`, nor what py-spy prints of a "
            f"rank, in a file such as rank-3.txt."
        )
    for missing in range(max(r.world_size for r in found.values())):  # it proves nothing
        found.setdefault(missing, RankRecord(missing, counts={}, threads=True))
    return Evidence(tuple(record for _, record in sorted(found.items())))


def of_threads(rank: int, threads: Sequence[stacks.ThreadStack]) -> RankRecord:
    """A rank of which only the stacks are known. The operation that it stands in has no number."""
    frames = threads[0].frames
    file, line = stacks.place(frames)
    called = _operation(frames)
    waits = (Wait(called, f"{called}(...)", "", (), None, 0, line=line, file=file),) if called else ()
    others = tuple((f"thread {t.name}".strip(), t.frames) for t in threads[1:] if stacks.own(t.frames))
    idle = 0.0 if threads[0].active else None
    return RankRecord(
        rank, phase="unknown", line=line, file=file, waits=waits, idle=idle, stack=frames, others=others
    )


def _operation(frames: Sequence[Frame]) -> str | None:
    """The function of torch.distributed that the program stands in."""
    last = max((n for n, f in enumerate(frames) if stacks.is_own(f.filename)), default=-1)
    inside = [
        f.name.rpartition(".")[2] for f in frames[last + 1 :] if "/torch/distributed/" in f"/{f.filename}"
    ]
    return next((name for name in inside if name not in ("wrapper", "__call__")), None)


def explain(found: Sequence[RankRecord]) -> verdict.JobVerdict:
    """What happened, as far as records of a job that has ended, or hangs, can tell."""
    if any(r.phase == "unknown" for r in found):
        return _by_stacks(found)
    if all(r.phase == "finished" for r in found):
        return verdict.finished(found)
    return verdict.judge(found) or verdict.unclear(found, "nothing here proves who is to blame.")


def _by_stacks(found: Sequence[RankRecord]) -> verdict.JobVerdict:
    """What stacks alone say: who is in no operation, while the others wait in one."""
    waiting = [r for r in found if r.waits]
    outside = [r for r in found if not r.waits]
    culprits: list[RankRecord] = []
    head = "no rank stands in an operation."
    if waiting and not outside:
        head = "every rank stands in an operation."
    elif waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        head = f"{name_ranks([r.rank for r in outside])} {_does(outside)}, and "
        if any(r.idle == 0.0 for r in outside):
            head += "the others wait: slow, or an endless loop."
        else:
            culprits = outside
            head += f"{name_ranks([r.rank for r in waiting])} {verb} for it in {waiting[0].waits[0].op}."
    return verdict.JobVerdict(
        "still" if culprits else "unclear",
        tuple(r.rank for r in culprits),
        head,
        tuple(f"rank {r.rank}  {_does([r])}" for r in [*outside, *waiting]),
        "Stacks do not number operations: whether two ranks in the same line stand in the same call, and who is ahead, "
        "is not known. `rankcell run` tells it.",
        tuple((r.file, r.line) for r in culprits if r.line),
    )


def _does(alike: Sequence[RankRecord]) -> str:
    first, s = alike[0], "s" if len(alike) == 1 else ""
    place = at_line(first.line, first.file) or "an unknown line"
    if first.waits:
        return f"wait{s} in {first.waits[0].op} at {place}"
    return f"compute{s} at {place}" if first.idle == 0.0 else f"stand{s} at {place}"


def show(found: Sequence[RankRecord]) -> None:
    """Print the verdict, and what each rank did."""
    print(verdict.text(explain(found), found))


def main(options: Any) -> int:
    """Explain the folder as the options say; 0 if something could be read."""
    try:
        show(read(options.folder).records)
    except ValueError as error:
        print(f"rankcell explain: {error}", file=sys.stderr)
        return 1
    return 0
