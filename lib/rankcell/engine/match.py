"""Calls that must be alike on several ranks: what each of them puts down, and what does not match.

Before an operation sends anything, the rank writes its `Signature` where its peers can read it, and reads
theirs: on one machine in shared memory (`Board`), between machines in the store that the notebook holds
(`StoreBoard`). What one rank has called is then found not to match before any data moves, where the backend
would abort the process or return garbage.
"""

import json
import marshal
import mmap
import struct
import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import MismatchError
from ..results import Call, Mismatch

MAX_TENSORS = 16  # of one call that a signature lists; of more it holds a sum


@dataclass(frozen=True)
class Signature:
    """One call of one rank, as far as it concerns the others.

    Two calls match if they agree in `op`, `tensors` (dtype and number of elements: shapes may differ, as only
    numbers travel), `reduce_op` and `root`, and if the rows that one sends to the other are as many as that
    one expects. A `members` is what `new_group` was given.
    """

    text: str  # the call in words
    op: str
    tensors: tuple[tuple[str, int], ...] = ()
    reduce_op: str = ""  # "": issued from C++, where it is not known: DDP's reducer, which sums
    root: int | None = None
    sends: tuple[int, ...] = ()  # of an all_to_all: rows for each rank of the group
    expects: tuple[int, ...] = ()  # ... and rows from each
    members: tuple[int, ...] = ()
    device: str = ""  # "cpu" where the world's own device is another: its backend is another, too

    def packed(self) -> bytes:
        """As bytes: equal for calls that match in all but words, and never cut."""
        tensors = self.tensors
        if len(tensors) > MAX_TENSORS:
            whole = zlib.crc32(repr(tensors).encode())
            tensors = ((f"{len(tensors)} tensors, {whole:x}", sum(n for _, n in tensors)),)
        return marshal.dumps(
            (
                self.text[:300],
                self.op,
                tensors,
                self.reduce_op,
                self.root,
                struct.pack(f"<{len(self.sends)}q", *self.sends),
                struct.pack(f"<{len(self.expects)}q", *self.expects),
                self.members[:64],
                zlib.crc32(repr(self.members).encode()) if self.members else 0,
                self.device,
            )
        )


def difference(
    mine: bytes, theirs: bytes, ranks: Sequence[int], rank: int, peer: int
) -> tuple[str, str, str]:
    """What does not match between two packed signatures of `rank` and `peer`, in words, "" if they match; and
    the texts of both calls. `ranks` are those of the group.
    """
    a, b = marshal.loads(mine), marshal.loads(theirs)
    problem = _problem(a, b, ranks, rank, peer)
    return problem, a[0], b[0]


def _problem(a: Any, b: Any, ranks: Sequence[int], rank: int, peer: int) -> str:
    _, op, tensors, reduce_op, root, sends, expects, members, whole, device = a
    _, op_b, tensors_b, reduce_op_b, root_b, sends_b, expects_b, members_b, whole_b, device_b = b
    if op != op_b:
        return "different operations"
    if (members, whole) != (members_b, whole_b):
        return "different lists of ranks"
    if device != device_b:
        return "a tensor on the CPU and one on a GPU"
    if tensors != tensors_b:
        if [t[0] for t in tensors] != [t[0] for t in tensors_b]:
            return "different dtypes" if len(tensors) == len(tensors_b) else "different numbers of tensors"
        return "different sizes" if op == "send to recv" else "different shapes"
    if root != root_b:
        return "different roots"
    if reduce_op != reduce_op_b and reduce_op and reduce_op_b:
        return "different reduce operations"
    if not sends and not sends_b:
        return ""
    if len(sends) != len(sends_b) or len(expects) != len(expects_b):
        return "different numbers of splits"
    i, j = ranks.index(rank), ranks.index(peer)
    if 8 * max(i, j) >= min(len(sends), len(expects)):
        return "different numbers of splits"
    for sender, receiver, rows, expected in (
        (rank, peer, _at(sends, j), _at(expects_b, i)),
        (peer, rank, _at(sends_b, i), _at(expects, j)),
    ):
        if rows != expected:
            return f"rank {sender} sends {rows} to rank {receiver}, which expects {expected}"
    return ""


def _at(packed: bytes, index: int) -> int:
    return int(struct.unpack_from("<q", packed, 8 * index)[0])


class Board:
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
        slot = 1024 + 16 * world_size
        return slot, max(4, min(cls.SLOTS, cls.PER_RANK // slot))

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Bytes of shared memory for `world_size` ranks."""
        slot, slots = cls.layout(world_size)
        return world_size * slots * slot

    def __init__(self, fd: int, rank: int, world_size: int) -> None:
        self.rank = rank
        self.slot, self.slots = self.layout(world_size)
        self.map = mmap.mmap(fd, self.nbytes(world_size))
        self._fence = threading.Lock()

    def write(self, name: str, signature: bytes, line: int) -> int:
        """Publish this rank's `signature` under `name`; returns the number under which peers find it."""
        key = zlib.crc32(name.encode()) << 8 | 1
        at = (self.rank * self.slots + (key >> 8) % self.slots) * self.slot
        memory, size = self.map, self._HEAD.size
        if len(signature) > self.slot - size:  # nothing is compared rather than half of it
            return key
        self._KEY.pack_into(memory, at, 0)
        memory[at + size : at + size + len(signature)] = signature
        self._LENGTH.pack_into(memory, at + 8, line, len(signature))
        self._KEY.pack_into(memory, at, key)  # last: whoever sees the key sees the rest
        with self._fence:  # a full memory barrier: our write is out before we read the peers' slots
            pass
        return key

    def read(self, key: int, rank: int) -> tuple[bytes, int] | None:
        """Signature and line that `rank` published under the number `key`, or None."""
        at = (rank * self.slots + (key >> 8) % self.slots) * self.slot
        found, line, length = self._HEAD.unpack_from(self.map, at)
        if found != key:
            return None
        at_text = at + self._HEAD.size
        text = self.map[at_text : at_text + length]
        return (text, line) if self._HEAD.unpack_from(self.map, at)[0] == key else None


class StoreBoard:
    """The same for ranks on several machines, which share no memory, in a `torch.distributed.Store`.

    It costs two questions to the store per operation: one puts down this rank's call, one reads those of all
    who came before, whoever and however many they are.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self._complete: dict[Hashable, str] = {}

    def write(
        self, name: str, signature: bytes, line: int, *, stream: Hashable, ranks: int
    ) -> dict[int, tuple[bytes, int]]:
        """Publish this rank's `signature` under `name`; returns signature and line of all who have, by rank.

        `ranks` is how many there will be, `stream` what `name` is a later operation of.
        """
        name = f"call|{name}"
        self.store.append(name, json.dumps([self.rank, line, signature.decode("latin-1")]) + "\n")
        lines = map(json.loads, self.store.get(name).decode().splitlines())
        found = {rank: (text.encode("latin-1"), at) for rank, at, text in lines}
        if len(found) == ranks:
            # everybody has come to this operation, and so has read all there was of the one before
            before = self._complete.get(stream)
            self._complete[stream] = name
            if before is not None:
                self.store.delete_key(before)
        return found

    @staticmethod
    def read(found: dict[int, tuple[bytes, int]], rank: int) -> tuple[bytes, int] | None:
        """Signature and line that `rank` had published when this rank looked, or None."""
        return found.get(rank)


class Matcher:
    """Of one rank: puts down what it is about to call, and raises if a peer's call does not match."""

    def __init__(self) -> None:
        self.rank = 0
        self.board: Board | None = None
        self.far: StoreBoard | None = None  # for calls that concern ranks on other nodes
        self.near: frozenset[int] = frozenset()  # the ranks of this node, where there are others
        self.found: Mismatch | None = None  # the first one of this cell
        self._refused: dict[str, Mismatch] = {}  # by group: until the cell ends, nothing more is sent there

    def begin(self) -> None:
        """A new cell begins."""
        self.found = None
        self._refused.clear()

    def check(
        self,
        name: str,
        signature: Signature | bytes,
        call: Callable[[], Call],
        ranks: Sequence[int],
        *,
        stream: Hashable,
        group: str,
        line: int,
        fits_itself: bool = True,
    ) -> None:
        """Compare a call with those of `ranks` that have come to it before.

        Args:
            name: the same for the same call on all ranks, and never used again.
            signature: of the call; packed already if it is known from before.
            call: makes what a message shows of it; only asked if there is one.
            ranks: those whose calls must match; of an `all_to_all` in the order of the group.
            stream: what the call is a later one of.
            group: its group, which sends nothing more in this cell after a mismatch.
            line: its line in the cell.
            fits_itself: equal signatures match; the pieces of an `all_to_all` must be held against each other.

        Raises:
            MismatchError: it does not match, or the group is out of step since an earlier call of the cell.
        """
        if self._refused and (earlier := self._refused.get(group)) is not None:
            raise MismatchError(earlier, again=True)
        packed = signature if isinstance(signature, bytes) else signature.packed()
        board: Any
        found: Any
        if self.far is None or self.near.issuperset(ranks):
            board = self.board
            if board is None:
                return
            found = board.write(name, packed, line)
        else:
            board = self.far
            found = board.write(name, packed, line, stream=stream, ranks=max(len(ranks), 2))
        for peer in ranks:
            if peer == self.rank:
                continue
            other = board.read(found, peer)
            if other is None or (fits_itself and other[0] == packed):
                continue
            problem, _, theirs = difference(packed, other[0], ranks, self.rank, peer)
            if problem:
                mine = call()
                mismatch = Mismatch(
                    problem, {self.rank: mine, peer: replace(mine, text=theirs, line=other[1])}
                )
                self.found = self.found or mismatch
                self._refused[group] = mismatch
                raise MismatchError(mismatch)
