"""What is known of one rank of a job: as data, as a message, and as a file of a report. `verdict` judges it."""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.messages import Wait
from ..results import Call, Event, Frame, Mismatch, RankFailure


@dataclass(frozen=True)
class RankRecord:
    """What is known of one rank.

    `phase` is "running", "finished", "error" (it raised), "lost" (its process ended), "absent" (it never came),
    or "still" (it is blocked outside torch; only when that is known). `counts` are its operations by `Wait.key`.
    `events` are its last operations, with `seq` counted since the job began and times in seconds since the epoch.
    `cpu` and `moved` grow while it, or one of its workers, computes, reads or writes.
    """

    rank: int
    world_size: int = 0
    phase: str = "running"
    why: str = ""  # of "error", "lost", "absent" and "still", in words
    line: int = 0  # where its main thread is
    file: str = ""
    waits: tuple[Wait, ...] = ()
    counts: Mapping[Any, int] = field(default_factory=dict)
    calls: int = 0
    joins: bool = False
    blocked: bool = False  # its main thread stands still inside torch
    threads: bool = False  # a thread of the program's own could still answer
    idle: float = 0.0  # seconds for which it has not used the processor, read or written
    cpu: float = 0.0  # seconds
    moved: int = 0  # bytes
    runs: bool = False  # it has a core, or waits for one
    stack: tuple[Frame, ...] = ()  # of the main thread, outermost first
    events: tuple[Event, ...] = ()
    handles: str = ""  # the exception for which its main thread is in an `except` or a `finally`
    without: tuple[str, ...] = ()  # parameters in DDP that have no gradient, where others have one
    failure: RankFailure | None = None
    failed_in: Wait | None = None  # the operation that raised, if one did
    at: float = 0.0  # seconds since the epoch when it finished, raised or was lost

    @property
    def over(self) -> bool:
        """Whether its program has come to an end, in whatever way."""
        return self.phase in ("finished", "error", "lost")


class RankArrived(NamedTuple):
    """The first message of a rank to the runner. Then it sends `RankRecord`s, the last one when its program is over."""

    rank: int
    world_size: int
    pid: int
    host: str  # the same for processes that share memory
    crash_file: str  # where it writes its stack when it crashes


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        for kind in (RankRecord, Wait, Event, Frame, Call, Mismatch, RankFailure):
            if (kind.__module__, kind.__name__) == (module, name):
                return kind
        raise ValueError(f"it wants {module}.{name}, and a report holds plain data only")


def load(data: bytes) -> Any:
    """The record in a file of a report. Raises ValueError if it cannot be read, or is more than plain data."""
    try:
        return _PlainData(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001 - a broken pickle raises anything
        raise ValueError(f"this is no report of rankcell: {error}") from None


def write(folder: Path, records: Sequence[RankRecord]) -> None:
    """A file for each of `records`, in place of those of an earlier job."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*.pickle"):
        old.unlink()
    for record in records:
        (folder / f"rank-{record.rank}.pickle").write_bytes(pickle.dumps(record))
