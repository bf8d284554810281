"""What each rank is doing, from what it answers, and in words."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import LATE, OF_WORLD, PAIRED
from ..results import Event, Standing, at_line, grouped, name_ranks, placed
from .messages import Status, Wait

OVER = ("finished", "error", "lost", "absent", "still")  # in this cell such a rank issues nothing more
CELL, SCRIPT = "cell", "script"  # what the ranks run


@dataclass(frozen=True)
class State:
    """What one rank is doing. `phase` is "running" or one of `OVER`.

    "still" is found in a script only: it has not moved for so long that nobody expects it to, and stands in no
    operation. `why` says where.
    """

    rank: int
    phase: str
    waits: tuple[Wait, ...] = ()
    counts: Mapping[Any, int] | None = None
    calls: int = 0  # operations called in this cell
    line: int = 0
    file: str = ""
    joins: bool = False  # its main thread waits for another thread of the rank
    blocked_in_torch: bool = False  # its main thread stands still inside torch: C++ waits, not Python
    other_threads: bool = False  # a thread of the learner communicates too: it could still answer
    why: str = ""  # "error", "lost", "still", and "absent" of a script: how; "finished": where it stands
    what: str = CELL
    compiles: bool = False

    @property
    def standing(self) -> tuple[tuple[Wait, ...], ...]:
        """The operations that this rank stands in, a tuple for each of its threads; empty while one can still go on."""
        mine = tuple(w for w in self.waits if w.thread == 0 and w.waiting)
        if not mine and self.blocked_in_torch:
            mine = tuple(w for w in self.waits if w.thread == 0)
        others = grouped((w.thread, w) for w in self.waits if w.thread and w.waiting)
        computes = self.phase == "running" and not mine and not self.joins  # the main thread
        if computes or self.phase not in ("running", "finished", "error", "absent"):
            return ()
        return tuple(filter(None, (mine if self.phase == "running" else (), *map(tuple, others.values()))))

    @property
    def blocking(self) -> tuple[Wait, ...]:
        """All operations of `standing`."""
        return tuple(wait for waits in self.standing for wait in waits)


def missing_peers(wait: Wait, states: Mapping[int, State], rank: int) -> tuple[int, ...]:
    """The ranks that have not yet done their part of `wait`, an operation of `rank`."""

    def count(peer: int, key: Any) -> int:
        return (states[peer].counts or {}).get(key, 0)

    if wait.op in ("send", "recv"):
        if wait.peer is None:  # a receive from anyone: whoever can still go on may answer
            return tuple(r for r in wait.ranks if r != rank)
        key = (*wait.key[:-1], "recv" if wait.op == "send" else "send")
        return () if count(wait.peer, key) >= wait.seq else (wait.peer,)
    return tuple(r for r in wait.ranks if r != rank and count(r, wait.key) < wait.seq)


def late(wait: Wait, states: Sequence[State], rank: int) -> tuple[list[State], str]:
    """Those that still compute where `rank` has waited for them until its timeout, and that in words."""
    by_rank = {s.rank: s for s in states}
    missing = [by_rank[r] for r in missing_peers(wait, by_rank, rank)]
    if not (found := [s for s in missing if s.phase == "running" and not s.blocking]):
        return found, LATE
    does = doing(found[0], len(states), many=len(found) > 1)
    return found, LATE.replace("another rank", f"{name_ranks([s.rank for s in found])}, which {does}")


def doing(state: State, world_size: int, *, many: bool = False, twins: Collection[str] = ()) -> str:
    """What a rank is doing, in words, to follow its name, or the names of `many` that do the same."""
    s = "" if many else "s"
    over = {
        "error": f"failed: {state.why}",
        "lost": f"were {state.why[4:]}" if many and state.why.startswith("was ") else state.why,
        "still": f"stand{s} {state.why}",
        "absent": state.why or ("do not run this cell" if many else "does not run this cell"),
        "finished": state.why or f"finished the {state.what} after {state.calls} call{'s' * (state.calls != 1)}",
    }
    if state.phase in over:
        return over[state.phase]
    if not (blocking := state.blocking):
        begun = next((w for w in state.waits if w.thread == 0), None)
        unfinished = f", with {begun.text} of {at_line(begun.line, begun.file)} not over" if begun is not None else ""
        return f"compute{s}{placed(state.line, state.file)}{unfinished}"
    wait = blocking[0]
    of = "this pair" if wait.op in ("send", "recv") else _group_of(wait, world_size)
    if wait.group in twins:
        of = f"group {wait.called!r} of {of.partition(' of ')[2]}"
    return f"wait{s} in {wait.text}{inside(wait)} (call {wait.nth} of {of}{placed(wait.line, wait.file, ', ')})"


def inside(call: Event | Wait) -> str:
    """ " inside backward" where not the program itself made the call."""
    is_own = call.via.removeprefix(call.op) in ("", "_single", "_tensor", "_into_tensor")
    return f" inside {call.via}" if call.via and not is_own else ""


def _group_of(call: Event | Wait, world_size: int) -> str:
    if len(call.ranks) < world_size:
        return f"the group of {name_ranks(call.ranks)}"
    return "the world" if call.group in OF_WORLD else "a group of all ranks"


def twins(states: Iterable[State]) -> set[str]:
    """Groups in which ranks wait and that have the same ranks: in words they are alike, but for their names."""
    waits = [s.blocking[0] for s in states if s.blocking]
    waits = [w for w in waits if w.called and w.group not in OF_WORLD and w.op not in ("send", "recv")]
    return {w.group for w in waits if any(w.ranks == v.ranks and w.group != v.group for v in waits)}


def call_of(call: Event | Wait, world_size: int, ranks: Sequence[int] = ()) -> str:
    """A call, its group, and where; of `ranks` that may each have called it in a group of their own."""
    group = _group_of(call, world_size) if set(ranks) <= set(call.ranks) else "their groups"
    return f"{call.text}{f' of {group}' if call.op not in PAIRED else ''}{placed(call.line, call.file)}"


def rows(states: Sequence[State], world_size: int, first: Sequence[int] = ()) -> tuple[str, ...]:
    """What each rank does, those that do the same together; the ranks in `first` before the others."""
    words = partial(doing, world_size=world_size, twins=twins(states))
    in_order = sorted(states, key=lambda s: (s.rank not in first, s.rank))
    alike = grouped(((s.rank not in first, words(s)), s) for s in in_order)
    named = [(name_ranks([s.rank for s in same]), words(same[0], many=len(same) > 1)) for same in alike.values()]
    width = max((len(name) for name, _ in named), default=0)
    return tuple(f"{name:<{width}}  {text}" for name, text in named)


def standings(states: Sequence[State]) -> tuple[Standing, ...]:
    """`states` as plain data for the run: who stood where, and whom it waited for."""
    by_rank = {s.rank: s for s in states}
    found = []
    for state in states:
        row = Standing(state.rank, state.phase, doing(state, len(states)), line=state.line, file=state.file)
        if state.blocking:
            wait = state.blocking[0]
            missing = missing_peers(wait, by_rank, state.rank)
            row = replace(row, op=wait.op, text=wait.text, line=wait.line, file=wait.file, waits_for=missing)
        found.append(row)
    return tuple(found)


def summary(states: Sequence[State]) -> str:
    """What the ranks are doing, in one line for the live display."""
    rows = grouped((_briefly(state), state.rank) for state in states if state.phase != "absent")
    return ", ".join(f"{name_ranks(ranks)} {what}" for what, ranks in rows.items())


def _briefly(state: State) -> str:
    if state.phase != "running":
        return {"finished": "done", "error": "failed"}.get(state.phase, state.phase)
    if state.blocking:
        return f"waiting in {state.blocking[0].op}"
    return "compiling" if state.compiles else "computing"


def from_status(status: Status, before: Status | None) -> State:
    """The state of a running rank from what its control thread answered, now and the time before.

    A rank stands still inside torch when its main thread has not run since the answer before: measured, a wait in C++
    (DDP's reducer, a functional collective) neither uses CPU time nor wakes up. On a busy machine a thread that only
    waits for a core uses none either, which `Status.runs` tells; nor does one that waits for its turn in
    Python, but that one wakes up.
    """
    cpu, switches = (before.cpu, before.switches) if before is not None else (None, None)
    still = status.cpu is not None and cpu is not None and status.cpu - cpu < 1e-4 and status.switches == switches
    phase = "running" if status.phase in ("starting", "idle") else status.phase
    blocked = status.synchronizes or (status.in_torch and not status.runs and still)
    return State(
        status.rank, phase, status.waits, status.counts, status.calls, status.line, status.file, status.joins,
        blocked_in_torch=blocked, other_threads=status.threads, compiles=status.compiles,
    )  # fmt: skip
