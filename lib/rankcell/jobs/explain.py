"""`rankcell explain`: a folder of dumps and logs, alone or mixed and incomplete -> records, a verdict, a notebook.

It reads reports of `rankcell run`, dumps of torch's flight recorder, what py-spy and faulthandler print, logs of nccl's
and torch's watchdog, and Kineto's traces. It tells which is what by the content, and the rank by the content or by the
file's name. Pickles are read as plain data only.
"""

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..engine import diagnose
from ..engine.messages import Wait
from ..results import Event, at_line, name_ranks
from . import flight, logs, records, stacks, traces, verdict
from .records import Record

MAX_NBYTES = 512 << 20  # of a file
_COLLECTIVES = {
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "barrier", "monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv", "new_group",
    "init_process_group", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a folder holds."""

    records: tuple[Record, ...] = ()
    timed: tuple[traces.Traced, ...] = ()
    skipped: tuple[str, ...] = ()  # files that are none of these, or could not be read
    sources: Mapping[str, int] = field(default_factory=dict)  # what was read, and how many files of it

    @property
    def events(self) -> tuple[Event, ...]:
        """What the ranks did, by the traces if there are any, else by the records; times begin at 0."""
        found = traces.events(self.timed) if self.timed else [e for r in self.records for e in r.events]
        zero = min((e.start for e in found if e.start), default=0.0)
        return tuple(sorted((traces.shifted(e, -zero) for e in found), key=lambda e: (e.start, e.rank)))


def read(folder: Path | str) -> Found:
    """What the files in `folder`, and in the folders in it, tell of a job.

    Raises:
        ValueError: there is no such folder, or nothing in it that can be read.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"there is no {folder}.")
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    ours: list[Record] = []
    dumps: list[flight.Dump] = []
    processes: list[tuple[int | None, stacks.Process]] = []
    texts: list[tuple[str, int | None]] = []
    kineto: list[traces.Traced] = []
    skipped: list[str] = []
    for path in files:
        try:
            content = _content(path)
        except ValueError as error:
            skipped.append(f"{path.name}: {error}")
            continue
        if isinstance(content, str):
            if spied := stacks.py_spy_text(content):
                processes += [(_rank_of(path, p), p) for p in spied]
            elif "most recent call first" in content:
                threads = stacks.faulthandler_threads(content)
                processes.append((flight.rank_in(path.name), stacks.Process(threads)))
            else:
                texts.append((content, flight.rank_in(path.name) if "rank" in path.name else None))
        elif (record := records.read(content)) is not None:
            ours.append(record)
        elif (dump := flight.of(content, path)) is not None:
            dumps.append(dump)
        elif (trace := traces.of(content, path)) is not None:
            kineto.append(trace)
        elif spied := stacks.py_spy_json(content):
            processes += [(_rank_of(path, p), p) for p in spied]
        else:
            skipped.append(
                f"{path.name}: it is none of the dumps and logs that `rankcell explain --help` lists"
            )
    dumps = _numbered(dumps)
    told = logs.records(texts)
    parts = [*ours, *flight.records(dumps), *_of_processes(processes), *told]
    sources = {
        "reports of rankcell": len(ours), "dumps of the flight recorder": len(dumps), "stacks": len(processes),
        "logs": len(texts) if told else 0, "traces": len(kineto),
    }  # fmt: skip
    if not parts and not kineto:
        what = "\n".join(skipped[:10])
        raise ValueError(
            f"in {folder} is nothing that tells of a job. It may hold reports of `rankcell run`, dumps of torch's "
            f"flight recorder, what py-spy prints, logs of the watchdog, and traces of the profiler.\n{what}".rstrip()
        )
    return Found(tuple(merged(parts)), tuple(kineto), tuple(skipped), {k: n for k, n in sources.items() if n})


def _content(path: Path) -> Any:
    """A file as JSON, as the plain data of a pickle, or as text."""
    if path.stat().st_size > MAX_NBYTES:
        raise ValueError(f"it is larger than {MAX_NBYTES >> 20} MiB")
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if data[:1] == b"\x80":
        return flight.load(data)
    if data[:1] in (b"{", b"[") and data[:5] != b"[rank":
        try:
            return json.loads(data)
        except ValueError as error:
            if data[:1] == b"{":
                raise ValueError(f"its JSON ends or breaks off: {error}") from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("it is neither JSON, nor a pickle, nor text") from None


def _rank_of(path: Path, process: stacks.Process) -> int | None:
    """The rank that the name of a file tells, if it is not the number of the process."""
    rank = flight.rank_in(path.name)
    return None if rank == process.pid and process.pid else rank


def _numbered(dumps: Sequence[flight.Dump]) -> list[flight.Dump]:
    """Dumps of which each has a rank of its own: those without one take what is left, in the order of their names."""
    taken = {d.rank for d in dumps if d.rank is not None}
    free = (n for n in range(len(dumps) + len(taken)) if n not in taken)
    seen: set[int] = set()
    found = []
    for dump in dumps:
        rank = dump.rank if dump.rank is not None and dump.rank not in seen else next(free)
        seen.add(rank)
        found.append(replace(dump, rank=rank))
    return found


def _of_processes(processes: Sequence[tuple[int | None, stacks.Process]]) -> list[Record]:
    taken = {rank for rank, _ in processes if rank is not None}
    free = (n for n in range(len(processes) + len(taken)) if n not in taken)
    found: dict[int, Record] = {}
    for rank, process in processes:
        rank = next(free) if rank is None else rank
        if rank in found:  # a worker of that rank
            main = process.threads[0].frames if process.threads else ()
            found[rank] = replace(
                found[rank], others=(*found[rank].others, (f"worker process {process.pid}", main))
            )
        else:
            found[rank] = of_process(rank, process)
    return list(found.values())


def of_process(rank: int, process: stacks.Process, *, size: int = 0, idle: float | None = None) -> Record:
    """A rank of which only the stack is known. The operation that it stands in has no number."""
    frames = process.threads[0].frames if process.threads else ()
    own = [f for f in frames if stacks.is_own(f.filename)]
    place = own[-1] if own else None
    inside = frames[frames.index(place) + 1 :] if place is not None else frames
    called = next((f for f in inside if f.name in _COLLECTIVES and "distributed" in f.filename), None)
    if called is None and any("/torch/distributed/" in f.filename for f in inside):
        called = next(f for f in inside if "/torch/distributed/" in f.filename)
    waits: tuple[Wait, ...] = ()
    if called is not None:
        line, file = (place.lineno, place.filename) if place else (0, "")
        waits = (Wait(called.name, f"{called.name}(...)", "", (), None, 0, 0, line=line, file=file),)
    others = tuple(
        (f"thread {t.name}".strip(), t.frames)
        for t in process.threads[1:]
        if any(stacks.is_own(f.filename) for f in t.frames)
    )
    return Record(
        rank, size, "unknown", line=place.lineno if place else 0, file=place.filename if place else "", waits=waits,
        stack=frames, others=others, idle=idle, origin=("stack",),
    )  # fmt: skip


def merged(parts: Sequence[Record]) -> list[Record]:
    """One record for each rank, from all that several sources tell of it: counts and operations from who has them, the
    stack from who has looked, the exception from who has seen it.
    """
    size = max([p.world_size for p in parts] + [p.rank + 1 for p in parts], default=0)
    found: dict[int, Record] = {}
    for part in parts:
        one = found.get(part.rank)
        if one is None:
            found[part.rank] = part
            continue
        numbered = next((p for p in (one, part) if p.counts is not None and "log" not in p.origin), None)
        numbered = numbered or (one if one.counts is not None else part)
        ended = one if one.phase not in ("unknown", "running") else part
        seen = one if one.stack else part
        waits = numbered.waits
        if waits and seen.waits and not waits[0].line:  # the place from the stack, the number from the dump
            waits = (replace(waits[0], line=seen.waits[0].line, file=seen.waits[0].file), *waits[1:])
        found[part.rank] = replace(
            numbered, phase=ended.phase, why=ended.why, failure=one.failure or part.failure,
            failed_in=one.failed_in or part.failed_in, stack=seen.stack, others=one.others or part.others,
            waits=waits or one.waits or part.waits, line=seen.line or numbered.line, file=seen.file or numbered.file,
            at=one.at or part.at, idle=seen.idle, origin=tuple(dict.fromkeys((*one.origin, *part.origin))),
        )  # fmt: skip
    return [replace(r, world_size=max(r.world_size, size)) for _, r in sorted(found.items())]


# --- the verdict


def explain(found: Sequence[Record]) -> verdict.Verdict:
    """What happened, as far as records of a job that has ended, or hangs, can tell; and what they cannot."""
    size = max([r.world_size for r in found] + [r.rank + 1 for r in found], default=0)
    missing = [r for r in range(size) if r not in {one.rank for one in found}]
    unknown = []
    if missing:
        unknown.append(f"Of {name_ranks(missing)} there is nothing.")
    here = _placed(found)
    if here and not missing and all(r.phase == "finished" for r in here):
        return verdict.finished(here)
    concluded = verdict.judge([*here, *_present(missing, here, size)])
    if concluded is None and missing and any(r.waits for r in here):
        gone = [Record(r, size, "absent", "has left nothing", counts={}) for r in missing]
        concluded = verdict.judge([*here, *gone])
    if concluded is None:
        concluded = by_stacks(here)
    if concluded is None:
        waiting = [r for r in here if r.waits]
        concluded = verdict.unclear(
            here,
            "nothing here proves who is to blame."
            if len(waiting) < len(here) or not here
            else "every rank has come to the operation that it waits in.",
            "If all stand in the same operation, the transfer itself does not end: look at network and backend.",
        )
    for record in here:
        if "log" in record.origin and record.counts is not None and len(record.origin) == 1:
            unknown.append(
                "Logs number the operations of the default group only as far as the watchdog says it."
            )
            break
    if any(r.origin == ("stack",) for r in here):
        unknown.append(
            "Stacks do not number operations: whether two ranks in the same line stand in the same call, and who is "
            "ahead, is not known. `rankcell run`, or TORCH_FR_BUFFER_SIZE=2000 in the job's environment, tells it."
        )
    return replace(concluded, unknown=tuple(dict.fromkeys((*concluded.unknown, *unknown))))


def _present(missing: Sequence[int], here: Sequence[Record], size: int) -> list[Record]:
    """Ranks of which nothing is known, as if they had come to all that the others have."""
    counts: dict[Any, int] = {}
    for record in here:
        for key, n in (record.counts or {}).items():
            counts[key] = max(counts.get(key, 0), n)
    return [Record(r, size, "running", counts=counts, threads=True) for r in missing]


def _placed(found: Sequence[Record]) -> list[Record]:
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


def by_stacks(found: Sequence[Record]) -> verdict.Verdict | None:
    """What stacks alone say: who is not where the others wait. None if they all wait in the same place."""
    if not found or not all(r.stack for r in found):
        return None
    ranks = tuple(sorted(r.rank for r in found))
    parties: dict[Any, list[Record]] = {}
    for record in found:
        wait = record.waits[0] if record.waits else None
        parties.setdefault((wait.op, wait.file, wait.line) if wait else None, []).append(record)
    waiting = [r for r in found if r.waits]
    outside = parties.get(None, [])
    if outside and waiting:
        key: Any = ("by stacks", ranks)
        known = []
        for record in found:
            if record.waits:
                wait = replace(record.waits[0], key=key, seq=1, nth=1, group="by stacks", ranks=ranks)
                record = replace(record, waits=(wait,), counts={key: 1}, phase="running")
            elif record.idle is not None and record.idle <= 0:
                record = replace(record, counts={key: 0}, phase="running")  # it computes
            else:
                where = at_line(record.line, record.file) or "an unknown line"
                record = replace(record, counts={key: 0}, phase="still", why=f"at {where}")
            known.append(record)
        proof = verdict.judge(known)
        if proof is None:
            busy = name_ranks([r.rank for r in outside])
            where = at_line(outside[0].line, outside[0].file)
            return replace(
                verdict.unclear(
                    known, f"{busy} computes at {where}, and the others wait: slow, or an endless loop."
                ),
                rows=tuple(_row(r) for r in sorted(found, key=lambda r: bool(r.waits))),
            )
        return replace(proof, rows=tuple(_row(r) for r in sorted(found, key=lambda r: bool(r.waits))))
    if len(parties) < 2:
        return None
    sizes = sorted(parties.values(), key=len)
    odd = sizes[0] if len(sizes[0]) < len(sizes[-1]) else [r for same in sizes for r in same]
    rest = sizes[-1]
    head = (
        f"{name_ranks([r.rank for r in sizes[0]])} {_stands(sizes[0])} where {name_ranks([r.rank for r in rest])} "
        f"{_stands(rest)}."
    )
    return verdict.Verdict(
        "mismatch", tuple(r.rank for r in odd), head, tuple(_row(r) for same in sizes for r in same),
        "Every rank of a group must call the same operations in the same order.",
        tuple((r.waits[0].file, r.waits[0].line) for r in odd if r.waits and r.waits[0].line),
    )  # fmt: skip


def _stands(same: Sequence[Record]) -> str:
    wait, verb = same[0].waits[0], "waits" if len(same) == 1 else "wait"
    return f"{verb} in {wait.op} at {at_line(wait.line, wait.file) or 'an unknown line'}"


def _row(record: Record) -> str:
    place = at_line(record.line, record.file) or "an unknown line"
    what = f"waits in {record.waits[0].op} at {place}" if record.waits else f"stands at {place}"
    return f"rank {record.rank}  {what}"


# --- the command


def main(options: Any) -> int:
    """Explain the folder as the options say; 0 if something could be read."""
    try:
        found = read(options.folder)
    except ValueError as error:
        print(f"rankcell explain: {error}", file=sys.stderr)
        return 1
    print(text(found))
    if options.perfetto:
        path = Path(options.perfetto)
        path.write_text(json.dumps(traces.perfetto(found.events)))
        print(f"{path} opens at https://ui.perfetto.dev.")
    if options.notebook:
        from . import notebook

        path = Path(options.notebook)
        path.write_text(json.dumps(notebook.make(found, Path(options.folder)), indent=1))
        print(f"{path} shows it with pictures.")
    return 0


def text(found: Found) -> str:
    """What the command prints."""
    read = ", ".join(f"{n} {what}" for what, n in found.sources.items())
    parts = [f"Read: {read}."]
    parts += [f"Not read: {line}" for line in found.skipped[:10]]
    if found.records:
        concluded = explain(found.records)
        parts += ["", f"rankcell: {concluded}"]
        if more := verdict.details(found.records, concluded):
            parts += ["", more]
    if found.timed:
        parts += ["", traces.summary(found.timed)]
    return "\n".join(parts)


def standings(found: Found) -> Any:
    """Who waits for whom, as `draw.waits` takes it."""
    return diagnose.standings([verdict.state_of(r) for r in _placed(found.records)])
