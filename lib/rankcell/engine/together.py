"""The process of a world whose ranks take turns in it: `%%ranks 64 --local`.

Each rank is a `worker.Rank` in a thread of its own, with its own names, process groups, recorder, random numbers and
output. One of them runs at a time (`rehearsal.turns`), and what a process has once (stdout, `__main__`, the state of
the random numbers, hooks on all modules) is exchanged when the turn goes on. They share the environment but RANK and
LOCAL_RANK, the working directory, and the modules that they import.

The notebook's side is `local.Together`: what is said to ranks and by ranks goes over one pair of channels.
"""

import contextlib
import io
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from ..errors import GroupError
from ..rehearsal.meeting import Meeting, RankSeat
from ..rehearsal.turns import Turns
from . import record, shell, system
from .channel import Channel
from .control import Control
from .groups import Groups, replace_in_torch
from .messages import Answer, Answered, Birth, Join, Output, Question, Said, Task
from .operation import clock, kind_of
from .stdio import Stdio
from .worker import Rank, settle

_FILE = 1 << 20  # bytes that C code and subprocesses have written, after which their file begins anew
# what a process has once and each rank has its own of: attributes, and the hooks on all modules and optimizers
_OWN: list[tuple[Any, str]] = [
    (sys, "stdout"),
    (sys, "stderr"),
    (sys, "__stdout__"),
    (sys, "__stderr__"),
    (shell.Publisher, "show"),
    (torch.UntypedStorage, "resize_"),
]
_HOOKS = [
    (owner, name)
    for owner in (modules, optimizers)
    for name, value in vars(owner).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


def main(birth: Birth, work: int, control: int, stdout: int, stderr: int, board: int) -> None:
    """The life of the process, in a fork of the one that imported torch, to the end of its channels."""
    system.die_with_parent()
    os.setpgid(0, 0)  # what a cell starts is in this group, and ends with it
    for fd in (stdout, stderr, board):
        os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Process(birth, Channel(socket.socket(fileno=work)), Channel(socket.socket(fileno=control))).serve()


class Process:
    """All ranks of the world of `birth`."""

    def __init__(self, birth: Birth, work: Channel, control: Channel) -> None:
        self.work, self.control = work, control
        settle(birth)
        c10d: Any = dist.distributed_c10d
        self.worlds = c10d._world = Worlds(self.running)
        in_c: Any = torch._C._distributed_c10d
        in_c._set_thread_isolation_mode(True)  # of the groups that functional collectives name
        # torch keeps what it knows of a mesh by the thread's too, if its ranks are threads
        device_mesh: Any = dist.device_mesh
        device_mesh.get_backend = lambda *group: dist.get_backend(*group) if group else "threaded"
        self.turns, self.table = Turns(), Table()
        self.threads: set[int | None] = {
            threading.get_ident()
        }  # none of them is one that a learner has started
        self.members: list[Member] = []
        self.written = Written(self.say_for_running)
        shell.RankShell.instance().recorder.uninstall()
        self.meeting = Meeting(self.turns, clock, lambda code: kind_of(code) is True)
        self.members = [
            Member(self, replace(birth, rank=rank, local_rank=rank)) for rank in range(birth.world_size)
        ]
        self.meeting.seats = [member.seat for member in self.members]
        self.members[0].recorder.install(lambda: self.running().recorder)
        replace_in_torch(
            {
                "new_group": (dist.new_group, self._of_running("new_group")),
                "destroy_process_group": (dist.destroy_process_group, self._of_running("destroy")),
                "init_process_group": (dist.init_process_group, self._of_running("init")),
            }
        )

    def running(self) -> "Member":
        """The rank that runs."""
        seat: Any = self.turns.holder
        return self.members[0 if seat is None else seat.rank]

    def say_for_running(self, stream: str, data: bytes) -> None:
        """Tell the notebook what the rank that runs has written."""
        member = self.running()
        member.say(Output(member.birth.rank, stream, data))

    def serve(self) -> None:
        """Hand on what the notebook sends, until it is gone."""
        control = threading.Thread(target=self._answer, name="rankcell control", daemon=True)
        control.start()
        self.threads.add(control.ident)
        for member in self.members:
            threading.Thread(target=member.live, name=f"rank {member.birth.rank}", daemon=True).start()
        while True:
            try:
                ranks, message = self.work.receive()
            except (EOFError, OSError):
                os._exit(0)
            order = pickle.loads(message)
            for rank in ranks:
                self.members[rank].orders.append(order)
            for rank in ranks:
                self.turns.wake(self.members[rank].seat)

    def _answer(self) -> None:
        while True:
            try:
                ranks, message = self.control.receive()
                question: Question = pickle.loads(message)
                memory = system.process_memory(os.getpid()) if question.about == "memory" else None
                answers = []
                for rank in ranks:
                    try:
                        answer = self.members[rank].control.answer(question)
                    except Exception:  # noqa: BLE001 - the notebook goes on without this answer
                        answer = None
                    if memory is not None:  # it belongs to all alike
                        answer = memory // len(self.members)
                    answers.append(Answered(rank, pickle.dumps(Answer(question.number, answer))))
                self.control.send(answers)
            except (EOFError, OSError):
                os._exit(0)

    def _of_running(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self.running().groups, name)(*args, **kwargs)

        return call


class Worlds(ThreadLocalWorld):
    """Where torch keeps its process groups: of each rank apart."""

    def __init__(self, running: "Callable[[], Member]") -> None:
        self._running = running

    def own(self) -> Any:
        """What there is for this thread."""
        return super()._get_world()

    def _get_world(self) -> Any:
        rank = self._running()
        # a thread that the learner has started is in its rank's groups
        return self.own() if threading.get_ident() in rank.process.threads else rank.world


class Member(Rank):
    """One rank of the process: `Rank`, of which whatever is the process's is done elsewhere."""

    ballast = 0  # where one rank takes all the memory, that of all others is there when it has failed

    def __init__(self, process: Process, birth: Birth) -> None:
        self.process = process
        self.orders: deque[Task | Join] = deque()
        self.seat: RankSeat
        super().__init__(birth, self, -1, Voice(birth.rank, process), -1)
        self.own = [(owner, name, getattr(owner, name)) for owner, name in self._places()]
        self.own += [(owner, name, type(hooks := getattr(owner, name))(hooks)) for owner, name in _HOOKS]
        self.module = sys.modules["__main__"]
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.dtype = torch.get_default_dtype()

    def _meet_others(self, control_fd: int, board_fd: int) -> None:
        process, rank = self.process, self.birth.rank
        self.recorder = record.Recorder()
        self.recorder.belong(rank, None, enqueues=frozenset())
        self.recorder.stage = process.meeting
        self.recorder.matcher.far = process.table.of(rank)  # type: ignore[assignment]
        self.seat = RankSeat(rank, self.recorder, self._leave, self._enter)
        self.groups = MeetingGroups(self.birth, self.recorder, self._notes.append)
        self.control = MemberControl(self, None)  # type: ignore[arg-type]

    def _set_up_environment(self) -> None:
        """The process has done it."""

    def _take_signals(self) -> None:
        """They are the process's."""

    def _places(self) -> list[tuple[Any, str]]:
        return [*_OWN, (self.shell, "user_ns"), (self.shell, "user_module"), (self.shell, "recorder")]

    def live(self) -> None:
        """The life of the rank, in its thread."""
        self.main_thread = threading.get_ident()
        self.process.threads.add(self.main_thread)
        torch.set_num_threads(1)
        self.world = self.process.worlds.own()
        self.process.turns.take(self.seat)
        self.shell.recorder = self.recorder
        self.follow_orders()

    def receive(self) -> Task | Join:
        """The next order of the notebook: what `Rank` asks its channel for."""
        while not self.orders:
            self.seat.freed = None
            with contextlib.suppress(KeyboardInterrupt, GroupError):  # it was through when it was to be freed
                self.process.turns.park(self.seat)
        self.seat.freed = None
        order = self.orders.popleft()
        if isinstance(order, Join):
            self.process.meeting.clear()  # all ranks join: nobody comes any more to what was called before
            self.process.table.clear()
        return order

    def send(self, message: Any) -> None:
        """Say `message` to the notebook: what `Rank` has its channel do."""
        self.say(Said(self.birth.rank, pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))

    def say(self, happening: Output | Said) -> None:
        """The same for what a host hears."""
        seat = self.seat
        if seat.thread != threading.get_ident():
            self.process.work.send([happening])
            return
        before, seat.shielded = seat.shielded, True  # half a message would make all later ones unreadable
        try:
            self.process.work.send([happening])
        finally:
            seat.shielded = before
        if seat.freed is not None and self.running and not before:
            raise seat.freed

    def _leave(self) -> None:
        self.stdio.flush()
        self.process.written.collect()
        self.own = [(owner, name, getattr(owner, name)) for owner, name, _ in self.own]
        self.module = sys.modules["__main__"]
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.dtype = torch.get_default_dtype()

    def _enter(self) -> None:
        for owner, name, value in self.own:
            if getattr(owner, name) is not value:
                setattr(owner, name, value)
        sys.modules["__main__"] = self.module
        numbers, pythons, numpys = self.random
        torch.set_rng_state(numbers)
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_default_dtype(self.dtype)
        os.environ["RANK"], os.environ["LOCAL_RANK"] = str(self.birth.rank), str(self.birth.local_rank)


class MemberControl(Control):
    """What is told of a rank and done to it from the control thread, which all ranks share."""

    _rank: Member

    @property
    def ours(self) -> set[int | None]:
        """Those of all ranks."""
        return self._rank.process.threads

    def answer(self, question: Question) -> Any:
        """The same; of its memory the process tells."""
        return None if question.about == "memory" else super().answer(question)

    def status(self) -> Any:
        """The same; what the rank's thread waits for is waited for by its main thread."""
        status, thread = super().status(), self._rank.main_thread
        waits = tuple(replace(w, thread=0) if w.thread == thread else w for w in status.waits)
        return replace(status, waits=waits)

    def _free(self, *, wanted: bool) -> None:
        rank = self._rank
        if rank.running:
            why = (
                KeyboardInterrupt()
                if wanted
                else GroupError("no other rank will ever come to this operation.")
            )
            rank.process.turns.free(rank.seat, why)


class MeetingGroups(Groups):
    """Process groups of a rank that meets the others in its process: there are no connections to open."""

    def waited_for(self, op: str, ranks: tuple[int, ...], make: Callable[[], Any], **how: Any) -> Any:
        """The same, when all have come to it that connect to each other: of a new group its members."""
        signature = how.get("signature")
        members = ranks if signature is None else signature.members

        def met() -> Any:
            stage: Any = self.recorder.stage
            if self.rank in members:
                stage.meet(list(self.recorder.open.values())[-1], members)
            return make()

        return super().waited_for(op, ranks, met, **how)


class Voice(Stdio):
    """stdout and stderr of one rank: what is written goes to the notebook under its name."""

    def __init__(self, rank: int, process: Process) -> None:
        self._rank, self._process = rank, process
        self._begin()

    def _raw(self) -> tuple[Any, Any]:
        return _Spoken(self, "out"), _Spoken(self, "err")

    def say(self, stream: str, data: bytes) -> None:
        """The rank has written `data`."""
        self._process.written.collect()  # C code has written it before
        self._process.members[self._rank].say(Output(self._rank, stream, data))


class _Spoken(io.RawIOBase):
    """A raw file whose text goes to the notebook."""

    def __init__(self, voice: Voice, stream: str) -> None:
        self._voice, self._stream = voice, stream
        self.written = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The descriptor that C code and subprocesses write to."""
        return 1 if self._stream == "out" else 2

    def write(self, data: Any) -> int:
        """Send it, after what was printed to stdout before."""
        if self._stream == "err":
            self._voice.turn(self.written)
        data = bytes(data)
        self._voice.say(self._stream, data)
        self.written += len(data)
        return len(data)


class Written:
    """What C code and subprocesses write to descriptors 1 and 2: it is the text of the rank that runs."""

    def __init__(self, say: Callable[[str, bytes], None]) -> None:
        self._say = say
        self._read = {1: 0, 2: 0}
        self._lock = threading.Lock()
        for fd in self._read:
            with tempfile.TemporaryFile(buffering=0) as file:
                os.dup2(file.fileno(), fd)

    def collect(self) -> None:
        """Send what was written since the last time. The order of the two streams is not known."""
        for fd, stream in ((1, "out"), (2, "err")):
            with self._lock:
                size, read = os.fstat(fd).st_size, self._read[fd]
                data = os.pread(fd, size - read, read) if size > read else b""
                self._read[fd] = read + len(data)
                if self._read[fd] > _FILE:
                    os.ftruncate(fd, 0)
                    os.lseek(fd, 0, os.SEEK_SET)
                    self._read[fd] = 0
            if data:
                self._say(stream, data)


class Table:
    """What each rank has called, for the others to compare theirs with: a `match.StoreBoard` inside one process."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, dict[int, tuple[bytes, int]]] = {}

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def of(self, rank: int) -> "TableOf":
        """The table as `rank` writes to it."""
        return TableOf(self._calls, rank)


class TableOf:
    """The table as one rank writes to it."""

    def __init__(self, calls: dict[Hashable, dict[int, tuple[bytes, int]]], rank: int) -> None:
        self._calls, self._rank = calls, rank

    def write(
        self, name: str, signature: bytes, line: int, *, stream: tuple[Any, ...], ranks: int
    ) -> dict[int, tuple[bytes, int]]:
        """Publish this rank's `signature` under `name`; returns signature and line of all who have, by rank."""
        key = (name, stream) if len(stream) == 2 else name  # of a collective with its ranks
        found = self._calls.setdefault(key, {})
        found[self._rank] = signature, line
        if len(found) == ranks:
            del self._calls[key]
        return found

    def read(self, found: dict[int, tuple[bytes, int]], rank: int) -> tuple[bytes, int] | None:
        """Signature and line that `rank` has published, or None."""
        return found.get(rank)
