"""What nccl's watchdog, torch and torchrun write into a log -> records.

Lines of several ranks may stand in one file, as torchrun and srun leave them. What a log does not say is not guessed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.messages import Wait
from ..results import Frame, RankFailure, call_text
from . import stacks
from .records import Record

_OPS = {
    "ALLREDUCE": "all_reduce", "ALLREDUCE_COALESCED": "all_reduce", "BROADCAST": "broadcast", "REDUCE": "reduce",
    "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "all_gather", "ALLGATHER_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "reduce_scatter", "GATHER": "gather",
    "SCATTER": "scatter", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all", "BARRIER": "barrier",
    "SEND": "send", "RECV": "recv", "COALESCED": "coalesced operations",
}  # fmt: skip
_RANK = re.compile(r"\[rank(\d+)\]:|\bRank (\d+)\]|^\s*(\d+): ")
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)"
)
_STATUS = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)")
_GROUP = re.compile(r"PG (?:GUID|ID) \w+ ?(?:PG GUID (\w+))?(?:\((\w+)\))?")
_SUMMARY = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+)")
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)$')
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Iteration))(?:: (.*))?$")


@dataclass
class _Told:
    """What the log has said of one rank."""

    waits: list[tuple[int, str, int]] = field(default_factory=list)  # number, operation, elements
    enqueued: int | None = None
    completed: int | None = None
    frames: list[Frame] = field(default_factory=list)
    inside: bool = False  # a traceback
    failure: RankFailure | None = None
    exit: int | None = None


def records(texts: Sequence[tuple[str, int | None]]) -> list[Record]:
    """A record for each rank of which a log tells something. Each of `texts` comes with the rank that its file's name
    tells, for lines that name none.
    """
    told: dict[int, _Told] = {}
    for text, of_file in texts:
        _read(text, of_file, told)
    size = max(told, default=-1) + 1
    return [_record(rank, size, one) for rank, one in sorted(told.items()) if _tells(one)]


def _tells(one: _Told) -> bool:
    return bool(one.waits or one.failure or one.exit or one.enqueued is not None)


def _read(text: str, of_file: int | None, told: dict[int, _Told]) -> None:
    summary: int | None = None
    for line in text.splitlines():
        found = _RANK.search(line)
        rank = next((int(g) for g in found.groups() if g), of_file) if found else of_file
        if begins := _SUMMARY.match(line):
            summary = int(begins[1])
            continue
        if summary is not None and (ended := _EXIT.match(line)):
            told.setdefault(summary, _Told()).exit = int(ended[1])
            summary = None
            continue
        if rank is None:
            continue
        one = told.setdefault(rank, _Told())
        if timeout := _TIMEOUT.search(line):
            item = int(timeout[1]), _OPS.get(timeout[2], timeout[2].lower()), int(timeout[3])
            one.waits += [item] if item not in one.waits else []
        if status := _STATUS.search(line):
            one.enqueued, one.completed = int(status[1]), int(status[2])
        _traceback(re.sub(r"^\[rank\d+\]: ?|^\s*\d+: ", "", line), one)


def _traceback(line: str, one: _Told) -> None:
    if line.startswith("Traceback (most recent call last)"):
        one.inside, one.frames = True, []
    elif one.inside and (frame := _FRAME.search(line)):
        one.frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    elif one.inside and one.frames and line.startswith("    ") and not line.strip().startswith(("^", "~")):
        one.frames[-1] = replace(one.frames[-1], source=one.frames[-1].source or line.strip())
    elif one.inside and (raised := _RAISED.match(line)):
        kind, message = raised[1].rpartition(".")[2], raised[2] or ""
        one.failure = RankFailure(kind, message, stacks.own(one.frames))
        one.inside = False


def _record(rank: int, size: int, one: _Told) -> Record:
    ranks = tuple(range(size))
    key: Any = ("0", ranks)
    waits = tuple(
        Wait(op, call_text(op, "", (), "", None), "0", ranks, key, number, number)
        for number, op, _ in sorted(one.waits)[:1]
    )
    count = one.enqueued if one.enqueued is not None else waits[0].seq if waits else None
    phase, why = "unknown", ""
    if one.failure is not None:
        phase, why = "error", str(one.failure)
    elif one.exit is not None and one.exit < 0:
        phase, why = "lost", f"was killed by signal {-one.exit}"
    elif one.exit:
        phase, why = "lost", f"ended with exit code {one.exit}"
    last = one.failure.frames[-1] if one.failure and one.failure.frames else None
    return Record(
        rank, size, phase, why, line=last.lineno if last else 0, file=last.filename if last else "", waits=waits,
        counts=None if count is None else {key: count}, calls=count or 0, failure=one.failure,
        failed_in=waits[0] if waits and one.failure else None, origin=("log",),
    )  # fmt: skip
