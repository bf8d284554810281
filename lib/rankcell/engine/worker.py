"""Inside a rank: its names, its process group, and the cells that the notebook sends.

The main thread runs cells. A second thread (`control.py`) answers the notebook while a cell runs. Every
exception of the learner's is caught in `run`, to report it.
"""

import builtins
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from .. import source
from ..errors import GroupError, RankInputError, SpawnError
from ..results import Connection, Display, NotSent, RankFailure
from . import listen, record, report, shell, system
from .channel import Channel
from .control import Control
from .execute import execute
from .groups import Groups
from .match import SignatureTable
from .messages import Birth, Done, Failed, Join, Outcome, Ready, Shown, Task
from .meter import Meter
from .operation import caller, clock
from .stdio import Stdio

_BALLAST = 4 << 20  # bytes given back when memory runs out, so that the report of it can be made
_Moved = dict[tuple[str, str], tuple[int, int]] | None  # (our end, the other end) -> bytes sent, received


def prepare() -> None:
    """Make what every rank needs, once, before the ranks are forked: the shell and the recorder. What is made
    here is memory that the ranks share.
    """
    made = shell.make()
    made.recorder = record.Recorder()
    listen.install(made.recorder)
    sys.displayhook = sys.__displayhook__


def main(birth: Birth, work: int, control: int, stdout: int, stderr: int, board: int) -> None:
    """The life of a rank, in a fork of the process that imported torch, to the end of its channel."""
    system.die_with_parent()
    os.setpgid(0, 0)  # what a cell starts is in this group, and ends with it
    Rank(birth, Channel(socket.socket(fileno=work)), control, Stdio(stdout, stderr), board).serve()


class Rank:
    """One rank: its names, its process groups, its two channels."""

    def __init__(self, birth: Birth, work: Channel, control_fd: int, stdio: Stdio, board_fd: int) -> None:
        self.birth = birth
        self.work = work
        self.stdio = stdio
        self.running = False
        self.phase = "starting"
        self.main_thread = threading.get_ident()
        self._pid = os.getpid()
        self._notes: list[str] = []
        self._shielded = False  # the main thread is in the middle of a message: an interrupt waits
        self._pending = False
        self._ballast: bytearray | None = bytearray(_BALLAST)
        self._limits = system.memory_limits()
        self._set_up_environment()
        self.shell: Any = shell.RankShell.instance()
        self.stage: Any = None
        self.recorder: record.Recorder
        self.groups: Groups
        self.control: Control
        self._meet_others(control_fd, board_fd)
        self.names = self._first_names()
        shell.Publisher.show = self.show

    def _meet_others(self, control_fd: int, board_fd: int) -> None:
        """Make what the notebook and the other ranks are met with: recorder, groups, control thread."""
        birth, self.recorder = self.birth, self.shell.recorder
        if birth.on:  # nobody else is there
            self.recorder.bind_rank(birth.rank, None, enqueues=frozenset())
            self._set_stage()
        else:
            table = SignatureTable(board_fd, birth.rank, birth.world_size)
            self.recorder.bind_rank(birth.rank, table, enqueues=birth.enqueues)
        os.close(board_fd)
        self.groups = Groups(birth, self.recorder, self._notes.append)
        self.control = Control(self, Channel(socket.socket(fileno=control_fd)))

    def _set_stage(self) -> None:
        """This rank rehearses: its tensors are fake, its time is the clock's, nobody answers it."""
        from ..rehearsal.cluster import Cluster
        from ..rehearsal.stage import Stage

        self.stage = Stage(Cluster.parse(self.birth.on, self.birth.world_size), self.recorder, caller)
        self.recorder.stage, self.recorder.clock = self.stage, self.stage.clock

    def _set_up_environment(self) -> None:
        settle(self.birth)
        torch.set_num_threads(1)
        self._take_signals()
        threading.current_thread().name = f"rank {self.birth.rank}"

    def _take_signals(self) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _first_names(self) -> dict[str, Any]:
        birth = self.birth
        if birth.device == "cuda":
            torch.cuda.set_device(birth.local_rank % torch.cuda.device_count())
            device = torch.device("cuda", torch.cuda.current_device())
            if birth.memory_fraction is not None:
                torch.cuda.set_per_process_memory_fraction(birth.memory_fraction)
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
            get_ipython=self.shell.get_ipython,
        )
        self.shell.user_module, self.shell.user_ns = module, names
        from IPython.display import display

        names["display"] = display
        self._lent = {name: names[name] for name in (*source.LENT, "display", "get_ipython", "__builtins__")}
        return names

    def serve(self) -> None:
        """Answer the notebook until it is gone."""
        self.groups.install()
        self.control.thread.start()
        self._join(self.birth.generation)
        self.phase = "idle"
        while True:
            try:
                order = self.work.receive()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(order, Join):
                self._join(order.generation)
            else:
                self.work.send(Done(self.run(order)))

    def _join(self, generation: int) -> None:
        try:
            self.groups.join(generation)
        except Exception as error:  # noqa: BLE001 - reported: the notebook replaces this rank, or says why
            self.work.send(Failed(f"{type(error).__name__}: {error}"))
        else:
            self.work.send(Ready(generation))

    def run(self, task: Task) -> Outcome:
        """Run one cell or function call and say what happened. Never raises."""
        self._begin(task)
        moved_before = system.bytes_moved(self.groups.connections)
        start = clock()
        meter: Meter | None = None
        failed: RankFailure | None = None
        value: Any = None
        data: dict[str, Any] = {}
        packed: bytes | NotSent | None = None
        pulled: dict[str, bytes | str] = {}
        seconds = 0.0
        try:
            try:
                if self.stage is None:
                    value = self._work(task, self._given(task))
                    self._settle()
                    seconds = clock() - start
                else:
                    meter = Meter(began=0.0, clock=self.stage.clock, watches=False)
                    given = self.stage.faked(self._given(task))
                    with self.stage.playing(meter):
                        value = self._work(task, given)
                    seconds = self.stage.clock.finish()
                # a __repr__ of the learner's is part of the cell: it may raise, wait, and communicate
                if value is not None:
                    data, _ = self.shell.display_formatter.format(value)
                    packed = report.pack(value, data.get("text/plain", ""))
                    self._settle()
                pulled = {name: self._pull(name) for name in task.pull}
            finally:
                self._leave_if_a_fork()
                self.running = False
        except BaseException as error:  # noqa: BLE001 - reported to the notebook, which raises it
            self.running = False
            seconds = seconds or clock() - start
            failed = self._failure(error, task)
            data, packed, pulled = {}, None, {}
        self._end()
        self.phase = "error" if failed else "finished"
        recorder = self.recorder
        return Outcome(
            cell=task.cell,
            error=failed,
            value=packed,
            data=data,
            pulled=pulled,
            seconds=seconds,
            events=recorder.events(),
            dropped=recorder.dropped,
            counts={} if self.stage else dict(recorder.counts),  # nobody else has called anything
            calls=recorder.total,
            broken=recorder.broken,
            group=self.groups.name,
            open=sum(not o.finished for o in list(recorder.open.values())),
            mismatch=recorder.matcher.found,
            threads=self.control.threads(busy=False),
            wire=None
            if recorder.enqueues
            else _moved(moved_before, system.bytes_moved(self.groups.connections)),
            names=tuple(n for n in self.names if not n.startswith("_")),
            memory=recorder.memory or (meter.samples if meter is not None else ()),
            trace=recorder.trace,
            order=self.stdio.turns,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _settle(self) -> None:
        """Wait until the device is through with what the cell waits for: its failures belong to this cell."""
        while True:
            if self.groups.aborted:  # the host went on, with whatever stood in the tensors
                raise GroupError("the process groups were aborted while the device waited in them.")
            if self.recorder.settled():
                return
            time.sleep(0.0005)

    def _leave_if_a_fork(self) -> None:
        """A child that a cell has forked ends where the cell ends: it is no rank, whatever it holds open."""
        if os.getpid() == self._pid:
            return
        error, code = sys.exc_info()[1], 0
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            traceback.print_exception(error)
            code = 1
        self.stdio.flush()
        os._exit(code)

    def _begin(self, task: Task) -> None:
        self.phase = "running"  # before the recorder learns of the cell, see `Control.status`
        self._pending = False
        self._notes.clear()
        self._take_signals()
        self.stdio.begin()
        if self._ballast is None:
            self._ballast = bytearray(_BALLAST)
        if task.forget_counts:
            self.recorder.forget_counts()
        self.recorder.begin(task.cell, began=0.0 if self.stage else task.began, values=task.values)
        self.running = True

    def _end(self) -> None:
        self._take_signals()
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # an alarm belongs to the cell that has set it
        system.restore_memory_limits(self._limits)
        for name, ours in self._lent.items():
            if name not in self.names:
                self.names[name] = ours  # `del rank`, or `%reset`
        for name, ours in (("rank", self.birth.rank), ("world_size", self.birth.world_size)):
            given = self.names[name]
            if type(given) is not int or given != ours:
                self.names[name] = ours
                self._notes.append(
                    f"the cell gave `{name}` another value; the next cell finds it as it was. Take another name for "
                    f"yours."
                )
        self.stdio.flush()

    def _given(self, task: Task) -> tuple[dict[str, Any], Any]:
        """What came with the task: the pushed names, and the function with its arguments, if it is one."""
        return cloudpickle.loads(task.push) if task.push else {}, cloudpickle.loads(
            task.call
        ) if task.call else None

    def _work(self, task: Task, given: tuple[dict[str, Any], Any]) -> Any:
        pushed, call = given
        for item in pushed.values():
            self._lend_names(item)
        self.names.update(pushed)
        if call is not None:
            function, args, kwargs = call
            self._lend_names(function)
            return function(*args, **kwargs)
        with self._around(task.around):
            return execute(task.source, task.filename, self.names)

    def _around(self, name: str) -> AbstractContextManager[Any]:
        """What the cell runs inside: other parts put their observers there."""
        module, _, found = name.partition(":")
        return getattr(importlib.import_module(module), found)(self.recorder) if name else nullcontext()

    def _lend_names(self, value: Any) -> None:
        """Let a function from the notebook use `rank`, `world_size`, `device`, `torch` and `dist` as a cell
        does.
        """
        scope = getattr(value, "__globals__", None)
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if isinstance(scope, dict) and scope is not getattr(module, "__dict__", None):
            for name in source.LENT:
                scope.setdefault(name, self.names[name])

    def _failure(self, error: BaseException, task: Task) -> RankFailure:
        if isinstance(error, MemoryError):
            self._ballast = None
            system.restore_memory_limits(self._limits)
        found = report.failure(error, at=clock() - task.began, call=self.recorder.failed_call)
        return report.without_addresses(found, renewed=self.groups.renewed)

    def _pull(self, name: str) -> bytes | str:
        """The pickled value of `name`, or a sentence that says why there is none."""
        if name not in self.names:
            return "missing"
        packed = report.pack(self.names[name], "", None)
        return packed if isinstance(packed, bytes) else packed.reason

    def show(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool
    ) -> None:
        """Send a rich display, with the place in stdout where it belongs."""
        message = Shown(Display(data, metadata, self.stdio.place(), display_id), update)
        if threading.get_ident() != self.main_thread:
            self.work.send(message)
            return
        self._shielded = True  # half a message would make all later ones unreadable
        try:
            self.work.send(message)
        finally:
            self._shielded = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _on_interrupt(self, *_: Any) -> None:
        if self._shielded:
            self._pending = True
        elif self.running:  # asked for by the notebook, or by the program itself
            raise KeyboardInterrupt


def settle(birth: Birth) -> None:
    """Give the process the environment, the folder and the import path of a rank, and what stands in for a terminal."""
    os.environ.clear()
    os.environ.update(birth.environment)
    address = "127.0.0.1" if birth.store.startswith("/") else birth.store.rpartition(":")[0]
    os.environ.update(
        RANK=str(birth.rank),
        WORLD_SIZE=str(birth.world_size),
        LOCAL_RANK=str(birth.local_rank),
        LOCAL_WORLD_SIZE=str(birth.local_world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(birth.port),
    )
    if birth.device == "cpu":
        # where no device is named torch takes a GPU that it sees: in fully_shard, in a mesh
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if os.path.isdir(birth.folder):  # noqa: PTH112
        os.chdir(birth.folder)
    sys.path[:] = list(birth.path)
    sys.argv = [""]
    _replace_what_needs_a_terminal()


def _replace_what_needs_a_terminal() -> None:
    """Keyboard input, the debugger, and processes of torch's own: each says what to do instead."""
    import torch.multiprocessing as mp

    builtins.input = _no_input
    sys.breakpointhook = _no_debugger
    spawn = mp.spawn

    def spawn_or_explain(fn: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__module__", None) == "__main__":
            raise SpawnError(getattr(fn, "__name__", "main"))
        return spawn(fn, *args, **kwargs)

    mp.spawn = spawn_or_explain
    # a worker of a DataLoader is a fork of the rank: it has the names that the cells have defined
    mp.set_start_method("fork", force=True)


def _moved(before: _Moved, after: _Moved) -> tuple[Connection, ...] | None:
    """What went over each connection during the cell."""
    if before is None or after is None:
        return None
    found = []
    for ports, (sent, received) in after.items():
        sent_before, received_before = before.get(ports, (0, 0))
        found.append(Connection(*ports, sent - sent_before, received - received_before))
    return tuple(found)


def _no_input(*_: Any, **__: Any) -> str:
    raise RankInputError


def _no_debugger(*_: Any, **__: Any) -> None:
    raise RankInputError(report.BDB_NOTE)
