"""Inside a rank: the thread that answers the notebook while the main thread runs or waits.

It says what the rank is doing, and on demand it frees the main thread. Nothing of the learner's may end it.
"""

import contextlib
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from . import system
from .channel import Channel
from .messages import Answer, Question, Status
from .operation import clock, file_of, kind_of
from .record import Recorder

if TYPE_CHECKING:
    from .worker import Rank

_WAITING = ("/threading.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py", "/queue.py")
BACK = 0.1  # seconds that an interrupted main thread has to come back by itself before connections are closed


class Control:
    def __init__(self, rank: "Rank", channel: Channel) -> None:
        self._rank, self._channel = rank, channel
        self.thread = threading.Thread(target=self._serve, name="rankcell control", daemon=True)

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                question, answer = self._channel.receive(), None
                with contextlib.suppress(Exception):  # the notebook goes on without this answer
                    answer = self._answer(question)
                self._channel.send(Answer(question.number, answer))
        os._exit(0)  # the notebook is gone

    def _answer(self, question: Question) -> Any:
        if question.about == "status":
            return self.status()
        if question.about == "complete":
            return complete(question.argument, self._rank.names)
        self._free(question.argument, wanted=question.about == "interrupt")
        return True

    def _free(self, cell: str, *, wanted: bool) -> None:
        """Get the main thread out of `cell`, unless that is over here: a question may be read late.

        `wanted`: the learner asked for it, and most likely the rank computes, or waits only for a moment. Then
        Python is interrupted first, and connections are closed if that did not help: gloo may hang for good if
        its connections are closed in the middle of a transfer. Otherwise the rank is known to wait in vain, and
        leaves with the clean error of a closed connection.
        """
        if wanted and self._runs(cell):
            system.interrupt_children()  # as Jupyter does
            if self._runs(cell):  # of this process the main thread alone: it may have to finish a message first
                signal.pthread_kill(self._rank.main_thread, signal.SIGINT)
            self._await_end(cell)
        if self._runs(cell):
            self._rank.groups.close()
            self._await_end(cell)
        if self._runs(cell):
            signal.pthread_kill(self._rank.main_thread, signal.SIGINT)

    def _runs(self, cell: str) -> bool:
        return self._rank.running and self._rank.recorder.cell == cell

    def _await_end(self, cell: str) -> None:
        end = clock() + BACK
        while self._runs(cell) and clock() < end:
            time.sleep(0.002)

    def status(self) -> Status:
        rank = self._rank
        # the cell first, as `phase` is set before the recorder learns of a new one: no older phase is told as its own
        cell = rank.recorder.cell
        phase = rank.phase
        rank.stdio.place()  # sends what was printed; the main thread may be writing to stderr
        return look(rank.recorder, rank.config.rank, phase, rank.main_thread, cell=cell, ours={self.thread.ident})


def look(recorder: Recorder, rank: int, phase: str, main_thread: int, *, cell: str, ours: set[int | None]) -> Status:
    """What a rank is doing now, asked from another thread: one of `ours`, which never answer for the learner."""
    frame = _frames().get(main_thread)
    top, line, file, joins, compiles = "", 0, "", _waits_for_a_thread(frame), False
    synchronizes = bool(recorder.enqueues) and frame is not None and frame.f_code.co_name == "synchronize"
    while frame is not None:
        name = frame.f_code.co_filename
        top = top or name
        compiles = compiles or name.endswith("/torch/_dynamo/convert_frame.py")
        # in a cell the cell's own line, also inside of a function from a file; in a script the innermost line
        if name.startswith("<cell") or "ipykernel_" in name or (not cell and kind_of(frame.f_code) is True):
            line, file = frame.f_lineno, file_of(frame.f_code)
            break
        frame = frame.f_back
    waits, counts = recorder.status()
    return Status(
        rank, cell, phase, line, file, joins=joins, synchronizes=synchronizes, compiles=compiles, waits=waits,
        in_torch="/torch/" in top, runs=system.wants_a_core(), cpu=system.thread_cpu_seconds(main_thread),
        switches=system.thread_switches(main_thread), counts=counts, calls=recorder.total,
        threads=threads(recorder, {main_thread, *ours}, busy=True),
    )  # fmt: skip


def threads(recorder: Recorder, ours: set[int | None], *, busy: bool) -> bool:
    """Whether another thread than `ours` is in the learner's code; if `busy`, one in no operation, which may answer.

    A thread of a library that waits for work, such as a progress bar's, has no frame of the learner's.
    """
    waiting = {o.thread for o in list(recorder.open.values()) if busy and o.waiting}
    others = (frame for ident, frame in _frames().items() if ident not in ours and ident not in waiting)
    return any(kind_of(f.f_code) is True for frame in others for f, _ in traceback.walk_stack(frame))


def _waits_for_a_thread(frame: Any) -> bool:
    """Whether a thread stands in `join()`, `result()`, `acquire()` and the like, without a time limit."""
    inside = False
    while frame is not None and frame.f_code.co_filename.endswith(_WAITING):
        inside = True
        if frame.f_locals.get("timeout") not in (None, -1):  # -1 is what `join()` passes on where there is none
            return False
        frame = frame.f_back
    return inside


def _frames() -> dict[int, Any]:
    """Where every other thread stands. Our own frame would hold itself, and with it all tensors of a cell."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def complete(text: str, names: dict[str, Any]) -> list[str]:
    """Names that begin with `text`, which may be dotted. It runs no code of the learner's, such as a property."""
    head, dot, start = text.rpartition(".")
    found = names
    for part in head.split(".") if dot else ():
        if part not in found or (found is not names and inspect.isdatadescriptor(found[part])):
            return []
        found = _attributes(found[part])
    return [f"{head}{dot}{name}" for name in (sorted(found) if dot else found) if name.startswith(start)]


def _attributes(value: Any) -> dict[str, Any]:
    """What stands in a value and in its classes, by name."""
    classes = [*type(value).__mro__, *(value.__mro__ if isinstance(value, type) else ())]
    found = {name: what for kind in reversed(classes) for name, what in vars(kind).items()}
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found
    for name in ("_parameters", "_buffers", "_modules"):  # of a torch module
        found |= own[name] if isinstance(own.get(name), dict) else {}
    return dict(own) if inspect.ismodule(value) else found | own
