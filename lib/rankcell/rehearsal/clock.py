"""Seconds that pass on the streams of a GPU that is not there.

Work is enqueued on the current stream and takes the time it is given; a stream waits for an event or for a
communication by moving on to the moment of its end. torch's own streams of the CPU do nothing: while a rehearsal
runs they keep this time, so that what FSDP2 overlaps on a GPU overlaps here. Launching is taken to be free.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class StreamClock:
    """The time on the current stream, and when each process group is free again."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}  # by id of the stream
        self._free: dict[str, float] = {}  # by group: its operations go one after another
        self._streams: list[Any] = []  # kept, so that no other stream gets the id of one

    def begin(self) -> None:
        """All streams stand at 0 again."""
        self._at.clear()
        self._free.clear()
        self._streams.clear()

    def __call__(self) -> float:
        """Seconds on the current stream."""
        return self._at.get(id(torch.cpu.current_stream()), 0.0)

    def work(self, seconds: float) -> None:
        """The current stream is busy for so long."""
        self.wait_until(self() + seconds)

    def wait_until(self, at: float, stream: Any = None) -> None:
        """The stream, by default the current one, does nothing more before the moment `at`."""
        stream = torch.cpu.current_stream() if stream is None else stream
        if id(stream) not in self._at:
            self._streams.append(stream)
        self._at[id(stream)] = max(self._at.get(id(stream), 0.0), at)

    def communicate(self, group: str, seconds: float) -> float:
        """An operation of `group` is enqueued behind those before it; the moment of its end."""
        end = self._free[group] = max(self._free.get(group, 0.0), self()) + seconds
        return end

    def finish(self) -> float:
        """The moment at which all streams and all operations are through."""
        return max([*self._at.values(), *self._free.values()], default=0.0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, torch's streams and events of the CPU keep this time."""

        def now(stream: Any) -> float:
            return self._at.get(id(stream), 0.0)

        def record(event: Any, stream: Any = None) -> None:
            event.at = now(stream or torch.cpu.current_stream())

        def record_event(stream: Any, event: Any = None) -> Any:
            event = torch.cpu.Event() if event is None else event
            record(event, stream)
            return event

        def wait(event: Any, stream: Any = None) -> None:
            self.wait_until(getattr(event, "at", 0.0), stream)

        stream, event = torch.cpu.Stream, torch.cpu.Event
        with contextlib.ExitStack() as replaced:
            for owner, name, method in (
                (stream, "wait_stream", lambda stream, other: self.wait_until(now(other), stream)),
                (stream, "wait_event", lambda stream, event: wait(event, stream)),
                (stream, "record_event", record_event),
                (event, "record", record),
                (event, "wait", wait),
                (event, "synchronize", wait),
            ):
                replaced.enter_context(mock.patch.object(owner, name, method))
            yield
