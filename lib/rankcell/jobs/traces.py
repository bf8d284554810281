"""Kineto's traces of several ranks -> the same Events as a rank cell's, and what they say; Events -> Perfetto.

On a GPU the kernels count: nccl's are communication, all others computing. Without one gloo's operations and the
outermost operations of torch do. What a trace does not hold (which bytes went where) is not made up.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..results import Event, name_ranks
from . import flight

APART = 1e-3  # seconds by which the clocks of two ranks may differ before their traces are put right
CLOSE = 20e-6  # seconds between two operations of torch that count as one stretch of computing
CLEAR = 2.0  # how much more than its share one rank must be waited for to be called a straggler
_SYNCHRONOUS = {
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
}  # all ranks leave together
_OPS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "sendrecv": "send", "broadcast": "broadcast", "reduce": "reduce", "barrier": "barrier", "gather": "gather",
    "scatter": "scatter", "send": "send", "recv": "recv",
}  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """The trace of one rank: what it communicated, and when it computed, in seconds of one clock."""

    rank: int
    events: tuple[Event, ...] = field(repr=False)

    def seconds(self, kind: str) -> float:
        """Seconds in which something of that kind went on."""
        return _covered(_parts(self.events, kind))

    @property
    def exposed(self) -> float:
        """Seconds in which it communicated and computed nothing meanwhile."""
        comm, compute = _parts(self.events, "comm"), _parts(self.events, "compute")
        return _covered(comm + compute) - _covered(compute)


def of(content: Any, path: Path) -> Traced | None:
    """The trace in what a file holds; None if it is something else."""
    if isinstance(content, Mapping):
        raw, about = content.get("traceEvents"), content
    else:
        raw, about = content, {}
    if not isinstance(raw, list) or not any(isinstance(e, Mapping) and "ph" in e for e in raw[:100]):
        return None
    told = about.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, Mapping) else None
    rank = rank if isinstance(rank, int) else flight.rank_in(path.name) or 0
    base = float(about.get("baseTimeNanoseconds") or 0) / 1e9
    spans = [e for e in raw if isinstance(e, Mapping) and e.get("ph") == "X" and e.get("dur") is not None]
    return Traced(rank, tuple(sorted(_events(spans, rank, base), key=lambda e: e.start)))


def _events(spans: Sequence[Mapping[str, Any]], rank: int, base: float) -> list[Event]:
    def at(span: Mapping[str, Any]) -> tuple[float, float]:
        start = base + float(span["ts"]) / 1e6
        return start, start + float(span["dur"]) / 1e6

    kernels = [s for s in spans if s.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        comm = [s for s in kernels if "nccl" in str(s["name"]).lower()]
        compute = [s for s in kernels if "nccl" not in str(s["name"]).lower()]
    else:
        comm = [s for s in spans if str(s["name"]).startswith(("gloo:", "nccl:"))]
        if not comm:
            comm = [s for s in spans if s["name"] == "record_param_comms"]
        compute = [s for s in spans if str(s["name"]).startswith(("aten::", "autograd::"))]
    found: list[Event] = []
    counts: dict[Any, int] = {}
    for span in sorted(comm, key=lambda s: float(s["ts"])):
        about = span.get("args") or {}
        op = _op(str(about.get("Collective name") or span["name"]))
        group = str(about.get("Process Group Name") or "")
        counts[group, op] = counts.get((group, op), 0) + 1
        start, end = at(span)
        elements = about.get("In msg nelems")
        found.append(
            Event(
                rank, op, start, end, group=group, seq=counts[group, op], dtype=str(about.get("dtype") or "").lower(),
                shape=(int(elements),) if isinstance(elements, int) else (), issued=start,
            )
        )  # fmt: skip
    stretch: tuple[float, float] | None = None
    for start, end in sorted(map(at, compute)):
        if stretch is None or start > stretch[1] + CLOSE:
            if stretch is not None:
                found.append(Event(rank, "compute", *stretch, kind="compute"))
            stretch = start, end
        else:
            stretch = stretch[0], max(stretch[1], end)
    if stretch is not None:
        found.append(Event(rank, "compute", *stretch, kind="compute"))
    return found


def _op(name: str) -> str:
    plain = name.partition(":")[2] or name
    plain = plain.removeprefix("ncclDevKernel_").removeprefix("ncclKernel_").removeprefix("_")
    plain = plain.partition("(")[0].lower().replace("_", "").replace("base", "").replace("coalesced", "")
    return next(
        (course for theirs, course in _OPS.items() if plain.startswith(theirs)), plain or "communication"
    )


def shifted(event: Event, by: float) -> Event:
    """The event so many seconds later."""
    return replace(
        event,
        start=event.start + by,
        end=event.end + by,
        issued=event.issued + by,
        wait_start=None if event.wait_start is None else event.wait_start + by,
        done=None if event.done is None else event.done + by,
    )


def events(found: Sequence[Traced]) -> list[Event]:
    """What the ranks of all traces did, on the clock of the first."""
    late = offsets(found)
    return [shifted(e, -late[t.rank]) for t in found for e in t.events]


def offsets(found: Sequence[Traced]) -> dict[int, float]:
    """Seconds by which each rank's clock is ahead of the first one's, by the ends of the operations that all leave
    together; 0 where they differ by no more than they do on one machine.
    """
    if not found:
        return {}
    first = _ends(found[0])
    ahead = {found[0].rank: 0.0}
    for trace in found[1:]:
        ends = _ends(trace)
        apart = [ends[key] - first[key] for key in ends.keys() & first.keys()]
        median = statistics.median(apart) if apart else 0.0
        ahead[trace.rank] = median if abs(median) > APART else 0.0
    return ahead


def _ends(trace: Traced) -> dict[Any, float]:
    return {(e.group, e.op, e.seq): e.end for e in trace.events if e.kind == "comm" and e.op in _SYNCHRONOUS}


def waited_for(found: Iterable[Event]) -> dict[tuple[int, int], float]:
    """Seconds that each rank (first) stood in collectives while another one (second) had not come, the last to come."""
    same: dict[Any, dict[int, Event]] = {}
    for event in found:
        if event.kind == "comm" and event.op not in ("send", "recv"):
            same.setdefault((event.group, event.op, event.seq), {})[event.rank] = event
    waits: dict[tuple[int, int], float] = {}
    for by_rank in same.values():
        last = max(by_rank.values(), key=lambda e: e.start)
        for rank, event in by_rank.items():
            if rank != last.rank:
                seconds = max(0.0, min(last.start, event.end) - event.start)
                waits[rank, last.rank] = waits.get((rank, last.rank), 0.0) + seconds
    return waits


def stragglers(found: Sequence[Event]) -> tuple[int, ...]:
    """The ranks that the others wait for clearly more than for the rest; empty if there are none."""
    ranks = sorted({e.rank for e in found})
    for_whom = {r: 0.0 for r in ranks}
    for (_, late), seconds in waited_for(found).items():
        for_whom[late] += seconds
    whole = sum(for_whom.values())
    span = max((e.end for e in found), default=0.0) - min((e.start for e in found), default=0.0)
    if len(ranks) < 2 or whole < 0.02 * span * (len(ranks) - 1):  # nobody waits much
        return ()
    return tuple(r for r in ranks if for_whom[r] > CLEAR * whole / len(ranks))


def summary(found: Sequence[Traced]) -> str:
    """What the traces say, in lines."""
    moved, ranks = events(found), sorted(found, key=lambda t: t.rank)
    late = {r: s for r, s in offsets(found).items() if s}
    waits = waited_for(moved)
    lines = [f"The traces of {name_ranks([t.rank for t in ranks])}:"]
    for trace in ranks:
        comm, waiting = trace.seconds("comm"), sum(s for (r, _), s in waits.items() if r == trace.rank)
        share = trace.exposed / comm if comm else 0.0
        lines.append(
            f"  rank {trace.rank}  computes {trace.seconds('compute'):.3f} s, communicates {comm:.3f} s, exposed "
            f"{trace.exposed:.3f} s ({share:.0%}), of that waits {waiting:.3f} s for others"
        )
    for (rank, other), seconds in sorted(waits.items(), key=lambda item: -item[1])[:8]:
        if seconds > 0:
            lines.append(f"  rank {rank} waited {seconds:.3f} s for rank {other}")
    slow = stragglers(moved)
    if slow:
        lines.append(
            f"{name_ranks(slow)} {'is' if len(slow) == 1 else 'are'} what the others wait for: slow, not stuck."
        )
    else:
        lines.append("No rank is clearly slower than the others.")
    if late:
        said = ", ".join(f"rank {r} by {1e3 * s:+.1f} ms" for r, s in late.items())
        lines.append(f"The clocks differ, and were put right by the ends of common operations: {said}.")
    return "\n".join(lines)


def perfetto(found: Iterable[Event]) -> dict[str, Any]:
    """The events as Perfetto and Chrome read them: a process for each rank, a row for each kind, arrows of messages."""
    out: list[dict[str, Any]] = []
    sends: dict[Any, Event] = {}
    found = list(found)
    for rank in sorted({e.rank for e in found}):
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, name in ((0, "computing"), (1, "communication")):
            out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
    for event in found:
        about = {
            "group": event.group,
            "call": event.seq,
            "bytes": event.nbytes,
            "line": event.line,
            "file": event.file,
        }
        out.append(
            {
                "ph": "X", "name": event.text, "cat": event.kind, "pid": event.rank, "tid": int(event.kind == "comm"),
                "ts": round(1e6 * event.start, 3), "dur": round(1e6 * max(event.seconds, 0.0), 3),
                "args": {k: v for k, v in about.items() if v},
            }
        )  # fmt: skip
        if event.op == "send":
            sends[event.rank, event.peer, event.tag, event.seq] = event
    for number, event in enumerate(e for e in found if e.op == "recv"):
        sent = sends.get((event.peer, event.rank, event.tag, event.seq))
        if sent is not None:
            for phase, one, at in (("s", sent, sent.start), ("f", event, event.end)):
                out.append(
                    {
                        "ph": phase, "id": number, "name": "message", "cat": "comm", "pid": one.rank, "tid": 1,
                        "ts": round(1e6 * at, 3), **({"bp": "e"} if phase == "f" else {}),
                    }
                )  # fmt: skip
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _parts(found: Iterable[Event], kind: str) -> list[tuple[float, float]]:
    return [(e.start, e.end) for e in found if e.kind == kind]


def _covered(parts: Sequence[tuple[float, float]]) -> float:
    """Seconds that at least one of the stretches covers."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(parts):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
