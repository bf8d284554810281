"""The actions of a pipeline, lists of them by rank, and in which order they can run.

An action is written as torch.distributed.pipelining writes it: "1F0" is stage 1, forward, micro-batch 0. The kinds are
F (forward), B (backward), and the two halves of B in a zero-bubble schedule: I (gradient of the input) and W (gradient
of the weights). Nothing here starts a process, needs torch or sends anything.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .errors import UserFacingError

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


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
    def parse(cls, text: str) -> "Action":
        """The action that `text`, for example "1F0", stands for. Raises ValueError if it stands for none."""
        for kind in KINDS:
            stage, found, microbatch = text.partition(kind)
            if found and stage.isdecimal() and microbatch.isdecimal():
                return cls(int(stage), kind, int(microbatch))
        raise ValueError(
            f'{text!r} is no action. Write stage, kind and micro-batch, as in "1F0"; '
            f"the kinds are {', '.join(f'{k} ({word})' for k, word in KINDS.items())}."
        )


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order: `actions[rank]` is the list of that rank. It shows as text."""

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
        return f"{self.name}: {self.n_ranks} ranks, {self.n_microbatches} micro-batches\n" + as_text(self)


def schedule(name: str, actions: Iterable[Iterable[Action | str]]) -> Schedule:
    """A schedule of your own, from actions or their texts, one list per rank. It is not validated.

    schedule("mine", [["0F0", "0B0"], ["1F0", "1B0"]])
    """
    parsed = tuple(tuple(Action.parse(a) if isinstance(a, str) else a for a in rank) for rank in actions)
    return Schedule(name, parsed)


def rounds(plan: Schedule) -> dict[Action, int]:
    """The round in which each action runs if every action takes one round: an order that all ranks can keep.

    Raises:
        ScheduleError: an action is missing, comes twice, stands on two ranks, or some ranks wait for each
            other for ever. The message holds the grid with the wrong action marked.
    """
    _complete(plan)
    done: dict[Action, int] = {}
    left, now = [deque(actions) for actions in plan.actions], 0
    while following := [actions[0] for actions in left if actions]:
        ready = [action for action in following if all(n in done for n in plan.needs(action))]
        if not ready:
            raise ScheduleError(_stuck(plan, following, done))
        done |= dict.fromkeys(ready, now)
        for action in ready:
            left[plan.homes[action.stage]].popleft()
        now += 1
    return done


def _complete(plan: Schedule) -> None:
    """Raise unless each action stands in the schedule once, and each stage on one rank."""
    if not plan.n_stages:
        raise ScheduleError("The schedule is empty.")
    homes: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, action in ((rank, action) for rank, actions in enumerate(plan.actions) for action in actions):
        home = homes.setdefault(action.stage, rank)
        if action in seen:
            raise _refused(plan, f"{action} comes twice.", action)
        if home != rank:
            why = f"{action} is on rank {rank}, but stage {action.stage} lives on rank {home}."
            raise _refused(plan, why, action)
        seen.add(action)
    for stage, j in itertools.product(range(plan.n_stages), range(plan.n_microbatches)):
        whole, inputs, weights = (Action(stage, kind, j) for kind in "BIW")
        halves = {inputs, weights} & seen
        for action in (Action(stage, "F", j), *((inputs, weights) if halves else (whole,))):
            if action not in seen:
                raise _refused(plan, f"{action} is missing.")
        if halves and whole in seen:
            why = f"Stage {stage} has two backwards of micro-batch {j}: {whole} is {inputs} and {weights} together."
            raise _refused(plan, why, whole, inputs)


def _refused(plan: Schedule, why: str, *marked: Action) -> ScheduleError:
    return ScheduleError(f"{why}\n{as_text(plan, marked=marked)}")


def _stuck(plan: Schedule, following: Sequence[Action], done: Mapping[Action, int]) -> str:
    lines = ["The schedule never ends:"]
    for action in following:
        waits = [f"{n} of rank {plan.homes[n.stage]}" for n in plan.needs(action) if n not in done]
        lines.append(f"  rank {plan.homes[action.stage]} is at {action} and waits for {' and '.join(waits)}")
    advice = "Move what the others wait for before what cannot start yet."
    return "\n".join([*lines, as_text(plan, marked=following), advice])


def as_text(plan: Schedule, *, marked: Iterable[Action] = ()) -> str:
    """The schedule as a grid of characters, one column per action; those that are `marked` stand between > and <."""
    marked = set(marked)
    names = [[f">{a}<" if a in marked else str(a) for a in actions] for actions in plan.actions]
    width = max((len(n) for rank in names for n in rank), default=1) + 1
    lines = ("".join(f"{name:<{width}}" for name in rank).rstrip() for rank in names)
    return "\n".join(f"rank {rank}  {line}" for rank, line in enumerate(lines))
