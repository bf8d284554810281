"""Ranks that live on this machine, or on one of several (`nodes/agent`): processes, their pipes, sockets and ends."""

import contextlib
import os
import selectors
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .. import errors
from . import devices, launch, stacks, system
from .channel import Channel, pair
from .host import Host
from .match import SignatureTable
from .messages import CRASHED, HostEvent, Output, ProcessExited, StartRank, WorkerMessage

MEMORY_PER_RANK = 40 << 20  # bytes; measured: 20-60 MB (PSS) for an idle rank
FILES_PER_RANK = 9  # descriptors that the notebook's process needs
MOST = 512  # ranks: each holds a connection to every other one


def room() -> tuple[int, str]:
    """How many ranks this machine can hold, and the sentence that says why."""
    memory, files = system.available_memory(), system.open_file_limit()
    by_memory, by_files = memory // MEMORY_PER_RANK, max(0, files - 200) // FILES_PER_RANK
    most = min(by_memory, by_files, MOST)
    need = f"a rank takes about {MEMORY_PER_RANK >> 20} MiB and {FILES_PER_RANK} open files"
    have = f"{memory / 2**30:.1f} GiB of memory are free, and {files:,} files may be open"
    why = f"{need}; {have}. It has room for {most} ranks."
    if by_files < by_memory:
        why += " `ulimit -n` in the shell that starts Jupyter allows more files."
    return most, why


@dataclass
class _Member:
    """What this process holds of one rank."""

    rank: int
    work: Channel
    control: Channel
    stdout: int
    stderr: int
    crash: int  # it writes there where it stands when it crashes
    process: BaseProcess = field(init=False)
    ended: bool = False

    @property
    def sources(self) -> dict[str, Any]:
        """All that may have something to say, by kind."""
        pipes: dict[str, Any] = {"out": self.stdout, "err": self.stderr}
        return pipes | {"work": self.work, "control": self.control, "end": self.process.sentinel}

    def close(self) -> None:
        self.work.close()
        self.control.close()
        for fd in (self.stdout, self.stderr, self.crash):
            os.close(fd)


class Local(Host):
    """The ranks of a world of `world_size` ranks that live on this machine; each `start` says which.

    `choice` is what they talk over, and what they find in their environment unless the learner has set it; `method` is
    one of `launch.METHODS`, `interface` the network interface of gloo. Raises StartError: gloo could not talk over that
    interface, or there is nowhere to put what the ranks share.
    """

    def __init__(
        self, world_size: int, choice: devices.Choice, method: str = "forkserver", *, interface: str = system.LOOPBACK
    ) -> None:
        self.ranks, self.choice = range(world_size), choice
        self._interface, self._method = interface, method
        self._members: dict[int, _Member] = {}
        if choice.backend == "gloo" and (problem := system.interface_problem(os.environ.get("GLOO_SOCKET_IFNAME"))):
            raise errors.StartError(f"ranks could not be started: {problem}")
        try:  # the memory that finds calls that do not match
            self._table = system.shared_file(SignatureTable.nbytes(world_size))
        except OSError as error:
            raise _nothing_can_be_written(error) from None
        self._folder = ""
        self._selector = selectors.DefaultSelector()

    @property
    def pids(self) -> dict[int, int]:  # type: ignore[override]
        return {rank: m.process.pid or 0 for rank, m in self._members.items()}

    def fileno(self) -> int:
        """A descriptor that is readable when a rank has something to say."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def address_for(self, rank: int) -> str:
        """The folder of the store, made when it is first asked for, and again if it was cleaned away."""
        if not self._folder:
            try:
                self._folder = launch.make_folder()
            except OSError as error:
                raise _nothing_can_be_written(error) from None
        Path(self._folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder

    def prepare_store(self, generation: int) -> None:
        """Make the folder of the store again if it was cleaned away; nobody reads what is older than one generation."""
        Path(self.address_for(0), str(generation - 2)).unlink(missing_ok=True)

    def start(self, orders: Sequence[StartRank]) -> None:
        environment = {**self.choice.environment, **os.environ}
        if self.choice.backend == "gloo":
            environment.setdefault("GLOO_SOCKET_IFNAME", self._interface)
        members: list[_Member] = []
        asked: list[tuple[StartRank, list[int], list[int]]] = []
        try:
            for order in orders:
                work, work_theirs = pair()
                control, control_theirs = pair()
                out_read, out_write = os.pipe()
                err_read, err_write = os.pipe()
                system.enlarge_pipe(out_read)
                os.set_blocking(out_read, False)
                os.set_blocking(err_read, False)
                members.append(_Member(order.rank, work, control, out_read, err_read, system.shared_file(0)))
                theirs = [work_theirs.detach(), control_theirs.detach(), out_write, err_write]
                asked.append((replace(order, environment=environment), theirs, [self._table, members[-1].crash]))
            processes = launch.start([(order, [*fds, *ours]) for order, fds, ours in asked], self._method)
        except BaseException as error:
            for member in members:
                member.close()
            if isinstance(error, OSError):
                how = "If files of this process are open by the hundred, close some"
                more = "`ulimit -n` in the shell that starts Jupyter allows more."
                raise errors.StartError(f"ranks could not be started: {error.strerror}. {how}; {more}") from None
            raise
        finally:
            for _, theirs, _ in asked:
                for fd in theirs:
                    os.close(fd)
        for member, process in zip(members, processes, strict=True):
            member.process = process
            self._members[member.rank] = member
            for kind, source in member.sources.items():
                self._selector.register(source, selectors.EVENT_READ, (member, kind))

    def send(self, ranks: Sequence[int], message: bytes, *, control: bool = False) -> None:
        for member in [self._members[rank] for rank in ranks if rank in self._members]:
            self._push(member, "control" if control else "work", message)

    def kill(self, ranks: Sequence[int]) -> None:
        for member in [self._members[rank] for rank in ranks if rank in self._members]:
            launch.end(member.process)

    def end(self, ranks: Sequence[int]) -> None:
        members = [self._members.pop(rank) for rank in ranks if rank in self._members]
        for member in members:
            launch.end(member.process)
        for member in members:
            self._unregister(*member.sources.values())
            member.close()
            member.process.join(2.0)
            with contextlib.suppress(ValueError):  # it does not end: the system holds it
                member.process.close()

    def stop(self) -> None:
        self.end(list(self._members))
        if self._table >= 0:
            os.close(self._table)
            self._table = -1
            self._selector.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def pump(self, timeout: float) -> list[HostEvent]:
        found: list[HostEvent] = []
        selected = self._selector.select(timeout)
        for key, ready in selected:
            member: _Member = key.data[0]
            kind: str = key.data[1]
            if self._members.get(member.rank) is not member or member.ended:
                continue
            if ready & selectors.EVENT_WRITE:
                self._push(member, kind)
            if not ready & selectors.EVENT_READ:
                continue
            if kind == "end" or (kind == "work" and not self._take_work(member, found)):
                self._exited(member, found)
            elif kind == "control":
                try:
                    found += [WorkerMessage(member.rank, m) for m in member.control.poll_packed()]
                except (EOFError, OSError):
                    self._unregister(member.control)
            elif kind in ("out", "err"):
                self._read(member, kind, found, turns=16)  # then give the others a turn
        if not selected:  # what a rank has forked may hold open all that would tell of its end
            for member in list(self._members.values()):
                if not member.ended and member.process.exitcode is not None:
                    self._exited(member, found)
        return found

    def _exited(self, member: _Member, found: list[HostEvent]) -> None:
        """The process of a rank has ended: what it said before comes first."""
        self._take_work(member, found)
        member.ended = True
        launch.end(member.process)  # what it has left behind
        self._unregister(*member.sources.values())
        member.process.join(10.0)  # on a busy machine the process that knows how it ended may be seconds late
        how = how_it_ended(member.process.exitcode)
        stack = stacks.own(stacks.crash_in(member.crash)[1]) if "crash" in how else ()
        found.append(ProcessExited(member.rank, how, stack[-8:]))  # of a recursion the end

    def _take_work(self, member: _Member, found: list[HostEvent]) -> bool:
        """A rank's messages, after what it wrote before them, which lies in the pipes; whether it may say more."""
        try:
            messages, more = member.work.poll_packed(), True
        except (EOFError, OSError):
            messages, more = [], False
        self._read(member, "out", found)
        self._read(member, "err", found)
        found += [WorkerMessage(member.rank, m) for m in messages]
        return more

    def _read(self, member: _Member, kind: str, found: list[HostEvent], *, turns: int = 64) -> None:
        """What lies in a pipe. A pipe holds 1 MiB at most, unless somebody goes on writing."""
        fd = member.stdout if kind == "out" else member.stderr
        for _ in range(turns):
            try:
                data = os.read(fd, 1 << 18)
            except BlockingIOError:
                return
            if not data:
                self._unregister(fd)
                return
            found.append(Output(member.rank, kind, data))

    def _push(self, member: _Member, kind: str, message: bytes | None = None) -> None:
        """Send a message, or the rest of earlier ones, as far as the rank reads; the rest goes when it does."""
        channel: Channel = member.sources[kind]
        with contextlib.suppress(OSError, KeyError, ValueError):  # it is gone, as `ProcessExited` will say
            if message is None:
                channel.push()
            else:
                channel.post(message)
            write = selectors.EVENT_WRITE if channel.unsent else 0
            self._selector.modify(channel, selectors.EVENT_READ | write, (member, kind))

    def _unregister(self, *sources: Channel | int) -> None:
        for source in sources:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)


def this_machine(world_size: int, device: str, method: str) -> Local:
    """All ranks are processes of this machine. Raises WorldSizeError: the machine cannot hold that many ranks, or has
    no such device, and ValueError: nor has any other.
    """
    choice = devices.choose(world_size, device, devices.look(mps=device == "cuda"))
    most, why = room()
    if world_size > most:
        raise errors.WorldSizeError(f"{world_size} ranks do not fit on this machine: {why}")
    return Local(world_size, choice, method)


def _nothing_can_be_written(error: OSError) -> errors.StartError:
    why = f"no temporary file can be written ({error.strerror or error})"
    how = "Make room in the folder of TMPDIR, or name another one there and restart the kernel."
    return errors.StartError(f"ranks could not be started: {why}. {how}")


def how_it_ended(exitcode: int | None) -> str:
    """The end of a rank's process in words, to follow "rank 2"."""
    if exitcode is None:
        return "lost contact"
    if exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL). Nothing in Python does that: memory may have run out, or somebody ended it"
    if exitcode < 0:
        names = {s.value: s.name for s in signal.Signals}  # a real-time signal has a number only
        name = names.get(-exitcode, f"signal {-exitcode}")
        crash = name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
        return f"was ended by {name}{' (a crash in C code)' if crash else ', for which it has no handler'}"
    if exitcode == CRASHED:
        return "ended with an error outside the cell, which its stderr shows"
    return f"left with exit code {exitcode} (os._exit)"
