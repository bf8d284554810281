"""Inside a rank: join the process group, run the cells that the notebook sends, report what happened.

The main thread runs cells. A second thread answers the notebook while a cell runs: what the rank is doing,
whether it waits, and on demand it frees the rank from an operation that can never finish. The rank's stdout
and stderr are pipes that the notebook reads, so everything is caught: prints, C libraries, subprocesses.

The one place that may catch every exception is here, to report it.
"""

import ast
import builtins
import ctypes
import io
import linecache
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from . import record, system
from .boards import Board
from .channel import Channel
from .errors import MismatchError, RankInputError
from .results import Connection, Display, Dropped, Frame, Memory, NotSent, RankFailure, Step

MAX_STEPS = 5_000  # lines noted per rank with `--step`
_Moved = dict[tuple[str, str], tuple[int, int]] | None  # (our end, the other end) -> bytes sent, received
MAX_VALUE_NBYTES = 16 << 20  # a larger value of the last expression stays on its rank; --pull has no limit


@dataclass(frozen=True)
class Birth:
    """What a rank must know to start."""

    rank: int
    world_size: int
    device: str
    backend: str
    store: tuple[str, int]  # host and port of the store that the notebook holds
    generation: int
    folder: str
    path: tuple[str, ...]
    local_rank: int
    local_world_size: int
    node: str = ""  # its name; empty in a world on one machine
    environment: dict[str, str] = field(default_factory=dict)  # set where the rank is started


@dataclass(frozen=True)
class Task:
    """One cell, or one function call, for a rank."""

    began: float  # zero of all times: when the notebook sent the task, on the clock of the rank's machine
    cell: str  # the same on all ranks: it keeps the signatures of two cells apart
    source: str = ""
    filename: str = "<cell>"
    call: bytes = b""  # cloudpickle of (function, args, kwargs)
    push: bytes = b""  # cloudpickle of names and values
    pull: tuple[str, ...] = ()
    values: bool = False
    step: tuple[str, ...] | None = None  # names to show at each line; None: do not step


@dataclass(frozen=True)
class Outcome:
    """What a rank did with a task. Values travel as their own pickle, so that one that fails spoils nothing
    else.
    """

    error: RankFailure | None
    value: bytes | NotSent | None
    data: dict[str, Any]
    pulled: dict[str, bytes | str]
    seconds: float
    events: list[Any]
    dropped: tuple[Dropped, ...]
    counts: dict[Any, int]
    calls: int = 0
    broken: bool = False  # a connection was closed, although the rank may have caught the error
    wire: tuple[Connection, ...] | None = None
    steps: tuple[Step, ...] = ()
    names: tuple[str, ...] = field(default=())
    memory: tuple[Memory, ...] = ()


def prepare() -> None:
    """Make what every rank needs, once, before the ranks are forked: the shell that gives a rank `display`,
    magics and rich output, and the recorder. What is made here is memory that the ranks share.
    """
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False  # no database, no thread
    config.HistoryAccessor.enabled = False
    config.InteractiveShell.colors = "nocolor"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shell = _RankShell.instance(config=config, display_pub_class=_Publisher, displayhook_class=_QuietHook)
    shell.recorder = record.Recorder()
    shell.recorder.install()
    sys.displayhook = sys.__displayhook__


class _RankShell(InteractiveShell):
    """IPython's shell without a user in front of it."""

    system = InteractiveShell.system_raw  # stdout is a pipe that is read as it is, no terminal

    def init_sys_modules(self) -> None:
        """Leave `__main__` alone: the rank sets its own."""

    def init_io(self) -> None:
        """Leave stdout and stderr alone: they are pipes to the notebook."""

    def enable_gui(self, gui: Any = None) -> None:
        """A rank has no window."""


class _QuietHook(DisplayHook):
    """The rank shows the value of the last expression itself."""


class _Publisher(DisplayPublisher):
    """Sends what `display(...)` is given to the notebook."""

    rank: Any = None

    def publish(
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        """Called by IPython with the display as MIME types."""
        if _Publisher.rank is not None:
            _Publisher.rank.show(data, metadata or {}, (transient or {}).get("display_id"), update)

    def clear_output(self, wait: bool = False) -> None:
        """Nothing to clear: the notebook shows a rank's output anew each time."""


class _CountingFile(io.FileIO):
    """A raw file that counts what was written, to place rich displays between the prints."""

    written = 0

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.written += count or 0
        return count


def main(_index: int, birth: Birth, work: socket.socket) -> None:
    """The life of a rank, from `torch.multiprocessing.start_processes` to the end of the channel."""
    system.die_with_parent()
    _let_go_of_the_fork_server()
    os.setpgid(0, 0)  # an interrupt of the notebook reaches the ranks through the control channel only
    _, fds, _, _ = socket.recv_fds(work, 1, 4)
    Rank(birth, Channel(work), *fds).serve()


def _let_go_of_the_fork_server() -> None:
    """Close our copy of its lifeline: it must end with the notebook, and take hanging ranks with it."""
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
        server._forkserver_address = None


class Rank:
    """One rank: its names, its process group, its two channels."""

    def __init__(
        self, birth: Birth, work: Channel, control_fd: int, stdout_fd: int, stderr_fd: int, board_fd: int
    ) -> None:
        self.birth = birth
        self.work = work
        self.control = Channel(socket.socket(fileno=control_fd))
        self.running = False
        self.phase = "starting"
        self.main_thread = threading.get_ident()
        # the backend's connections: to count their bytes and to shut them down
        self._connections: list[socket.socket] = []
        self._interrupted = False
        self._cell_began_at = 0  # bytes of stdout written before the cell
        self._redirect(stdout_fd, stderr_fd)
        self._set_up_environment()
        self.recorder: record.Recorder = InteractiveShell.instance().recorder
        self.recorder.belong(birth.rank, Board(board_fd, birth.rank, birth.world_size))
        os.close(board_fd)
        self.names = self._first_names()
        _Publisher.rank = self
        builtins.input = _no_input

    def _redirect(self, stdout_fd: int, stderr_fd: int) -> None:
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        os.close(stdout_fd)
        os.close(stderr_fd)
        self._raw_stdout = _CountingFile(1, "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(self._raw_stdout, 1 << 16), encoding="utf-8", errors="backslashreplace"
        )
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "wb", closefd=False), 1 << 16),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        self._libc = ctypes.CDLL(None)

    def _set_up_environment(self) -> None:
        birth = self.birth
        os.environ.clear()
        os.environ.update(birth.environment)
        os.environ.update(
            RANK=str(birth.rank),
            WORLD_SIZE=str(birth.world_size),
            LOCAL_RANK=str(birth.local_rank),
            LOCAL_WORLD_SIZE=str(birth.local_world_size),
            MASTER_ADDR=birth.store[0],
            MASTER_PORT=str(birth.store[1]),
        )
        if os.path.isdir(birth.folder):  # noqa: PTH112
            os.chdir(birth.folder)
        sys.path[:] = list(birth.path)
        sys.argv = [""]
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.current_thread().name = f"rank {birth.rank}"

    def _first_names(self) -> dict[str, Any]:
        birth = self.birth
        if birth.device == "cuda":
            torch.cuda.set_device(birth.local_rank % torch.cuda.device_count())
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cpu")
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        names = module.__dict__
        names.update(
            rank=birth.rank,
            world_size=birth.world_size,
            device=device,
            torch=torch,
            dist=dist,
            __builtins__=builtins,
            get_ipython=InteractiveShell.instance().get_ipython,
        )
        shell = InteractiveShell.instance()
        shell.user_module, shell.user_ns = module, names
        from IPython.display import display

        names["display"] = display
        return names

    def join_group(self, generation: int) -> None:
        """Join the default process group of this `generation`; leave an older one first."""
        birth = self.birth
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except RuntimeError:  # its connections were closed on purpose
                pass
            record.forget_groups()
        for s in self._connections:
            s.close()
        before = set(system.tcp_connections())
        options = {"device_id": self.names["device"]} if birth.backend == "nccl" else {}
        store = dist.TCPStore(birth.store[0], birth.store[1], None, False)
        dist.init_process_group(
            birth.backend,
            store=dist.PrefixStore(f"{generation}", store),
            rank=birth.rank,
            world_size=birth.world_size,
            **options,
        )
        self._connections = system.duplicate(set(system.tcp_connections()) - before)
        if birth.local_world_size < birth.world_size:
            first = birth.rank - birth.local_rank
            near = range(first, first + birth.local_world_size)
            self.recorder.reach(dist.PrefixStore(f"calls {generation}", store), near)
        self.recorder.join(generation)

    def serve(self) -> None:
        """Answer the notebook until it is gone."""
        self.join_group(self.birth.generation)
        self._watch_new_groups()
        threading.Thread(target=self._watch, name="rankcell control", daemon=True).start()
        self.phase = "idle"
        self.work.send(("ready", self.birth.generation))
        while True:
            try:
                kind, payload = self.work.receive()
            except EOFError:
                os._exit(0)
            if kind == "run":
                self.work.send(("done", self.run(payload)))
            elif kind == "join":
                try:
                    self.join_group(payload)
                except Exception as error:  # noqa: BLE001 - reported: the notebook replaces this rank
                    self.work.send(("failed", repr(error)))
                else:
                    self.work.send(("ready", payload))

    def run(self, task: Task) -> Outcome:
        """Run one cell or function call and say what happened. Never raises."""
        failure: RankFailure | None = None
        value: Any = None
        self.recorder.begin(task.cell, began=task.began, values=task.values)
        moved_before = system.bytes_moved(self._connections)
        start = record.clock()
        self._flush()
        self._cell_began_at = self._raw_stdout.written
        self._interrupted = False
        self._steps: list[Step] = []
        self.phase, self.running = "running", True
        try:
            if task.push:
                pushed = cloudpickle.loads(task.push)
                for item in pushed.values():
                    self._lend_names(item)
                self.names.update(pushed)
            if task.call:
                function, args, kwargs = cloudpickle.loads(task.call)
                self._lend_names(function)
                value = function(*args, **kwargs)
            else:
                value = self._execute(task)
            self.running = False
        except BaseException as error:  # noqa: BLE001 - reported to the notebook, which raises it
            self.running = False
            failure = self._failure(error, record.clock() - task.began, task)
        seconds = record.clock() - start
        self.phase = "error" if failure else "finished"
        data: dict[str, Any] = {}
        pickled: bytes | NotSent | None = None
        if failure is None and value is not None:
            try:
                data = self._formats(value)
                pickled = _pack(value, data.get("text/plain", ""), MAX_VALUE_NBYTES)
            except BaseException as error:  # noqa: BLE001 - a __repr__ of the learner may raise anything
                failure = self._failure(error, record.clock() - task.began, task)
        pulled = {} if failure else {name: self._pull(name) for name in task.pull}
        self._flush()
        events, dropped = self.recorder.events()
        return Outcome(
            error=failure,
            value=pickled,
            data=data,
            pulled=pulled,
            seconds=seconds,
            events=events,
            dropped=dropped,
            counts=dict(self.recorder.counts),
            calls=self.recorder.total,
            broken=self.recorder.broken,
            wire=_moved(moved_before, system.bytes_moved(self._connections)),
            steps=tuple(self._steps),
            names=tuple(n for n in self.names if not n.startswith("_")),
            memory=self.recorder.memory,
        )

    def _execute(self, task: Task) -> Any:
        """Run the source in the rank's names; the value of its last expression, as a notebook cell has."""
        source = task.source
        linecache.cache[task.filename] = (len(source), None, source.splitlines(True), task.filename)
        tree = ast.parse(source, task.filename)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not _is_silenced(source):
            last = ast.Expression(tree.body.pop().value)
        body = compile(tree, task.filename, "exec")
        value = None if last is None else compile(last, task.filename, "eval")
        if task.step is None:
            exec(body, self.names)
            return None if value is None else eval(value, self.names)
        sys.settrace(self._tracer(task.step))
        try:
            exec(body, self.names)
            return None if value is None else eval(value, self.names)
        finally:
            sys.settrace(None)
            self._note_step(0, self.names, task.step)

    def _tracer(self, names: Sequence[str]) -> Any:
        """A trace function that notes every line of a rank cell before it runs, and what `names` are then."""

        def on_line(frame: Any, event: str, _: Any) -> Any:
            if event == "line" and len(self._steps) < MAX_STEPS:
                self._note_step(frame.f_lineno, {**self.names, **frame.f_locals}, names)
            return on_line

        return lambda frame, *_: on_line if frame.f_code.co_filename.startswith("<cell") else None

    def _note_step(self, line: int, scope: Mapping[str, Any], names: Sequence[str]) -> None:
        values = {name: _short(scope[name]) for name in names if name in scope}
        self._steps.append(Step(self.birth.rank, record.clock() - self.recorder.began, line, values))

    def _lend_names(self, value: Any) -> None:
        """Let a function from the notebook use `rank`, `world_size`, `device`, `torch` and `dist` as a cell
        does.
        """
        scope = getattr(value, "__globals__", None)
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if isinstance(scope, dict) and scope is not getattr(module, "__dict__", None):
            for name in ("rank", "world_size", "device", "torch", "dist"):
                scope.setdefault(name, self.names[name])

    def _failure(self, error: BaseException, at: float, task: Task) -> RankFailure:
        frames = tuple(
            Frame(f.filename, f.lineno or 0, f.name, (f.line or "").strip())
            for f in traceback.extract_tb(error.__traceback__)
        )
        mine = [i for i, f in enumerate(frames) if f.filename != __file__]
        frames = frames[mine[0] :] if mine else ()
        # the learner's own frames; torch's below them say little and change with its version
        own = [f for f in frames if "/site-packages/" not in f.filename and "/rankcell/" not in f.filename]
        notes = list(getattr(error, "__notes__", ()))
        message = str(error)
        if isinstance(error, SystemExit):
            notes.append("sys.exit() ended the cell on this rank. The rank itself lives on, with its names.")
            message = "" if error.code is None else str(error.code)
        call = self.recorder.failed_call
        return RankFailure(
            type=type(error).__name__,
            message=message,
            frames=tuple(own or frames[-1:]),
            at=at,
            notes=tuple(notes),
            call=call,
            mismatch=error.details if isinstance(error, MismatchError) else None,
        )

    def _formats(self, value: Any) -> dict[str, Any]:
        data, _ = InteractiveShell.instance().display_formatter.format(value)
        return data

    def _pull(self, name: str) -> bytes | str:
        """The pickled value of `name`, or a sentence that says why there is none."""
        if name not in self.names:
            return "missing"
        try:
            packed = _pack(self.names[name], "", None)
        except Exception as error:  # noqa: BLE001 - reported
            return f"cannot be sent: {type(error).__name__}: {error}"
        return packed if isinstance(packed, bytes) else packed.reason

    def show(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool
    ) -> None:
        """Send a rich display, with the place in stdout where it belongs."""
        sys.stdout.flush()
        offset = self._raw_stdout.written - self._cell_began_at
        self.work.send(("display", Display(data, metadata, offset, display_id), update))

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (ValueError, OSError):  # the learner closed or replaced it
                continue
        self._libc.fflush(None)

    def _watch(self) -> None:
        """The control thread: answers while the main thread runs or waits."""
        while True:
            try:
                request = self.control.receive()
            except (EOFError, OSError):
                os._exit(0)  # the notebook is gone
            number, request, argument = request
            if request == "status":
                answer: Any = self._status()
            elif request == "interrupt":
                self._interrupted = True
                self._abort()
                # whoever waited for another rank now comes back by itself, with a clean error
                self._await_end(0.1)
                signal.pthread_kill(self.main_thread, signal.SIGINT)
                answer = True
            elif request == "memory":
                answer = system.process_memory(os.getpid())
            else:
                answer = self._complete(argument)
            try:
                self.control.send((number, answer))
            except OSError:
                os._exit(0)

    def _abort(self) -> None:
        """Free the main thread from an operation that waits for another rank."""
        system.shut_down(self._connections)
        if self.birth.backend == "nccl" and dist.is_initialized():
            # nccl has no connections to shut: its kernels spin on the GPU until the communicator is aborted
            dist.group.WORLD.abort()

    def _await_end(self, seconds: float) -> None:
        end = record.clock() + seconds
        while self.running and record.clock() < end:
            time.sleep(0.002)

    def _on_interrupt(self, *_: Any) -> None:
        if self.running and self._interrupted:
            raise KeyboardInterrupt

    def _status(self) -> dict[str, Any]:
        try:
            sys.stdout.flush()
        except (ValueError, OSError, RuntimeError):
            pass  # the learner replaced it, or the main thread is writing to it
        frame = sys._current_frames().get(self.main_thread)
        top, line = "", 0
        while frame is not None:
            name = frame.f_code.co_filename
            top = top or name
            if name.startswith("<cell") or "ipykernel_" in name:
                line = frame.f_lineno
                break
            frame = frame.f_back
        recorder = self.recorder
        operations = []
        for o in list(recorder.open.values()):
            if not o.finished:
                operations.append(
                    {
                        "op": o.op,
                        "text": o.describe(),
                        "group": o.group,
                        "ranks": o.ranks,
                        "key": o.key,
                        "seq": o.seq,
                        "nth": o.nth,
                        "peer": o.peer,
                        "tag": o.tag,
                        "line": o.line,
                        "via": o.via,
                        "nbytes": o.nbytes,
                        "waiting": o.waiting,
                    }
                )
        return {
            "rank": self.birth.rank,
            "phase": self.phase,
            "cell": recorder.cell,
            "line": line,
            "in_torch": "/torch/" in top,
            "cpu": system.thread_cpu_seconds(self.main_thread),
            "operations": operations,
            "counts": dict(recorder.counts),
            "calls": recorder.total,
            "other_threads": bool(recorder.threads),
        }

    def _complete(self, text: str) -> list[str]:
        """Names of this rank that begin with `text`, which may be dotted. Evaluates attributes only, no
        calls.
        """
        head, dot, start = text.rpartition(".")
        if not dot:
            return [n for n in self.names if n.startswith(start)]
        value: Any = self.names.get(head.split(".")[0], self)
        if value is self:
            return []
        for part in head.split(".")[1:]:
            value = getattr(value, part, None)
        return [f"{head}.{n}" for n in dir(value) if n.startswith(start)]

    def _watch_new_groups(self) -> None:
        """Record `new_group` like an operation: it waits for ranks too, and opens connections."""
        recorder, original = self.recorder, dist.new_group

        def new_group(*args: Any, **kwargs: Any) -> Any:
            o = record.Operation("new_group")
            o.group, o.ranks = "new_group", tuple(range(self.birth.world_size))
            o.line, o.via = record._caller()
            o.thread = threading.get_ident()
            with recorder._lock:
                recorder._number(o)
                recorder.open[id(o)] = o
            o.start = record.clock()
            before = set(system.tcp_connections())
            try:
                return original(*args, **kwargs)
            finally:
                o.done = record.clock()
                recorder.open.pop(id(o), None)
                self._connections += system.duplicate(set(system.tcp_connections()) - before)

        for module in (dist, dist.distributed_c10d, dist.device_mesh):
            if getattr(module, "new_group", None) is original:
                module.new_group = new_group


def _moved(before: _Moved, after: _Moved) -> tuple[Connection, ...] | None:
    """What went over each connection during the cell."""
    if before is None or after is None:
        return None
    found = []
    for ports, (sent, received) in after.items():
        sent_before, received_before = before.get(ports, (0, 0))
        found.append(Connection(*ports, sent - sent_before, received - received_before))
    return tuple(found)


def _short(value: Any) -> str:
    """A value in a few characters: a tensor by its numbers if they are few, else by its shape."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= 8:
            numbers = ", ".join(f"{v:.4g}" for v in value.detach().flatten().tolist())
            return f"[{numbers}]" if value.dim() else numbers
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _is_silenced(source: str) -> bool:
    """Whether the cell's last expression ends in a semicolon, which hides its value as in any notebook."""
    last = source.rstrip().splitlines()[-1] if source.strip() else ""
    return last.split("#")[0].rstrip().endswith(";")


def _no_input(*_: Any, **__: Any) -> str:
    raise RankInputError


class _TooLarge(Exception):
    pass


class _Limited(io.BytesIO):
    """A buffer that refuses more than `limit` bytes."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit = limit

    def write(self, data: Any) -> int:
        if self.limit is not None and self.tell() + memoryview(data).nbytes > self.limit:
            raise _TooLarge
        return super().write(data)


class _ValuePickler(cloudpickle.Pickler):
    """Sends a tensor as plain numbers on the CPU: its value, not its graph and not its GPU."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            value = value.detach().cpu()
            if value.untyped_storage().nbytes() != value.numel() * value.element_size():
                value = value.clone()  # a slice must not carry the whole tensor along
            return value.__reduce_ex__(4)
        return super().reducer_override(value)


def _pack(value: Any, text: str, limit: int | None) -> bytes | NotSent:
    buffer = _Limited(limit)
    try:
        _ValuePickler(buffer).dump(value)
    except _TooLarge:
        return NotSent(text, f"larger than {MAX_VALUE_NBYTES >> 20} MiB: fetch it with --pull")
    except Exception as error:  # noqa: BLE001 - reported
        return NotSent(text or repr(value), f"cannot be sent: {type(error).__name__}: {error}")
    return buffer.getvalue()
