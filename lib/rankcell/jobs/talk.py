"""What a rank of a job and the runner say to each other, as pickles over an authenticated channel.

A rank says `Arrival` first, and `Ended` when its program is over or has raised. The runner asks by `Question` (of the
engine's messages), and the rank's own thread answers: about "look" a `Look`, about "report" a `Record`, about "peek" a
`Look` of another process of its node. "near" tells a rank which others are on its node, "go" lets it end, "leave"
has it remove what it has written, "end" ends it, "last" asks for what a process that crashed has left.
"""

from dataclasses import dataclass

from ..engine.messages import Status
from .records import Record
from .stacks import Thread


@dataclass(frozen=True)
class Arrival:
    """A process of the job is a rank."""

    rank: int
    world_size: int
    pid: int
    host: str  # the same for processes that share memory
    node: str  # the machine's name
    folder: str  # where it writes its stack when it is sent a signal
    restart: int  # how often torchrun has started the ranks anew
    command: str


@dataclass(frozen=True)
class Look:
    """What a rank does now. `cpu` and `moved` grow while it, or one of its workers, computes, reads or writes."""

    status: Status | None
    cpu: float  # seconds
    moved: int  # bytes
    runs: bool = False  # it has a core, or waits for one
    threads: tuple[Thread, ...] = ()  # only of a process that could not answer itself


@dataclass(frozen=True)
class Ended:
    """The program of a rank is over; the last that is heard of it."""

    record: Record
