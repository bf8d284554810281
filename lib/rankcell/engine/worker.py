"""Inside a rank: its process group, and the cells that the notebook sends.

The main thread runs cells. A second thread (`control.py`) answers the notebook while a cell runs. Every
exception of the learner's is caught in `run`, to report it.
"""

import ast
import asyncio
import inspect
import linecache
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

from ..errors import GroupError
from ..results import Connection, Display, NotSent, RankFailure, RankResult, at_line, name_some
from ..source import marks, split
from . import control, current, environment, listen, operation, record, report, settings, shell, stacks, system
from .channel import Channel
from .groups import Groups
from .match import SignatureTable
from .messages import Done, Join, Joined, RankState, Shown, StartRank, Task
from .operation import clock
from .stdio import Stdio

_Moved = dict[tuple[str, str], tuple[int, int]] | None  # (our end, the other end) -> bytes sent, received


def prepare() -> None:
    """Make what every rank needs, once, before ranks are forked, which then share its memory: shell and recorder."""
    made = shell.make()
    current.recorder = made.recorder = record.Recorder()
    listen.install(made.recorder)
    sys.displayhook = sys.__displayhook__


def main(config: StartRank, work: int, control: int, stdout: int, stderr: int, table: int, crash: int) -> None:
    """The life of a rank, in a new process that has torch, to the end of its channel."""
    system.die_with_parent()
    stacks.keep_crashes(crash)
    os.setpgid(0, 0)  # what a cell starts is in this group, and ends with it
    Rank(config, Channel(socket.socket(fileno=work)), control, Stdio(stdout, stderr), table).serve()


class Rank:
    """One rank: its names, its process groups, its two channels."""

    def __init__(self, config: StartRank, work: Channel, control_fd: int, stdio: Stdio, table_fd: int) -> None:
        self.config, self.work, self.stdio = config, work, stdio
        self.running, self.phase = False, "starting"
        self.main_thread, self._pid = threading.get_ident(), os.getpid()
        self._notes: list[str] = []
        self._exit = ""  # what ended the cell early, without an error
        self._given: dict[str, Any] = {}  # what was pushed for the cell, and its `marks` then
        environment.enter(config)
        self._settings = settings.read()  # those of the notebook, until it changes one
        self._process = environment.Process()
        self._process.restore(self._on_interrupt)
        threading.current_thread().name = f"rank {config.rank}"
        self.shell: Any = shell.RankShell.instance()
        self.recorder: record.Recorder = self.shell.recorder
        table = SignatureTable(table_fd, config.rank, config.world_size)
        self.recorder.bind_rank(config.rank, table, enqueues=config.enqueues)
        os.close(table_fd)
        self.groups = Groups(config, self.recorder, self._notes.append)
        self.control = control.Control(self, Channel(socket.socket(fileno=control_fd)))
        self._names = environment.Names(config, self.shell)
        self.names = self._names.values
        shell.Publisher.show = self.show

    def serve(self) -> None:
        """Answer the notebook until it is gone."""
        self.groups.install()
        self.control.thread.start()
        self._join(self.config.generation)
        self.phase = "idle"
        while True:
            try:
                message = self.work.receive()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, Join):
                self._join(message.generation)
            else:
                self.work.send(self.run(message))

    def _join(self, generation: int) -> None:
        problem = ""
        try:
            self.groups.join(generation)
        except Exception as error:  # noqa: BLE001 - reported: the notebook replaces this rank, or says why
            problem = f"{type(error).__name__}: {error}"
        self.work.send(Joined(generation, problem))

    def run(self, task: Task) -> Done:
        """Run one cell or function call and say what happened. Never raises."""
        self.phase = "running"  # before the recorder learns of the cell, see `Control.status`
        self._notes.clear()
        self._process.resume()
        self.stdio.begin(self.control.thread.ident)
        if task.forget_counts:
            self.recorder.forget_counts()
        self.recorder.begin(task.cell, began=task.began, values=task.values)
        self.groups.left.clear()
        self.running = True
        moved_before = system.bytes_moved(self.groups.connections)
        start = clock()
        failed: RankFailure | None = None
        value: bytes | NotSent | None = None
        data: dict[str, Any] = {}
        pulled: dict[str, bytes | str] = {}
        seconds = 0.0
        try:
            try:
                found, seconds = self._work(task, start)
                # a __repr__ of the learner's is part of the cell: it may raise, wait, and communicate
                if found is not None:
                    data, _ = self.shell.display_formatter.format(found, exclude={shell.WIDGET})
                    value = report.pack(found, data.get("text/plain", ""))
                    self._synchronize()
                pulled = {name: self._names.pull(name) for name in task.pull}
            finally:
                self._leave_if_a_fork()
                self.shell.events.trigger("post_execute")  # shows figures that are open, as in a notebook
                self.running = False
        except BaseException as error:  # noqa: BLE001 - reported to the notebook, which raises it
            self.running = False
            seconds = seconds or clock() - start
            if isinstance(error, MemoryError):
                self._process.make_room()
            found = report.failure(error, at=clock() - task.began, call=self.recorder.failed_call)
            failed = report.without_addresses(found, renewed=self.groups.renewed)
            data, value, pulled = {}, None, {}
        self._process.restore(self._on_interrupt)
        self._notes += self._names.restore()
        if late := name_some(self.stdio.late):
            said = f"a thread of an earlier cell (`{late}`) has printed, too"
            self._notes.append(f"{said}: its lines stand under this cell.")
        self.stdio.flush()
        self.phase = "error" if failed else "finished"
        recorder = self.recorder
        moved = None if recorder.enqueues else system.bytes_moved(self.groups.connections)
        result = RankResult(
            self.config.rank, "error" if failed else "ok", node=self.config.node, value=value, data=data, error=failed,
            seconds=seconds, events=recorder.events(), dropped=recorder.dropped, memory=recorder.memory,
            trace=recorder.trace, mismatch=recorder.matcher.found, order=tuple(self.stdio.turns),
            connections=_moved(moved_before, moved),
        )  # fmt: skip
        return Done(task.cell, result, self._state(pulled))

    def _state(self, pulled: dict[str, bytes | str]) -> RankState:
        recorder = self.recorder
        return RankState(
            pulled, dict(recorder.counts), recorder.total, recorder.broken, self.groups.name,
            exit=self._exit, open=sum(not o.finished for o in list(recorder.open.values())),
            threads=control.threads(recorder, {self.main_thread, self.control.thread.ident}, busy=False),
            names=tuple(n for n in self.names if not n.startswith("_")), notes=tuple(dict.fromkeys(self._notes)),
            changed=tuple(name for name, (value, before) in self._given.items() if marks(value)[0] != before[0]),
        )  # fmt: skip

    def _work(self, task: Task, start: float) -> tuple[Any, float]:
        """The value of the cell or call, and the seconds until all that it waits for was through."""
        pushed = _read(task.push, task.pushed) if task.push else {}
        self.names.update(pushed)
        for item in pushed.values():
            self._names.lend(item)
        # a tensor by itself is left out: communication is made to change those
        self._given = {n: (value, marks(value)) for n, value in pushed.items() if not isinstance(value, torch.Tensor)}
        settings.follow(task.settings, self._settings)
        self._settings |= task.settings
        self._exit, value = "", None
        operation.cell["runs"] = "" if task.call else task.filename
        try:
            if task.call:
                function, args, kwargs = cloudpickle.loads(task.call)
                self._names.lend(function)
                value = function(*args, **kwargs)
            else:
                value = _execute(task.source, task.filename, self.names)
        except SystemExit as error:
            if error.code:
                raise
            at = at_line(report.failure(error).line)  # of a script that is through
            self._exit = f"sys.exit(){' in ' * bool(at)}{at}"
        self._synchronize()
        return value, clock() - start

    def _synchronize(self) -> None:
        """Wait until the device is through with what the cell waits for: its failures belong to this cell."""
        while True:
            if self.groups.aborted:  # the host went on, with whatever stood in the tensors
                raise GroupError("the process groups were aborted while the device waited in them.")
            if self.recorder.device_is_through():
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

    def show(self, data: dict[str, Any], display_id: str | None, update: bool) -> None:
        """Send a rich display, with the place in stdout where it belongs."""
        # half a message would make all later ones unreadable: an interrupt waits
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.work.send(Shown(Display(data, self.stdio.place(), display_id), update))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _on_interrupt(self, *_: Any) -> None:
        if self.running:  # asked for by the notebook, or by the program itself
            raise KeyboardInterrupt


def _read(push: bytes, names: Sequence[str]) -> dict[str, Any]:
    """What was pushed under these names; the error of what cannot be read says that it was that."""
    try:
        return cloudpickle.loads(push)
    except Exception as error:
        lacks = "Does this rank lack something that it is made of?"
        how = "Run in a rank cell, too, what has made that in the notebook."
        if isinstance(error, RecursionError):
            lacks = "Its `__getattr__` is asked before it has any attribute:"
            how = "let it raise AttributeError for names that begin with an underscore."
        error.add_note(f"{', '.join(names)} came and could not be read here. {lacks} {how}")
        raise


def _moved(before: _Moved, after: _Moved) -> tuple[Connection, ...] | None:
    if before is None or after is None:
        return None
    return tuple(
        Connection(*ports, sent - before.get(ports, (0, 0))[0], received - before.get(ports, (0, 0))[1])
        for ports, (sent, received) in after.items()
    )


def _execute(source: str, filename: str, names: dict[str, Any]) -> Any:
    """Run `source` in `names`; the value of its last expression. `await` may stand outside of functions."""
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    tree, last = split(source, filename)
    parts = [compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]
    if last is not None:
        parts.append(compile(last, filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    if any(code.co_flags & inspect.CO_COROUTINE for code in parts):
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves `get_event_loop` as it was
            return runner.run(_awaited(parts, names))
    return [eval(code, names) for code in parts][-1]


async def _awaited(parts: Sequence[Any], names: dict[str, Any]) -> Any:
    value = None
    for code in parts:
        value = eval(code, names)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value
