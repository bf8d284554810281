"""Inside a rank: writes down every communication, and knows at any time what the rank waits for.

`listen.py` tells it of every call before it is sent. Each is also published where other ranks can read it
(`match.py`): a rank whose call does not match its peers' raises `MismatchError` before any data moves. Beside these it
notes what a program asks for: spans of computing (`rankcell.span`), an array whose numbers are noted with every
communication (`rankcell.watch`), and what other parts measure, to go with the cell's result. It does not draw, and it
decides nothing about hangs: `diagnose.py` does.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..results import Call, Event, Memory, Watched
from .match import Matcher, SignatureTable
from .messages import Wait
from .operation import MAX_VALUES, Operation, caller, clock, numbers, part_of, queued

MAX_EVENTS = 10_000  # operations, and spans, per rank and cell; older ones are only counted
MAX_WAITS = 64  # operations in a device's queues of which the notebook is told: the first ones say it all


class Recorder:
    """Writes down every communication of this rank while a cell runs. One per rank, see `listen.install`.

    What the control thread asks for is read without a lock: lists and dictionaries of CPython are safe to
    read while the main thread appends. Other parts may add to `trace` what they observe; it goes with the result.
    """

    def __init__(self) -> None:
        # kinds of device whose calls return when they are enqueued: they are over when the device says so
        self.enqueues: frozenset[str] = frozenset()
        self.rank = 0
        self.listening: Any = None  # a torch.library.Library, for as long as it is kept
        self.matcher = Matcher()
        self.cell = self.generation = self._suffix = ""
        self.groups_with_timeout: set[str] = set()  # of their own: their waits end by themselves
        self.counts: dict[Any, int] = {}
        self.past: dict[Any, int] = {}  # of groups that this cell has destroyed: a slower rank may still wait there
        self.failures: dict[Any, int] = {}  # calls that raised, as `counts` counts those that did not
        self.open: dict[int, Operation] = {}  # issued and not known to be finished
        self.by_work: weakref.WeakKeyDictionary[Any, Operation] = weakref.WeakKeyDictionary()  # not waited for yet
        self._lock = threading.Lock()
        self.begin("", began=clock(), values=False)

    def bind_rank(self, rank: int, table: SignatureTable | None, *, enqueues: frozenset[str]) -> None:
        """From now on this is the recorder of `rank`: it was installed before the ranks were started."""
        self.rank = self.matcher.rank = rank
        self.enqueues, self.matcher.table = enqueues, table

    def begin(self, cell: str, *, began: float, values: bool) -> None:
        """Forget the last cell and record the one called `cell`, with times since `began`."""
        with self._lock:
            self._sweep()
            self.matcher.begin()
            self.began, self.cell, self.keep_values = began, cell, values
            self.dropped = 0  # operations and spans that are not kept
            self.computing: deque[Event] = deque()
            self.memory: tuple[Memory, ...] = ()
            self.array: torch.Tensor | None = None  # that `watch` looks at
            self._watching: Operation | None = None  # the last operation seen by it
            self.meters: list[Any] = []  # what measures memory now: it wants to know the phase
            self.operations, self.total = deque[Operation](), 0
            self.broken = False  # a wait failed: gloo has closed the connection, whoever caught the error
            self.failed_call: Call | None = None  # the last operation that raised
            self.failed_wait: Wait | None = None  # the same, as others are told of it
            self.latest: Any = None  # a Work that may be over before the program holds it, and would be gone then
            self.trace: tuple[Any, ...] = ()  # what other parts observed
            self.past, self._before = {}, dict(self.counts)

    def join(self, generation: str, *, again: bool = False) -> None:
        """Count from 1 again: the process groups are new, `again` within a cell, and nothing is open any more."""
        with self._lock:
            self.generation = generation
            self.past = {**self.past, **self.counts} if again else {}
            self._suffix = f"\n{generation}" if again else ""  # torch gives new groups the names of old ones
            for kept in (self.counts, self._before, self.failures, self.open, self.by_work):
                kept.clear()
            self.groups_with_timeout.clear()

    def forget_counts(self) -> None:
        """Count from 1 again, under a new name: a program may use any number of tags and groups."""
        kept = set(self.groups_with_timeout)
        base, _, epoch = self.generation.partition("'")
        self.join(f"{base}'{int(epoch or 0) + 1}")
        self.groups_with_timeout = kept

    def events(self) -> tuple[Event, ...]:
        return (*(o.event(self.rank, self.began) for o in self.operations if o.start is not None), *self.computing)

    def call(self, o: Operation, inputs: list[Any], outputs: list[Any]) -> None:
        """The rank calls `o` on these tensors: count and keep it."""
        self.look_at_array(o, inputs[0] if inputs else outputs[0] if outputs else None)
        if self.keep_values:
            o.inputs, o.outputs = inputs, outputs
            o.before, o.before_out = numbers(inputs), numbers(outputs)
        o.has_timeout = o.has_timeout or o.group in self.groups_with_timeout
        with self._lock:
            self._count(o)
            if self.enqueues:
                self._close_oldest()
            if len(self.open) > 256:
                self._sweep()
            self.make_room(self.operations)
            self.operations.append(o)
            self.total += 1
            self.open[id(o)] = o
        o.start = clock()

    @contextlib.contextmanager
    def call_by_hand(self, o: Operation, *, blocks: bool) -> Iterator[None]:
        """In the block this rank is in an operation that passes no dispatcher: making a group, or leaving one."""
        o.blocks = blocks
        with self._lock:
            self._count(o)
            self.open[id(o)] = o
        o.start = clock()
        try:
            yield
        except BaseException as error:
            self.fail(o, error)
            raise
        finally:
            o.done = clock()
            self.open.pop(id(o), None)

    def _count(self, o: Operation) -> None:
        """Which one it is of its group, or of its pair of ranks."""
        group = o.group + self._suffix
        key: tuple[Any, ...] = (group, o.ranks)
        if o.op in ("send", "recv"):
            ends = (self.rank, o.peer) if o.op == "send" else (o.peer, self.rank)
            key = (group, "p2p", *ends, o.tag, o.op)
        o.key = key
        o.seq = self.counts[key] = self.counts.get(key, 0) + 1
        o.nth = o.seq - self._before.get(key, 0)

    def came_from(self, o: Operation, peer: int) -> None:
        """A receive from anyone has ended: it was the next one of that pair."""
        with self._lock:
            self.counts[o.key] = self.counts.get(o.key, 1) - 1
            o.peer = peer
            self._count(o)

    def is_uncertain(self, o: Operation) -> bool:
        """Whether nobody knows yet which message of its pair this is: one from anyone is under way, or it is that."""
        return o.op == "recv" and self.counts.get((*o.key[:2], None, *o.key[3:]), 0) > 0

    def name_of(self, o: Operation) -> str:
        """What all ranks call this operation, and nothing else is ever called."""
        name = f"{self.generation}|{o.group}|{o.seq}"
        if self.failures and self.failures.get(o.key[:-1]):
            name += f"|{self.failures[o.key[:-1]]}"
        return name if len(o.key) == 2 else f"{name}|{o.key[2]}>{o.key[3]}|{o.tag}"

    def fail(self, o: Operation, error: BaseException) -> None:
        """An operation that failed counts as never called: whoever waits for it waits in vain."""
        self.failed_call, self.failed_wait = o.call(), replace(o.wait(), waiting=True)
        o.error = repr(error)
        with self._lock:
            if self.counts.get(o.key) == o.seq:
                self.counts[o.key] -= 1
                # its signature stays published: the next call must not be compared with it
                self.failures[o.key[:-1]] = self.failures.get(o.key[:-1], 0) + 1

    def waited(self, o: Operation) -> None:
        o.wait_end, self.latest = clock() if o.done is None else None, None  # what was over before has its end
        if o.error is None and o.landing is not None:
            tensor, buffer = o.landing
            tensor.copy_(buffer)
        if o.passed is None or o.error is not None:
            self.close(o)
        else:
            self.note_result(o)

    def mark_done(self, o: Operation) -> None:
        o.done = clock()
        self.close(o)

    def note_result(self, o: Operation) -> None:
        """With `--values`: what the tensors of `o` hold now is what it gave."""
        if o.before is not None and o.after is None:
            o.after = numbers(o.outputs)

    def close(self, o: Operation) -> None:
        """Nobody asks for `o` any more."""
        if o.error is None:
            self.note_result(o)
        # these hold tensors: keeping them would keep the learner's memory
        o.inputs = o.outputs = ()
        o.work = o.landing = None
        if o.passed is not None:
            o.passed = lambda: True
        self.open.pop(id(o), None)

    def _close_oldest(self) -> None:
        while self.open:
            oldest = next(iter(self.open.values()))
            if oldest.passed is None or oldest.issued is None or not oldest.finished:
                return
            self.close(oldest)

    def _sweep(self) -> None:
        """Close operations that nobody waited for and that are over."""
        for o in list(self.open.values()):
            if o.issued is not None and o.finished:
                self.close(o)

    def status(self) -> tuple[tuple[Wait, ...], dict[Any, int]]:
        """What this rank waits for, and how often it has come to each operation (or its device has)."""
        pending = [o for o in list(self.open.values()) if not o.finished]
        reached = {**self.past, **self.counts}
        if not self.enqueues:
            return tuple(o.wait() for o in pending), reached
        order = queued(pending)
        for o, behind in order:
            if behind and o.key in reached:
                reached[o.key] -= 1
        return tuple(o.wait(behind=behind) for o, behind in order[:MAX_WAITS]), reached

    def device_is_through(self) -> bool:
        # a call that blocks its thread is over when the cell is, or a thread that serves others stands in it
        return not any(o.passed is not None and o.waiting for o in list(self.open.values()))

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
