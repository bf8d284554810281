"""The ranks of a world that live on this machine: processes, their pipes and sockets, their ends.

Starts a rank, hands messages to it, says what came from it, ends it. It does not know what a cell is: the
messages stay packed. `Ranks` uses it for a world on one machine, and the agent of a node for its part of a
world on several (`nodes.py`), which therefore are started, heard and ended in the same way.
"""

import contextlib
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from typing import Any

from . import channel, system
from .boards import Board

MEMORY_PER_RANK = 40 << 20  # bytes; measured: 20-60 MB (PSS) for an idle rank
FILES_PER_RANK = 8  # descriptors that the notebook's process needs

# What came from a rank: ("out" | "err", rank, bytes), ("work" | "control", rank, a packed message),
# ("gone", rank, how its process ended).
Happening = tuple[str, int, Any]


def warm_up() -> None:
    """Start the process that the ranks are forked from; it imports torch while the notebook goes on."""
    multiprocessing.set_forkserver_preload(["rankcell.preload"])
    # the server must find our package and torch as this process does, but not inherit a slow or noisy set-up
    forkserver.ensure_running()


def room() -> tuple[int, str]:
    """How many ranks this machine can hold, and the sentence that says why."""
    memory = system.available_memory()
    by_memory = memory // MEMORY_PER_RANK if memory is not None else 256
    by_files = (system.open_file_limit() - 200) // FILES_PER_RANK
    # every rank holds a connection to every other one
    most = min(by_memory, by_files, 512)
    have = f"{memory / 2**30:.1f} GiB of memory are free" if memory is not None else "its limits are these"
    return most, (
        f"a rank takes about {MEMORY_PER_RANK >> 20} MiB and {FILES_PER_RANK} open files, and {have}. It has "
        f"room for {most} ranks."
    )


@dataclass
class _Member:
    """What this process holds of one rank."""

    rank: int
    context: Any  # torch.multiprocessing.ProcessContext of its one process
    work: channel.Channel
    control: channel.Channel
    stdout: int
    stderr: int

    @property
    def process(self) -> Any:
        return self.context.processes[0]


class Local:
    """The ranks of a world that live on this machine.

    Args:
        world_size: ranks of the whole world, which share the memory that finds calls that do not match.
        device: "cpu" or "cuda".
        interface: the network interface of gloo; the loopback by default.
    """

    def __init__(self, world_size: int, device: str, *, interface: str = system.LOOPBACK) -> None:
        self._device, self._interface = device, interface
        self._members: dict[int, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._board = system.shared_file(Board.nbytes(world_size))

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id."""
        return {rank: m.process.pid for rank, m in self._members.items()}

    def fileno(self) -> int:
        """A descriptor that is readable when a rank has something to say."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def node_of(self, rank: int) -> str:
        """The name of the node that `rank` lives on: none, where there is only this machine."""
        return ""

    def reachable(self, rank: int) -> bool:
        """Whether a process can be started in the place of `rank`."""
        return True

    def clock_offset(self, rank: int) -> float:
        """Seconds by which the clock of the rank's machine is ahead of ours."""
        return 0.0

    def start(self, births: Sequence[Any]) -> None:
        """Start a process for each of `births` (`worker.Birth`); its "ready" message says that it joined."""
        for birth in births:
            self._members[birth.rank] = self._start(birth)

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        """Give a packed message to the main threads of `ranks`. Of one that is gone, "gone" tells."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._members[rank].work.send(message)

    def ask(self, ranks: Sequence[int], message: bytes) -> None:
        """Give a packed message to the control threads of `ranks`."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._members[rank].control.send(message)

    def kill(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` at once; "gone" follows."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._members[rank].process.pid, signal.SIGKILL)

    def end(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`, reap them, and hear nothing of them any more."""
        members = [self._members.pop(rank) for rank in ranks if rank in self._members]
        for member in members:
            self._forget(member)
            _kill(member, wait=0.0)
        for member in members:
            _kill(member, wait=1.0)

    def stop(self) -> None:
        """End all ranks. Safe to call twice."""
        self.end(list(self._members))
        if self._board >= 0:
            os.close(self._board)
            self._board = -1
            self._selector.close()

    def pump(self, timeout: float) -> list[Happening]:
        """What has come from the ranks, after waiting at most `timeout` seconds for something."""
        found: list[Happening] = []
        for key, _ in self._selector.select(timeout):
            member, kind = key.data
            if self._members.get(member.rank) is not member:
                continue
            if kind == "work":
                self._take_work(member, found)
            elif kind == "control":
                try:
                    found += [("control", member.rank, m) for m in member.control.poll_packed()]
                except (EOFError, OSError):
                    self._selector.unregister(member.control)
            else:
                self._read(member, kind, found, turns=16)  # then give the others a turn
        return found

    def _start(self, birth: Any) -> _Member:
        import torch.multiprocessing

        from . import worker  # imports torch, which may only be imported when ranks are started

        environment = dict(os.environ)
        if self._device == "cpu":
            environment.setdefault("GLOO_SOCKET_IFNAME", self._interface)
        birth = replace(birth, environment=environment)
        ours, theirs = socket.socketpair()
        control, control_theirs = channel.pair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        system.enlarge_pipe(out_read)
        try:
            fds = [control_theirs.fileno(), out_write, err_write, self._board]
            socket.send_fds(ours, [b"f"], fds)
            with _hidden_main():
                context = torch.multiprocessing.start_processes(
                    worker.main,
                    (birth, theirs),
                    nprocs=1,
                    join=False,
                    daemon=False,
                    start_method="forkserver",
                )
        finally:
            theirs.close()
            control_theirs.close()
            os.close(out_write)
            os.close(err_write)
        os.set_blocking(out_read, False)
        os.set_blocking(err_read, False)
        member = _Member(birth.rank, context, channel.Channel(ours), control, out_read, err_read)
        for fd, kind in (
            (member.work, "work"),
            (member.control, "control"),
            (out_read, "out"),
            (err_read, "err"),
        ):
            self._selector.register(fd, selectors.EVENT_READ, (member, kind))
        return member

    def _take_work(self, member: _Member, found: list[Happening]) -> None:
        try:
            messages = member.work.poll_packed()
        except (EOFError, OSError):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(member.work)
            self._drain(member, found)
            member.process.join(1.0)
            found.append(("gone", member.rank, how_it_ended(member.process.exitcode)))
            return
        # what the rank wrote before its message already lies in the pipes
        self._drain(member, found)
        found += [("work", member.rank, m) for m in messages]

    def _drain(self, member: _Member, found: list[Happening]) -> None:
        self._read(member, "out", found)
        self._read(member, "err", found)

    def _read(self, member: _Member, kind: str, found: list[Happening], *, turns: int = 1 << 30) -> None:
        fd = member.stdout if kind == "out" else member.stderr
        for _ in range(turns):
            try:
                data = os.read(fd, 1 << 18)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)
                return
            found.append((kind, member.rank, data))

    def _forget(self, member: _Member) -> None:
        """Stop listening to a rank and close our ends."""
        for fd in (member.work, member.control, member.stdout, member.stderr):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        member.work.close()
        member.control.close()
        os.close(member.stdout)
        os.close(member.stderr)


def how_it_ended(exitcode: int | None) -> str:
    """The end of a rank's process in words, to follow "rank 2"."""
    if exitcode is None:
        return "lost contact"
    if exitcode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL). Nothing in Python does that: memory may have run out, or somebody ended it"
        )
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        crash = " (a crash in C code)" if name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL") else ""
        return f"was ended by {name}{crash}"
    return f"left with exit code {exitcode} (os._exit)"


def _kill(member: _Member, *, wait: float) -> None:
    """End the process of a rank and reap it."""
    process = member.process
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    process.join(wait)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Start a process without its parent's `__main__`: a rank must not run the learner's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
