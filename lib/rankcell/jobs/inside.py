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
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine import channel, stacks, system
from ..engine.messages import Answer, Question
from ..results import Frame, RankFailure, at_line, placed
from .records import RankArrived, RankRecord

if TYPE_CHECKING:
    from .recording import Recording

POLL = 0.5  # seconds after which a rank says what it does
HOLD = 20.0  # seconds that a failed rank waits, so that the others can be asked before they are ended too
NEAR = 10.0  # seconds to wait for the others' arrival, to learn who is on this node
_state: dict[str, Any] = {}  # "inside": of this process


def host() -> str:
    """The same text in processes that share memory, another one elsewhere."""
    shared = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0  # noqa: PTH112, PTH116
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {shared}"


class Inside:
    """This process as a rank of a job. Raises OSError when the runner cannot be reached."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.pid = rank, world_size, os.getpid()
        self.phase = "running"
        self.recording: Recording | None = None
        self.near: tuple[int, ...] | None = None
        self._main = threading.main_thread().ident or 0
        self._released, self._near_known = threading.Event(), threading.Event()
        told = json.loads(Path(os.environ["RANKCELL_JOB"]).read_text())
        self.token: str = told["token"]
        self._channel = channel.connect((*told["addresses"], "127.0.0.1"), told["port"], bytes.fromhex(told["key"]))
        self._crash_file = f"{tempfile.gettempdir()}/rankcell-{self.token}-{self.pid}"
        stacks.keep_crashes(self._crash_file)
        # what it starts is no rank, unless it joins a process group
        os.environ["RANKCELL_CLAIMED"] = str(rank)
        self._channel.send(RankArrived(rank, world_size, self.pid, host(), self._crash_file))
        # in a fork: the runner must hear of the end of the rank, not of the end of its last worker
        os.register_at_fork(after_in_child=self._channel.socket.close)
        atexit.register(self.end)
        before = sys.excepthook

        def excepthook(kind: Any, error: Any, trace: Any) -> None:
            before(kind, error, trace)
            if not issubclass(kind, KeyboardInterrupt):
                self.end(error)

        leave, self._left = sys.exit, ""

        def exit_from(status: Any = None) -> None:
            for frame in stacks.own(self._stack())[-1:] if threading.get_ident() == self._main else ():
                if "(" not in frame.source.partition("exit(")[2]:  # not as in sys.exit(main())
                    self._left = f"ended with sys.exit() in {at_line(frame.lineno, frame.filename)}"
            leave(status)

        sys.excepthook, sys.exit = excepthook, exit_from  # type: ignore[assignment]
        self.thread = threading.Thread(target=self._serve, name="rankcell", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        said = 0.0
        with contextlib.suppress(EOFError, OSError):  # the runner is gone: the program goes on
            while True:
                select.select([self._channel], [], [], POLL)
                questions = self._channel.poll()
                for question in questions:
                    self._channel.send(Answer(question.number, self._answer(question)))
                if not questions or time.monotonic() - said > POLL:  # also where questions come without a pause
                    # what is over is said once, by `end`
                    said = time.monotonic()
                    self._channel.send(replace(self.record(), phase="running"))
        self._released.set()
        self._near_known.set()

    def _answer(self, question: Question) -> Any:
        """What the runner asks, or has this rank do: `near` is who is on its node, `release` lets it end."""
        if question.about == "report":
            return self.report()
        if question.about == "crash":
            return stacks.crash_in(question.argument)
        if question.about == "near":
            self.near = question.argument
            self._near_known.set()
        elif question.about == "release":
            self._released.set()
        elif question.about == "end":
            for pid in stacks.children(self.pid):  # a worker that hangs would outlive us
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            Path(self._crash_file).unlink(missing_ok=True)
            os._exit(1)
        return None

    def wait_for_near(self) -> tuple[int, ...] | None:
        """The ranks on this node, once all have arrived; None if they do not."""
        self._near_known.wait(NEAR)
        return self.near

    def record(self) -> RankRecord:
        """What the main thread does now, and what this process and its children have used, less this thread."""
        children = stacks.children(self.pid)
        record = RankRecord(
            self.rank, self.world_size, self.phase, at=time.time(), moved=sum(map(_moved, (self.pid, *children))),
            cpu=time.process_time() - time.thread_time() + sum(map(system.process_cpu_seconds, children)),
            runs=system.wants_a_core() or any(map(_runs, children)),
        )  # fmt: skip
        if self.recording is not None:
            return self.recording.look(record, self._main, self.thread.ident)
        file, line = stacks.place(self._stack())
        return replace(record, file=file, line=line)

    def report(self) -> RankRecord:
        """The same with its stack and its last operations."""
        stack = self._stack()  # before the record, by which the runner sees whether this rank has moved on
        record = replace(self.record(), stack=stack)
        file, line = stacks.place(stack)
        record = record if record.line else replace(record, file=file, line=line)
        if self.recording is None:
            return record
        from ..engine import report

        of_main: Any = sys._current_exceptions().get(self._main)
        error = of_main[1] if isinstance(of_main, tuple) else of_main  # Python 3.11 gives three things
        handles = "" if error is None else _with_place(report.failure(error))
        without = () if self.phase == "finished" else self.recording.without_gradient()
        return replace(record, events=self.recording.events(), handles=handles, without=without)

    def _stack(self) -> tuple[Frame, ...]:
        frames = sys._current_frames()
        found = stacks.of_frame(frames.get(self._main))
        if found and found[-1].name == "_shutdown of threading":  # the script is over, and a thread of its own is not
            theirs = (stacks.of_frame(frames.get(t.ident)) for t in threading.enumerate() if not t.daemon and t.ident)
            return next(filter(stacks.own, theirs), found)
        return found

    def end(self, error: BaseException | None = None) -> None:
        """The program has ended or raised: wait until the runner has seen the others, whom the launcher will end."""
        if self.phase != "running" or os.getpid() != self.pid:
            return
        self.phase = "finished" if error is None else "error"
        record = replace(self.report(), stack=(), why=self._left)
        if error is not None:
            record = self._failed(record, error)
        with contextlib.suppress(OSError):
            Path(self._crash_file).unlink(missing_ok=True)
            self._channel.send(record)
        if error is not None:
            self._released.wait(HOLD)

    def _failed(self, record: RankRecord, error: BaseException) -> RankRecord:
        from ..engine import report

        recorder = None if self.recording is None else self.recording.recorder
        failure = report.failure(error, call=recorder.failed_call if recorder else None)
        failure = report.without_addresses(failure, renewed=False)
        of_operations = failure.type in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
        failed_in = recorder.failed_wait if recorder and of_operations else None
        if recorder and recorder.operations and failed_in is None and failure.message.endswith(report.GONE):
            failed_in = recorder.operations[-1].wait()  # C++ has waited for it, as DDP does
        # where the others are gone, the operation that waited for them fails: the stack tells where it stood
        stack = failure.frames if failed_in is not None else ()
        handles = next((_with_place(cause) for how, cause in failure.causes if how == "while handling"), "")
        return replace(record, why=str(failure), failure=failure, failed_in=failed_in, stack=stack, handles=handles)


def _moved(pid: int) -> int:
    """Bytes that a process has read and written."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/io").read_text().split()
        return int(words[1]) + int(words[3])  # rchar, wchar
    return 0


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "R"
    return False


def arrive(rank: int, world_size: int) -> Inside | None:
    """This process as a rank; None, with a line on stderr, if the runner cannot be reached."""
    found: Inside | None = _state.get("inside")
    if found is not None and found.pid == os.getpid():
        return found
    try:
        found = _state["inside"] = Inside(rank, world_size)
    except (OSError, EOFError, ValueError, KeyError) as error:
        print(f"rankcell run: rank {rank} is not recorded: {error}", file=sys.stderr)
        return None
    return found


def _with_place(failure: RankFailure) -> str:
    file, line = stacks.place(failure.frames)
    return f"{failure}{placed(line, file)}"


def init_process_group(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`init_process_group` of a program: from now on this process is a rank, and recorded."""
    try:
        given: Mapping[str, Any] = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        rank, size = int(given.get("rank", -1)), int(given.get("world_size") or -1)
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        size = size if size > 0 else int(os.environ.get("WORLD_SIZE", "-1"))
        address = str(given.get("init_method") or "env://") if given.get("store") is None else ""
    except (TypeError, ValueError):
        rank, size, address = -1, -1, ""
    if address == "env://":
        address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    # a launcher of its own, such as MPI's, or a world of one, or no runner: the program does as ever
    if (inside := arrive(rank, size) if rank >= 0 and size >= 2 else None) is None:
        return original(*args, **kwargs)
    if inside.recording is None:
        from .recording import Recording

        inside.world_size = max(inside.world_size, size)  # a program may wait for more than were started
        inside.recording = Recording(inside.rank, inside.world_size, inside.token)
    says = [f"rank={rank}"] * (rank != inside.rank) + [address] * bool(address)
    return inside.recording.init(lambda: original(*args, **kwargs), inside.wait_for_near, ", ".join(says))
