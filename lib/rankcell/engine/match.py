"""Calls that must be alike on several ranks: what each of them publishes, and what does not match.

Before an operation sends anything, the rank writes its `Signature` where its peers can read it, and reads
theirs: on one machine in shared memory (`SignatureTable`), between machines in the store that the notebook holds
(`SignatureStore`). What one rank has called is then found not to match before any data moves, where the backend
would abort the process or return garbage.
"""

import json
import marshal
import mmap
import struct
import threading
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import MismatchError
from ..results import Mismatch

MAX_TENSORS = 16  # of one call that a signature lists; of more it holds a sum


class Signature(NamedTuple):
    """One call of one rank, as far as it concerns the others.

    Two calls match if they agree in `op`, `tensors` (dtype and number of elements: shapes may differ, as only numbers
    travel), `reduce_op` and `root`, and if the rows that one sends to the other are as many as that one expects.
    """

    text: str  # the call in words
    op: str
    tensors: tuple[tuple[str, int], ...] = ()
    reduce_op: str = ""
    root: int | None = None
    sends: tuple[int, ...] = ()  # of an all_to_all: rows for each rank of the group
    expects: tuple[int, ...] = ()  # ... and rows from each
    members: int = 0  # a digest of what new_group was given; of a local one the groups before
    device: str = ""  # "cpu" where the world's own device is another: its backend is another, too

    def packed(self) -> bytes:
        """As bytes: equal for calls that match in all but words, and never cut."""
        tensors = self.tensors
        if len(tensors) > MAX_TENSORS:
            digest = zlib.crc32(repr(tensors).encode())
            tensors = ((f"{len(tensors)} tensors, {digest:x}", sum(n for _, n in tensors)),)
        # version 2 has no references, which would make equal signatures different bytes
        return marshal.dumps(tuple(self._replace(text=self.text[:300], tensors=tensors)), 2)


def difference(mine: bytes, theirs: bytes, ranks: Sequence[int], rank: int, peer: int) -> tuple[str, str]:
    """What does not match between two packed signatures of a group, in words, "" if they match; and the peer's call."""
    a, b = Signature(*marshal.loads(mine)), Signature(*marshal.loads(theirs))
    reshaped = a.tensors != b.tensors
    differ = {  # the first that holds
        "different operations": a.op != b.op,
        "different lists of ranks": a.members != b.members and a.op == "new_group",
        "different numbers of groups before": a.members != b.members,
        "a tensor on the CPU and one on a GPU": a.device != b.device,
        "different numbers of tensors": len(a.tensors) != len(b.tensors),
        "different dtypes": [dtype for dtype, _ in a.tensors] != [dtype for dtype, _ in b.tensors],
        "different roots and different shapes": reshaped and a.root != b.root,
        "different sizes": reshaped and a.op == "send to recv",
        "different shapes": reshaped,
        "different roots": a.root != b.root,
        "different reduce operations": a.reduce_op != b.reduce_op,
    }
    if not any(differ.values()) and (a.sends or b.sends):
        i, j = ranks.index(rank), ranks.index(peer)
        sizes = (len(a.sends), len(a.expects))
        if sizes != (len(b.sends), len(b.expects)) or max(i, j) >= min(sizes):
            return "different numbers of splits", b.text
        ways = (rank, peer, a.sends[j], b.expects[i]), (peer, rank, b.sends[i], a.expects[j])
        differ = {f"rank {s} sends {n} to rank {r}, which expects {wanted}": n != wanted for s, r, n, wanted in ways}
    return next((problem for problem, holds in differ.items() if holds), ""), b.text


Published = dict[int, tuple[bytes, str]]  # by rank: its signature, packed, and its line and file


class SignatureTable:
    """The signatures of the latest operations of the ranks of one machine, in memory that all of them see.

    Reading and writing need no lock: a slot's key is written last and contains the group and the sequence
    number, so that a slot of another operation is never mistaken for this one.
    """

    SLOTS = 128  # operations by which ranks may be apart and still be compared; fewer in large worlds
    PER_RANK = 1 << 18  # bytes of shared memory at most
    _KEY, _LENGTH = struct.Struct("<Q"), struct.Struct("<II")
    _HEAD = struct.Struct("<QII")

    @classmethod
    def layout(cls, world_size: int) -> tuple[int, int]:
        """Bytes of a slot, which holds rows for every rank, and the number of a rank's slots."""
        slot = 1280 + 16 * world_size
        return slot, max(4, min(cls.SLOTS, cls.PER_RANK // slot))

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        slot, slots = cls.layout(world_size)
        return world_size * slots * slot

    def __init__(self, fd: int, rank: int, world_size: int) -> None:
        self.rank = rank
        self.slot, self.slots = self.layout(world_size)
        self.map = mmap.mmap(fd, self.nbytes(world_size))
        self._fence = threading.Lock()

    def publish(self, name: str, signature: bytes, place: str, ranks: Iterable[int], _: Hashable) -> Published:
        """Publish this rank's `signature` under `name`; returns what others of `ranks` have published, by rank."""
        key = zlib.crc32(name.encode()) << 8 | 1
        at = (self.rank * self.slots + (key >> 8) % self.slots) * self.slot
        memory, size, both = self.map, self._HEAD.size, signature + place.encode(errors="replace")
        if len(both) > self.slot - size:  # nothing is compared rather than half of it
            return {}
        self._KEY.pack_into(memory, at, 0)
        memory[at + size : at + size + len(both)] = both
        self._LENGTH.pack_into(memory, at + 8, len(signature), len(both))
        self._KEY.pack_into(memory, at, key)  # last: whoever sees the key sees the rest
        with self._fence:  # a full memory barrier: our write is out before we read the peers' slots
            pass
        return {r: found for r in ranks if r != self.rank and (found := self._read(key, r)) is not None}

    def _read(self, key: int, rank: int) -> tuple[bytes, str] | None:
        at = (rank * self.slots + (key >> 8) % self.slots) * self.slot
        found, end, length = self._HEAD.unpack_from(self.map, at)
        if found != key:
            return None
        at_text = at + self._HEAD.size
        text = self.map[at_text : at_text + length]
        return (text[:end], text[end:].decode()) if self._HEAD.unpack_from(self.map, at)[0] == key else None


class SignatureStore:
    """The same for ranks on several machines, which share no memory, in a `torch.distributed.Store`.

    It costs two questions to the store per operation: one publishes this rank's call, one reads those of all
    who came before, whoever and however many they are.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self._complete: dict[Hashable, str] = {}

    def publish(self, name: str, signature: bytes, place: str, ranks: Sequence[int], stream: Hashable) -> Published:
        """As that of the table. `name` is a later operation of `stream`: the one before is forgotten."""
        name = f"call|{name}"
        self.store.append(name, json.dumps([self.rank, place, signature.decode("latin-1")]) + "\n")
        lines = map(json.loads, self.store.get(name).decode().splitlines())
        found = {rank: (text.encode("latin-1"), at) for rank, at, text in lines}
        if len(found) == max(len(ranks), 2):
            # everybody has come to this operation, and so has read all there was of the one before
            before = self._complete.get(stream)
            self._complete[stream] = name
            if before is not None:
                self.store.delete_key(before)
        return {rank: each for rank, each in found.items() if rank in ranks}


class Matcher:
    """Of one rank: publishes what it is about to call, and raises if a peer's call does not match."""

    def __init__(self) -> None:
        self.rank = 0
        self.table: SignatureTable | None = None
        self.store: SignatureStore | None = None  # for calls that concern ranks on other nodes
        self.near: frozenset[int] = frozenset()  # the ranks of this node, where there are others
        self.found: Mismatch | None = None  # the first one of this cell
        self._refused: dict[str, Mismatch] = {}  # by group: until the cell ends, nothing more is sent there

    def begin(self) -> None:
        self.found = None
        self._refused.clear()

    def check(self, name: str, signature: bytes, o: Any, ranks: Sequence[int], *, symmetric: bool = True) -> None:
        """Compare the operation `o` with those of `ranks` that have come to it before. Raises MismatchError: it does
        not match, or the group is out of step since an earlier call of the cell. `name` is as `Recorder.name_of` gives
        it, `signature` packed. `symmetric`: equal signatures match. The pieces of an `all_to_all` must be held against
        each other, and its `ranks` be in the order of the group.
        """
        if self._refused and (earlier := self._refused.get(o.group)) is not None:
            raise MismatchError(earlier, again=True)
        shared = self.store is None or self.near.issuperset(ranks)
        if (board := self.table if shared else self.store) is None:
            return
        for peer, (theirs, at) in board.publish(name, signature, o.place(), ranks, o.key).items():
            if peer == self.rank or (symmetric and theirs == signature):
                continue
            problem, text = difference(signature, theirs, ranks, self.rank, peer)
            if problem:
                line, _, file = at.partition(" ")
                other = replace(o.call(), text=text, line=int(line), file=file)
                mismatch = Mismatch(problem, {self.rank: o.call(), peer: other})
                self.found = self.found or mismatch
                self._refused[o.group] = mismatch
                raise MismatchError(mismatch)
