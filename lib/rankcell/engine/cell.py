"""On the notebook's side: one cell, from its task to its `Run`, or the error that says what went wrong first.

It listens, asks now and then what the ranks do, proves a deadlock (`diagnose.py`), and gets everybody out of a cell
that cannot end, took too long, or was interrupted. What then must be repaired is for the world to do.
"""

import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import errors, extensions
from ..results import NotSent, Run, grouped, name_ranks
from . import diagnose, stacks, system
from .messages import RankState, Status, Task
from .received import unpack
from .states import State, from_status, late, rows, standings, summary
from .workers import Workers, under_way

FIRST_POLL, POLL = 0.1, 0.2  # seconds until the ranks are first asked what they do, and between two questions
CONFIRM = 0.04  # seconds between the two looks that must agree before a deadlock is reported
SETTLE = 2.0  # seconds that ranks on the way to an operation get to reach it: the report counts them, too
STILL = 10.0  # ... if they get no core; and that a rank may stand still, in a store or a lock, once another has failed
GRACE = 0.8  # seconds that a freed or interrupted rank has to come back before it is replaced
PATIENCE = 4.0  # ... if it gets no processor: on a busy machine that is not its fault
SPINS = 0.5  # seconds of computing meanwhile that show that it does get one

OnUpdate = Callable[[Run, str], None]
Cause = errors.RankError | errors.RanksInterrupted  # why a cell was ended


@dataclass(frozen=True)
class Ending:
    run: Run
    error: Cause | errors.PullError | None
    states: Mapping[int, RankState]  # of the ranks that came back
    lost: tuple[int, ...] = ()  # ranks whose processes have ended
    broken: bool = False  # connections were closed, or ranks are out of step: they must join anew
    left: tuple[int, ...] = ()  # ranks that have destroyed their process group


@dataclass
class Cell:
    """One cell on the ranks of `members`."""

    workers: Workers
    task: Task
    members: Sequence[int]
    source: str  # for the `Run`: of a function its name
    timeout: float | None  # as of `Ranks.run`, and so is the next
    on_update: OnUpdate | None
    _last: dict[int, Status] = field(default_factory=dict)  # what each rank answered last
    _states: list[State] = field(default_factory=list)  # at the last look
    _moved: dict[int, float] = field(default_factory=dict)  # when each rank was last seen to have run
    _hungry: set[int] = field(default_factory=set)  # ranks that run, or wait for a core, at the last look
    _proved: tuple[float, dict[int, float]] | None = None  # since when some wait in vain; what the others had used

    def run(self, interrupted: Callable[[], bool]) -> Ending:
        """Give the task to the ranks, and wait until it is over on all of them, or until `interrupted`."""
        self.workers.next_cell(self.task.cell, self.members)
        host = self.workers.host
        # its beginning as the clock of each one's machine shows it
        for offset, mine in grouped((host.clock_offset(rank), rank) for rank in self.members).items():
            host.send(mine, pickle.dumps(replace(self.task, began=self.task.began + offset), pickle.HIGHEST_PROTOCOL))
        if (cause := self._wait(interrupted)) is not None:
            self._free(wanted=not isinstance(cause, errors.Deadlock))
        return self._ending(cause)

    def _over(self) -> bool:
        return all(p.over for p in self.workers.received.values())

    def _wait(self, interrupted: Callable[[], bool]) -> Cause | None:
        """Wait until the ranks are through, or until there is a reason to end the cell."""
        began, timeout = self.workers.began, self.timeout
        next_poll, seen = began + FIRST_POLL, None
        while not self._over():
            now = time.monotonic()
            end = began + timeout if timeout is not None else now + 3600
            self.workers.pump(max(min(next_poll, end) - now, 0.0))
            now = time.monotonic()
            if self._over():
                break
            if interrupted():
                self._look()
                return errors.RanksInterrupted(self._where("the ranks were interrupted while they were here:"))
            if timeout is not None and now >= end:
                self._look()
                where = self._where(f"the ranks did not all finish within {timeout:g} s.")
                slow = "Nobody is known to wait for a rank that cannot answer, so this is slow rather than stuck"
                return errors.RankTimeout(f"{where}\n{slow}: give it more time with `--timeout`, or less to do.")
            if now >= next_poll:
                self._look()
                diagnosis = diagnose.diagnose(self._states)
                if diagnosis is None:
                    self._proved = None
                elif seen == _fingerprint(self._states) and not self._may_still_arrive(now):
                    return errors.Deadlock(str(diagnosis))
                if self._nobody_moves(now):
                    return errors.Deadlock(self._where("a rank has failed, and the others stand still:"))
                seen = _fingerprint(self._states) if diagnosis is not None else None
                next_poll = time.monotonic() + (CONFIRM if diagnosis is not None else POLL)
                if self.on_update is not None:
                    try:
                        self.on_update(self._run(live=True), summary(self._states))
                    except Exception:  # noqa: BLE001 - a display that fails must not end the ranks' cell
                        self.on_update = None
        return None

    def _look(self) -> None:
        """Find out what every rank is doing now."""
        received = self.workers.received
        idle = {rank for rank in self.workers.with_threads if not received[rank].runs}
        asked = [n for n, r in received.items() if not r.over or n in idle or (r.done and r.done.state.threads)]
        answers: dict[int, Status | None] = self.workers.ask(asked, "status", wait=0.3)
        self._hungry = {rank for rank in asked if (found := answers.get(rank)) is None or found.runs}
        states = []
        for rank, part in sorted(received.items()):
            before = self.workers.counts.get(rank, {})
            if (status := answers.get(rank)) is not None and part.runs and status.cell != self.task.cell:
                status = None  # it has not taken the task up: what it says is about the cell before
            if not part.runs:
                states.append(_with_threads(State(rank, "absent", counts=before), status))
            elif part.lost:
                states.append(State(rank, "lost", counts=before, why=part.lost.message))
            elif part.done is not None:
                left, error = part.done.state, part.done.result.error
                ended = left.exit and f"ended the cell with {left.exit}"
                phase, why = ("error", str(error)) if error else ("finished", ended)
                state = State(rank, phase, counts=left.counts, calls=left.calls, why=why)
                if left.threads and status is None:
                    state = replace(state, other_threads=True)  # it did not answer: nobody knows
                states.append(_with_threads(state, status))
            elif status is not None:
                last = self._last.get(rank)
                if last is None or status.cpu is None or (status.cpu, status.switches) != (last.cpu, last.switches):
                    self._moved[rank] = time.monotonic()
                states.append(from_status(status, last))
                self._last[rank] = status
            else:  # it holds the interpreter in a long C call: busy, as far as anybody can tell
                self._moved[rank] = time.monotonic()
                states.append(State(rank, "running", counts=before))
        self._states = states
        for state in states:
            if state.why.endswith(received[state.rank].late) and state.rank in self._last:
                for wait in self._last[state.rank].waits[-1:]:
                    _, received[state.rank].late = late(wait, states, state.rank)

    def _may_still_arrive(self, now: float) -> bool:
        """Whether a rank is on the way to an operation, and has not yet had the time, or the core, to reach it."""
        on_the_way = [s.rank for s in self._states if s.phase == "running" and not s.standing]
        since, used = self._proved = self._proved or (now, {rank: self._used(rank) for rank in on_the_way})
        hungry = [r for r in on_the_way if r in self._hungry and self._used(r) - used.get(r, 0.0) < SETTLE]
        return bool(on_the_way) and now < since + (STILL if hungry else SETTLE)

    def _nobody_moves(self, now: float) -> bool:
        """Whether a rank has failed and the others do nothing: what they wait for may never come."""
        runs = [s.rank for s in self._states if s.phase == "running"]
        still = bool(runs) and all(now - self._moved.get(rank, now) > STILL for rank in runs)
        if not still or not any(s.phase in ("error", "lost") for s in self._states):
            return False
        host = self.workers.host
        pids = [host.pids.get(rank, 0) for rank in runs if not host.place_of(rank)[2]]  # of this machine
        # a process of its own may work for a rank that stands still
        return not any(s.compiles for s in self._states) and not any(map(stacks.children, pids))

    def _where(self, headline: str) -> str:
        """`headline`, and under it where the ranks were; those in the same place together."""
        present = [state for state in self._states if state.phase != "absent"]
        return "\n".join([headline, *(f"  {row}" for row in rows(present, self.workers.world_size))])

    def _free(self, *, wanted: bool) -> None:
        """Get every rank out of the cell, or end it; `wanted` by the learner or a limit, or known to wait in vain."""
        workers, received = self.workers, self.workers.received
        about = "interrupt" if wanted else "free"
        running = [rank for rank, r in received.items() if not r.over]
        for rank in running:
            received[rank].freed = True
        began = time.monotonic()
        used = {rank: self._used(rank) for rank in running}
        workers.ask(running, about, self.task.cell, wait=GRACE / 2)
        again = time.monotonic() + GRACE / 4
        while running := [rank for rank, r in received.items() if not r.over]:
            now = time.monotonic()
            if now > began + GRACE:
                self._end([r for r in running if now > began + PATIENCE or self._used(r) - used[r] >= SPINS])
            elif now > again:  # a first interrupt may have been swallowed by an `except`
                again = now + GRACE / 4
                workers.ask(running, about, self.task.cell, wait=0.05)
            workers.pump(0.05)

    def _used(self, rank: int) -> float:
        """CPU seconds of the rank's process; 0 where it is on another machine."""
        host = self.workers.host
        return 0.0 if host.place_of(rank)[2] else system.process_cpu_seconds(host.pids.get(rank, 0))

    def _end(self, ranks: Sequence[int]) -> None:
        self.workers.host.kill(ranks)
        self.workers.pump(0.0)  # what they wrote until then
        for rank in ranks:  # also one that came back meanwhile, since those that it waited for were ended
            self.workers.lose(rank, "did not react and was ended", by_us=True)

    def _ending(self, cause: Cause | None) -> Ending:
        received = self.workers.received
        lost = tuple(rank for rank, r in received.items() if r.lost)
        states = {rank: r.done.state for rank, r in received.items() if r.done is not None}
        unmatched = None if cause is not None or lost else self._unmatched(states)
        left = tuple(rank for rank, state in states.items() if not state.group)
        run = self._run(live=False)
        if cause is not None:
            run = replace(run, standstill=standings(self._states))
        earlier = self.workers.counts
        now = {**earlier, **{rank: state.counts for rank, state in states.items()}}
        # a message that a rank has not taken, because it raised, would be taken for the next one
        left_over = bool(run.failed) and under_way(now.values()) != under_way(earlier.values())
        broken = bool(cause or left_over or lost or unmatched or left or any(r.mismatch for r in run.ranks))
        broken = broken or len({s.group for s in states.values()}) > 1 or any(s.broken for s in states.values())
        replaced = all(self.workers.host.reachable(rank) for rank in lost)
        error = what_went_wrong(run, cause, unmatched, self.task.pull, replaced=replaced)
        for name, ranks in errors.missing_names(run).items():
            new = [rank for rank in ranks if name in self.workers.gone[rank]]
            have = [rank for rank, names in self.workers.names.items() if name in names and rank not in ranks]
            if error and new:
                are = "is a new process" if len(new) == 1 else "are new processes"
                error.add(f"{name_ranks(new)} {are} since `{name}` was defined: run the cell that defines it again.")
            elif error and have:
                error.add(f"Only {name_ranks(have)} defined `{name}` in an earlier cell.")
        return Ending(run, error, states, lost, broken, left)

    def _unmatched(self, states: Mapping[int, RankState]) -> str | None:
        """A sentence, if some ranks called more than others."""
        known = self.workers.counts | {rank: state.counts for rank, state in states.items()}
        counts = {rank: known.get(rank, {}) for rank in self.workers.received}
        if working := [rank for rank, state in states.items() if state.threads]:  # may have called more since
            later: dict[int, Status | None] = self.workers.ask(working, "status", wait=0.5)
            counts |= {rank: status.counts for rank, status in later.items() if status is not None}
        return diagnose.unmatched(counts, self.members)

    def _run(self, *, live: bool) -> Run:
        """The run when the cell is over, or so far."""
        workers, pulled = self.workers, {}
        nodes = {rank: workers.host.place_of(rank)[2] for rank in sorted(workers.received)}
        results = [workers.received[rank].result(rank, node, live=live) for rank, node in nodes.items()]
        if not live:
            done = [r.done for r in workers.received.values() if r.done and r.done.result.error is None]
            pulled = {name: [unpack(d.state.pulled[name]) for d in done] for name in self.task.pull}
        choice, seconds = workers.host.choice, time.monotonic() - workers.began
        return Run(self.source, tuple(results), choice.device, choice.backend, seconds, pulled)


def what_went_wrong(
    run: Run, cause: Cause | None, unmatched: str | None, pull: Sequence[str], *, replaced: bool
) -> Cause | errors.PullError | None:
    """The error of a cell that is over: what went wrong first; None if nothing did.

    `cause` is why we have ended the cell, if the ranks did not; `unmatched` a sentence, if some ranks called more than
    others; `pull` are the names that the notebook wants; `replaced`: whether lost ranks can be replaced.
    """
    lost = [r for r in run.ran if r.state == "lost" and not (r.error and r.error.caused_by_abort)]
    raised = [r for r in run.failed if r.error and not r.error.caused_by_abort and r.state == "error"]
    error: Cause | None = None
    if isinstance(cause, (errors.RanksInterrupted, errors.RankTimeout)):
        error = cause
    elif lost:
        error = errors.lost_error(run, lost, replaced=replaced)
    elif any(r.mismatch for r in run.ran) and (cause is not None or raised):
        error = errors.mismatch_error(run, extensions.find("before a mismatch")(run))
    elif raised:
        error = errors.rank_error(run)
    elif cause is not None:
        error = cause
    elif unmatched:
        error = errors.Deadlock(unmatched)
    elif run.failed:
        error = errors.rank_error(run)
    if error is None:
        return _pull_error(run, pull)
    error.run = run
    # who waits where calls do not match is a matter of chance
    if cause is not None and not isinstance(error, errors.RankMismatch) and (summing := _summing(run)):
        error.add(f"The tensors that {name_ranks(summing)} were summing may hold parts of the sum: make them anew.")
    if hidden := _hidden(run):
        error.add(hidden)
    if ended := [r.rank for r in run.ran if r.state == "lost" and r.error and r.error.caused_by_abort]:
        were = "was" if len(ended) == 1 else "were"
        error.add(f"{name_ranks(ended)} did not react and {were} replaced: names defined there are gone.")
    return error


def _summing(run: Run) -> list[int]:
    """Ranks that waited in a sum with others: one that waits alone has received nothing, and a number has no parts."""
    summing = (s for s in run.standstill if s.phase == "running" and s.op in ("all_reduce", "reduce"))
    alike = grouped(((s.text, s.waits_for), s.rank) for s in summing if "[]" not in s.text)
    return sorted(rank for ranks in alike.values() if len(ranks) > 1 for rank in ranks)


def _hidden(run: Run) -> str:
    """The exception that a rank handled while it stood in a call that did not end: a `finally` that waits hides it."""
    for r in run.ran:
        stood = r.error is not None and (r.error.caused_by_abort or r.error.mismatch)
        for _, why in r.error.causes if r.error is not None and stood else ():
            if why.type not in ("MismatchError", "KeyboardInterrupt"):
                return f"rank {r.rank} came there while it handled {why} (line {why.line})."
    return ""


def _pull_error(run: Run, pull: Sequence[str]) -> errors.PullError | None:
    problems = []
    for name in pull:
        values = zip(run.ran, run.pulled[name], strict=False)
        reasons = grouped((value.reason, result.rank) for result, value in values if isinstance(value, NotSent))
        problems += [f"{name} on {name_ranks(ranks)}: {why}" for why, ranks in reasons.items()]
    if not problems:
        return None
    how = " Make plain data of it in the rank cell, of a module `weights = model.state_dict()`, and pull that."
    said = f"the cell ran, but not every name could be pulled. {'; '.join(problems)}."
    return errors.PullError(said + how * any("cannot be sent" in problem for problem in problems), run)


def _with_threads(state: State, status: Status | None) -> State:
    """A rank whose main thread is through: its other threads may still call something, or wait."""
    if status is None:
        return state
    waits = tuple(w for w in status.waits if w.thread)
    return replace(state, counts=status.counts, waits=waits, other_threads=status.threads)


def _fingerprint(states: Sequence[State]) -> Any:
    """What must not change between two looks for a deadlock to be believed."""
    return [(s.rank, s.phase, tuple((w.key, w.seq) for w in s.blocking), dict(s.counts or {})) for s in states]


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
