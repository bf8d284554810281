"""Threads of one process that take turns: one runs, until it waits for another one, and the next goes on.

Which one is next depends on nothing but what they call, so that two runs of a program are alike: those that can go on
do so in the order in which they could. It does not know what they wait for (`meeting.py` does).
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Seat:
    """The place of one thread among those that take turns.

    Args:
        leave, enter: called in the thread when its turn ends, and when the next one begins.
    """

    def __init__(self, leave: Callable[[], None], enter: Callable[[], None]) -> None:
        self.leave, self.enter = leave, enter
        self.thread = 0  # ident of the thread
        self.wants: Any = None  # what it waits for
        self.woken = False  # while it runs
        self.freed: BaseException | None = None  # why it must leave whatever it does
        # its turn is being handed on, or it speaks to the notebook: an exception must wait until that is over
        self.shielded = True
        self._gate, self._alarm = threading.Lock(), threading.Lock()
        self._gate.acquire()
        self._alarm.acquire()


class Turns:
    """Who runs, and who can go on."""

    def __init__(self) -> None:
        self.holder: Seat | None = None
        self._ready: deque[Seat] = deque()
        self._asleep: set[Seat] = set()
        self._lock = threading.Lock()
        self.stuck: Callable[[], None] = lambda: None  # called when nobody can go on

    def take(self, seat: Seat) -> None:
        """The first turn of this thread: wait for it."""
        seat.thread = threading.get_ident()
        self.wake(seat)
        self._back(seat)

    def wake(self, seat: Seat) -> None:
        """`seat` can go on, when those have had their turn that could before it. From any thread."""
        with self._lock:
            if seat is self.holder:
                seat.woken = True  # it may be about to park
            if seat is self.holder or seat in self._ready or seat in self._asleep:
                return
            self._ready.append(seat)
            if self.holder is None:
                self._give()

    def park(self, seat: Seat) -> None:
        """Let the others run until somebody wakes this one."""
        self._hand_on(seat)
        if self.holder is None and not self._asleep:
            self.stuck()
        self._back(seat)

    def pass_on(self, seat: Seat) -> None:
        """Let all run once that can."""
        if self._ready:
            self._hand_on(seat, last=True)
            self._back(seat)

    def sleep(self, seat: Seat, seconds: float) -> None:
        """Let the others run for so long."""
        with self._lock:
            self._asleep.add(seat)
            seat.woken = False
        self._hand_on(seat)
        seat._alarm.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        with self._lock:
            self._asleep.discard(seat)
        self.wake(seat)
        self._back(seat)

    def free(self, seat: Seat, error: BaseException) -> None:
        """Have `error` raised in the thread of `seat`, whatever it does. From any thread.

        In the one that runs it is a KeyboardInterrupt, which a long call in C puts off.
        """
        seat.freed = error
        if seat is self.holder:
            if not seat.shielded:
                ident, kind = ctypes.c_ulong(seat.thread), ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)
        elif seat in self._asleep and seat._alarm.locked():
            seat._alarm.release()
        else:
            self.wake(seat)

    def _hand_on(self, seat: Seat, *, last: bool = False) -> None:
        seat.shielded = True
        seat.leave()
        with self._lock:
            self.holder = None
            if last or seat.woken:
                self._ready.append(seat)
            seat.woken = False
            self._give()

    def _give(self) -> None:
        if self._ready:
            self.holder = self._ready.popleft()
            self.holder._gate.release()

    def _back(self, seat: Seat) -> None:
        seat._gate.acquire()
        seat.enter()
        seat.shielded = False
        if seat.freed is not None:
            raise seat.freed
