"""A run as a trace for Perfetto (https://ui.perfetto.dev) and Chrome's `about:tracing`: one process per rank.

The format is the Trace Event Format's JSON (Google, "Trace Event Format", 2016): complete events with times
in microseconds, flow events for messages. It draws nothing by itself.
"""

import json
from pathlib import Path
from typing import Any

from ..results import Event, Run

_TRACKS = ("compute", "communication")


def chrome_trace(run: Run) -> dict[str, Any]:
    """`run` as a trace: a track group per rank, with a track for computing and one for communication."""
    rows: list[dict[str, Any]] = []
    for result in run.ran:
        where = f" on {result.node}" if result.node else ""
        rows.append(_name("process_name", result.rank, 0, f"rank {result.rank}{where}"))
        rows.append(
            {"ph": "M", "name": "process_sort_index", "pid": result.rank, "args": {"sort_index": result.rank}}
        )
        rows += [_name("thread_name", result.rank, tid, name) for tid, name in enumerate(_TRACKS)]
    for event in run.events:
        rows.append(
            {
                "ph": "X",
                "name": event.text,
                "cat": event.kind,
                "pid": event.rank,
                "tid": int(event.kind == "comm"),
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
                "args": _details(event),
            }
        )
    for number, (sent, received) in enumerate(messages(run.events)):
        flow = {"cat": "message", "name": "message", "id": number, "tid": 1}
        rows.append({**flow, "ph": "s", "pid": sent.rank, "ts": sent.start * 1e6})
        rows.append({**flow, "ph": "f", "bp": "e", "pid": received.rank, "ts": received.end * 1e6})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def save_trace(run: Run, path: str | Path) -> Path:
    """Write the trace of `run` to a file that ui.perfetto.dev opens. Returns the path."""
    path = Path(path)
    path.write_text(json.dumps(chrome_trace(run)))
    return path


def messages(events: tuple[Event, ...]) -> list[tuple[Event, Event]]:
    """The sends with the receives that took them: same pair, tag and count."""
    receives: dict[tuple, Event] = {
        (e.group, e.peer, e.rank, e.tag, e.seq): e for e in events if e.op == "recv" and e.peer is not None
    }
    pairs = []
    for event in events:
        if event.op == "send":
            taken = receives.get((event.group, event.rank, event.peer, event.tag, event.seq))
            if taken is not None:
                pairs.append((event, taken))
    return pairs


def _name(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


def _details(event: Event) -> dict[str, Any]:
    details = {
        "line": event.line,
        "bytes": event.nbytes,
        "group": list(event.ranks),
        "call": event.seq,
        "inside": event.via,
        "async": event.is_async,
    }
    return {k: v for k, v in details.items() if v}
