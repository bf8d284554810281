"""Who waits for whom, and what is to blame: a pure function of the ranks' states.

A deadlock is proved, not timed out: a rank is stuck when it waits for a rank that will never answer (it
finished the cell, raised, died, or does not run the cell) or for one that is stuck itself. A rank that
computes can always still answer, so a slow rank is never reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..results import Standing, at_line, name_ranks
from .messages import LEAVES, Status, Wait

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
    why: str = (
        ""  # for "error", "lost" and "still"; of a script for "absent", too; "finished": where it stands
    )
    what: str = CELL

    @property
    def standing(self) -> tuple[tuple[Wait, ...], ...]:
        """The operations that this rank stands in, a tuple for each of its threads; empty if it can still do
        something by itself. A thread is stuck if it is in one of them for ever.
        """
        mine = tuple(w for w in self.waits if w.thread == 0 and w.waiting)
        if not mine and self.blocked_in_torch:
            mine = tuple(w for w in self.waits if w.thread == 0)
        others: dict[int, tuple[Wait, ...]] = {}
        for wait in self.waits:
            if wait.thread and wait.waiting:
                others[wait.thread] = (*others.get(wait.thread, ()), wait)
        if self.phase == "running" and not mine and not self.joins:
            return ()  # the main thread computes
        if self.phase not in ("running", "finished", "error", "absent"):
            return ()
        return tuple(filter(None, (mine if self.phase == "running" else (), *others.values())))

    @property
    def blocking(self) -> tuple[Wait, ...]:
        """All operations of `standing`."""
        return tuple(wait for waits in self.standing for wait in waits)


@dataclass(frozen=True)
class Diagnosis:
    """A proved deadlock: a headline, a line per rank, and what to change."""

    blame: int
    headline: str
    lines: tuple[str, ...]
    advice: str
    culprits: tuple[int, ...] = ()  # all who are to blame alike, as far as it can be told
    suspects: tuple[int, ...] = ()  # both sides, where only what they called before tells who it is

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {line}" for line in self.lines), self.advice])


def missing_peers(wait: Wait, states: Mapping[int, State], rank: int) -> tuple[int, ...]:
    """The ranks that have not yet done their part of `wait`, an operation of `rank`."""

    def count(peer: int, key: Any) -> int:
        return (states[peer].counts or {}).get(key, 0)

    if wait.op in ("send", "recv"):
        if wait.peer is None:  # a receive from anyone: whoever can still go on may answer
            return tuple(r for r in wait.ranks if r != rank)
        other = "recv" if wait.op == "send" else "send"
        key = (*wait.key[:-1], other)
        return () if count(wait.peer, key) >= wait.seq else (wait.peer,)
    return tuple(r for r in wait.ranks if r != rank and count(r, wait.key) < wait.seq)


def diagnose(states: Sequence[State]) -> Diagnosis | None:
    """The deadlock that `states` prove, or None while somebody can still go on."""
    states = [left(state) for state in states]
    by_rank = {s.rank: s for s in states}
    # rank -> what each of its threads waits for, and for whom
    threads: dict[int, list[list[tuple[Wait, tuple[int, ...]]]]] = {}
    for state in states:
        for waits in state.standing:
            missing = [(wait, missing_peers(wait, by_rank, state.rank)) for wait in waits]
            threads.setdefault(state.rank, []).append([(w, m) for w, m in missing if m])
    over = {s.rank for s in states if s.phase in OVER and not s.other_threads and s.rank not in threads}
    free = {s.rank for s in states if s.rank not in over and (s.rank not in threads or s.other_threads)}
    while True:
        freed = {
            rank
            for rank, mine in threads.items()
            # one thread that goes on may do whatever the others wait for
            if rank not in free
            and any(all(_answerable(wait, missing, free) for wait, missing in waits) for waits in mine)
        }
        if not freed:
            break
        free |= freed
    stuck = {r: [edge for waits in mine for edge in waits] for r, mine in threads.items() if r not in free}
    if not any(by_rank[r].phase == "running" for r in stuck):
        return None
    return _explain(by_rank, stuck, over)


def left(state: State) -> State:
    """A rank that stands in `destroy_process_group` calls nothing more, as one that is through."""
    wait = next((w for w in state.blocking if w.group == LEAVES), None)
    if wait is None or state.phase != "running":
        return state
    where = f" ({at_line(wait.line, wait.file)})" if wait.line else ""
    return replace(state, phase="finished", waits=(), why=f"stands in {LEAVES}{where}")


def settled(states: Sequence[State]) -> bool:
    """Whether every rank is through with the cell or stands in an operation: nobody is still on the way to one."""
    return all(state.phase != "running" or state.standing for state in states)


def _answerable(wait: Wait, missing: Sequence[int], free: set[int]) -> bool:
    if wait.op == "recv" and wait.peer is None:
        return any(peer in free for peer in missing)
    return all(peer in free for peer in missing)


def _explain(
    states: Mapping[int, State], stuck: Mapping[int, list[tuple[Wait, tuple[int, ...]]]], over: set[int]
) -> Diagnosis:
    ended = sorted({m for waits in stuck.values() for _, missing in waits for m in missing if m in over})
    lines = tuple(describe(states[r], len(states)) for r in sorted(states))
    if ended:
        return _ended(states, stuck, ended, lines)
    circle = _circle(stuck)  # the others only wait behind them
    waits = {r: w[0][0] for r, w in stuck.items() if r in circle}
    who = name_ranks(list(waits))
    blame = min(waits)
    kinds = {w.op for w in waits.values()}
    if kinds == {"send"}:
        head = f"{who} all send first, and nobody receives."
        advice = (
            "A send waits until the other side receives. "
            "Let one side receive first, or use isend, or batch_isend_irecv."
        )
    elif kinds == {"recv"}:
        head = f"{who} all receive first, and nobody sends."
        advice = "Let one side send first, or post irecv, send, and then wait."
    elif kinds <= {"send", "recv"}:
        head = f"the sends and receives of {who} do not fit together."
        advice = (
            "Every send(dst) needs a recv(src) on the other rank, in the same order and with the same tag."
        )
    elif len({w.group for w in waits.values()}) > 1:
        head = f"{who} take their process groups in different order, and each waits for the other."
        advice = "Take the groups in one order that holds for all ranks, say all rows before all columns."
        turns = [f"rank {r} takes {_name(w)} first" for r, w in sorted(waits.items())]
        lines = (*lines, *turns)
    else:
        head = f"{who} wait for each other."
        advice = "Every rank of a group must call the same operations in the same order."
    suspects = () if kinds <= {"send", "recv"} else circle
    return Diagnosis(blame, head, lines, advice, _odd_ones(states, stuck, circle), suspects)


_Stuck = Mapping[int, list[tuple[Wait, tuple[int, ...]]]]


def _circle(stuck: _Stuck) -> tuple[int, ...]:
    """The ranks that wait for themselves, through others; all if nobody does."""
    waits_for = {r: {m for _, missing in waits for m in missing if m in stuck} for r, waits in stuck.items()}
    circle = []
    for rank in stuck:
        found: set[int] = set()
        todo = set(waits_for[rank])
        while todo:
            found |= todo
            todo = {m for r in todo for m in waits_for[r]} - found
        if rank in found:
            circle.append(rank)
    return tuple(sorted(circle or stuck))


def _odd_ones(states: Mapping[int, State], stuck: _Stuck, circle: Sequence[int]) -> tuple[int, ...]:
    """Who of a circle called another number of collectives than all who stand in the same one, or than most ranks;
    else who stands in another operation than most, or the whole circle if that cannot be told.
    """
    first = {rank: waits[0][0] for rank, waits in stuck.items()}
    sizes = {r: _by_size(states, r) for r in states}
    for rank in circle:
        beside = [
            sizes[r]
            for r in first
            if r not in circle and (first[r].key, first[r].seq) == (first[rank].key, first[rank].seq)
        ]
        if beside and all(o == beside[0] for o in beside):
            common = sizes[rank].keys() & beside[0].keys()
            if any(sizes[rank][size] != beside[0][size] for size in common):
                return (rank,)
    parties: dict[Any, list[int]] = {}
    for rank, wait in first.items():
        parties.setdefault(wait.op if wait.op in ("send", "recv") else wait.key, []).append(rank)
    least = sorted(map(len, parties.values()))
    for members in parties.values():
        odd = [r for r in members if r in circle]
        if odd and len(parties) > 1 and len(members) == least[0] < least[1]:
            return tuple(odd)
    return tuple(circle)


def _by_size(states: Mapping[int, State], rank: int) -> dict[int, int]:
    """How many collectives a rank has called in groups of each size in which it is: alike groups do alike work. It may
    be in a group that only others have used so far.
    """
    counts = states[rank].counts or {}
    found: dict[int, int] = {}
    for key in {k for s in states.values() for k in s.counts or {}}:
        if len(key) == 2 and isinstance(key[1], tuple) and rank in key[1]:
            found[len(key[1])] = found.get(len(key[1]), 0) + counts.get(key, 0)
    return found


def _ended(
    states: Mapping[int, State],
    stuck: Mapping[int, list[tuple[Wait, tuple[int, ...]]]],
    ended: list[int],
    lines: tuple[str, ...],
) -> Diagnosis:
    # the rank that is missed by an operation, and by which
    blame = next((r for r in ended if states[r].phase in ("error", "lost")), ended[0])
    victims = [
        (rank, wait) for rank, waits in sorted(stuck.items()) for wait, missing in waits if blame in missing
    ]
    first = victims[0][1]
    if first.op in ("send", "recv"):  # one sentence is about one of the two
        victims = [(rank, wait) for rank, wait in victims if wait.op == first.op]
    who = name_ranks(sorted({r for r, _ in victims}))
    verb = "waits" if len({r for r, _ in victims}) == 1 else "wait"
    state = states[blame]
    call, what = first.via or first.op, state.what
    culprits = tuple(r for r in ended if states[r].phase == state.phase)
    freed = "The other ranks were freed." if what == CELL else "The others did nothing wrong."
    if state.phase == "still":
        head = f"{name_ranks(culprits)} {_stand(culprits)} {state.why}, and {who} {verb} for it in {call}."
        if len({states[r].why for r in culprits}) > 1:
            head = (
                f"{name_ranks(culprits)} {_stand(culprits)} still outside torch, and {who} {verb} in {call}."
            )
        advice = "Look at that line: what does it wait for?"
    elif state.phase == "absent" and state.why:
        head = f"{name_ranks(culprits)} {state.why}, and {who} {verb} for {_it(culprits)} in {call}."
        advice = "Look at what that rank prints, and whether its process was started."
    elif state.phase == "absent":
        head = f"rank {blame} does not run this cell, and {who} {verb} for it in {call}."
        advice = (
            "A collective needs every rank of its group: leave --only away, or make a group of those ranks."
        )
    elif state.phase == "lost":
        head = f"rank {blame} {state.why}, and {who} {verb} for it in {call}."
        advice = freed
    elif state.phase == "error":
        head = f"rank {blame} failed ({state.why}), and {who} {verb} for it in {call}."
        advice = freed
    elif first.op == "send":
        head = f"rank {blame} finished without receiving what {who} {'sends' if verb == 'waits' else 'send'}."
        advice = f"Add the missing dist.recv(buffer, src={victims[0][0]}) on rank {blame}, or drop the send."
    elif first.op == "recv":
        head = f"rank {blame} finished without sending what {who} {verb} for."
        advice = (
            f"Add the missing dist.send(tensor, dst={victims[0][0]}) on rank {blame}, or drop the receive."
        )
    elif first.op == "new_group":
        head = f"rank {blame} finished without calling new_group, and {who} {verb} for it there."
        advice = "new_group must be called by every rank of the world, also by those outside the new group."
        if len(first.ranks) < len(states) or first.group != "new_group":
            advice = f"A group with local synchronization must be made by all its members, {name_ranks(first.ranks)}."
    else:
        over = state.why or f"finished the {what}"
        head = f"rank {blame} {over} without the {call} that {who} {verb} in."
        advice = (
            "Every rank of a group must call the same collectives in the same order: "
            f"look at what rank {blame} skips."
        )
        ahead = _ahead(states, ended, [r for r, _ in victims])
        if ahead or (len(ended) == 1 and len(stuck) == 1 and len(first.ranks) > 2) or len(stuck) < len(ended):
            culprits = ahead or tuple(sorted(stuck))
            blame = culprits[0]
            head = f"rank {blame} calls one {call} more than {name_ranks(ended)}, which finished."
            advice = (
                "Every rank of a group must call the same collectives equally often: look at what this rank does "
                "in addition (one more batch, a call inside `if rank == ...`)."
            )
    finished = state.phase == "finished" and first.op not in ("send", "recv", "new_group")
    suspects = tuple(sorted({*ended, *(r for r, _ in victims)})) if finished else ()
    return Diagnosis(blame, head, lines, advice, culprits, suspects)


def _ahead(states: Mapping[int, State], ended: Sequence[int], waiting: Sequence[int]) -> tuple[int, ...]:
    """Those of the `waiting` that have called more than is usual, if those that they wait for have called as much as
    most of the ranks that finished; none if there are too few to tell.
    """
    sizes = {r: _by_size(states, r) for r in states}
    finished = [sizes[r] for r, s in states.items() if s.phase == "finished"]
    usual = max(finished, key=finished.count, default={})
    if (
        len(finished) < 3
        or 2 * finished.count(usual) <= len(finished)
        or any(sizes[r] != usual for r in ended)
    ):
        return ()
    return tuple(sorted({r for r in waiting if any(n > usual.get(k, n) for k, n in sizes[r].items())}))


def _stand(ranks: Sequence[int]) -> str:
    return "stands" if len(ranks) == 1 else "stand"


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def describe(state: State, world_size: int) -> str:
    """One rank's state in a line."""
    return f"rank {state.rank}  {doing(state, world_size)}"


def doing(state: State, world_size: int, *, many: bool = False) -> str:
    """What a rank is doing, in words, to follow its name, or the names of `many` that do the same."""
    s = "" if many else "s"
    if state.phase == "error":
        return f"failed: {state.why}"
    if state.phase == "lost" or (state.phase == "absent" and state.why):
        return state.why
    if state.phase == "still":
        return f"stand{s} {state.why}"
    if state.phase == "absent":
        return "do not run this cell" if many else "does not run this cell"
    calls = state.calls
    if state.phase == "finished" and state.why:
        return state.why
    if state.phase == "finished":
        return f"finished the {state.what} after {calls} {'call' if calls == 1 else 'calls'}"
    blocking = state.blocking
    if not blocking:
        at = f" at {at_line(state.line, state.file)}" if state.line else ""
        begun = next((w for w in state.waits if w.thread == 0), None)
        unfinished = (
            f", with {begun.text} of {at_line(begun.line, begun.file)} not over" if begun is not None else ""
        )
        return f"compute{s}{at}{unfinished}"
    wait = blocking[0]
    where = f", {at_line(wait.line, wait.file)}" if wait.line else ""
    inside = f" inside {wait.via}" if wait.via and wait.via not in (wait.op, f"{wait.op}_single") else ""
    return f"wait{s} in {wait.text}{inside} (call {wait.nth} {_group(wait, world_size)}{where})"


def _name(wait: Wait) -> str:
    return f"group {wait.group!r} of {name_ranks(wait.ranks)}"


def _group(wait: Wait, world_size: int) -> str:
    if wait.op in ("send", "recv"):
        return "of this pair"
    if len(wait.ranks) == world_size:
        return (
            "of the world"
            if wait.group in ("0", "new_group", "init_process_group")
            else "of a group of all ranks"
        )
    return f"of the group of {name_ranks(wait.ranks)}"


def standings(states: Sequence[State]) -> tuple[Standing, ...]:
    """`states` as plain data for the run: who stood where, and whom it waited for."""
    by_rank = {s.rank: s for s in states}
    found = []
    for state in states:
        wait = state.blocking[0] if state.blocking else None
        found.append(
            Standing(
                rank=state.rank,
                phase=state.phase,
                doing=doing(state, len(states)),
                op=wait.op if wait else "",
                text=wait.text if wait else "",
                line=wait.line if wait else state.line,
                waits_for=missing_peers(wait, by_rank, state.rank) if wait else (),
            )
        )
    return tuple(found)


def summary(states: Sequence[State]) -> str:
    """What the ranks are doing, in one line for the live display."""
    rows: dict[str, list[int]] = {}
    for state in states:
        if state.phase == "absent":
            continue
        blocking = state.blocking
        if state.phase != "running":
            what = {"finished": "done", "error": "failed", "lost": "lost"}.get(state.phase, state.phase)
        elif blocking:
            what = f"waiting in {blocking[0].op}"
        else:
            what = "computing"
        rows.setdefault(what, []).append(state.rank)
    return ", ".join(f"{name_ranks(ranks)} {what}" for what, ranks in rows.items())


def from_status(status: Status, before: Status | None) -> State:
    """The state of a running rank from what its control thread answered, now and the time before.

    A rank stands still inside torch when its main thread has not run since the answer before: measured, a wait in C++
    (DDP's reducer, a functional collective) neither uses CPU time nor wakes up. On a busy machine a thread that only
    waits for a core uses none either, which `Status.in_torch` leaves out; nor does one that waits for its turn in
    Python, but that one wakes up.
    """
    still = (
        status.cpu is not None
        and before is not None
        and before.cpu is not None
        and status.cpu - before.cpu < 1e-4
        and status.switches == before.switches
    )
    return State(
        rank=status.rank,
        phase="running" if status.phase in ("starting", "idle") else status.phase,
        waits=status.waits,
        counts=status.counts,
        calls=status.calls,
        line=status.line,
        file=status.file,
        joins=status.joins,
        blocked_in_torch=status.synchronizes or (status.in_torch and still),
        other_threads=status.threads,
    )


def unmatched(counts: Mapping[int, Mapping[Any, int]], ran: Sequence[int]) -> str | None:
    """A sentence if some ranks called more collectives of a group than others by the end of a cell that `ran`
    ran, else None.

    Such a cell came to its end only because the extra call did not wait (the root of a broadcast,
    `async_op=True`); the next collective would be matched with the wrong one. `counts` holds, by rank, the
    calls under each `Wait.key`.
    """
    for key in {k for c in counts.values() for k in c if len(k) == 2 and not str(k[0]).startswith(LEAVES)}:
        _, ranks = key
        calls = {r: counts.get(r, {}).get(key, 0) for r in ranks}
        most = max(calls.values())
        fewer = [r for r in ranks if calls[r] < most]
        more = [r for r in ranks if calls[r] == most]
        if fewer and key[0] == "new_group":
            return (
                f"{name_ranks(more)} called new_group and {name_ranks(fewer)} did not.\n"
                f"new_group must be called by every rank of the world, also by those outside the new group: the "
                f"ranks count their groups alike. The process groups were closed, so that the next cell starts "
                f"clean."
            )
        if fewer:
            extra = most - min(calls.values())
            absent = [r for r in fewer if r not in ran]
            why = f" ({name_ranks(absent)} did not run this cell)" if absent else ""
            return (
                f"{name_ranks(more)} called {extra} {'collective' if extra == 1 else 'collectives'} more than "
                f"{name_ranks(fewer)}{why}, and did not wait for the answer.\n"
                f"Every rank of a group must call the same collectives in the same order. The process group was "
                f"set up anew, so that the next cell starts clean."
            )
    return None
