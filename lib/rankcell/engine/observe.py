"""Inside a rank: what is recorded besides communication, when a program asks for it.

Spans of computing (`rankcell.span`), an array whose numbers are noted with every communication (`rankcell.watch`), and
what other parts measure (`rankcell.spans`, `rankcell.memory`, `rankcell.trace`), to go with the cell's result.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..results import Event, Memory, Watched
from .operation import MAX_VALUES, Operation, caller, clock, numbers, part_of

MAX_EVENTS = 10_000  # operations, and spans, per rank and cell; older ones are only counted


class Observer:
    """Notes what a program asks for, in the cell that has begun last."""

    rank = 0

    def begin_observing(self, began: float) -> None:
        """Forget the last cell; times are since `began`."""
        self.began = began
        self.dropped = 0  # operations and spans that are not kept
        self.computing: deque[Event] = deque()
        self.memory: tuple[Memory, ...] = ()
        self.array: torch.Tensor | None = None  # that `watch` looks at
        self._watching: Operation | None = None  # the last operation seen by it
        self.meters: list[Any] = []  # what measures memory now: it wants to know the phase

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = clock()
        outside = [(meter, meter.phase) for meter in self.meters]
        for meter, _ in outside:
            meter.phase = name
        try:
            yield
        finally:
            now = clock()
            for meter, phase in outside:
                meter.phase = phase
            self.note_span(name, start, now, caller()[0])

    def note_span(self, name: str, start: float, end: float, line: int = 0) -> None:
        self.make_room(self.computing)
        self.computing.append(Event(self.rank, name, start - self.began, end - self.began, kind="compute", line=line))

    def make_room(self, kept: deque[Any]) -> None:
        """Let go of the oldest of many events."""
        if len(kept) >= MAX_EVENTS:
            kept.popleft()
            self.dropped += 1

    @contextlib.contextmanager
    def watch(self, array: torch.Tensor) -> Iterator[None]:
        if array.numel() > MAX_VALUES:
            raise ValueError(f"an array of {array.numel()} numbers is too long to watch: {MAX_VALUES} at most.")
        self.array, self._watching = array, None
        try:
            yield
        finally:
            self.look_at_array(None, None)
            self.array = None

    def look_at_array(self, o: Operation | None, tensor: torch.Tensor | None) -> None:
        """Note what the watched array holds now: after the last operation, before `o`."""
        array, last = self.array, self._watching
        if array is None:
            return
        (now,) = numbers([array])
        if last is not None and last.watched is not None:
            last.watched = replace(last.watched, after=now)
        self._watching = o
        if o is not None:
            o.watched = Watched(now, now, None if tensor is None else part_of(array, tensor))
