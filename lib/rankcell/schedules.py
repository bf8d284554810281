"""Pipeline schedules: for each rank a list of actions, from arithmetic, and what they will cost.

An action is written as torch.distributed.pipelining writes it: "1F0" is stage 1, forward, micro-batch 0. The
kinds are F (forward), B (backward), and the two halves of B in a zero-bubble schedule: I (gradient of the
input) and W (gradient of the weights). With several chunks per rank, stage s lives on rank s mod p; or, in a
V, stages 0 to p - 1 live on the ranks from first to last, and p to 2p - 1 from last to first.

Nothing here starts a process, needs torch or sends anything: `rankcell.parallel.pipeline` executes the
lists. Sending costs a fixed number of seconds here, none unless you say so, and links are never busy.
"""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .errors import UserFacingError
from .results import Event

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
    """Who does what in which order: `actions[rank]` is the list of that rank. It shows as a text grid."""

    name: str
    actions: tuple[tuple[Action, ...], ...]

    @property
    def n_ranks(self) -> int:
        """How many ranks the pipeline has: p."""
        return len(self.actions)

    @property
    def n_stages(self) -> int:
        """How many stages the model is cut into: the ranks times the chunks on each."""
        return 1 + max((a.stage for rank in self.actions for a in rank), default=-1)

    @property
    def n_microbatches(self) -> int:
        """How many micro-batches a batch is cut into: m."""
        return 1 + max((a.microbatch for rank in self.actions for a in rank), default=-1)

    @property
    def chunks(self) -> int:
        """How many stages each rank has: v."""
        return -(-self.n_stages // max(self.n_ranks, 1))

    @property
    def trains(self) -> bool:
        """Whether it has any backward. Without one it evaluates, see `forward_only`."""
        return any(a.kind != "F" for rank in self.actions for a in rank)

    def __repr__(self) -> str:
        return f"{self.name}: {self.n_ranks} ranks, {self.n_microbatches} micro-batches\n" + as_text(self)


def schedule(name: str, actions: Iterable[Iterable[Action | str]]) -> Schedule:
    """A schedule of your own, from actions or their texts, one list per rank. It is not validated.

    schedule("mine", [["0F0", "0B0"], ["1F0", "1B0"]])
    """
    parsed = tuple(tuple(Action.parse(a) if isinstance(a, str) else a for a in rank) for rank in actions)
    return Schedule(name, parsed)


# The schedules


def naive(n_ranks: int, n_microbatches: int = 1) -> Schedule:
    """One micro-batch after the other through all stages and back: one rank computes, the others wait."""
    _check(n_ranks, n_microbatches)
    lists = [[Action(r, k, j) for j in range(n_microbatches) for k in "FB"] for r in range(n_ranks)]
    return schedule("naive", lists)


def gpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Simple, and every stage keeps the activations of all micro-batches.

    Huang et al., https://arxiv.org/abs/1811.06965, section 2.2 (2019). The backwards come in the order of
    the forwards here.
    """
    _check(n_ranks, n_microbatches)
    lists = [[Action(r, k, j) for k in "FB" for j in range(n_microbatches)] for r in range(n_ranks)]
    return schedule("GPipe", lists)


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """As many forwards as the stages behind it are deep, then one forward and one backward in turns.

    Stage s never keeps more than p - s micro-batches. Narayanan et al., https://arxiv.org/abs/2104.04473,
    section 2.2.1 (2021).
    """
    _check(n_ranks, n_microbatches)
    lists = []
    for rank in range(n_ranks):
        forwards = [Action(rank, "F", j) for j in range(n_microbatches)]
        backwards = [Action(rank, "B", j) for j in range(n_microbatches)]
        lists.append(_in_turns(forwards, backwards, warmup=n_ranks - 1 - rank))
    return schedule("1F1B", lists)


def interleaved(n_ranks: int, n_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B in which each rank has several smaller stages, its chunks: the bubble is `chunks` times smaller.

    Stage s lives on rank s mod p. Micro-batches go through in groups of p: a group passes the first chunk,
    then the second, and so on. Where p does not divide their number, some groups are larger, so that nobody
    waits between two chunks. With one chunk it is 1F1B. Narayanan et al., section 2.2.2, who ask for a
    multiple of p.
    """
    _check(n_ranks, n_microbatches, chunks)
    if chunks == 1:
        return one_f_one_b(n_ranks, n_microbatches)
    n_groups = max(1, n_microbatches // n_ranks)
    starts = [-(-i * n_microbatches // n_groups) for i in range(n_groups + 1)]  # larger groups first
    groups = [range(a, b) for a, b in pairwise(starts)]
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

    Rank r puts each W off by r micro-batches, and the Ws fill the gaps at the end. Every rank keeps at most p
    micro-batches, as rank 0 of 1F1B does. This is ZB-H1: Qi et al., https://arxiv.org/abs/2401.10241, section
    2.2 (2023).
    """
    _check(n_ranks, n_microbatches)
    lists = []
    for rank in range(n_ranks):
        forwards = [Action(rank, "F", j) for j in range(n_microbatches)]
        inputs = [Action(rank, "I", j) for j in range(n_microbatches)]
        actions, done = [], 0
        for action in _in_turns(forwards, inputs, warmup=n_ranks - 1 - rank):
            actions.append(action)
            if action.kind == "I" and action.microbatch >= rank:
                actions.append(Action(rank, "W", done))
                done += 1
        actions += [Action(rank, "W", j) for j in range(done, n_microbatches)]
        lists.append(actions)
    return schedule("zero bubble", lists)


def zb_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """ZB-V: two chunks per rank in a V, down to the last rank and back, and backwards in two halves.

    Stages s and 2p - 1 - s live on rank s, so the first and the last stage, and with them the loss, are on
    rank 0. Where F, I and W of a chunk take the same time t and m is at least 2p - 1, a rank idles for
    (p - 1) t at the start of a step and at its end together, and never in between. It keeps at most 2p
    chunks' shares, on every rank: as much as p whole micro-batches, the most that a rank of 1F1B keeps.

    Qi et al., https://arxiv.org/abs/2401.10241, section 6 (2023). Their optimizer step begins on each rank as
    soon as its own gradients are there, so that even the (p - 1) t are not lost; `Pipeline.step` ends first.
    """
    _check(n_ranks, n_microbatches)
    p, n = n_ranks, max(n_microbatches, 2 * n_ranks - 1)  # with fewer, as if they were there
    lists = []
    for r in range(p):
        phases = [
            (2 * (p - r) - 1, "F0"),  # until the first micro-batch has come back to this rank
            (r, "F1 F0"),
            (p - r, "F1 I1 W"),  # until the first gradient has gone round
            (n - 2 * p + 1 + r, "F0 I0 W F1 I1 W"),
            (p - 1 - r, "I0 W F1 I1 W"),
            (r, "I0 I1"),  # no forwards are left: first what others wait for
            (p - r, "I0 W"),
            (2 * r, "W"),
        ]
        lists.append(_in_a_v(r, p, n_microbatches, phases))
    return schedule("ZB-V", lists)


def dualpipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """DualPipeV: the V of ZB-V in which a forward of one chunk stands next to a backward of the other.

    The two belong to different micro-batches, and one can compute while the other communicates. In the list
    they follow one another, and so they run here. Only the backwards at the ends come in halves. Where F, I
    and W of a chunk take the same time t and m is at least 2p, as the authors ask, a rank idles for
    (p - 1) t. It keeps at most 2p + 1 chunks' shares.

    It is half of DualPipe, whose two directions would need every stage twice: DeepSeek-AI,
    https://arxiv.org/abs/2412.19437, section 3.2.1 (2024), cut in half at
    https://github.com/deepseek-ai/DualPipe (2025), where the steps below are listed.
    """
    _check(n_ranks, n_microbatches)
    p, n = n_ranks, max(n_microbatches, 2 * n_ranks)  # with fewer, as if they were there
    lists = []
    for r in range(p):
        in_turns = ["B1", "B0"] * (r + 1)
        in_turns[r + 1 :] = [name.replace("B", "I") for name in in_turns[r + 1 :]]
        phases = [
            (2 * (p - 1 - r), "F0"),
            (r + 1, "F0 F1"),
            (p - 1 - r, "I1 W F1"),
            (n - 2 * p + r + 1, "F0 B1 F1 B0"),  # the pairs
            (p - 1 - r, "B1 F1 B0"),
            (1, " ".join(in_turns)),
            (p - 1 - r, "W I0"),
            (r + 1, "W"),
        ]
        lists.append(_in_a_v(r, p, n_microbatches, phases))
    return schedule("DualPipeV", lists)


def _in_a_v(rank: int, n_ranks: int, n_microbatches: int, phases: list[tuple[int, str]]) -> list[Action]:
    """The list of a rank with two stages in a V: each phase repeats its actions so many times.

    "F0" is the forward of the stage on the way down for its next micro-batch, "F1" of the one on the way
    back; "W" is the oldest weight gradient that an "I" put off. Micro-batches that there are not are left
    out.
    """
    stages = rank, 2 * n_ranks - 1 - rank
    following: Counter[tuple[int, str]] = Counter()
    put_off: deque[Action] = deque()
    actions = []
    for times, names in phases:
        for name in names.split() * times:
            if name == "W":
                actions.append(put_off.popleft())
                continue
            kind, stage = name[0], stages[int(name[1])]
            direction = stage, "F" if kind == "F" else "B"
            actions.append(Action(stage, kind, following[direction]))
            if kind == "I":
                put_off.append(Action(stage, "W", following[direction]))
            following[direction] += 1
    return [action for action in actions if action.microbatch < n_microbatches]


def forward_only(plan: Schedule, n_microbatches: int | None = None) -> Schedule:
    """The forwards of a schedule, each rank's in its order: for an evaluation, which has no backward.

    Args:
        plan: any schedule that can run. Its stages stay on their ranks.
        n_microbatches: how many micro-batches go through, by default and at most those of `plan`.
    """
    m = plan.n_microbatches if n_microbatches is None else n_microbatches
    lists = ([a for a in actions if a.kind == "F" and a.microbatch < m] for actions in plan.actions)
    return schedule(f"{plan.name}, forward only", lists)


# Stage s lives on rank s mod p
SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "naive": naive,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "interleaved": interleaved,
    "zero bubble": zero_bubble,
}
# Stages s and 2p - 1 - s live on rank s
V_SCHEDULES: Mapping[str, Callable[..., Schedule]] = {"ZB-V": zb_v, "DualPipeV": dualpipe_v}


def _in_turns(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turns, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *(a for pair in pairs for a in pair), *backwards[steady:]]


def _check(n_ranks: int, n_microbatches: int, chunks: int = 1) -> None:
    if min(n_ranks, n_microbatches, chunks) < 1:
        raise ValueError(
            f"A pipeline of {n_ranks} ranks with {n_microbatches} micro-batches and {chunks} chunks cannot "
            f"be. Each must be at least 1."
        )


# What a schedule needs, and in which order it can run


def needs(action: Action, n_stages: int, *, split: bool = False) -> tuple[Action, ...]:
    """The actions that must be done before this one can start.

    `split`: the backward of the stage behind comes in halves, so its I is what this stage waits for.
    """
    stage, kind, j = action
    if kind == "F":
        return (Action(stage - 1, "F", j),) if stage else ()
    if kind == "W":
        return (Action(stage, "I", j),)
    own = Action(stage, "F", j)
    if stage == n_stages - 1:
        return (own,)
    return own, Action(stage + 1, "I" if split else "B", j)


def rounds(plan: Schedule) -> dict[Action, int]:
    """The round in which each action runs if every action takes one round: an order that all ranks can keep.

    Raises:
        ScheduleError: an action is missing, comes twice, stands on two ranks, or some ranks wait for each
            other for ever. The message holds the grid with the wrong action marked.
    """
    _complete(plan)
    split = _split(plan)
    done: dict[Action, int] = {}
    place, now = [0] * plan.n_ranks, -1
    n_stages = plan.n_stages
    while any(place[r] < len(plan.actions[r]) for r in range(plan.n_ranks)):
        now += 1
        ready = []
        for rank, actions in enumerate(plan.actions):
            if place[rank] < len(actions):
                action = actions[place[rank]]
                if all(n in done for n in needs(action, n_stages, split=_behind(action, split))):
                    ready.append((rank, action))
        if not ready:
            raise ScheduleError(_stuck(plan, place, done, split))
        for rank, action in ready:
            done[action] = now
            place[rank] += 1
    return done


def validate(plan: Schedule) -> Schedule:
    """`plan` itself, if every stage does each micro-batch once and nobody waits for ever.

    Raises:
        ScheduleError: as `rounds`.
    """
    rounds(plan)
    return plan


def _split(plan: Schedule) -> frozenset[tuple[int, int]]:
    """The stages and micro-batches whose backward comes in halves."""
    return frozenset((a.stage, a.microbatch) for rank in plan.actions for a in rank if a.kind == "I")


def _behind(action: Action, split: frozenset[tuple[int, int]]) -> bool:
    return (action.stage + 1, action.microbatch) in split


def _complete(plan: Schedule) -> None:
    """Raise unless each action stands in the schedule once, and each stage on one rank."""
    if not plan.n_stages:
        raise ScheduleError("The schedule is empty.")
    seen: dict[Action, int] = {}
    homes: dict[int, int] = {}
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if action.kind not in KINDS or action.stage < 0 or action.microbatch < 0:
                raise ScheduleError(f"{action} is no action.\n{as_text(plan, marked=[action])}")
            if action in seen:
                raise ScheduleError(f"{action} comes twice.\n{as_text(plan, marked=[action])}")
            if homes.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{action} is on rank {rank}, but stage {action.stage} lives on rank "
                    f"{homes[action.stage]}.\n{as_text(plan, marked=[action])}"
                )
            seen[action] = rank
    microbatches, trains = range(plan.n_microbatches), plan.trains
    for stage in range(plan.n_stages):
        for j in microbatches:
            if missing := _missing(stage, j, seen, trains):
                raise ScheduleError(f"{missing} is missing.\n{as_text(plan, marked=())}")
            if all(Action(stage, kind, j) in seen for kind in "BI"):
                both = [Action(stage, "B", j), Action(stage, "I", j)]
                raise ScheduleError(
                    f"Stage {stage} has two backwards of micro-batch {j}: {both[0]} is {both[1]} and "
                    f"{stage}W{j} together.\n{as_text(plan, marked=both)}"
                )


def _missing(stage: int, j: int, seen: Mapping[Action, int], trains: bool) -> str:
    if Action(stage, "F", j) not in seen:
        return str(Action(stage, "F", j))
    if not trains:
        return ""
    if Action(stage, "B", j) in seen and Action(stage, "W", j) not in seen:
        return ""
    if Action(stage, "I", j) not in seen:
        return str(Action(stage, "I" if Action(stage, "W", j) in seen else "B", j))
    return "" if Action(stage, "W", j) in seen else str(Action(stage, "W", j))


def _stuck(
    plan: Schedule, place: Sequence[int], done: Mapping[Action, int], split: frozenset[tuple[int, int]]
) -> str:
    homes = {a.stage: rank for rank, actions in enumerate(plan.actions) for a in actions}
    sentences, marked = [], []
    for rank, actions in enumerate(plan.actions):
        if place[rank] == len(actions):
            continue
        action = actions[place[rank]]
        marked.append(action)
        waits = [n for n in needs(action, plan.n_stages, split=_behind(action, split)) if n not in done]
        names = " and ".join(f"{n} of rank {homes[n.stage]}" for n in waits)
        sentences.append(f"  rank {rank} is at {action} and waits for {names}")
    return "\n".join(
        [
            "The schedule never ends:",
            *sentences,
            as_text(plan, marked=marked),
            "Move what the others wait for before what cannot start yet.",
        ]
    )


def as_text(plan: Schedule, *, marked: Iterable[Action] | None = None) -> str:
    """The schedule as a grid of characters: one column per round where it can run, else one per action.

    With `marked` one column per action, and those between > and <.
    """
    columns: dict[Action, int] = {}
    if marked is None:
        try:
            columns = rounds(plan)
        except ScheduleError:
            pass  # it is shown as it is
    marked = set(marked or ())
    names = [[f">{a}<" if a in marked else str(a) for a in actions] for actions in plan.actions]
    width = max((len(n) for rank in names for n in rank), default=1) + 1
    lines = []
    for rank, actions in enumerate(plan.actions):
        cells: dict[int, str] = {}
        for i, action in enumerate(actions):
            cells[columns.get(action, i)] = names[rank][i]
        text = "".join(f"{cells.get(c, '.'):<{width}}" for c in range(max(cells, default=-1) + 1))
        lines.append(f"rank {rank}  {text.rstrip()}")
    return "\n".join(lines)


# What it will cost


def predict(
    plan: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    send: float = 0.0,
    measured: Iterable[Event] = (),
) -> tuple[Event, ...]:
    """What each rank will do and when, as predicted events named after their actions.

    Args:
        plan: any schedule that can run.
        forward: seconds of one stage's forward of one micro-batch.
        backward: seconds of its whole backward: the two halves together.
        weight: seconds of the half that gives the weights' gradients, by default half of `backward`.
        send: seconds from the end of an action until another rank can use its result.
        measured: take the seconds of an action from the event of this name, where there is one. What the
            measured step takes longer than this prediction was spent between the actions.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    weight = backward / 2 if weight is None else weight
    seconds = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    if min(*seconds.values(), send) < 0:
        raise ValueError(f"Times cannot be negative: {seconds}, send {send}.")
    split = _split(plan)
    homes = {a.stage: rank for rank, actions in enumerate(plan.actions) for a in actions}
    took = {action: event.seconds for action, event in actions_of(measured)}
    ends: dict[Action, float] = {}
    free = [0.0] * plan.n_ranks
    events, n_stages = [], plan.n_stages
    for action in _in_order(plan):
        rank = homes[action.stage]
        found = needs(action, n_stages, split=_behind(action, split))
        arrived = [ends[n] + (send if homes[n.stage] != rank else 0.0) for n in found]
        start = max([free[rank], *arrived])
        free[rank] = ends[action] = start + took.get(action, seconds[action.kind])
        events.append(Event(rank, str(action), start, free[rank], kind="compute", predicted=True))
    return tuple(sorted(events, key=lambda e: (e.start, e.rank)))


def message_seconds(plan: Schedule, measured: Iterable[Event]) -> float:
    """Seconds from the end of an action to the start of one on another rank that waited for it: the median.

    To be given to `predict` as `send`. It is 0.0 where no rank ever waited for another.
    """
    events = dict(actions_of(measured))
    split = _split(plan)
    gaps = []
    for actions in plan.actions:
        free = float("-inf")
        for action in actions:
            found = needs(action, plan.n_stages, split=_behind(action, split))
            arrived = max(
                (events[n].end for n in found if events[n].rank != events[action].rank), default=free
            )
            if arrived > free:
                gaps.append(events[action].start - arrived)
            free = events[action].end
    return statistics.median(gaps) if gaps else 0.0


def _in_order(plan: Schedule) -> Iterator[Action]:
    """All actions in an order in which each comes after what it needs."""
    when = rounds(plan)
    return iter(sorted(when, key=lambda a: (when[a], a)))


def actions_of(events: Iterable[Event]) -> list[tuple[Action, Event]]:
    """The events that are actions of a pipeline, with their actions, in order of time; no others."""
    found = []
    for event in events:
        if event.kind == "comm":
            continue
        try:
            found.append((Action.parse(event.op), event))
        except ValueError:
            continue  # a span of something else
    return sorted(found, key=lambda pair: (pair[1].start, pair[1].rank))


def length(events: Iterable[Event]) -> float:
    """Seconds from the start of the first action to the end of the last, of all ranks."""
    chosen = [e for _, e in actions_of(events)]
    return max(e.end for e in chosen) - min(e.start for e in chosen) if chosen else 0.0


def idle_share(events: Iterable[Event]) -> float:
    """The bubble, measured or predicted: which share of all ranks' time no action ran, from 0 to 1."""
    chosen = [e for _, e in actions_of(events)]
    if not chosen:
        raise ValueError("None of these events is an action of a pipeline, such as 1F0.")
    ranks = len({e.rank for e in chosen})
    return 1 - sum(e.seconds for e in chosen) / (ranks * length(chosen))


def bubble_fraction(n_ranks: int, n_microbatches: int, chunks: int = 1) -> float:
    """(p - 1) / (v m + p - 1): idle time as a share of the whole step, for GPipe, 1F1B and interleaved 1F1B.

    For interleaved 1F1B it holds where m is a multiple of p.
    """
    # Huang et al., https://arxiv.org/abs/1811.06965, section 2.3 (2019), for v = 1
    return (n_ranks - 1) / (chunks * n_microbatches + n_ranks - 1)


def bubble_overhead(n_ranks: int, n_microbatches: int, chunks: int = 1) -> float:
    """(p - 1) / (v m): the same idle time as a share of the time in which a rank computes."""
    # Narayanan et al., https://arxiv.org/abs/2104.04473, sections 2.2.1 and 2.2.2 (2021)
    return (n_ranks - 1) / (chunks * n_microbatches)


def peak_in_flight(plan: Schedule) -> list[int]:
    """By rank, how many micro-batches' activations it holds at most: those with a forward whose backward is
    not over.

    With several chunks each chunk's share of a micro-batch counts as one. An evaluation keeps none.
    """
    if not plan.trains:
        return [0] * plan.n_ranks
    peaks = []
    for actions in plan.actions:
        held = most = 0
        for action in actions:
            held += {"F": 1, "I": 0}.get(action.kind, -1)
            most = max(most, held)
        peaks.append(most)
    return peaks
