"""The ranks of a world that live on this machine: processes, their pipes and sockets, their ends.

Starts a rank, hands messages to it, says what came from it, ends it. It does not know what a cell is: the
messages stay packed. `Ranks` uses it for a world on one machine, and the agent of a node for its part of a
world on several (`nodes.py`), which therefore are started, heard and ended in the same way.
"""

import contextlib
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import errors
from ..rehearsal.cluster import Cluster
from . import forks, system
from .channel import Channel, pair
from .match import SignatureTable
from .messages import CRASHED, Answered, Birth, Gone, Happening, Output, Said

MEMORY_PER_RANK = 40 << 20  # bytes; measured: 20-60 MB (PSS) for an idle rank
FILES_PER_RANK = 8  # descriptors that the notebook's process needs
MOST = 512  # ranks: each holds a connection to every other one


def room() -> tuple[int, str]:
    """How many ranks this machine can hold, and the sentence that says why."""
    memory = system.available_memory()
    files = system.open_file_limit()
    by_memory = memory // MEMORY_PER_RANK if memory is not None else MOST
    by_files = max(0, files - 200) // FILES_PER_RANK
    have = (
        f"{memory / 2**30:.1f} GiB of memory are free"
        if memory is not None
        else "how much is free is unknown"
    )
    most = min(by_memory, by_files, MOST)
    why = (
        f"a rank takes about {MEMORY_PER_RANK >> 20} MiB and {FILES_PER_RANK} open files; {have}, and {files:,} "
        f"files may be open. It has room for {most} ranks."
    )
    if by_files < by_memory:
        why += " `ulimit -n` in the shell that starts Jupyter allows more files."
    return most, why


@dataclass
class _Member:
    """What this process holds of one rank."""

    rank: int
    pid: int
    work: Channel
    control: Channel
    stdout: int
    stderr: int
    gone: bool = False

    @property
    def listened(self) -> tuple[Channel | int, ...]:
        """All that may have something to say."""
        return self.work, self.control, self.stdout, self.stderr


class Local:
    """The ranks of a world that live on this machine.

    Args:
        world_size: ranks of the whole world, which share the memory that finds calls that do not match.
        backend: what the ranks talk over; "gloo" wants an interface.
        environment: what the ranks find in theirs beside this process's.
        interface: the network interface of gloo; the loopback by default.

    Raises:
        StartError: gloo could not talk over that interface, or there is nowhere to put what the ranks share.
    """

    def __init__(
        self,
        world_size: int,
        backend: str,
        environment: Mapping[str, str] | None = None,
        *,
        interface: str = system.LOOPBACK,
    ) -> None:
        self._backend, self._interface = backend, interface
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
        self._listen_to_server()

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id."""
        return {rank: m.pid for rank, m in self._members.items()}

    def fileno(self) -> int:
        """A descriptor that is readable when a rank has something to say."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Local rank, ranks on the node (0: all of them), its name: this machine needs none."""
        return rank, 0, ""

    def address_for(self, rank: int) -> str:
        """The folder of the store, made when it is first asked for, and again if it was cleaned away.

        Only this user can enter it, so that nobody else can take part in the ranks' rendezvous.
        """
        if not self._folder:
            try:
                self._folder = tempfile.mkdtemp(prefix="rankcell-")
            except OSError as error:
                raise _nothing_can_be_written(error) from None
            forks.server.remove_at_end(self._folder)
        Path(self._folder).mkdir(mode=0o700, exist_ok=True)
        return self._folder

    def reachable(self, rank: int) -> bool:
        """Whether a process can be started in the place of `rank`."""
        return True

    def clock_offset(self, rank: int) -> float:
        """Seconds by which the clock of the rank's machine is ahead of ours."""
        return 0.0

    def start(self, births: Sequence[Birth]) -> None:
        """Start a process for each of `births`; its `Ready` says that it has joined."""
        environment = {**os.environ, **self._environment}
        if self._backend == "gloo":
            environment.setdefault("GLOO_SOCKET_IFNAME", self._interface)
        ours: list[_Member] = []
        orders: list[tuple[Birth, list[int]]] = []
        try:
            for birth in births:
                work, work_theirs = pair()
                control, control_theirs = pair()
                out_read, out_write = os.pipe()
                err_read, err_write = os.pipe()
                system.enlarge_pipe(out_read)
                os.set_blocking(out_read, False)
                os.set_blocking(err_read, False)
                ours.append(_Member(birth.rank, 0, work, control, out_read, err_read))
                theirs = [work_theirs.detach(), control_theirs.detach(), out_write, err_write]
                orders.append((replace(birth, environment=environment), theirs))
            pids = forks.server.fork([(birth, [*theirs, self._board]) for birth, theirs in orders])
        except BaseException as error:
            for member in ours:
                self._forget(member)
            if isinstance(error, OSError):
                raise errors.StartError(
                    f"ranks could not be started: {error.strerror}. If files of this process are open by the "
                    f"hundred, close some; `ulimit -n` in the shell that starts Jupyter allows more."
                ) from None
            raise
        finally:
            for _, theirs in orders:
                for fd in theirs:
                    os.close(fd)
        self._listen_to_server()
        for member, pid in zip(ours, pids, strict=True):
            member.pid = pid
            self._members[member.rank] = member
            listened: tuple[tuple[Channel | int, str], ...] = (
                (member.work, "work"),
                (member.control, "control"),
                (member.stdout, "out"),
                (member.stderr, "err"),
            )
            for end, kind in listened:
                self._selector.register(end, selectors.EVENT_READ, (member, kind))

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        """Give a packed message to the main threads of `ranks`. Of one that is gone, `Gone` tells."""
        for rank in ranks:
            if rank in self._members:
                self._post(self._members[rank], "work", message)

    def ask(self, ranks: Sequence[int], message: bytes) -> None:
        """Give a packed message to the control threads of `ranks`."""
        for rank in ranks:
            if rank in self._members:
                self._post(self._members[rank], "control", message)

    def kill(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` at once; `Gone` follows."""
        forks.server.kill([self._members[rank].pid for rank in ranks if rank in self._members])

    def end(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`, and hear nothing of them any more."""
        members = [self._members.pop(rank) for rank in ranks if rank in self._members]
        forks.server.kill([m.pid for m in members if not m.gone])
        for member in members:
            self._forget(member)
        deadline = time.monotonic() + 2.0
        for member in members:
            if not member.gone:
                forks.server.exit_code(member.pid, wait=max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """End all ranks. Safe to call twice."""
        self.end(list(self._members))
        if self._board >= 0:
            os.close(self._board)
            self._board = -1
            self._selector.close()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
                forks.server.forget_folder(self._folder)

    def forget_store(self, generation: int) -> None:
        """Remove the store of an older generation of process groups, which nobody reads any more."""
        with contextlib.suppress(FileNotFoundError):
            (Path(self._folder) / str(generation)).unlink()

    def pump(self, timeout: float) -> list[Happening]:
        """What has come from the ranks, after waiting at most `timeout` seconds for something."""
        found: list[Happening] = []
        for key, ready in self._selector.select(timeout):
            if key.data is None:
                self._bury(found)
                continue
            member: _Member = key.data[0]
            kind: str = key.data[1]
            if self._members.get(member.rank) is not member or member.gone:
                continue
            if ready & selectors.EVENT_WRITE:
                self._push(member, kind)
            if not ready & selectors.EVENT_READ:
                continue
            if kind == "work":
                self._take_work(member, found)
            elif kind == "control":
                try:
                    found += [Answered(member.rank, m) for m in member.control.poll_packed()]
                except (EOFError, OSError):
                    self._deaf(member.control)
            else:
                self._read(member, kind, found, turns=16)  # then give the others a turn
        return found

    def _listen_to_server(self) -> None:
        """Hear of ends also when a rank's own child holds its socket open; the server may be a new one."""
        known = [key for key in self._selector.get_map().values() if key.data is None]
        fd = forks.server.fileno()
        if fd >= 0 and not (known and known[0].fd == fd):
            for key in known:
                self._selector.unregister(key.fd)
            self._selector.register(fd, selectors.EVENT_READ, None)

    def _bury(self, found: list[Happening]) -> None:
        for member in list(self._members.values()):
            if not member.gone and (code := forks.server.exit_code(member.pid)) is not None:
                self._gone(member, code, found)
        if forks.server.fileno() < 0:
            for key in [key for key in self._selector.get_map().values() if key.data is None]:
                self._selector.unregister(key.fd)

    def _gone(self, member: _Member, code: int | None, found: list[Happening]) -> None:
        """The process of a rank has ended: what it said before comes first."""
        with contextlib.suppress(EOFError, OSError):
            messages = member.work.poll_packed()
            self._drain(member, found)
            found += [Said(member.rank, m) for m in messages]
        self._drain(member, found)
        member.gone = True
        for fd in member.listened:
            self._deaf(fd)
        found.append(Gone(member.rank, how_it_ended(code)))

    def _take_work(self, member: _Member, found: list[Happening]) -> None:
        try:
            messages = member.work.poll_packed()
        except (EOFError, OSError):
            # on a busy machine the process that knows how it ended may be seconds late
            self._gone(member, forks.server.exit_code(member.pid, wait=10.0), found)
            return
        # what the rank wrote before its message already lies in the pipes
        self._drain(member, found)
        found += [Said(member.rank, m) for m in messages]

    def _drain(self, member: _Member, found: list[Happening]) -> None:
        self._read(member, "out", found)
        self._read(member, "err", found)

    def _read(self, member: _Member, kind: str, found: list[Happening], *, turns: int = 64) -> None:
        """What lies in a pipe. A pipe holds 1 MiB at most, unless somebody goes on writing."""
        fd = member.stdout if kind == "out" else member.stderr
        for _ in range(turns):
            try:
                data = os.read(fd, 1 << 18)
            except BlockingIOError:
                return
            if not data:
                self._deaf(fd)
                return
            found.append(Output(member.rank, kind, data))

    def _post(self, member: _Member, kind: str, message: bytes) -> None:
        channel = member.work if kind == "work" else member.control
        with contextlib.suppress(OSError, KeyError, ValueError):  # it is gone, as `Gone` will say
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

    def _deaf(self, fd: Channel | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def _forget(self, member: _Member) -> None:
        """Stop listening to a rank and close our ends."""
        for fd in member.listened:
            self._deaf(fd)
        member.work.close()
        member.control.close()
        os.close(member.stdout)
        os.close(member.stderr)


class Rehearsing(Local):
    """The one process that rehearses `rank` of a job of `world_size` ranks on the cluster `on`.

    Raises:
        ValueError: there is no such cluster or rank.
    """

    def __init__(self, world_size: int, on: str, rank: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} does not exist among {world_size} ranks: they are 0 to {world_size - 1}."
            )
        self.cluster = Cluster.parse(on, world_size)
        super().__init__(1, "gloo")

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Local rank, ranks on the node, and its name."""
        per_node = self.cluster.per_node
        return rank % per_node, per_node, self.cluster.node_of(rank)


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
