"""`rankcell explain`: the report of a job under `rankcell run` -> its verdict, and what pictures take of it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import Event, RankResult, Run
from . import records, verdict
from .records import RankRecord


@dataclass(frozen=True)
class Evidence:
    """What a report holds: a record of each rank."""

    records: tuple[RankRecord, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        """The last operations of all ranks; times begin at 0."""
        found = sorted((e for r in self.records for e in r.events), key=lambda e: (e.start, e.rank))
        return tuple(records.later(e, -found[0].start) for e in found)

    @property
    def run(self) -> Run:
        """The same as `draw.timeline` and `draw.waits` take it."""
        ranks = [RankResult(r.rank, events=tuple(e for e in self.events if e.rank == r.rank)) for r in self.records]
        return Run("", tuple(ranks), standstill=verdict.standings(self.records))

    @property
    def verdict(self) -> verdict.JobVerdict:
        """What happened, as far as the records can tell."""
        if all(r.phase == "finished" for r in self.records):
            return verdict.finished(self.records)
        return verdict.judge(self.records) or verdict.unclear(self.records, "nothing here proves who is to blame.")


def read(folder: Path | str) -> Evidence:
    """What the report in `folder` tells of a job. Raises ValueError where there is none, or a pickle that is none."""
    found = [records.load(path.read_bytes()) for path in Path(folder).glob("rank-*.pickle")]
    if not found:
        raise ValueError(f"in {folder} is no report of `rankcell run`.")
    return Evidence(tuple(sorted(found, key=lambda r: r.rank)))


def main(options: Any) -> int:
    """Explain the folder as the options say; 0 if it could be read."""
    try:
        found = read(options.folder)
    except ValueError as error:
        print(f"rankcell explain: {error}", file=sys.stderr)
        return 1
    print(verdict.text(found.verdict, found.records))
    return 0
