"""What the notebook and its ranks say to each other: typed, frozen, without torch.

A reader can follow a cell by these names: a rank's main thread gets `StartRank`, `Join` and `Task`, and says `Joined`,
`Shown` while the task runs, and `Done`; its control thread gives an `Answer` to each `Question`; a host hears `Output`,
`WorkerMessage` and `ProcessExited`. Values and pulled names travel inside as pickles of their own: one that fails
spoils nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ..results import Display, Frame, RankResult

# in its environment the fork server finds what to remove when the notebook is gone
FOLDER = "RANKCELL_FOLDER"
LEAVES = "destroy_process_group"  # what a rank stands in that has called it, where it waits for the others


def with_cache(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with a cache, made anew where it has come to."""
    return lru_cache(**parameters)(function)


@dataclass(frozen=True)
class StartRank:
    rank: int
    world_size: int
    device: str
    backend: str
    store: str  # a folder on this machine, or "host:port" of the store that the notebook holds
    port: int  # a free port of this machine, for a script that wants to set up a store of its own
    generation: int
    folder: str
    path: tuple[str, ...]
    local_rank: int
    local_world_size: int
    node: str = ""  # its name; empty in a world on one machine
    memory_fraction: float | None = None  # of its GPU, which it shares; None: all of it
    environment: dict[str, str] = field(default_factory=dict)  # set where the rank is started

    @property
    def enqueues(self) -> frozenset[str]:
        """The kinds of device whose calls return when they are enqueued, as nccl's do, and not when they are over."""
        return frozenset() if self.backend == "gloo" else frozenset({self.device})


@dataclass(frozen=True)
class Task:
    """One cell, or one function call, for a rank."""

    began: float  # zero of all times: when the notebook sent the task, on the clock of the rank's machine
    cell: str  # the same on all ranks: it keeps what belongs to two cells apart
    source: str = ""
    filename: str = "<cell>"
    settings: Mapping[tuple[str, str], Any] = field(default_factory=dict)  # of the notebook (`settings.read`)
    call: bytes = b""  # cloudpickle of (function, args, kwargs)
    push: bytes = b""  # cloudpickle of names and values
    pushed: tuple[str, ...] = ()  # those names
    pull: tuple[str, ...] = ()
    values: bool = False
    forget_counts: bool = False  # everything is matched and nothing open on any rank: count from 1 again


class Join(NamedTuple):
    """Leave the process group, and join the one of this generation."""

    generation: int


class Joined(NamedTuple):
    """The rank has joined the process group of this generation and waits for a task, or could not join."""

    generation: int
    problem: str = ""


class Shown(NamedTuple):
    """What `display(...)` was given on the rank."""

    display: Display
    update: bool


@dataclass(frozen=True)
class RankState:
    """In what state a cell has left a rank: what the world must know to go on."""

    pulled: dict[str, bytes | str] = field(default_factory=dict)
    counts: Mapping[Any, int] = field(default_factory=dict)
    calls: int = 0
    broken: bool = False  # a connection was closed, although the rank may have caught the error
    group: str = ""  # the default process group that the rank is in at the end, "" if it has left it
    exit: str = ""  # "sys.exit() line 3", where that ended the cell without an error
    open: int = 0  # operations that are not over
    threads: bool = False  # a thread of the learner's is still there, at work or waiting
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what the learner should know, although nothing failed
    changed: tuple[str, ...] = ()  # names that were pushed, and whose values the cell has changed in place


class Done(NamedTuple):
    """The rank has finished with a task. What it printed and showed is missing in `result`: that comes by itself."""

    cell: str
    result: RankResult
    state: RankState


class Question(NamedTuple):
    """Something that the control thread answers while the main thread runs or waits: "status", "complete" (the
    argument is the text), or "interrupt" (the learner wants to stop) and "free" (nobody will ever answer): a cell.
    """

    number: int
    about: str
    argument: Any = None


class Answer(NamedTuple):
    """The answer to the question of this number; None if the rank could not find one."""

    number: int
    value: Any


@dataclass(frozen=True)
class Wait:
    """An operation that a rank has called and that is not over."""

    op: str
    text: str  # "all_reduce(float32[4])"
    group: str
    ranks: tuple[int, ...]  # of the group
    key: Any  # what `seq` counts: the group, or the pair and tag of a send or receive
    seq: int
    nth: int = 0  # the same, counted from the beginning of the cell
    peer: int | None = None
    tag: int = 0
    line: int = 0
    file: str = ""  # of that line; "" in a rank cell
    via: str = ""
    waiting: bool = True  # Python stands in it
    thread: int = 0  # that called it; 0: the main thread
    called: str = ""  # the group: its `group_desc`, or its name in torch; "" if it has none


@dataclass(frozen=True)
class Status:
    """What a rank is doing now, as its control thread sees it."""

    rank: int
    cell: str  # the task that this is about
    phase: str  # "starting", "idle", "running", "finished" or "error"
    line: int = 0
    file: str = ""
    in_torch: bool = False  # its main thread stands in a file of torch
    runs: bool = False  # one of its threads has a core, or waits for one
    joins: bool = False  # its main thread waits for another thread, without a time limit
    synchronizes: bool = False  # its main thread waits for its device
    compiles: bool = False  # torch.compile does, in its main thread
    cpu: float | None = None  # seconds that the main thread has used; None where nobody tells
    switches: int | None = None  # how often the main thread has left its core; None where nobody tells
    waits: tuple[Wait, ...] = ()
    counts: Mapping[Any, int] = field(default_factory=dict)
    calls: int = 0
    threads: bool = False  # a thread of the learner's runs, and stands in no operation


class Output(NamedTuple):
    """Bytes that a rank wrote. `stream` is "out" or "err"."""

    rank: int
    stream: str
    data: bytes


class WorkerMessage(NamedTuple):
    rank: int
    message: bytes  # packed


class ProcessExited(NamedTuple):
    rank: int
    how: str  # in words, to follow "rank 2"
    stack: tuple[Frame, ...] = ()  # where it crashed


HostEvent = Output | WorkerMessage | ProcessExited
CRASHED = 70  # exit code of a rank whose own code raised, not the learner's (EX_SOFTWARE of sysexits.h)
