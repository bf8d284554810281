"""What a rank cell leaves behind: frozen data that other modules read, draw and check. It imports nothing of ours."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import PurePath
from typing import Any, NamedTuple


class Values(NamedTuple):
    """Contents of one operation's tensors, flattened: one tuple of numbers per tensor.

    For an in-place operation (all-reduce, broadcast) input and output are the same tensor.
    """

    input_before: tuple[tuple[float, ...], ...]
    output_before: tuple[tuple[float, ...], ...]
    output_after: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Watched:
    """What the array named by `rankcell.watch` held, flattened."""

    before: tuple[float, ...]  # when an operation of the rank was called
    after: tuple[float, ...]  # when the rank called its next one, or left the block
    part: tuple[int, int] | None = None  # where in it the operation's tensor lies, from and up to; None: nowhere


@dataclass(frozen=True)
class Event:
    """One thing that one rank did: a communication or a span of computing, measured or predicted.

    Times are in seconds since the cell began, on a clock that all ranks of a machine share. `nbytes` counts
    the input tensors, of a receive its buffer. `peer` is the global rank at the other end: the root of a
    collective, the destination of a send, the source of a receive. `seq` counts the operations of this group
    from 1 (for send and recv: per pair). `via` is the function that the program called, where it is not `op`'s own.

    A communication begins with its call (`start`), which returns at `issued`. If the program waits for its Work, it
    does so from `wait_start`, and `end` is the end of that wait, or when the backend is `done`, if that is later. Else
    `end` is when the backend is done, where it tells, or `issued`. A call that raised, or was freed because others
    never joined it, ends there; nothing in the event says so.
    """

    rank: int
    op: str
    start: float
    end: float
    kind: str = "comm"
    group: str = ""
    ranks: tuple[int, ...] = ()
    seq: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    nbytes: int = 0
    peer: int | None = None
    tag: int = 0
    reduce_op: str = ""
    is_async: bool = False
    issued: float = 0.0
    wait_start: float | None = None
    done: float | None = None  # when the backend was done, where it tells: may be long before somebody waits
    line: int = 0
    file: str = ""  # of that line; "" in a rank cell
    outer: tuple[tuple[str, int], ...] = ()  # file and line of the calls that led to that line, from the inside
    via: str = ""
    values: Values | None = None
    watched: Watched | None = None
    predicted: bool = False

    @property
    def seconds(self) -> float:
        """Seconds from the call to its end."""
        return self.end - self.start

    @property
    def text(self) -> str:
        """The call in words: "all_reduce(float32[4])"; the name of a span."""
        if self.kind != "comm":
            return self.op
        return call_text(self.op, self.dtype, self.shape, self.reduce_op, self.peer, self.tag)


# What memory holds, from the bottom of the pile to its top.
KINDS = ("parameters", "gradients", "optimizer", "activations", "rest")


@dataclass(frozen=True)
class Memory:
    """Bytes that one process held at one moment, by kind; each storage counts once.

    `activations` are what autograd keeps for backward, `rest` is all else that operations of torch have touched.
    """

    at: float  # seconds since the cell, or the measuring, began
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    rest: int = 0
    phase: str = ""  # the span it was in

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind, as the pictures of memory take them."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Display:
    """A rich display made on a rank: MIME type to data, and how many bytes of stdout stood before it."""

    data: Mapping[str, Any]
    stdout_offset: int = 0
    display_id: str | None = None


@dataclass(frozen=True)
class NotSent:
    """Stands for a value that stayed on its rank, and says why. It shows as the value's own text."""

    text: str
    reason: str
    rank: int | None = None

    def __repr__(self) -> str:
        return self.text or f"<{self.reason}>"

    def __getitem__(self, *_: Any) -> Any:
        raise TypeError(self._why())

    __iter__ = __getitem__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("_") else self._why())

    def _why(self) -> str:
        what, where = self.text[:80] or "this value", "its rank" if self.rank is None else f"rank {self.rank}"
        return f"{what} stayed on {where} ({self.reason}): make plain data of it there: numbers, lists, tensors."


class Frame(NamedTuple):
    """One line of a traceback. `source` is the text of the line where it is known."""

    filename: str
    lineno: int
    name: str
    source: str = ""


@dataclass(frozen=True)
class Call:
    """A communication as a rank called it."""

    text: str  # "all_reduce(float32[4])"
    line: int = 0  # of the cell, or of `file`
    nth: int = 0  # the how-many-th call of its group in the cell
    group: str = ""
    op: str = ""
    file: str = ""


FROM = ", from line "  # behind a file or "cell 2": the line of the cell that runs which led there


def at_line(line: int, file: str = "") -> str:
    """A place in words: "line 4" of the cell that runs, or "line 4 of cell 2"; "" where it is not known."""
    if not line:
        return ""
    return f"line {line} of {PurePath(file).name}" if file else f"line {line}"


def placed(line: int, file: str = "", before: str = " at ") -> str:
    """The same in words that follow `before`; "" where the line is not known."""
    return f"{before}{at_line(line, file)}" if line else ""


def call_text(op: str, dtype: str, shape: Sequence[int], reduce_op: str, peer: int | None, tag: int = 0) -> str:
    """A communication in a learner's words: "all_reduce(float32[4])", "send(float32[8] to rank 1)"."""
    what = f"{dtype}{list(shape)}" if dtype and op != "barrier" else ""
    if reduce_op not in ("", "SUM"):
        what += f", {reduce_op}"
    if op == "send":
        what += f" to rank {peer}"
    elif op == "recv":
        what += f" from {'any rank' if peer is None else f'rank {peer}'}"
    elif peer is not None:
        what += f", root {peer}"
    if tag:
        what += f", tag {tag}"
    return f"{op}({what})"


@dataclass(frozen=True)
class Mismatch:
    """Calls that should have been alike and were not: what differs, and what each rank called."""

    problem: str
    calls: Mapping[int, Call]


@dataclass(frozen=True)
class RankFailure:
    """Why a rank did not finish the cell: the exception as text, its frames, and when it happened. `causes` are those
    behind it, each with how it led here: "caused by" (`raise ... from`), "while handling", "1 of 2" of a group.
    """

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    at: float = 0.0  # seconds since the cell began
    caused_by_abort: bool = False  # it was freed from an operation that could never finish: a victim
    causes: "tuple[tuple[str, RankFailure], ...]" = ()
    notes: tuple[str, ...] = ()
    call: Call | None = None  # the communication in which it happened
    mismatch: Mismatch | None = None

    @property
    def line(self) -> int:
        """Line of the cell, counted from the magic's line as 1; 0 where it is not known."""
        return next((f.lineno for f in reversed(self.frames) if f.filename.startswith("<cell")), 0)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class Connection(NamedTuple):
    """Bytes that moved on one TCP connection of a rank during a cell, by the kernel's count."""

    ours: str  # address and port of an end
    theirs: str
    sent: int
    received: int


@dataclass(frozen=True)
class Standing:
    """What one rank was doing when its cell had to be ended, and which ranks it waited for.

    `phase` is "running", "finished", "error", "lost" or "absent" (the cell does not run on it). `op` is the
    operation it waited in ("" if it did not wait), `text` the whole call, `doing` a sentence.
    """

    rank: int
    phase: str
    doing: str
    op: str = ""
    text: str = ""
    line: int = 0
    waits_for: tuple[int, ...] = ()
    file: str = ""  # of that line; "" in a rank cell


@dataclass(frozen=True)
class RankResult:
    """What one rank did in one cell.

    `state` is "ok", "error" (it raised, or was freed or interrupted), "lost" (its process ended), "running" (in
    what is shown while the cell runs) or "skipped" (the cell ran on other ranks only). Of a flood of output
    `stdout` and `stderr` keep the beginning and the end, and say how much lay between. `order` says how they
    took turns: pairs of bytes of stderr, and of stdout, written until then.
    """

    rank: int
    state: str = "ok"
    stdout: str = ""
    stderr: str = ""
    value: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)  # the value as MIME types, made on the rank
    displays: tuple[Display, ...] = ()
    error: RankFailure | None = None
    seconds: float = 0.0
    events: tuple[Event, ...] = ()
    connections: tuple[Connection, ...] | None = None  # what really moved (Linux and gloo)
    node: str = ""  # the node it ran on, of a world with `--nodes`
    dropped: int = 0  # how many of the oldest events are not in `events`: a long run stays small
    memory: tuple[Memory, ...] = ()  # what it held over time, with `rankcell.memory` only
    trace: tuple[Any, ...] = ()  # what its model computed, with `rankcell.trace` only: `compare.reference.Traced`
    mismatch: Mismatch | None = None  # a call that did not match, also if the program caught the error
    order: tuple[tuple[int, int], ...] = ()

    @property
    def peak(self) -> Memory | None:
        """The moment in which most was held, all kinds together; None if memory was not measured."""
        return max(self.memory, key=lambda sample: sample.total, default=None)

    def __repr__(self) -> str:
        return f"RankResult(rank={self.rank}, state={self.state!r}, value={self.value!r})"


@dataclass(frozen=True)
class Run:
    """The value of a rank cell: one `RankResult` per rank of the world, by rank."""

    source: str
    ranks: tuple[RankResult, ...]
    device: str = "cpu"
    backend: str = "gloo"
    seconds: float = 0.0
    pulled: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    standstill: tuple[Standing, ...] = ()  # where the ranks stood, if the cell had to be ended

    def forget_details(self) -> None:
        """Let go of events, memory samples and traces; what was printed, shown and returned stays."""
        slim = (replace(r, events=(), connections=None, memory=(), trace=(), order=()) for r in self.ranks)
        object.__setattr__(self, "ranks", tuple(slim))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The name of each rank's node, by rank; empty for a world on one machine."""
        return tuple(r.node for r in self.ranks) if any(r.node for r in self.ranks) else ()

    @property
    def world_size(self) -> int:
        """How many ranks the world has, those that skipped the cell included."""
        return len(self.ranks)

    @property
    def ran(self) -> tuple[RankResult, ...]:
        """The results of the ranks that ran the cell."""
        return tuple(r for r in self.ranks if r.state != "skipped")

    @property
    def values(self) -> list[Any]:
        """The value of the cell's last expression, by rank, of the ranks that ran it."""
        return [r.value for r in self.ran]

    @property
    def events(self) -> tuple[Event, ...]:
        """What all ranks did, in order of time."""
        return tuple(sorted((e for r in self.ranks for e in r.events), key=lambda e: (e.start, e.rank)))

    @property
    def wire(self) -> tuple[tuple[int, ...], ...] | None:
        """Bytes that really arrived at rank j from rank i in the cell: `wire[i][j]`, by the kernel's TCP counters.

        Headers of gloo's messages are counted too. Counted where they arrive: a send may return before its last bytes
        have left. None where there are no such counters (nccl, macOS).
        """
        if not self.ranks or any(r.connections is None for r in self.ran) or self.backend != "gloo":
            return None
        ends = {(c.ours, c.theirs): (r.rank, c) for r in self.ran for c in r.connections or ()}
        matrix = [[0] * self.world_size for _ in self.ranks]
        for (ours, theirs), (rank, _) in ends.items():
            peer, other = ends.get((theirs, ours), (None, None))
            if peer is not None and other is not None:
                matrix[rank][peer] += other.received
        return tuple(map(tuple, matrix))

    @property
    def failed(self) -> tuple[RankResult, ...]:
        """The ranks that did not finish, the earliest failure first, victims of another's last."""
        bad = sorted((r for r in self.ran if r.state != "ok"), key=lambda r: r.error.at if r.error else 0.0)
        return tuple(sorted(bad, key=lambda r: bool(r.error and r.error.caused_by_abort)))


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """What belongs to each key, in the order in which they come."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def name_ranks(ranks: Sequence[int]) -> str:
    """`ranks` in words: "rank 2", "ranks 0-3", "ranks 0, 2"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    parts: list[str] = []
    for _, numbered in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        row = [rank for _, rank in numbered]
        parts += [f"{row[0]}-{row[-1]}"] if len(row) > 2 else map(str, row)
    return "ranks " + ", ".join(parts)


def name_some(names: Iterable[str], most: int = 3) -> str:
    """The first `most` of `names` in order, and how many more there are: "a, b, c and 40 more"."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
