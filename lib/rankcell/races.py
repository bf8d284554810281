"""Races of a simulated GPU: two jobs that touch the same memory, one of them writing, and nothing orders them."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

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


class Enqueued(NamedTuple):
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


def find_races(jobs: Sequence[Enqueued], times: Sequence[tuple[float, float]], names: list[str]) -> tuple[Race, ...]:
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


def _mend(a: Enqueued, b: Enqueued, names: Sequence[str]) -> str:
    if b.row == 0:
        return f"Let the host wait before the second: {names[a.row]}.synchronize()."
    if a.kind == "comm" and names[a.row] == ASYNC:
        return f"Before the second, call wait() on what {a.name} returned."
    return f"Put {names[b.row]}.wait_stream({names[a.row]}) before the second."


def _conflicts(a: Enqueued, b: Enqueued) -> Iterator[tuple[str, str, str, str]]:
    """What both jobs touch where one of them writes: what a does, the name it used, what b does, its name."""
    of_a, of_b = ([*product(["writes"], job.writes), *product(["reads"], job.reads)] for job in (a, b))
    for (x, (name_a, block_a)), (y, (name_b, block_b)) in product(of_a, of_b):
        if block_a == block_b and "writes" in (x, y):
            yield x, name_a, y, name_b
