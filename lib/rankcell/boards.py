"""Where ranks put down what they are about to call: calls that do not match are found before they send.

On one machine it is shared memory, between machines the store that the notebook holds. What a signature says
and when two of them match is for `record.py` to know.
"""

import json
import mmap
import struct
import threading
import zlib
from collections.abc import Hashable
from typing import Any


class Board:
    """The signatures of the latest operations of the ranks of one machine, in memory that all of them see.

    Reading and writing need no lock: a slot's key is written last and contains the group and the sequence
    number, so that a slot of another operation is never mistaken for this one.
    """

    SLOTS = 128
    SLOT = 1024  # bytes: key, line, length, text
    _KEY, _LENGTH = struct.Struct("<Q"), struct.Struct("<II")
    _HEAD = struct.Struct("<QII")

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Bytes of shared memory for `world_size` ranks."""
        return world_size * cls.SLOTS * cls.SLOT

    def __init__(self, fd: int, rank: int, world_size: int) -> None:
        self.rank = rank
        self.map = mmap.mmap(fd, self.nbytes(world_size))
        self._fence = threading.Lock()

    def write(self, name: str, signature: bytes, line: int) -> int:
        """Publish this rank's `signature` under `name`; returns the number under which peers find it."""
        key = zlib.crc32(name.encode()) << 8 | 1
        at = (self.rank * self.SLOTS + (key >> 8) % self.SLOTS) * self.SLOT
        memory, size = self.map, self._HEAD.size
        signature = signature[: self.SLOT - size]
        self._KEY.pack_into(memory, at, 0)
        memory[at + size : at + size + len(signature)] = signature
        self._LENGTH.pack_into(memory, at + 8, line, len(signature))
        self._KEY.pack_into(memory, at, key)  # last: whoever sees the key sees the rest
        with self._fence:  # a full memory barrier: our write is out before we read the peers' slots
            pass
        return key

    def read(self, key: int, rank: int) -> tuple[bytes, int] | None:
        """Signature and line that `rank` published under the number `key`, or None."""
        at = (rank * self.SLOTS + (key >> 8) % self.SLOTS) * self.SLOT
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
        self.store.append(name, json.dumps([self.rank, line, signature.decode(errors="replace")]) + "\n")
        lines = map(json.loads, self.store.get(name).decode().splitlines())
        found = {rank: (text.encode(), at) for rank, at, text in lines}
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
