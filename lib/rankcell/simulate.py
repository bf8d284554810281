"""A simulated GPU: one host that enqueues work, streams, engines and one clock. It says what ran when.

    gpu = Device()
    copies = gpu.stream("copies")
    with gpu.use(copies):
        gpu.copy(2**28, writes="Y", pinned=True, non_blocking=True)
    gpu.current_stream().wait_stream(copies)
    gpu.matmul(seconds=0.02, reads="Y", writes="Z")
    gpu.events, gpu.races

The calls are those of `torch.cuda`. Nothing is computed or measured: the caller says how long a kernel takes. It also
keeps which job is *ordered* before which, and so finds races: two jobs that touch the same memory, one of them writing,
and nothing that makes one wait for the other, whatever their times happened to be.

What it leaves out: kernels that share the GPU (each engine does one job at a time, in the order in which jobs become
ready), the host stopping when a queue is full, priorities, graphs, slower memory while copies run.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .results import Event

HOST = "host"
Names = str | Iterable[str]  # of one buffer, or of several
ASYNC = "nccl"  # the stream of collectives with `async_op`
_ING = {"reads": "reading", "writes": "writing"}


class RaceError(Exception):
    """Two jobs touch the same memory and nothing orders them."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentences, without our own lines."""
        return [f"RaceError: {self}"]


class Race(NamedTuple):
    """Two jobs that touch the same memory, one of them writing, without an order; `first` was enqueued first."""

    buffer: str
    first: str
    second: str
    text: str


class _Enqueued(NamedTuple):
    """What was enqueued in a stream, or done by the host."""

    number: int
    name: str
    kind: str
    row: int
    engine: str
    seconds: float
    issued: float
    after: frozenset[int]
    before: int  # bit j is set where job j is ordered before this one
    reads: tuple[tuple[str, int], ...]  # name of the buffer, number of its block of memory
    writes: tuple[tuple[str, int], ...]
    nbytes: int = 0


class _Freed(NamedTuple):
    """Memory that was given back: to whom it belongs, and who must be done before it is given out again."""

    number: int
    owner: int
    nbytes: int
    users: frozenset[int]


class Mark:
    """An event of a stream: the point between what was enqueued before it and what comes after."""

    def __init__(self, device: "Device", jobs: frozenset[int]) -> None:
        self._device, self._jobs = device, jobs

    def wait(self) -> None:
        """The current stream waits for everything before it. The host does not."""
        self._device.current_stream().wait_event(self)


class Stream:
    """A queue of a device: its jobs run one after the other, in the order in which they were enqueued."""

    def __init__(self, device: "Device", name: str, row: int) -> None:
        self._device, self.name, self._row = device, name, row
        self._tail: frozenset[int] = frozenset()  # the next job must wait for these

    def record_event(self) -> Mark:
        """An event that is reached when all that was enqueued here so far is done."""
        return Mark(self._device, self._tail)

    def wait_event(self, event: Mark) -> None:
        """What is enqueued here from now on waits for `event`. The host does not."""
        self._tail |= event._jobs

    def wait_stream(self, stream: "Stream") -> None:
        """What is enqueued here from now on waits for all that was enqueued in `stream` so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """The host waits until all that was enqueued here is done."""
        self._device._host_waits(self._tail, f"{self.name}.synchronize")


@dataclass
class Device:
    """One simulated GPU and the host thread that drives it.

    Each kernel or copy costs the host `launch` seconds. A copy moves `pinned_rate` bytes/s from or to page-locked
    memory of the host, `pageable_rate` from or to other memory. Engines: "compute", "H2D" and "D2H" (one copy engine
    each way) and "link" (communication with other GPUs).
    """

    launch: float = 10e-6
    pinned_rate: float = 25e9
    pageable_rate: float = 10e9
    now: float = field(default=0.0, init=False)  # the host's clock, seconds

    def __post_init__(self) -> None:
        self._jobs: list[_Enqueued] = []
        self._schedule: list[tuple[float, float]] = []
        self._host: list[Event] = []
        self._known = 0  # jobs that the host knows to be done, and its own, as bits
        self._streams: dict[str, Stream] = {}
        self._blocks: dict[str, tuple[int, int, int]] = {}  # buffer: block, owner, nbytes
        self._freed: list[_Freed] = []
        self._gone: set[str] = set()
        self._users: dict[str, list[Stream]] = {}
        self._numbers = itertools.count(1)  # of blocks of memory
        self._current = self.stream("default")

    def stream(self, name: str) -> Stream:
        """The stream of that name; the first call makes it."""
        return self._streams.setdefault(name, Stream(self, name, len(self._streams) + 1))

    def default_stream(self) -> Stream:
        """The stream that work goes to unless `use` says otherwise."""
        return self.stream("default")

    def current_stream(self) -> Stream:
        """The stream that work goes to now."""
        return self._current

    @contextmanager
    def use(self, stream: Stream) -> Iterator[Stream]:
        """Inside, work goes to `stream` (`torch.cuda.stream`). It orders nothing."""
        before, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = before

    def synchronize(self) -> None:
        """The host waits until all streams are done."""
        self._host_waits(frozenset[int]().union(*(s._tail for s in self._streams.values())), "synchronize")

    def kernel(self, name: str, seconds: float, *, reads: Names = (), writes: Names = ()) -> None:
        """Enqueue a kernel in the current stream; `reads` and `writes` name the buffers it touches."""
        self._enqueue(self._current, name, "compute", "compute", seconds, reads, writes)

    def matmul(self, *, seconds: float, reads: Names = (), writes: Names = ()) -> None:
        """Enqueue a matrix product in the current stream."""
        self.kernel("matmul", seconds, reads=reads, writes=writes)

    def copy(
        self,
        nbytes: int = 0,
        *,
        seconds: float | None = None,
        to: str = "device",
        pinned: bool = False,
        non_blocking: bool = False,
        reads: Names = (),
        writes: Names = (),
    ) -> None:
        """Enqueue a copy between host and device in the current stream.

        It lasts `seconds`, or `nbytes` at the rate of pinned or pageable memory. The host goes on at once only where
        the host memory is pinned *and* the call is `non_blocking`.
        """
        if to not in ("device", "host"):
            raise ValueError(f"A copy goes to 'device' or to 'host', not to {to!r}.")
        engine = "H2D" if to == "device" else "D2H"
        time = nbytes / (self.pinned_rate if pinned else self.pageable_rate) if seconds is None else seconds
        job = self._enqueue(self._current, f"copy {engine}", "copy", engine, time, reads, writes, nbytes=nbytes)
        if not (pinned and non_blocking):
            self._host_waits(frozenset({job}), "copy")

    def all_reduce(self, buffer: Names = (), *, seconds: float, async_op: bool = False) -> Mark | None:
        """Enqueue an all-reduce of `buffer`, in place, in the current stream. With `async_op` it runs on the stream
        "nccl", which first waits for the current one; then what to `wait` for comes back.
        """
        stream = self.stream(ASYNC) if async_op else self._current
        stream.wait_stream(self._current)
        self._enqueue(stream, "all_reduce", "comm", "link", seconds, buffer, buffer)
        return stream.record_event() if async_op else None

    def on_host(self, name: str, seconds: float, *, reads: Names = (), writes: Names = ()) -> None:
        """The host itself works: it prepares a batch, or reads a result."""
        start, touched = self.now, (self._touch(reads), self._touch(writes))
        job = self._add(name, HOST, 0, "", seconds, start, frozenset(), self._known, *touched)
        self.now += seconds
        self._known |= 1 << job

    def empty(self, buffer: str, nbytes: int = 0) -> None:
        """Give `buffer` memory of the current stream, as PyTorch does: a freed block of its size if there is one."""
        owner = self._current._row
        fitting = (b for b in self._freed if (b.owner, b.nbytes) == (owner, nbytes))
        block = next((b for b in fitting if all(self._times[j][1] <= self.now for j in b.users)), None)
        if block is not None:
            self._freed.remove(block)
            self._known |= self._closure(block.users)  # the allocator asked: they are done
        self._blocks[buffer] = (block.number if block else next(self._numbers), owner, nbytes)
        self._gone.discard(buffer)
        self._users[buffer] = []

    def record_stream(self, buffer: str, stream: Stream) -> None:
        """Say that `stream` uses `buffer` too: once freed, its memory is kept until that stream is done."""
        self._touch(buffer)
        self._users[buffer].append(stream)

    def free(self, buffer: str) -> None:
        """Drop the last reference to `buffer` (`del`): its memory may be given out again."""
        self._touch(buffer)
        number, owner, nbytes = self._blocks.pop(buffer)
        others = (s._tail for s in self._users.pop(buffer) if s._row != owner)  # its own queue keeps the order
        self._freed.append(_Freed(number, owner, nbytes, frozenset[int]().union(*others)))
        self._gone.add(buffer)

    @property
    def events(self) -> tuple[Event, ...]:
        """All that host and streams did, in order of time, as predicted events.

        `rank` is the row: 0 the host, then the streams; `group` is its name. `kind` is "host", "wait" (the host
        stands), "compute", "copy", "comm", or "order": a moment at which a stream was let go by another one, whose row
        is `peer` and which was done at `issued`.
        """
        found = [*self._host, *_events(self._jobs, self._times, [HOST, *self._streams])]
        return tuple(sorted(found, key=lambda e: (e.start, e.rank, e.end)))

    @property
    def seconds(self) -> float:
        """When host and device are both done."""
        return max([self.now, *(end for _, end in self._times)])

    def buffers(self, name: str) -> tuple[str, ...]:
        """The buffers that the jobs called `name` read or write, in the order of the alphabet."""
        jobs = [job for job in self._jobs if job.name == name]
        return tuple(sorted({buffer for job in jobs for buffer, _ in (*job.reads, *job.writes)}))

    @property
    def races(self) -> tuple[Race, ...]:
        """Every pair of streams and buffers with a race, the first jobs of each; empty if all is ordered."""
        return _find_races(self._jobs, self._times, [HOST, *self._streams])

    def check(self) -> None:
        """Raise `RaceError`, with a sentence for each race, unless everything is ordered."""
        if races := self.races:
            raise RaceError("\n".join(race.text for race in races))

    def _enqueue(
        self, stream: Stream, name: str, kind: str, engine: str, seconds: float, *touches: Names, nbytes: int = 0
    ) -> int:
        """`touches`: the buffers that it reads, and those that it writes."""
        start, touched = self.now, [*map(self._touch, touches)]
        self.now += self.launch
        if self.launch:
            self._note_host(f"launch {name}", start, HOST)
        after = stream._tail
        before = self._known | self._closure(after)
        job = self._add(name, kind, stream._row, engine, seconds, self.now, after, before, *touched, nbytes)
        stream._tail = frozenset({job})
        return job

    def _add(self, name: str, kind: str, row: int, engine: str, seconds: float, *rest: Any) -> int:
        if not seconds >= 0:
            raise ValueError(f"A job cannot take {seconds} seconds. Give zero or more.")
        self._jobs.append(_Enqueued(len(self._jobs), name, kind, row, engine, seconds, *rest))
        return len(self._jobs) - 1

    def _note_host(self, what: str, start: float, kind: str) -> None:
        self._host.append(Event(0, what, start, self.now, kind=kind, group=HOST, predicted=True))

    @property
    def _times(self) -> list[tuple[float, float]]:
        """Start and end of each job so far."""
        if len(self._schedule) != len(self._jobs):
            self._schedule = _schedule(self._jobs)
        return self._schedule

    def _closure(self, jobs: Iterable[int]) -> int:
        bits = 0
        for j in jobs:
            bits |= self._jobs[j].before | 1 << j
        return bits

    def _host_waits(self, jobs: frozenset[int], why: str) -> None:
        start, self.now = self.now, max([self.now, *(self._times[j][1] for j in jobs)])
        if self.now > start:
            self._note_host(why, start, "wait")
        self._known |= self._closure(jobs)

    def _touch(self, buffers: Names) -> tuple[tuple[str, int], ...]:
        """The blocks of memory of some buffers; a new name gets a block that is never given to another."""
        names = (buffers,) if isinstance(buffers, str) else tuple(buffers)
        for name in names:
            if name in self._gone:
                raise ValueError(f"{name} was freed. Give it memory again with empty({name!r}).")
            if name not in self._blocks:
                self._blocks[name] = (next(self._numbers), self._current._row, -1)
                self._users[name] = []
        return tuple((name, self._blocks[name][0]) for name in names)


def _events(jobs: Sequence[_Enqueued], times: Sequence[tuple[float, float]], names: Sequence[str]) -> Iterator[Event]:
    """The jobs on the streams, and where one was let go by another stream."""
    for job in jobs:
        start, end = times[job.number]
        of: dict[str, Any] = {"group": names[job.row], "predicted": True}
        yield Event(job.row, job.name, start, end, kind=job.kind, nbytes=job.nbytes, issued=job.issued, **of)
        last = {jobs[other].row: other for other in sorted(job.after)}  # the others were before it
        for row, other in last.items():
            if row != job.row:
                yield Event(job.row, "wait_event", start, start, kind="order", peer=row, issued=times[other][1], **of)


def _schedule(jobs: list[_Enqueued]) -> list[tuple[float, float]]:
    """Start and end of each job: an engine takes the job that was ready first; more jobs do not change what was."""
    times: dict[int, tuple[float, float]] = {}
    free: dict[str, float] = {}
    left = list(jobs)
    while left:
        ready = {j: max([j.issued, *(times[k][1] for k in j.after)]) for j in left if j.after <= times.keys()}
        starts = {j: max(at, free.get(j.engine, 0.0)) for j, at in ready.items()}
        job = min(ready, key=lambda j: (starts[j], ready[j], j.number))
        times[job.number] = (starts[job], starts[job] + job.seconds)
        if job.engine:
            free[job.engine] = times[job.number][1]
        left.remove(job)
    return [times[job.number] for job in jobs]


def _find_races(jobs: Sequence[_Enqueued], times: Sequence[tuple[float, float]], names: list[str]) -> tuple[Race, ...]:
    """Every pair of rows and buffers with a race, the first jobs of each. `times` are start and end of each job,
    `names` those of the rows: the host, and the streams.
    """
    found: dict[tuple[str, str, int, int], Race] = {}
    pairs = ((a, b) for b in jobs for a in jobs[: b.number] if not b.before >> a.number & 1)
    for a, b in pairs:
        for x, name_a, y, name_b in _conflicts(a, b):
            if (key := (name_a, name_b, a.row, b.row)) not in found:
                first, second = (f"{job.name} on {names[job.row]}" for job in (a, b))
                happened, mend = _happened(times[a.number], times[b.number]), _mend(a, b, names)
                both = f"{first} {x} it, {second} {y} it"
                text = f"Race on {name_a}: {both}, and nothing orders the two. {happened} {mend}"
                if name_a != name_b:
                    text = (
                        f"Memory reused too early: {name_b} was given the memory of {name_a}, which was freed while "
                        f"{first} may still be {_ING[x]} it; now {second} {y} it. {happened} Call "
                        f'record_stream("{name_a}", {names[a.row]}) before freeing {name_a}.'
                    )
                found[key] = Race(name_b, first, second, text)
    return tuple(found.values())


def _happened(a: tuple[float, float], b: tuple[float, float]) -> str:
    if max(a[0], b[0]) < min(a[1], b[1]):
        return "Here they ran at the same time."
    if a[0] < b[0]:
        return "Here the first happened to be over in time; nothing promises it."
    return "Here the second even ran first."


def _mend(a: _Enqueued, b: _Enqueued, names: Sequence[str]) -> str:
    if b.row == 0:
        return f"Let the host wait before the second: {names[a.row]}.synchronize()."
    if a.kind == "comm" and names[a.row] == ASYNC:
        return f"Before the second, call wait() on what {a.name} returned."
    return f"Put {names[b.row]}.wait_stream({names[a.row]}) before the second."


def _conflicts(a: _Enqueued, b: _Enqueued) -> Iterator[tuple[str, str, str, str]]:
    """What both jobs touch where one of them writes: what a does, the name it used, what b does, its name."""
    of_a, of_b = (
        [*itertools.product(["writes"], job.writes), *itertools.product(["reads"], job.reads)] for job in (a, b)
    )
    for (x, (name_a, block_a)), (y, (name_b, block_b)) in itertools.product(of_a, of_b):
        if block_a == block_b and "writes" in (x, y):
            yield x, name_a, y, name_b
