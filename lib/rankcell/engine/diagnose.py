"""Who waits for whom, and what is to blame: a pure function of the ranks' states.

A deadlock is proved, not timed out: a rank is stuck when it waits for a rank that will never answer (it
finished the cell, raised, died, or does not run the cell) or for one that is stuck itself. A rank that
computes can always still answer, so a slow rank is never reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..results import at_line, grouped, name_ranks
from .messages import LEAVES, Wait
from .states import CELL, OVER, State, call_of, doing, missing_peers, twins


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


_Edge = tuple[Wait, tuple[int, ...]]  # what a rank waits for, and for whom
_Stuck = Mapping[int, list[_Edge]]


def diagnose(states: Sequence[State]) -> Diagnosis | None:
    """The deadlock that `states` prove, or None while somebody can still go on."""
    states = [finished_if_leaving(state) for state in states]
    by_rank = {s.rank: s for s in states}
    stand = [(s.rank, [(w, missing_peers(w, by_rank, s.rank)) for w in waits]) for s in states for waits in s.standing]
    threads = grouped((rank, [(w, m) for w, m in waits if m]) for rank, waits in stand)  # of a rank, for each thread
    over = {s.rank for s in states if s.phase in OVER and not s.other_threads and s.rank not in threads}
    free = {s.rank for s in states if s.rank not in over and (s.rank not in threads or s.other_threads)}

    def answerable(wait: Wait, missing: Sequence[int]) -> bool:
        anyone = wait.op == "recv" and wait.peer is None
        return (any if anyone else all)(peer in free for peer in missing)

    while True:
        freed = {
            rank
            for rank, mine in threads.items()
            # one thread that goes on may do whatever the others wait for
            if rank not in free and any(all(answerable(*edge) for edge in waits) for waits in mine)
        }
        if not freed:
            break
        free |= freed
    stuck = {r: [edge for waits in mine for edge in waits] for r, mine in threads.items() if r not in free}
    return _explain(by_rank, stuck, over) if any(by_rank[r].phase == "running" for r in stuck) else None


def finished_if_leaving(state: State) -> State:
    """A rank that stands in `destroy_process_group` calls nothing more, as one that is through."""
    if (wait := next((w for w in state.blocking if w.group == LEAVES), None)) is None or state.phase != "running":
        return state
    where = f" ({at_line(wait.line, wait.file)})" if wait.line else ""
    return replace(state, phase="finished", waits=(), why=f"stands in {LEAVES}{where}")


def _explain(states: Mapping[int, State], stuck: _Stuck, over: set[int]) -> Diagnosis:
    ended = sorted({m for waits in stuck.values() for _, missing in waits for m in missing if m in over})
    same_ranks = twins(states.values())
    lines = tuple(f"rank {r}  {doing(states[r], len(states), twins=same_ranks)}" for r in sorted(states))
    if ended:
        return _ended(states, stuck, ended, lines)
    circle = _circle(stuck)  # the others only wait behind them
    odd = _odd_ones(states, stuck, circle)
    head, advice, ends = _of_circle(states, stuck, circle, odd)
    suspects = () if {stuck[r][0][0].op for r in circle} <= {"send", "recv"} else circle
    return Diagnosis(min(circle), head, lines, advice, ends or odd, suspects)


def _of_circle(
    states: Mapping[int, State], stuck: _Stuck, circle: Sequence[int], odd: Sequence[int]
) -> tuple[str, str, tuple[int, ...]]:
    """Headline and advice for ranks that wait for each other, and the two ends of a message that are to blame alike."""
    waits = {r: stuck[r][0][0] for r in circle}
    who, kinds = name_ranks(list(waits)), {w.op for w in waits.values()}
    # from one line all come to it alike; in several one may be right, and lack an earlier part
    apart = len({(w.file, w.line) for w in waits.values()}) > 1
    if kinds == {"send"}:
        head = f"{who} all {'wait in a send' if apart else 'send first'}, and nobody receives."
        ask = "Was a recv left out before? If not: a" if apart else "A"
        advice = f"{ask} send waits until the other side receives. Let one side receive first, or use isend, or "
        return head, f"{advice}batch_isend_irecv.", ()
    if kinds == {"recv"}:
        head = f"{who} all {'wait in a recv' if apart else 'receive first'}, and nobody sends."
        ask = "Was a send left out before? If not: let" if apart else "Let"
        return head, f"{ask} one side send first, or post irecv, send, and then wait.", ()
    if kinds <= {"send", "recv"}:
        advice = "Every send(dst) needs a recv(src) on the other rank, in the same order and with the same tag."
        tags = grouped((w.tag, r) for r, w in waits.items())
        if len(tags) > 1:
            advice += f" Here the tag is {', '.join(f'{tag} on {name_ranks(r)}' for tag, r in tags.items())}."
        return f"the sends and receives of {who} do not fit together.", advice, ()
    come = [r for r, w in waits.items() if w.op == "new_group"]
    come = come or [r for r, w in waits.items() if w.op not in ("send", "recv")]
    rest = [r for r in waits if r not in come and any(r in missing for c in come for _, missing in stuck[c])]
    if rest:
        return _of_missed_call(waits, come, rest)
    several = len({w.group for w in waits.values()})
    if several == 1:
        return (
            f"{who} wait for each other.",
            "Every rank of a group must call the same operations in the same order.",
            (),
        )
    advice = "Take the groups in one order that holds for all ranks, say all rows before all columns."
    head = f"{who} take their process groups in different order, and each waits for the other."
    if several == 2:  # one call left out makes no larger circle
        advice = f"Has a rank left out a call, or do they take the groups in different order? {advice}"
        head = f"{who} wait for each other in different process groups."
    if len(odd) == 1:
        left = next(w for r in circle for w, missing in stuck[r] if odd[0] in missing)
        victims = [r for r, edges in stuck.items() if any((w.key, w.seq) == (left.key, left.seq) for w, _ in edges)]
        own, other = (call_of(wait, len(states)) for wait in (waits[odd[0]], left))
        head = f"rank {odd[0]} calls {own} without {other} that {_who(victims, 'wait')} in."
    return head, advice, ()


def _of_missed_call(
    waits: Mapping[int, Wait], come: Sequence[int], rest: Sequence[int]
) -> tuple[str, str, tuple[int, ...]]:
    """The same where the ranks that have `come` to a collective, and wait in `waits`, lack the `rest` in it."""
    missed = waits[come[0]]
    call = missed.via or missed.op
    late = {r: w for r in rest if (w := waits[r]).op in ("send", "recv") and w.peer in come}
    for op in ("send", "recv"):
        ends = [r for r, wait in late.items() if wait.op == op]
        if not ends:
            continue
        peers = [peer for peer in come if peer in {late[r].peer for r in ends}]
        one, part = len(ends) == 1, "recv" if op == "send" else "send"
        whom = f"{name_ranks(peers)}, which {'waits' if len(peers) == 1 else 'wait'} for {'it' if one else 'them'}"
        make, again = "makes" if len(peers) == 1 else "make", "calls" if one else "call"
        advice = f"Either {name_ranks(peers)} left out a {part}, or {make} it only after that {call}; or "
        advice += f"{name_ranks(ends)} left out that {call}, or {again} {op} once too often."
        return f"{_who(ends, 'wait')} in {op} for {whom} in {call}.", advice, tuple(sorted({*ends, *peers}))
    calls = " or ".join(sorted({waits[r].via or waits[r].op for r in rest}))
    head = f"{_who(rest, 'wait')} in {calls} without the {call} that {_who(come, 'stand')} in."
    if missed.op == "new_group":
        left = f"{'has' if len(come) == 1 else 'have'} {name_ranks(come)}"
        return head, f"{_by_whom(missed.group, missed.ranks)} Or {left} left out that {calls}?", ()
    return (
        head,
        f"Either {name_ranks(rest)} left that call out, or {_who(come, 'make')} it once too often or too early.",
        (),
    )


def _circle(stuck: _Stuck) -> tuple[int, ...]:
    """The ranks that wait for themselves, through others; all if nobody does."""
    reach = {r: {m for _, missing in waits for m in missing if m in stuck} for r, waits in stuck.items()}
    for middle in stuck:
        for found in reach.values():
            if middle in found:
                found |= reach[middle]
    return tuple(sorted([r for r in stuck if r in reach[r]] or stuck))


def _odd_by_number(states: Mapping[int, State], stuck: _Stuck, circle: Sequence[int]) -> int | None:
    """Who of a circle called one collective more or fewer than all who stand in the same one."""
    place = {rank: (waits[0][0].key, waits[0][0].seq) for rank, waits in stuck.items()}
    sizes = {r: _by_size(states, r) for r in states}
    for rank in circle:
        beside = [sizes[r] for r in place if r not in circle and place[r] == place[rank]]
        if beside and all(o == beside[0] for o in beside):
            common = sizes[rank].keys() & beside[0].keys()
            if any(abs(sizes[rank][size] - beside[0][size]) == 1 for size in common):
                return rank
    return None


def _odd_ones(states: Mapping[int, State], stuck: _Stuck, circle: Sequence[int]) -> tuple[int, ...]:
    """Who of a circle called another number of collectives than the others; else who stands in another operation than
    most, or the whole circle if that cannot be told.
    """
    if (odd := _odd_by_number(states, stuck, circle)) is not None:
        return (odd,)
    waits = {rank: edges[0][0] for rank, edges in stuck.items()}
    for among in (stuck, circle):
        parties = grouped((w.op if (w := waits[r]).op in ("send", "recv") else w.key, r) for r in among)
        least = sorted(map(len, parties.values()))
        for members in parties.values():
            some = tuple(r for r in members if r in circle)
            if some and len(parties) > 1 and len(members) == least[0] < least[1]:
                return some
    return tuple(circle)


def _by_size(states: Mapping[int, State], rank: int) -> dict[int, int]:
    """How many collectives a rank has called in groups of each size that it is in: alike groups do alike work."""
    counts = states[rank].counts or {}
    found: dict[int, int] = {}
    for key in {k for s in states.values() for k in s.counts or {}}:
        if len(key) == 2 and isinstance(key[1], tuple) and rank in key[1]:
            found[len(key[1])] = found.get(len(key[1]), 0) + counts.get(key, 0)
    return found


def _ended(states: Mapping[int, State], stuck: _Stuck, ended: list[int], lines: tuple[str, ...]) -> Diagnosis:
    """Of ranks that wait for some that have `ended`."""
    blame = next((r for r in ended if states[r].phase in ("error", "lost")), ended[0])
    state = states[blame]
    victims = [(r, wait) for r, waits in sorted(stuck.items()) for wait, missing in waits if blame in missing]
    first = victims[0][1]
    if first.op in ("send", "recv"):  # one sentence is about one of the two
        victims = [(r, wait) for r, wait in victims if wait.op == first.op]
    waiting = sorted({r for r, _ in victims})
    culprits = tuple(r for r in ended if states[r].phase == state.phase)
    suspects: tuple[int, ...] = ()
    if state.phase != "finished":
        head, advice = _of_gone(states, culprits, waiting, first.via or first.op, blame)
    elif first.op in ("send", "recv", "new_group"):
        head, advice = _of_finished(states, blame, waiting, first)
    else:
        suspects = tuple(sorted({*ended, *waiting}))
        ahead = _ahead(states, ended, waiting)
        call = first.via or first.op
        if ahead or len(stuck) < len(ended):
            culprits = ahead or tuple(sorted(stuck))
            blame = culprits[0]
            head = f"rank {blame} calls one {call} more than {name_ranks(ended)}, which finished."
            advice = (
                "Every rank of a group must call the same collectives equally often: look at what this rank does "
                "in addition (one more batch, a call inside `if rank == ...`)."
            )
        else:
            over = state.why or f"finished the {state.what}"
            lacked = [set(missing) for waits in stuck.values() for _, missing in waits if blame in missing]
            alike = [blame] if state.why else sorted(set(culprits).intersection(*lacked))
            head = f"{name_ranks(alike)} {over} without the {call} that {_who(waiting, 'wait')} in."
            advice = (
                "Every rank of a group must call the same collectives in the same order: "
                f"look at what {_who(alike, 'skip')}."
            )
    return Diagnosis(blame, head, lines, advice, culprits, suspects)


def _of_gone(
    states: Mapping[int, State], culprits: Sequence[int], waiting: Sequence[int], call: str, blame: int
) -> tuple[str, str]:
    """Headline and advice where the ranks to blame stand still, failed, are lost, or do not run the cell."""
    state, who = states[blame], _who(waiting, "wait")
    advice = "The other ranks were freed." if state.what == CELL else "The others did nothing wrong."
    if state.phase == "still":
        advice = "Look at that line: what does it wait for?"
        if len({states[r].why for r in culprits}) > 1:
            return f"{_who(culprits, 'stand')} still outside torch, and {who} in {call}.", advice
        return f"{_who(culprits, 'stand')} {state.why}, and {who} for it in {call}.", advice
    if state.phase == "absent" and state.why:
        it = "it" if len(culprits) == 1 else "them"
        advice = (
            f"They wait for {len(states)} ranks in all: is that right? If so, were all started, and what do they print?"
        )
        return f"{name_ranks(culprits)} {state.why}, and {who} for {it} in {call}.", advice
    if state.phase == "absent":
        advice = "A collective needs every rank of its group: leave --only away, or make a group of those ranks."
        return f"rank {blame} does not run this cell, and {who} for it in {call}.", advice
    what = f"failed ({state.why})" if state.phase == "error" else state.why
    return f"rank {blame} {what}, and {who} for it in {call}.", advice


def _of_finished(states: Mapping[int, State], blame: int, waiting: Sequence[int], wait: Wait) -> tuple[str, str]:
    """Headline and advice where a rank finished without its part of a message, or without a new group."""
    if wait.op == "send":
        head = f"rank {blame} finished without receiving what {_who(waiting, 'send')}."
        return head, f"Add the missing dist.recv(buffer, src={waiting[0]}) on rank {blame}, or drop the send."
    if wait.op == "recv":
        head = f"rank {blame} finished without sending what {_who(waiting, 'wait')} for."
        return head, f"Add the missing dist.send(tensor, dst={waiting[0]}) on rank {blame}, or drop the receive."
    head = f"rank {blame} finished without calling new_group, and {_who(waiting, 'wait')} for it there."
    return head, _by_whom(wait.group, wait.ranks)


def _by_whom(label: str, ranks: Sequence[int]) -> str:
    """Who must make a group that is made as `label`."""
    if label != "new_group":
        return f"A group with local synchronization must be made by all its members, {name_ranks(ranks)}."
    return "new_group must be called by every rank of the world, also by those outside the new group."


def _who(ranks: Sequence[int], verb: str) -> str:
    """ "rank 1 waits", "ranks 1, 2 wait"."""
    return f"{name_ranks(ranks)} {verb}{'s' if len(ranks) == 1 else ''}"


def _ahead(states: Mapping[int, State], ended: Sequence[int], waiting: Sequence[int]) -> tuple[int, ...]:
    """Those of the `waiting` that have called more than is usual, if those that they wait for have called as much as
    most of the ranks that finished; none if there are too few to tell.
    """
    sizes = {r: _by_size(states, r) for r in states}
    finished = [sizes[r] for r, s in states.items() if s.phase == "finished"]
    usual = max(finished, key=finished.count, default={})
    if len(finished) < 3 or 2 * finished.count(usual) <= len(finished) or any(sizes[r] != usual for r in ended):
        return ()
    return tuple(sorted({r for r in waiting if any(n > usual.get(k, n) for k, n in sizes[r].items())}))


def unmatched(counts: Mapping[int, Mapping[Any, int]], ran: Sequence[int]) -> str | None:
    """A sentence if some ranks called more collectives of a group than others by the end of a cell on `ran`, else None.

    Such a cell ended only because the extra call did not wait (the root of a broadcast, `async_op=True`); the next
    collective would be matched with the wrong one. `counts` holds, by rank, the calls under each `Wait.key`.
    """
    for key in {k for c in counts.values() for k in c if len(k) == 2 and not str(k[0]).startswith(LEAVES)}:
        _, ranks = key
        calls = {r: counts.get(r, {}).get(key, 0) for r in ranks}
        most = max(calls.values())
        fewer = [r for r in ranks if calls[r] < most]
        more = [r for r in ranks if calls[r] == most]
        if fewer and (label := key[0].partition("\n")[0]) == "new_group":
            closed = "The process groups were closed, so that the next cell starts clean."
            uneven = f"{name_ranks(more)} called new_group and {name_ranks(fewer)} did not."
            return f"{uneven}\n{_by_whom(label, ranks)} {closed}"
        if fewer:
            extra = most - min(calls.values())
            absent = [r for r in fewer if r not in ran]
            why = f" ({name_ranks(absent)} did not run this cell)" if absent else ""
            return (
                f"{name_ranks(more)} called {extra} collective{'s' * (extra > 1)} more than {name_ranks(fewer)}{why}, "
                "and did not wait for the answer.\nEvery rank of a group must call the same collectives in the same "
                "order. The process group was set up anew, so that the next cell starts clean."
            )
    return None
