"""What is known of one rank of a job, whoever has told it; as data, and as a file of a report's folder.

It judges nothing: `verdict` does.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.messages import Wait
from ..results import Call, Event, Frame, Mismatch, RankFailure

FORMAT = "rankcell record 1"


@dataclass(frozen=True)
class Record:
    """What is known of one rank, and from where.

    `phase` is "running", "finished", "error" (it raised), "lost" (its process ended), "absent" (it never came),
    "still" (it stands still outside torch; only when that is known) or "unknown". `counts` are its operations by
    `Wait.key`, None where nobody tells. `events` are its last operations, with `seq` counted since the job began and
    times in seconds since the epoch.
    """

    rank: int
    world_size: int = 0
    phase: str = "running"
    why: str = ""  # of "error", "lost", "absent" and "still", in words
    node: str = ""
    line: int = 0  # where its main thread is
    file: str = ""
    waits: tuple[Wait, ...] = ()
    counts: Mapping[Any, int] | None = None
    calls: int = 0
    joins: bool = False
    blocked: bool = False  # its main thread stands still inside torch
    threads: bool = False  # a thread of the program's own could still answer
    idle: float | None = None  # seconds for which nothing of it has moved; None where unknown
    stack: tuple[Frame, ...] = ()  # of the main thread, outermost first
    others: tuple[
        tuple[str, tuple[Frame, ...]], ...
    ] = ()  # stacks of its workers and threads, with what they are
    events: tuple[Event, ...] = ()
    failure: RankFailure | None = None
    failed_in: Wait | None = None  # the operation that raised, if one did
    at: float = 0.0  # seconds since the epoch when it finished, raised or was lost
    origin: tuple[str, ...] = ()  # "rankcell", "flight recorder", "py-spy", "log"
    notes: tuple[str, ...] = ()  # what is not known, or what a log has said


_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Record, Wait, Event, Frame, Call, Mismatch, RankFailure)
}


def pack(value: Any) -> Any:
    """`value`, made of the classes above, as JSON knows it; what is as by default is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: pack(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
        }
        return {"is": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {"is": "map", "items": [[pack(k), pack(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [pack(v) for v in value]
    return value


def unpack(value: Any) -> Any:
    """What `pack` has packed. Raises ValueError for anything else."""
    if isinstance(value, list):
        return tuple(unpack(v) for v in value)
    if not isinstance(value, dict):
        return value
    name = str(value.get("is"))
    try:
        if name == "map":
            return {unpack(k): unpack(v) for k, v in value["items"]}
        return _KINDS[name](**{k: unpack(v) for k, v in value.items() if k != "is"})
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no record of rankcell: {error}") from None


def write(folder: Path, records: Sequence[Record]) -> None:
    """A file for each of `records`, in place of those of an earlier job."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*.json"):
        old.unlink()
    for record in records:
        text = json.dumps({"format": FORMAT, "record": pack(record)})
        (folder / f"rank-{record.rank}.json").write_text(text)


def read(content: Any) -> Record | None:
    """The record in the JSON of a file; None if it is no such file."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    found = unpack(content["record"])
    return found if isinstance(found, Record) else None
