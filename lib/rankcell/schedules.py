"""Pipeline schedules: for each rank a list of actions, in which order they can run, and what they will cost.

An action is written as torch.distributed.pipelining writes it: "1F0" is stage 1, forward, micro-batch 0. The kinds are
F (forward), B (backward), and the two halves of B in a zero-bubble schedule: I (gradient of the input) and W (gradient
of the weights). With several chunks per rank, stage s lives on rank s mod p; or, in a V, stages 0 to p - 1 live on the
ranks from first to last, and p to 2p - 1 from last to first. Sending costs a fixed number of seconds, none unless you
say so, and links are never busy. `rankcell.parallel.pipeline` executes schedules: nothing here starts a process, needs
torch or sends anything.
"""

import itertools
import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .errors import UserFacingError
from .results import Event


class ScheduleError(UserFacingError, ValueError):
    """A schedule that cannot train: an action is missing, comes twice, or waits for ever."""


class Action(NamedTuple):
    """One thing a rank does: `str(Action(1, "F", 0))` is "1F0"."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action | None":
        """The action that `text`, for example "1F0", stands for, if it stands for one."""
        found = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        return cls(int(found[1]), found[2], int(found[3])) if found else None


@dataclass(frozen=True, repr=False)
class Schedule:
    """Who does what in which order: `actions[rank]` is the list of that rank."""

    name: str
    actions: tuple[tuple[Action, ...], ...]

    @property
    def n_ranks(self) -> int:
        """How many ranks the pipeline has: p."""
        return len(self.actions)

    @cached_property
    def homes(self) -> dict[int, int]:
        """The rank on which each stage lives."""
        return {a.stage: rank for rank, actions in enumerate(self.actions) for a in actions}

    @cached_property
    def n_stages(self) -> int:
        """How many stages the model is cut into: the ranks times the chunks on each."""
        return 1 + max(self.homes, default=-1)

    @cached_property
    def n_microbatches(self) -> int:
        """How many micro-batches a batch is cut into: m."""
        return 1 + max((a.microbatch for rank in self.actions for a in rank), default=-1)

    @property
    def chunks(self) -> int:
        """How many stages each rank has: v."""
        return -(-self.n_stages // self.n_ranks)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The stages and micro-batches whose backward comes in halves."""
        return frozenset((a.stage, a.microbatch) for rank in self.actions for a in rank if a.kind == "I")

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must be done before this one can start."""
        stage, kind, j = action
        if kind == "F":
            return (Action(stage - 1, "F", j),) if stage else ()
        if kind == "W":
            return (Action(stage, "I", j),)
        own = Action(stage, "F", j)
        if stage == self.n_stages - 1:
            return (own,)
        return own, Action(stage + 1, "I" if (stage + 1, j) in self.split else "B", j)

    def __repr__(self) -> str:
        return f"{self.name}: {self.n_ranks} ranks, {self.n_microbatches} micro-batches"


def schedule(name: str, actions: Iterable[Iterable[Action]]) -> Schedule:
    """A schedule from one list of actions per rank. `rounds` checks it."""
    return Schedule(name, tuple(map(tuple, actions)))


def rounds(plan: Schedule) -> dict[Action, int]:
    """The round in which each action runs if every action takes one round: an order that all ranks can keep.

    Raises `ScheduleError` where an action is missing or comes twice, and where some wait for ever: it names them.
    """
    counts = Counter(action for actions in plan.actions for action in actions)
    places = itertools.product(range(plan.n_stages), range(plan.n_microbatches))
    kinds = {(stage, j): "FIW" if (stage, j) in plan.split else "FB" for stage, j in places}
    wanted = Counter(Action(stage, kind, j) for (stage, j), of in kinds.items() for kind in of)
    for action in [*(wanted - counts), *(counts - wanted)]:
        raise ScheduleError(f"{action} {'comes twice' if counts[action] > wanted[action] else 'is missing'}.")
    done: dict[Action, int] = {}
    left, now = [deque(actions) for actions in plan.actions], 0
    while following := [actions[0] for actions in left if actions]:
        if not (ready := [action for action in following if all(n in done for n in plan.needs(action))]):
            waits = ((a, [str(n) for n in plan.needs(a) if n not in done]) for a in following)
            lines = (f"  rank {plan.homes[a.stage]} is at {a} and waits for {' and '.join(ns)}" for a, ns in waits)
            raise ScheduleError("\n".join(["The schedule never ends:", *lines]))
        done |= dict.fromkeys(ready, now)
        for action in ready:
            left[plan.homes[action.stage]].popleft()
        now += 1
    return done


def naive(n_ranks: int, n_microbatches: int = 1) -> Schedule:
    """One micro-batch after the other through all stages and back: one rank computes, the others wait."""
    return schedule("naive", [[Action(r, k, j) for j in range(n_microbatches) for k in "FB"] for r in range(n_ranks)])


def gpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Simple, and every stage keeps the activations of all micro-batches.

    Huang et al., https://arxiv.org/abs/1811.06965, section 2.2 (2019).
    """
    return schedule("GPipe", [[Action(r, k, j) for k in "FB" for j in range(n_microbatches)] for r in range(n_ranks)])


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """As many forwards as the stages behind it are deep, then one forward and one backward in turns.

    Stage s keeps at most p - s micro-batches. Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.1 (2021).
    """
    return schedule("1F1B", [_one_f_one_b(r, n_ranks, n_microbatches, "B") for r in range(n_ranks)])


def interleaved(n_ranks: int, n_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B in which each rank has several smaller stages, its chunks: the bubble is `chunks` times smaller.

    Micro-batches go through in groups of p: a group passes the first chunk, then the second, and so on. Where p does
    not divide their number, some groups are larger. Narayanan et al., section 2.2.2, who ask for a multiple of p.
    """
    if chunks == 1:
        return one_f_one_b(n_ranks, n_microbatches)
    n_groups = max(1, n_microbatches // n_ranks)
    starts = [-(-i * n_microbatches // n_groups) for i in range(n_groups + 1)]  # larger groups first
    groups = [range(a, b) for a, b in itertools.pairwise(starts)]
    lists = []
    for rank in range(n_ranks):
        stages = [chunk * n_ranks + rank for chunk in range(chunks)]
        forwards = [Action(s, "F", j) for group in groups for s in stages for j in group]
        backwards = [Action(s, "B", j) for group in groups for s in stages[::-1] for j in group]
        warmup = 2 * (n_ranks - 1 - rank) + (chunks - 1) * len(groups[0])
        lists.append(_in_turns(forwards, backwards, warmup))
    return schedule(f"interleaved, {chunks} chunks", lists)


def zero_bubble(n_ranks: int, n_microbatches: int) -> Schedule:
    """1F1B with backwards in two halves: I, for which the stage before waits, and W, for which nobody does.

    Rank r puts each W off by r micro-batches, and the Ws fill the gaps at the end. Every rank keeps at most p of them,
    as rank 0 of 1F1B does. This is ZB-H1: Qi et al., https://arxiv.org/abs/2401.10241, section 2.2 (2023).
    """
    lists = []
    for rank in range(n_ranks):
        actions = []
        for action in _one_f_one_b(rank, n_ranks, n_microbatches, "I"):
            actions.append(action)
            if action.kind == "I" and action.microbatch >= rank:
                actions.append(Action(rank, "W", action.microbatch - rank))
        actions += [Action(rank, "W", j) for j in range(max(0, n_microbatches - rank), n_microbatches)]
        lists.append(actions)
    return schedule("zero bubble", lists)


def _one_f_one_b(rank: int, n_ranks: int, n_microbatches: int, backward: str) -> list[Action]:
    """The list of a rank in 1F1B, whose backwards are of a kind."""
    forwards, backwards = ([Action(rank, k, j) for j in range(n_microbatches)] for k in ("F", backward))
    return _in_turns(forwards, backwards, warmup=n_ranks - 1 - rank)


def _in_turns(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turns, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *(a for pair in pairs for a in pair), *backwards[steady:]]


def predict(
    plan: Schedule, *, forward: float = 1.0, backward: float = 2.0, weight: float | None = None, send: float = 0.0
) -> tuple[Event, ...]:
    """What each rank will do and when, as predicted events named after their actions.

    `forward` and `backward` are the seconds of one stage's forward and whole backward of one micro-batch, `weight` of
    the half that gives the weights' gradients, by default half of `backward`. `send` is the seconds from the end of an
    action until another rank can use its result.
    """
    weight = backward / 2 if weight is None else weight
    seconds = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    ends: dict[Action, float] = {}
    free = [0.0] * plan.n_ranks
    events, when = [], rounds(plan)
    for action in sorted(when, key=lambda a: (when[a], a)):
        rank = plan.homes[action.stage]
        arrived = [ends[n] + (send if plan.homes[n.stage] != rank else 0.0) for n in plan.needs(action)]
        start = max([free[rank], *arrived])
        free[rank] = ends[action] = start + seconds[action.kind]
        events.append(Event(rank, str(action), start, free[rank], kind="compute", predicted=True))
    return tuple(sorted(events, key=lambda e: (e.start, e.rank)))


def actions_of(events: Iterable[Event]) -> list[tuple[Action, Event]]:
    """The events that are actions of a pipeline, with their actions, in order of time; no others."""
    named = ((Action.parse(e.op), e) for e in sorted(events, key=lambda e: (e.start, e.rank)) if e.kind != "comm")
    return [(action, event) for action, event in named if action]


def length(events: Iterable[Event]) -> float:
    """Seconds from the start of the first action to the end of the last, of all ranks."""
    chosen = [e for _, e in actions_of(events)]
    return max(e.end for e in chosen) - min(e.start for e in chosen) if chosen else 0.0


def idle_share(events: Iterable[Event]) -> float:
    """The bubble, measured or predicted: which share of all ranks' time no action ran, from 0 to 1."""
    if not (chosen := [e for _, e in actions_of(events)]):
        raise ValueError("None of these events is an action of a pipeline, such as 1F0.")
    return 1 - sum(e.seconds for e in chosen) / (len({e.rank for e in chosen}) * length(chosen))


def peak_in_flight(plan: Schedule) -> list[int]:
    """By rank, of how many micro-batches it holds activations at most: a forward is over, its backward is not.

    With several chunks each chunk's share of a micro-batch counts as one.
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(itertools.accumulate((change[a.kind] for a in of_rank), initial=0)) for of_rank in plan.actions]
