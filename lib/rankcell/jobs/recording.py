"""In a rank of a job that has torch: the recorder of rank cells, with what a cell's world would set up for it.

Calls are compared before they are sent, as in a cell: between ranks of one node in shared memory, between nodes in the
program's own store, in worlds of at most `FAR` ranks; larger ones are compared by the runner when something is wrong.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..engine import control, listen, states
from ..engine.groups import GroupCalls, replace_in_torch
from ..engine.match import SignatureStore, SignatureTable
from ..engine.messages import Status
from ..engine.record import Recorder
from ..results import Event
from .records import RankRecord

FAR = 64  # ranks of a world of several nodes whose calls are compared in the store: two questions for each call
LAST = 40  # operations of each rank that a report holds


class _ProgramsStore(SignatureStore):
    """A board in the program's store, which may end before the program does: then nothing is compared any more."""

    ended = False

    def publish(self, *args: Any, **kwargs: Any) -> dict[int, tuple[bytes, str]]:
        if self.store is not None and not self.ended:
            try:
                return super().publish(*args, **kwargs)
            except RuntimeError:
                self.ended = True
        return {}


class Recording:
    """The recorder of this rank, from `init_process_group` on."""

    def __init__(self, rank: int, world_size: int, token: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.recorder = Recorder()
        listen.install(self.recorder)
        self._board_path = Path("/dev/shm") / f"rankcell-{token}"
        self.recorder.bind_rank(rank, _shared_board(self._board_path, rank, world_size), enqueues=frozenset())
        self.recorder.join("job")
        self._epoch = self.recorder.began - time.time()  # by the clock of its operations
        self._before: Status | None = None
        self._groups = groups = GroupCalls(self.recorder, rank, world_size)
        replace_in_torch((dist.new_group, groups.new_group), (dist.destroy_process_group, groups.destroy))

    def init(self, original: Callable[[], Any], near: Callable[[], tuple[int, ...] | None], says: str) -> Any:
        """`init_process_group`, in which this rank waits for all others; `says` where, and by which other number."""
        everybody, text = tuple(range(self.world_size)), f"init_process_group({says})"
        found = self._groups.waited_for("init_process_group", everybody, original, text=text)
        pairs = (each.partition(":") for each in dist.get_backend_config().split(","))  # known from here on
        self.recorder.enqueues = frozenset(device for device, _, backend in pairs if backend in listen.ENQUEUE)
        if (here := near()) is None:  # not all ranks are recorded: there is nobody to be compared with
            self.recorder.matcher.table = None
        elif len(here) < self.world_size:
            self.recorder.matcher.near = frozenset(here)
            self.recorder.matcher.store = self._far_board()
        if here and self.rank == min(here):
            self._board_path.unlink(missing_ok=True)  # everybody has it: all have come through
        return found

    def look(self, record: RankRecord, main_thread: int, ours: int | None) -> RankRecord:
        """`record` with what its main thread does now; a thread of ours does not count."""
        status = control.look(self.recorder, record.rank, record.phase, main_thread, cell="", ours={ours})
        state, self._before = states.from_status(status, self._before), status
        return replace(
            record, line=status.line, file=status.file, waits=status.waits, counts=dict(status.counts),
            calls=status.calls, joins=status.joins, blocked=state.blocked_in_torch, threads=status.threads,
        )  # fmt: skip

    def events(self) -> tuple[Event, ...]:
        """The last operations, with times since the epoch."""
        kept = [o for o in list(self.recorder.operations)[-LAST:] if o.start is not None]
        return tuple(replace(o.event(self.rank, self._epoch), seq=o.seq) for o in kept)

    @staticmethod
    def without_gradient() -> tuple[str, ...]:
        """Parameters for whose gradient DDP waits and that have none, of models that have others."""
        found: list[str] = []
        for ddp in [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]:
            if not vars(ddp).get("find_unused_parameters", True) and not ddp.static_graph:  # it is set up
                named = {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}
                none = [n for n, p in named.items() if p.requires_grad and p.grad is None]
                found += none if any(p.grad is not None for p in named.values()) else []
        return tuple(found)

    def _far_board(self) -> SignatureStore:
        """A board in the store of the default group, on a connection of its own; one that is over if there is none."""
        store: Any = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if self.world_size <= FAR and isinstance(store, dist.TCPStore) and hasattr(store, "clone"):
            return _ProgramsStore(dist.PrefixStore("rankcell", store.clone()), self.rank)
        return _ProgramsStore(None, self.rank)


def _shared_board(path: Path, rank: int, world_size: int) -> SignatureTable | None:
    """What the ranks of this node are about to call, in memory that they share; None where there is none."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, SignatureTable.nbytes(world_size))
            return SignatureTable(fd, rank, world_size)
        finally:
            os.close(fd)
    return None
