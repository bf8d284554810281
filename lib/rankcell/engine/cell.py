"""On the notebook's side: one cell, from the moment the ranks have it to the moment nobody runs it any more.

It listens, asks now and then what the ranks do, proves a deadlock (`diagnose.py`), and gets everybody out of a
cell that cannot end, took too long, or was interrupted. What then must be repaired is for the world to do.
"""

import contextlib
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import errors
from ..results import Run, name_ranks
from . import diagnose, system
from .mailbox import Mailbox
from .messages import Status, Task
from .parts import Part, unpack

FIRST_POLL, POLL = 0.1, 0.2  # seconds until the ranks are first asked what they do, and between two questions
CONFIRM = 0.04  # seconds between the two looks that must agree before a deadlock is reported
SETTLE = (
    2.0  # seconds that ranks on the way to an operation get to reach it, so that the report counts them, too
)
GRACE = 0.8  # seconds that a freed or interrupted rank has to come back before it is replaced
PATIENCE = 4.0  # ... if it gets no processor: on a busy machine that is not its fault
SPINS = 0.5  # seconds of computing meanwhile that show that it does get one

OnUpdate = Callable[[Run, str], None]


@dataclass(frozen=True)
class World:
    """What a cell must know of the world that it runs in."""

    size: int
    device: str
    backend: str


@dataclass(frozen=True)
class Ending:
    """How a cell ended."""

    run: Run
    cause: errors.RankError | errors.RanksInterrupted | None = None  # why we ended it, if the ranks did not
    lost: tuple[int, ...] = ()  # ranks whose processes have ended
    unmatched: str | None = None  # a sentence, if some ranks called more than others
    broken: bool = False  # connections were closed, or ranks are out of step: they must join anew
    left: tuple[int, ...] = ()  # ranks that have destroyed their process group


class Cell:
    """One cell on the ranks of `members`.

    Args:
        source: the source, or the name of the function, for the `Run`.
        timeout: seconds after which the ranks are interrupted; None waits as long as somebody makes progress.
        counts: how often each rank had called each operation when the cell began.
        with_threads: ranks on which threads of earlier cells are still there.
        on_update: called while the cell runs, with the run so far and a line that says what the ranks do.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        world: World,
        task: Task,
        members: Sequence[int],
        *,
        source: str,
        timeout: float | None,
        counts: Mapping[int, Mapping[Any, int]],
        with_threads: Collection[int],
        on_update: OnUpdate | None,
    ) -> None:
        self._mailbox, self._world, self._task, self._members = mailbox, world, task, members
        self._source, self._timeout, self._counts, self._on_update = source, timeout, counts, on_update
        self._with_threads = with_threads
        self._last: dict[int, Status] = {}  # what each rank answered last
        self._states: list[diagnose.State] = []  # at the last look

    def run(self, interrupted: Callable[[], bool]) -> Ending:
        """Give the task to the ranks, and wait until it is over on all of them, or until `interrupted`."""
        mailbox = self._mailbox
        before = mailbox.parts
        mailbox.parts = {r: Part(runs=r in self._members) for r in range(self._world.size)}
        for rank, part in before.items():
            mailbox.parts[rank].inherit(part)
        mailbox.began, mailbox.cell = time.monotonic(), self._task.cell
        self._send()
        cause = self._wait(interrupted)
        if cause is not None:
            self._free(wanted=not isinstance(cause, errors.Deadlock))
        return self._ending(cause)

    def _send(self) -> None:
        """Give the task to the ranks, its beginning as the clock of each one's machine shows it."""
        host = self._mailbox.host
        by_offset: dict[float, list[int]] = {}
        for rank in self._members:
            by_offset.setdefault(host.clock_offset(rank), []).append(rank)
        for offset, mine in by_offset.items():
            task = replace(self._task, began=self._task.began + offset) if offset else self._task
            host.send(mine, pickle.dumps(task, pickle.HIGHEST_PROTOCOL))

    def _over(self) -> bool:
        return all(p.over for p in self._mailbox.parts.values())

    def _wait(self, interrupted: Callable[[], bool]) -> errors.RankError | errors.RanksInterrupted | None:
        """Wait until the ranks are through, or until there is a reason to end the cell."""
        began, timeout = self._mailbox.began, self._timeout
        next_poll, seen, proved = began + FIRST_POLL, None, None
        while not self._over():
            now = time.monotonic()
            end = began + timeout if timeout is not None else now + 3600
            self._mailbox.pump(max(min(next_poll, end) - now, 0.0))
            now = time.monotonic()
            if self._over():
                break
            if interrupted():
                self._look()
                return errors.RanksInterrupted(
                    self._where("the ranks were interrupted while they were here:")
                )
            if timeout is not None and now >= end:
                self._look()
                return errors.RankTimeout(
                    self._where(f"the ranks did not all finish within {timeout:g} s.")
                    + "\nNobody is known to wait for a rank that cannot answer, so this is slow rather than stuck: "
                    "give it more time with `--timeout`, or less to do."
                )
            if now >= next_poll:
                self._look()
                diagnosis = diagnose.diagnose(self._states)
                proved = (proved or now) if diagnosis is not None else None
                patient = proved is not None and now < proved + SETTLE and not diagnose.settled(self._states)
                if diagnosis is not None and seen == _fingerprint(self._states) and not patient:
                    return errors.Deadlock(str(diagnosis))
                seen = _fingerprint(self._states) if diagnosis is not None else None
                next_poll = time.monotonic() + (CONFIRM if diagnosis is not None else POLL)
                if self._on_update is not None:
                    try:
                        self._on_update(self._so_far(), diagnose.summary(self._states))
                    except Exception:  # noqa: BLE001 - a display that fails must not end the ranks' cell
                        self._on_update = None
        return None

    def _look(self) -> None:
        """Find out what every rank is doing now."""
        parts = self._mailbox.parts
        asked = [
            r
            for r, p in parts.items()
            if not p.over or (p.outcome.threads if p.outcome else not p.runs and r in self._with_threads)
        ]
        answers: dict[int, Status | None] = self._mailbox.ask(asked, "status", wait=0.3)
        states = []
        for rank, part in sorted(parts.items()):
            before = self._counts.get(rank, {})
            status = answers.get(rank)
            if status is not None and part.runs and status.cell != self._task.cell:
                status = None  # it has not taken the task up: what it says is about the cell before
            if not part.runs:
                states.append(_with_threads(diagnose.State(rank, "absent", counts=before), status))
            elif part.lost:
                states.append(diagnose.State(rank, "lost", counts=before, why=part.lost.message))
            elif part.outcome is not None:
                outcome = part.outcome
                phase, why = ("error", str(outcome.error)) if outcome.error else ("finished", "")
                state = diagnose.State(rank, phase, counts=outcome.counts, calls=outcome.calls, why=why)
                if outcome.threads and status is None:
                    state = replace(state, other_threads=True)  # it did not answer: nobody knows
                states.append(_with_threads(state, status))
            elif status is not None:
                states.append(diagnose.from_status(status, self._last.get(rank)))
                self._last[rank] = status
            else:  # it holds the interpreter in a long C call: busy, as far as anybody can tell
                states.append(diagnose.State(rank, "running", counts=before))
        self._states = states

    def _where(self, headline: str) -> str:
        """`headline`, and under it where the ranks were; those in the same place together."""
        alike: dict[str, list[diagnose.State]] = {}
        for state in self._states:
            if state.phase != "absent":
                alike.setdefault(diagnose.doing(state, self._world.size), []).append(state)
        rows = [
            (
                name_ranks([s.rank for s in same]),
                diagnose.doing(same[0], self._world.size, many=len(same) > 1),
            )
            for same in alike.values()
        ]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([headline, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _free(self, *, wanted: bool) -> None:
        """Get every rank out of the cell; one that does not react is ended.

        `wanted`: the learner asked for it, or the time is up. Otherwise the ranks are known to wait in vain.
        """
        mailbox, parts = self._mailbox, self._mailbox.parts
        about = "interrupt" if wanted else "free"
        running = [r for r, p in parts.items() if not p.over]
        for rank in running:
            parts[rank].freed = True
        began = time.monotonic()
        cpu = {rank: status.cpu for rank, status in self._last.items()}
        used = {rank: self._used(rank) for rank in running}
        mailbox.ask(running, about, wait=GRACE / 2)
        again = time.monotonic() + GRACE / 4
        silent: Counter[int] = Counter()  # how often a rank did not even answer
        while running := [r for r, p in parts.items() if not p.over]:
            now = time.monotonic()
            if now > began + GRACE:
                answers: dict[int, Status | None] = mailbox.ask(running, "status", wait=GRACE / 4)
                silent.update(r for r in running if answers.get(r) is None)
                late = now > began + PATIENCE
                # a silent rank that has run meanwhile holds the interpreter; another one may only want a core
                deaf = {r for r in running if silent[r] > 1 and self._used(r) - used[r] >= SPINS}
                stubborn = [r for r in running if late or r in deaf or _spins(answers.get(r), cpu.get(r))]
                self._end(stubborn)
            elif now > again:  # a first interrupt may have been swallowed by an `except`
                again = now + GRACE / 4
                mailbox.ask(running, about, wait=0.05)
            mailbox.pump(0.05)

    def _used(self, rank: int) -> float:
        """CPU seconds of the rank's process; 0 where it is on another machine."""
        host = self._mailbox.host
        return 0.0 if host.place_of(rank)[2] else system.process_cpu_seconds(host.pids.get(rank, 0))

    def _end(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`, and note that it was our doing."""
        mailbox = self._mailbox
        if not ranks:
            return
        mailbox.host.kill(ranks)
        mailbox.pump(0.0)  # what they wrote until then
        for rank in ranks:
            if mailbox.parts[rank].outcome is None:
                mailbox.lose(rank, "did not react and was ended")
                part = mailbox.parts[rank]
                assert part.lost is not None
                part.lost = replace(part.lost, message="did not react and was ended", caused_by_abort=True)

    def _ending(self, cause: errors.RankError | errors.RanksInterrupted | None) -> Ending:
        parts = self._mailbox.parts
        lost = tuple(r for r, p in parts.items() if p.lost)
        outcomes = {r: p.outcome for r, p in parts.items() if p.outcome is not None}
        unmatched = None
        if cause is None and not lost:
            counts = {r: outcomes[r].counts if r in outcomes else self._counts.get(r, {}) for r in parts}
            working = [r for r, o in outcomes.items() if o.threads]  # these may have called more since
            later: dict[int, Status | None] = (
                self._mailbox.ask(working, "status", wait=0.5) if working else {}
            )
            counts |= {r: status.counts for r, status in later.items() if status is not None}
            unmatched = diagnose.unmatched(counts, self._members)
        left = tuple(r for r, o in outcomes.items() if not o.group)
        broken = (
            cause is not None
            or bool(lost or unmatched or left)
            or any(o.broken or o.mismatch for o in outcomes.values())
            or len({o.group for o in outcomes.values()}) > 1
        )
        standstill = diagnose.standings(self._states) if cause is not None else ()
        return Ending(replace(self._result(), standstill=standstill), cause, lost, unmatched, broken, left)

    def _result(self) -> Run:
        ran = [p for p in self._mailbox.parts.values() if p.outcome is not None and p.outcome.error is None]
        pulled = {
            name: [unpack(p.outcome.pulled[name]) for p in ran if p.outcome is not None]
            for name in self._task.pull
        }
        return self._run(live=False, pulled=pulled)

    def _so_far(self) -> Run:
        return self._run(live=True, pulled={})

    def _run(self, *, live: bool, pulled: Mapping[str, Sequence[Any]]) -> Run:
        host = self._mailbox.host
        results = [
            part.so_far(rank, host.place_of(rank)[2]) if live else part.result(rank, host.place_of(rank)[2])
            for rank, part in sorted(self._mailbox.parts.items())
        ]
        seconds = time.monotonic() - self._mailbox.began
        world = self._world
        return Run(self._source, tuple(results), world.device, world.backend, seconds, pulled)


def _with_threads(state: diagnose.State, status: Status | None) -> diagnose.State:
    """A rank whose main thread is through: its other threads may still call something, or wait."""
    if status is None:
        return state
    waits = tuple(w for w in status.waits if w.thread)
    return replace(state, counts=status.counts, waits=waits, other_threads=status.threads)


def _spins(status: Status | None, cpu_before: float | None) -> bool:
    """Whether a rank goes on computing although it was told to leave the cell."""
    if status is None or status.cpu is None or cpu_before is None:
        return False
    return status.phase == "running" and status.cpu - cpu_before > SPINS


def _fingerprint(states: Sequence[diagnose.State]) -> Any:
    """What must not change between two looks for a deadlock to be believed."""
    return [
        (s.rank, s.phase, tuple((w.key, w.seq) for w in s.blocking), dict(s.counts or {})) for s in states
    ]


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of raising in the middle of a message; the caller asks whether it came."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
