"""Dumps of torch's flight recorder -> records: what gloo and nccl keep of the last operations of one rank.

A dump does not say which rank it is from: the name of its file does. The members of a group stand in nccl's dumps only;
of gloo's groups they are taken to be the ranks that have used it. gloo's dumps do not hold sends and receives.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.messages import Wait
from ..results import Event
from . import stacks
from .records import RankRecord

_NAMES = {
    "_all_gather_base": "all_gather", "_allgather_base": "all_gather", "allgather_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier", "all_to_allv": "all_to_all", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all", "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
}  # fmt: skip
_DTYPES = {  # name and bytes
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Int": ("int32", 4), "Long": ("int64", 8), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Dump:
    """One file: the rank that its name tells, and what torch has written."""

    rank: int
    content: Mapping[str, Any]

    @property
    def entries(self) -> list[Mapping[str, Any]]:
        return list(self.content.get("entries") or [])


def rank_in(name: str) -> int | None:
    """The rank that a file's name tells: "nccl_trace_rank_3", "fr-3.json", "rank3.txt"; None if it has no number."""
    found = re.search(r"rank[-_. ]?(\d+)", name) or re.search(r"(\d+)\D*$", name)
    return int(found[1]) if found else None


def is_dump(content: Any) -> bool:
    """Whether the content of a file is a dump."""
    return isinstance(content, Mapping) and bool({"entries", "pg_config", "pg_status"} & set(content))


def records(dumps: Sequence[Dump]) -> list[RankRecord]:
    """A record for each rank that has left a dump. Whoever has an operation open is taken to wait in it."""
    members = _members(dumps)
    size = max([len(ranks) for ranks in members.values()] + [d.rank + 1 for d in dumps], default=0)
    found = []
    for dump in dumps:
        events, waits = [], []
        counts: dict[Any, int] = {}
        for entry in dump.entries:
            event = _event(entry, dump.rank, members)
            key: tuple[Any, ...] = (event.group, event.ranks)
            seq = event.seq
            if event.op in ("send", "recv"):  # the recorder numbers them together, the pairs are counted here
                ends = (dump.rank, event.peer) if event.op == "send" else (event.peer, dump.rank)
                key = (event.group, "p2p", *ends, 0, event.op)
                seq = counts.get(key, 0) + 1
            counts[key] = max(counts.get(key, 0), seq)
            events.append(event)
            if not entry.get("retired") and entry.get("state") != "completed":
                waits.append(
                    Wait(
                        event.op, event.text, event.group, event.ranks, key, seq, seq, event.peer, line=event.line,
                        file=event.file,
                    )
                )  # fmt: skip
        found.append(
            RankRecord(
                dump.rank, size, "unknown", waits=tuple(waits), counts=counts, calls=len(events),
                events=tuple(events), origin=("flight recorder",),
            )
        )  # fmt: skip
    return found


def _members(dumps: Sequence[Dump]) -> dict[str, tuple[int, ...]]:
    """The ranks of each group, by its name."""
    told: dict[str, tuple[int, ...]] = {}
    seen: dict[str, set[int]] = {}
    for dump in dumps:
        for group in (dump.content.get("pg_config") or {}).values():
            if ranks := group.get("ranks"):
                told[str(group["name"])] = tuple(json.loads(ranks) if isinstance(ranks, str) else ranks)
        for entry in dump.entries:
            name, description = entry["process_group"]
            seen.setdefault(name, set()).add(dump.rank)
            if description == "default_pg":
                seen[name] |= {d.rank for d in dumps}
    return {name: tuple(sorted(ranks)) for name, ranks in seen.items()} | told


def _event(entry: Mapping[str, Any], rank: int, members: Mapping[str, tuple[int, ...]]) -> Event:
    name = str(entry["profiling_name"]).partition(":")[2]
    message = re.match(r"(send|recv) (\d+)(?:->|<-)(\d+)", name)
    group = entry["process_group"][0]
    ranks = members.get(group, ())
    peer = None
    if message:  # counted within the group
        here, there = int(message[2]), int(message[3])
        other = there if here == (ranks.index(rank) if rank in ranks else rank) else here
        peer = ranks[other] if other < len(ranks) else other
    op = message[1] if message else _NAMES.get(name, name.partition(" ")[0])
    side = "output" if op in ("recv", "scatter") and entry.get("output_sizes") else "input"
    sizes, dtypes = entry.get(f"{side}_sizes") or [()], entry.get(f"{side}_dtypes") or [""]
    shape = tuple(map(int, sizes[0]))
    dtype, width = _DTYPES.get(dtypes[0], (str(dtypes[0]).lower(), 4))
    created = int(entry.get("time_created_ns") or 0) / 1e9
    ended = int(entry.get("time_discovered_completed_ns") or 0) / 1e9
    frames = [f for f in entry.get("frames") or [] if stacks.is_own(str(f.get("filename") or ""))]
    return Event(
        rank=rank, op=op, start=created, end=max(ended, created), group=group, ranks=ranks,
        seq=int(entry["p2p_seq_id" if message else "collective_seq_id"]), shape=shape, dtype=dtype, peer=peer,
        line=int(frames[0]["line"]) if frames else 0, file=frames[0]["filename"] if frames else "",
        nbytes=math.prod(shape) * width,
    )  # fmt: skip
