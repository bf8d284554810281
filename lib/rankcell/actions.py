"""The actions of a pipeline, lists of them by rank, and in which order they can run.

An action is written as torch.distributed.pipelining writes it: "1F0" is stage 1, forward, micro-batch 0. The kinds are
F (forward), B (backward), and the two halves of B in a zero-bubble schedule: I (gradient of the input) and W (gradient
of the weights). Nothing here starts a process, needs torch or sends anything.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from .errors import UserFacingError


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
    places = product(range(plan.n_stages), range(plan.n_microbatches))
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
