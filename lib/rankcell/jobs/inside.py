"""In the process of a rank under `rankcell run`: says that it is there, what it does, and how it ends.

A thread of its own answers the runner. The recorder of rank cells is installed when the program calls
`init_process_group` (`recording.py`); until then only the stack is known. Whatever fails here, the program goes on as
it would without us. It decides nothing: the runner does. No torch is imported here.
"""

import atexit
import contextlib
import inspect
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine import channel, system
from ..engine.messages import Answer, Question
from ..results import Frame, RankFailure
from . import stacks
from .records import Look, RankArrived, RankRecord

if TYPE_CHECKING:
    from .recording import Recording

HOLD = 20.0  # seconds that a failed rank waits, so that the others can be asked before they are ended too
NEAR = 10.0  # seconds to wait for the others' arrival, to learn who is on this node
_state: dict[str, Any] = {}  # "inside": of this process


def host() -> str:
    """The same text in processes that share memory, another one elsewhere."""
    shared = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0  # noqa: PTH112, PTH116
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {shared}"


class Inside:
    """This process as a rank of a job.

    Raises:
        OSError: the runner cannot be reached.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.pid = rank, world_size, os.getpid()
        self.phase = "running"
        self.recording: Recording | None = None
        self.near: tuple[int, ...] | None = None
        self._main = threading.main_thread().ident or 0
        self._released, self._near_known = threading.Event(), threading.Event()
        told = json.loads(Path(os.environ["RANKCELL_JOB"]).read_text())
        self.token: str = told["token"]
        sock = channel.connect((*told["addresses"], "127.0.0.1"), told["port"], bytes.fromhex(told["key"]))
        system.keep_alive(sock, reads_always=False)
        self._channel = channel.Channel(sock)
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._made_folder = "RANKCELL_STACKS" not in os.environ
        self._folder = os.environ.get("RANKCELL_STACKS") or tempfile.mkdtemp(prefix="rankcell-")
        # what this process starts is no rank, unless it joins a process group
        os.environ.update(RANKCELL_CLAIMED=str(rank), RANKCELL_STACKS=self._folder)
        stacks.answer(self._folder)
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._channel.send(RankArrived(rank, world_size, self.pid, host(), self.node, self._folder, restart))
        # in a fork: the runner must hear of the end of the rank, not of the end of its last worker
        os.register_at_fork(after_in_child=self._channel.socket.close)
        atexit.register(self._remove_folder)  # after `end`: what is registered last comes first
        atexit.register(self.end)
        before = sys.excepthook

        def excepthook(kind: Any, error: Any, trace: Any) -> None:
            before(kind, error, trace)
            if not issubclass(kind, KeyboardInterrupt):
                self.failed(error)

        sys.excepthook = excepthook
        self.thread = threading.Thread(target=self._serve, name="rankcell", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                question = self._channel.receive()
            except (EOFError, OSError):  # the runner is gone: the program goes on
                self._released.set()
                self._near_known.set()
                return
            try:
                answer = self._answer(question)
            except Exception as error:  # noqa: BLE001 - a rank that does not answer cannot be diagnosed
                answer = repr(error)
            with contextlib.suppress(OSError):
                self._channel.send(Answer(question.number, answer))

    def _answer(self, question: Question) -> Any:
        """What the runner asks, or has this rank do: `near` is who is on its node, `release` lets it end."""
        if question.about == "look":
            busy = system.wants_a_core() or any(_runs(pid) for pid in stacks.children(self.pid))
            return Look(self.record(), *used(self.pid, time.process_time() - time.thread_time()), runs=busy)
        if question.about == "report":
            return self.report()
        if question.about in ABOUT_ANOTHER:
            return ABOUT_ANOTHER[question.about](*question.argument)
        if question.about == "near":
            self.near = question.argument
            self._near_known.set()
        elif question.about == "release":
            self._released.set()
        elif question.about == "end":
            for pid in stacks.children(self.pid):  # a worker that hangs would outlive us
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._remove_folder()
            os._exit(1)
        return None

    def wait_for_near(self) -> tuple[int, ...] | None:
        """The ranks on this node, once all have arrived; None if they do not."""
        self._near_known.wait(NEAR)
        return self.near

    def record(self) -> RankRecord:
        """What the main thread does now."""
        record = RankRecord(
            self.rank, self.world_size, self.phase, node=self.node, counts={}, at=time.time(), origin=("rankcell",)
        )  # fmt: skip
        if self.recording is not None:
            return self.recording.look(record, self._main, self.thread.ident)
        file, line = stacks.place(self._stacks().get(self._main, ()))
        return replace(record, file=file, line=line)

    def report(self) -> RankRecord:
        """The same with its stack, its threads' and workers', and its last operations."""
        record, found = self.record(), self._stacks()
        names = {t.ident: t.name for t in threading.enumerate()}
        others = [
            (f"thread {names.get(ident, '')}".strip(), stack)
            for ident, stack in found.items()
            if ident not in (self._main, self.thread.ident) and stacks.own(stack)
        ]
        for pid in stacks.children(self.pid)[:64]:
            if stack := stacks.ask(pid, self._folder):
                others.append((f"worker process {pid}", stack))
        events = () if self.recording is None else self.recording.events()
        return replace(record, stack=found.get(self._main, ()), others=tuple(others), events=events)

    def _stacks(self) -> dict[int, tuple[Frame, ...]]:
        me = threading.get_ident()
        return {ident: stacks.of_frame(f) for ident, f in sys._current_frames().items() if ident != me}

    def failed(self, error: BaseException) -> None:
        """The program has raised. Wait until the runner has seen what the others do: the launcher will end them."""
        if self.phase != "running" or os.getpid() != self.pid:
            return
        self.phase = "error"
        failure = _failure(error, self.recording)
        record = replace(self.record(), why=str(failure), failure=failure)
        if self.recording is not None:
            failed_in = self.recording.failed_in(failure)
            record = replace(record, events=self.recording.events(), failed_in=failed_in)
        self._say(record)
        self._released.wait(HOLD)

    def end(self) -> None:
        """The program has come to its end."""
        if self.phase != "running" or os.getpid() != self.pid:
            return
        self.phase = "finished"
        events = () if self.recording is None else self.recording.events()
        self._say(replace(self.record(), events=events))

    def _say(self, record: RankRecord) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(record)

    def _remove_folder(self) -> None:
        """On another node than the runner's nobody else would. (What a crash leaves in it is read before it goes.)"""
        if self._made_folder and os.getpid() == self.pid:
            shutil.rmtree(self._folder, ignore_errors=True)


def _failure(error: BaseException, recording: "Recording | None") -> RankFailure:
    if recording is not None:
        return recording.failure(error)
    entries = traceback.extract_tb(error.__traceback__)
    frames = tuple(Frame(f.filename, f.lineno or 0, f.name, f.line or "") for f in entries)
    return RankFailure(type(error).__name__, str(error), stacks.own(frames) or frames)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "R"
    return False


def used(pid: int, own: float | None = None) -> tuple[float, int]:
    """CPU seconds and bytes read or written by a process (`own` are its CPU seconds) and those that it has started."""
    cpu, moved = system.process_cpu_seconds(pid) if own is None else own, 0
    for each in (pid, *stacks.children(pid)):
        if each != pid:
            cpu += system.process_cpu_seconds(each)
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{each}/io").read_text().split()
            moved += int(words[1]) + int(words[3])  # rchar, wchar
    return cpu, moved


def look_from_outside(pid: int, folder: str) -> Look:
    """A process of this machine that does not answer: what it uses, and its stack."""
    return Look(None, *used(pid), stack=stacks.ask(pid, folder))


# questions about another process of the same node
ABOUT_ANOTHER: dict[str, Callable[[int, str], Any]] = {
    "look from outside": look_from_outside,
    "last words": stacks.last_words,
}


def arrive(rank: int | None = None, world_size: int | None = None) -> Inside | None:
    """This process as a rank; None, with a line on stderr, if the runner cannot be reached."""
    found: Inside | None = _state.get("inside")
    if found is not None and found.pid == os.getpid():
        return found
    rank = int(os.environ["RANK"]) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    try:
        found = _state["inside"] = Inside(rank, world_size)
    except (OSError, EOFError, ValueError, KeyError) as error:
        print(f"rankcell run: rank {rank} is not recorded: {error}", file=sys.stderr)
        return None
    return found


def init_process_group(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`init_process_group` of a program: from now on this process is a rank, and recorded."""
    try:
        given: Mapping[str, Any] = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        rank, size = int(given.get("rank", -1)), int(given.get("world_size") or -1)
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        size = size if size > 0 else int(os.environ.get("WORLD_SIZE", "-1"))
    except (TypeError, ValueError):
        rank = size = -1
    # a launcher of its own, such as MPI's, or a world of one, or no runner: the program does as ever
    inside = arrive(rank, size) if rank >= 0 and size >= 2 else None
    if inside is None:
        return original(*args, **kwargs)
    if inside.recording is None:
        from .recording import Recording

        inside.recording = Recording(inside.rank, inside.world_size, inside.token)
    return inside.recording.init(original, args, kwargs, inside.wait_for_near)


def spawned(original: Callable[..., Any], fn: Callable[..., Any], *args: Any) -> Any:
    """`_wrap` of torch.multiprocessing.spawn, which catches what a rank raises: we hear of it before."""

    def call(*arguments: Any) -> Any:
        try:
            return fn(*arguments)
        except Exception as error:
            found: Inside | None = _state.get("inside")
            if found is not None:
                found.failed(error)
            raise

    return original(call, *args)
