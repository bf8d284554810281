"""Races of a simulated GPU: two jobs that touch the same memory, one of them writing, and nothing orders them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

ASYNC = "nccl"  # the stream of collectives with `async_op`
_ING = {"reads": "reading", "writes": "writing"}


class RaceError(Exception):
    """Two jobs touch the same memory and nothing orders them."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the sentences, without our own lines."""
        return [f"RaceError: {self}"]


@dataclass(frozen=True)
class Race:
    """Two jobs that touch the same memory, one of them writing, without an order; `first` was enqueued first."""

    buffer: str
    first: str
    second: str
    text: str


@dataclass(frozen=True)
class Enqueued:
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


def find_races(
    jobs: Sequence[Enqueued], times: Sequence[tuple[float, float]], names: Sequence[str]
) -> tuple[Race, ...]:
    """Every pair of rows and buffers with a race, the first jobs of each. `times` are start and end of each job,
    `names` those of the rows: the host, and the streams.
    """
    found: dict[tuple[str, str, int, int], Race] = {}
    pairs = ((a, b) for b in jobs for a in jobs[: b.number] if not b.before >> a.number & 1)
    for a, b in pairs:
        for x, name_a, y, name_b in _conflicts(a, b):
            if (key := (name_a, name_b, a.row, b.row)) not in found:
                happened = _happened(times[a.number], times[b.number])
                of_a, of_b = (a.name, names[a.row], x, name_a), (b.name, names[b.row], y, name_b)
                is_async = a.kind == "comm" and names[a.row] == ASYNC
                found[key] = _race(of_a, of_b, happened, is_async=is_async, is_host=b.row == 0)
    return tuple(found.values())


def _happened(a: tuple[float, float], b: tuple[float, float]) -> str:
    if max(a[0], b[0]) < min(a[1], b[1]):
        return "Here they ran at the same time."
    if a[0] < b[0]:
        return "Here the first happened to be over in time; nothing promises it."
    return "Here the second even ran first."


def _race(a: tuple[str, ...], b: tuple[str, ...], happened: str, *, is_async: bool, is_host: bool) -> Race:
    """`a` and `b` are each the name of a job and of its row, what it does to the memory, and the buffer's name."""
    (job_a, row_a, x, name_a), (job_b, row_b, y, name_b) = a, b
    first, second = f"{job_a} on {row_a}", f"{job_b} on {row_b}"
    mend = f"Put {row_b}.wait_stream({row_a}) before the second."
    if is_async:
        mend = f"Before the second, call wait() on what {job_a} returned."
    if is_host:
        mend = f"Let the host wait before the second: {row_a}.synchronize()."
    text = f"Race on {name_a}: {first} {x} it, {second} {y} it, and nothing orders the two. {happened} {mend}"
    if name_a != name_b:
        text = (
            f"Memory reused too early: {name_b} was given the memory of {name_a}, which was freed while "
            f"{first} may still be {_ING[x]} it; now {second} {y} it. {happened} Call "
            f'record_stream("{name_a}", {row_a}) before freeing {name_a}.'
        )
    return Race(name_b, first, second, text)


def _conflicts(a: Enqueued, b: Enqueued) -> Iterator[tuple[str, str, str, str]]:
    """What both jobs touch where one of them writes: what a does, the name it used, what b does, its name."""
    of_a, of_b = ([*product(["writes"], job.writes), *product(["reads"], job.reads)] for job in (a, b))
    for (x, (name_a, block_a)), (y, (name_b, block_b)) in product(of_a, of_b):
        if block_a == block_b and "writes" in (x, y):
            yield x, name_a, y, name_b
