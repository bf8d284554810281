"""Dumps of torch's flight recorder -> records: pickles and JSON, of gloo and nccl, as torch 2.11 to 2.15 write them.

A dump is a list of the last operations of one rank. It does not say which rank it is from: the name of its file
does. The members of a group stand in nccl's dumps only; of gloo's groups they are taken to be the
ranks that have used it. gloo's dumps do not hold sends and receives.
"""

import io
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.messages import Wait
from ..results import Event, call_text
from . import stacks
from .records import Record

_NAMES = {
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
}
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32",
    "Long": "int64", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_WIDTHS = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1}


class ForeignPickle(ValueError):
    """A pickle that holds more than numbers, text, lists and dictionaries: it is not opened."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ForeignPickle(f"it wants {module}.{name}; a dump of the flight recorder holds plain data only")


@dataclass(frozen=True)
class Dump:
    """One file: the rank as its name says (None if it does not), and what torch has written."""

    rank: int | None
    content: Mapping[str, Any]
    name: str = ""

    @property
    def entries(self) -> list[Mapping[str, Any]]:
        found = self.content.get("entries") or []
        return [e for e in found if isinstance(e, Mapping)]


def rank_in(name: str) -> int | None:
    """The rank that a file's name tells: "nccl_trace_rank_3", "fr-3.json", "rank3.txt"; None if it has no number."""
    stem = re.sub(r"\.(json|pickle|pkl|txt|log|out|err|gz|pt|trace)+", "", name)
    found = re.search(r"rank[-_. ]?(\d+)", stem) or re.search(r"(\d+)\D*$", stem)
    return int(found[1]) if found else None


def load(data: bytes) -> Any:
    """What a dump holds. Raises ForeignPickle if it is more than plain data, ValueError if it is none."""
    try:
        return _Plain(io.BytesIO(data)).load()
    except ForeignPickle:
        raise
    except Exception as error:  # noqa: BLE001 - a broken pickle raises anything
        raise ValueError(f"it cannot be read: {type(error).__name__}: {error}") from None


def of(content: Any, path: Path) -> Dump | None:
    """The dump in what a file holds; None if it is something else."""
    if not isinstance(content, Mapping):
        return None
    if "entries" not in content and not ({"pg_config", "pg_status"} & set(content)):
        return None
    rank = content.get("rank")
    return Dump(rank if isinstance(rank, int) else rank_in(path.name), content, path.name)


def _number(value: Any, default: int = 0) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


def _members(dumps: Sequence[Dump]) -> dict[str, tuple[int, ...]]:
    """The ranks of each group, by its name."""
    told: dict[str, tuple[int, ...]] = {}
    seen: dict[str, set[int]] = {}
    everybody = {d.rank for d in dumps if d.rank is not None}
    for dump in dumps:
        config = dump.content.get("pg_config")
        groups = (
            config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
        )
        for group in groups:
            if not isinstance(group, Mapping):
                continue
            ranks = group.get("ranks")
            if isinstance(ranks, str):
                try:
                    ranks = json.loads(ranks)
                except ValueError:
                    ranks = []
            if isinstance(ranks, list) and ranks:
                told[str(group.get("name"))] = tuple(_number(r) for r in ranks)
        for entry in dump.entries:
            name, about = _group(entry)
            seen.setdefault(name, set()).add(dump.rank or 0)
            if about == "default_pg":
                seen[name] |= everybody  # type: ignore[arg-type]
    return {name: tuple(sorted(ranks)) for name, ranks in seen.items()} | told


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    group = entry.get("process_group") or (str(entry.get("pg_id", 0)), "")
    if isinstance(group, str):
        return group, ""
    return str(group[0]), str(group[1]) if len(group) > 1 else ""


def _event(entry: Mapping[str, Any], rank: int, members: Mapping[str, tuple[int, ...]]) -> tuple[Event, bool]:
    """An entry as an Event, and whether it is still open."""
    name = str(entry.get("profiling_name") or "").partition(":")[2] or str(entry.get("profiling_name") or "")
    words = re.match(r"(send|recv) (\d+)(?:->|<-)(\d+)", name)
    group, _ = _group(entry)
    ranks = members.get(group, ())
    peer = None
    if words:
        here, there = int(words[2]), int(words[3])
        local = ranks.index(rank) if rank in ranks else rank
        other = there if here == local else here
        peer = ranks[other] if other < len(ranks) else other
    op = words[1] if words else _NAMES.get(name, name.partition(" ")[0])
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    if op in ("recv", "scatter") and entry.get("output_sizes"):
        sizes, dtypes = entry.get("output_sizes") or [], entry.get("output_dtypes") or []
    shape = tuple(_number(n) for n in sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else ()
    dtype = str(dtypes[0]) if dtypes else ""
    created = _number(entry.get("time_created_ns")) / 1e9
    ended = _number(entry.get("time_discovered_completed_ns")) / 1e9
    frames = entry.get("frames") or []
    own = [f for f in frames if isinstance(f, Mapping) and stacks.is_own(str(f.get("filename") or ""))]
    state = str(entry.get("state") or "")
    opened = not entry.get("retired") and state != "completed"
    pair = bool(entry.get("is_p2p")) or words is not None
    seq = _number(entry.get("p2p_seq_id" if pair else "collective_seq_id", entry.get("seq_id")))
    # the operations of this group from 1; older torch counts in `seq_id`
    return Event(
        rank=rank, op=op, start=created, end=max(ended, created), group=group, ranks=ranks, seq=seq, shape=shape,
        dtype=_DTYPES.get(dtype, dtype.lower()), peer=peer, line=_number(own[0].get("line")) if own else 0,
        file=str(own[0].get("filename")) if own else "", nbytes=math.prod(shape) * _WIDTHS.get(dtype, 4),
    ), opened  # fmt: skip


def records(dumps: Sequence[Dump]) -> list[Record]:
    """A record for each rank that has left a dump. Whoever has an operation open is taken to wait in it."""
    members = _members(dumps)
    size = max([len(r) for r in members.values()] + [(d.rank or 0) + 1 for d in dumps], default=0)
    found = []
    for dump in dumps:
        rank = dump.rank or 0
        events, waits = [], []
        counts: dict[Any, int] = {}
        pairs: dict[Any, int] = {}
        for entry in dump.entries:
            event, opened = _event(entry, rank, members)
            if event.op in ("send", "recv"):
                ends = (rank, event.peer) if event.op == "send" else (event.peer, rank)
                key: tuple[Any, ...] = (event.group, "p2p", *ends, 0, event.op)
                pairs[key] = seq = pairs.get(key, 0) + 1
            else:
                key, seq = (event.group, event.ranks), event.seq
            counts[key] = max(counts.get(key, 0), seq)
            events.append(event)
            if opened:
                text = call_text(event.op, event.dtype, event.shape, "", event.peer)
                waits.append(
                    Wait(
                        event.op,
                        text,
                        event.group,
                        event.ranks,
                        key,
                        seq,
                        seq,
                        event.peer,
                        0,
                        event.line,
                        event.file,
                    )
                )
        found.append(
            Record(
                rank, size, "unknown", waits=tuple(waits), counts=counts, calls=len(events), events=tuple(events),
                origin=("flight recorder",),
            )
        )  # fmt: skip
    return found
