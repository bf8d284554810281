"""Ranks that live on this machine: processes, their pipes and sockets, their ends.

Hosts of a world on one machine are made of it (`host.py`), and the agent of a node uses it for its part of a world on
several (`agent.py`), so that all ranks are started, heard and ended in the same way.
"""

import contextlib
import os
import selectors
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from .. import errors
from . import launch, system
from .channel import Channel, pair
from .match import SignatureTable
from .messages import CRASHED, HostEvent, Output, ProcessExited, StartRank, WorkerMessage

MEMORY_PER_RANK = 40 << 20  # bytes; measured: 20-60 MB (PSS) for an idle rank
FILES_PER_RANK = 8  # descriptors that the notebook's process needs
MOST = 512  # ranks: each holds a connection to every other one


def room() -> tuple[int, str]:
    """How many ranks this machine can hold, and the sentence that says why."""
    memory = system.available_memory()
    files = system.open_file_limit()
    by_memory = memory // MEMORY_PER_RANK
    by_files = max(0, files - 200) // FILES_PER_RANK
    most = min(by_memory, by_files, MOST)
    why = (
        f"a rank takes about {MEMORY_PER_RANK >> 20} MiB and {FILES_PER_RANK} open files; {memory / 2**30:.1f} "
        f"GiB of memory are free, and {files:,} "
        f"files may be open. It has room for {most} ranks."
    )
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
    process: BaseProcess = field(init=False)
    ended: bool = False

    @property
    def sources(self) -> dict[str, Channel | int]:
        """All that may have something to say, by kind."""
        pipes: dict[str, Channel | int] = {"out": self.stdout, "err": self.stderr}
        return pipes | {"work": self.work, "control": self.control, "end": self.process.sentinel}

    def close(self) -> None:
        """Close our ends."""
        self.work.close()
        self.control.close()
        os.close(self.stdout)
        os.close(self.stderr)


class Local:
    """The ranks of a world that live on this machine.

    Args:
        world_size: ranks of the whole world, which share the memory that finds calls that do not match.
        backend: what the ranks talk over; "gloo" wants an interface.
        environment: what the ranks find in theirs beside this process's.
        method: how their processes are started, one of `launch.METHODS`.
        interface: the network interface of gloo; the loopback by default.

    Raises:
        StartError: gloo could not talk over that interface, or there is nowhere to put what the ranks share.
    """

    def __init__(
        self,
        world_size: int,
        backend: str,
        environment: Mapping[str, str] | None = None,
        method: str = "forkserver",
        *,
        interface: str = system.LOOPBACK,
    ) -> None:
        self._backend, self._interface, self._method = backend, interface, method
        self._environment = dict(environment or {})
        self._members: dict[int, _Member] = {}
        asked = os.environ.get("GLOO_SOCKET_IFNAME")
        if backend == "gloo" and (problem := system.interface_problem(asked)):
            raise errors.StartError(f"ranks could not be started: {problem}")
        try:
            self._board, note = system.shared_file(SignatureTable.nbytes(world_size))
        except OSError as error:
            raise _nothing_can_be_written(error) from None
        self._folder = ""
        self.notes = [note] if note else []
        self._selector = selectors.DefaultSelector()

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id."""
        return {rank: m.process.pid or 0 for rank, m in self._members.items()}

    def fileno(self) -> int:
        """A descriptor that is readable when a rank has something to say."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Local rank, ranks on the node (0: all of them), its name: this machine needs none."""
        return rank, 0, ""

    def address_for(self, rank: int) -> str:
        """The folder of the store, made when it is first asked for, and again if it was cleaned away."""
        if not self._folder:
            try:
                self._folder = launch.make_folder()
            except OSError as error:
                raise _nothing_can_be_written(error) from None
        Path(self._folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder

    def reachable(self, rank: int) -> bool:
        """Whether a process can be started in the place of `rank`."""
        return True

    def clock_offset(self, rank: int) -> float:
        """Seconds by which the clock of the rank's machine is ahead of ours."""
        return 0.0

    def start(self, orders: Sequence[StartRank]) -> None:
        """Start a process for each of `orders`; its `Joined` tells more."""
        environment = {**os.environ, **self._environment}
        if self._backend == "gloo":
            environment.setdefault("GLOO_SOCKET_IFNAME", self._interface)
        members: list[_Member] = []
        asked: list[tuple[StartRank, list[int]]] = []
        try:
            for order in orders:
                work, work_theirs = pair()
                control, control_theirs = pair()
                out_read, out_write = os.pipe()
                err_read, err_write = os.pipe()
                system.enlarge_pipe(out_read)
                os.set_blocking(out_read, False)
                os.set_blocking(err_read, False)
                members.append(_Member(order.rank, work, control, out_read, err_read))
                theirs = [work_theirs.detach(), control_theirs.detach(), out_write, err_write]
                asked.append((replace(order, environment=environment), theirs))
            processes = launch.start(
                [(order, [*theirs, self._board]) for order, theirs in asked], self._method
            )
        except BaseException as error:
            for member in members:
                member.close()
            if isinstance(error, OSError):
                raise errors.StartError(
                    f"ranks could not be started: {error.strerror}. If files of this process are open by the "
                    f"hundred, close some; `ulimit -n` in the shell that starts Jupyter allows more."
                ) from None
            raise
        finally:
            for _, theirs in asked:
                for fd in theirs:
                    os.close(fd)
        for member, process in zip(members, processes, strict=True):
            member.process = process
            self._members[member.rank] = member
            for kind, source in member.sources.items():
                self._selector.register(source, selectors.EVENT_READ, (member, kind))

    def send(self, ranks: Sequence[int], message: bytes, *, control: bool = False) -> None:
        """Give a packed message to the main threads of `ranks`, or to their control threads, without waiting."""
        for rank in ranks:
            if rank in self._members:
                self._post(self._members[rank], "control" if control else "work", message)

    def kill(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` at once; `ProcessExited` follows."""
        for rank in ranks:
            if rank in self._members:
                launch.end(self._members[rank].process)

    def end(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`, and hear nothing of them any more."""
        members = [self._members.pop(rank) for rank in ranks if rank in self._members]
        for member in members:
            launch.end(member.process)
        for member in members:
            self._forget(member)

    def stop(self) -> None:
        """End all ranks. Safe to call twice."""
        self.end(list(self._members))
        if self._board >= 0:
            os.close(self._board)
            self._board = -1
            self._selector.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    def prepare_store(self, generation: int) -> None:
        """Make the folder of the store again if it was cleaned away; nobody reads what is older than one generation."""
        folder = Path(self.address_for(0))
        with contextlib.suppress(FileNotFoundError):
            (folder / str(generation - 2)).unlink()

    def pump(self, timeout: float) -> list[HostEvent]:
        """What has come from the ranks, after waiting at most `timeout` seconds for something."""
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
            if kind == "end":
                self._exited(member, found)
            elif kind == "work":
                self._take_work(member, found)
            elif kind == "control":
                try:
                    found += [WorkerMessage(member.rank, m) for m in member.control.poll_packed()]
                except (EOFError, OSError):
                    self._unregister(member.control)
            else:
                self._read(member, kind, found, turns=16)  # then give the others a turn
        if not selected:  # what a rank has forked may hold open all that would tell of its end
            for member in list(self._members.values()):
                if not member.ended and member.process.exitcode is not None:
                    self._exited(member, found)
        return found

    def _exited(self, member: _Member, found: list[HostEvent]) -> None:
        """The process of a rank has ended: what it said before comes first."""
        with contextlib.suppress(EOFError, OSError):
            messages = member.work.poll_packed()
            self._drain(member, found)
            found += [WorkerMessage(member.rank, m) for m in messages]
        self._drain(member, found)
        member.ended = True
        launch.end(member.process)  # what it has left behind
        for source in member.sources.values():
            self._unregister(source)
        member.process.join(10.0)  # on a busy machine the process that knows how it ended may be seconds late
        found.append(ProcessExited(member.rank, how_it_ended(member.process.exitcode)))

    def _take_work(self, member: _Member, found: list[HostEvent]) -> None:
        try:
            messages = member.work.poll_packed()
        except (EOFError, OSError):
            self._exited(member, found)
            return
        # what the rank wrote before its message already lies in the pipes
        self._drain(member, found)
        found += [WorkerMessage(member.rank, m) for m in messages]

    def _drain(self, member: _Member, found: list[HostEvent]) -> None:
        self._read(member, "out", found)
        self._read(member, "err", found)

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

    def _post(self, member: _Member, kind: str, message: bytes) -> None:
        channel = member.work if kind == "work" else member.control
        with contextlib.suppress(OSError, KeyError, ValueError):  # it is gone, as `ProcessExited` will say
            channel.post(message)
            if channel.unsent:  # it does not read: the rest goes when it does, and nobody waits for that
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(channel, both, (member, kind))

    def _push(self, member: _Member, kind: str) -> None:
        channel = member.work if kind == "work" else member.control
        with contextlib.suppress(OSError, KeyError, ValueError):
            channel.push()
            if not channel.unsent:
                self._selector.modify(channel, selectors.EVENT_READ, (member, kind))

    def _unregister(self, fd: Channel | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def _forget(self, member: _Member) -> None:
        """Stop listening to a rank that is being ended, and give back what it took."""
        for source in member.sources.values():
            self._unregister(source)
        member.close()
        member.process.join(2.0)
        with contextlib.suppress(ValueError):  # it does not end: the system holds it
            member.process.close()


def _nothing_can_be_written(error: OSError) -> errors.StartError:
    return errors.StartError(
        f"ranks could not be started: no temporary file can be written ({error.strerror or error}). Make room in "
        f"/dev/shm and in the folder of TMPDIR, or name another one there and restart the kernel."
    )


def how_it_ended(exitcode: int | None) -> str:
    """The end of a rank's process in words, to follow "rank 2"."""
    if exitcode is None:
        return "lost contact"
    if exitcode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL). Nothing in Python does that: memory may have run out, or somebody ended it"
        )
    if exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:  # a real-time signal has a number only
            name = f"signal {-exitcode}"
        crash = " (a crash in C code)" if name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL") else ""
        return f"was ended by {name}{crash}"
    if exitcode == CRASHED:
        return "ended with an error outside the cell, which its stderr shows"
    return f"left with exit code {exitcode} (os._exit)"
