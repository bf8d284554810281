"""On the notebook's side: the processes of a world, wherever they live: started, heard, asked, replaced.

What ranks say is sorted by rank here, between cells too: a rank may end, or a thread of the learner's may print.
"""

import itertools
import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import errors
from ..results import Frame, RankFailure, name_ranks
from . import messages, system
from .host import Host
from .received import Received

START_TIMEOUT = 120.0  # seconds for ranks to join their first process group
MANY_COUNTS = 500  # kinds of operations (groups, pairs, tags) after which counters are reset
REJOIN_TIMEOUT = 30.0  # seconds for ranks to join a new one, before all are started anew


class Workers:
    """The processes of the ranks of `host`, and what has come from each of them in the current cell."""

    def __init__(self, host: Host, world_size: int) -> None:
        self.host, self.world_size = host, world_size
        self.generation = 0  # of process groups: one more whenever all ranks join a new one
        self.received = {rank: Received(runs=False) for rank in range(world_size)}
        self.counts: dict[int, Mapping[Any, int]] = {}  # what each rank had called when it was last heard
        self.can_reset_counts = False  # with the next cell of all ranks
        self.names: dict[int, set[str]] = {}  # that each rank has
        self.gone = {rank: set[str]() for rank in range(world_size)}  # ... had before it was started anew
        self.with_threads: set[int] = set()  # ranks on which a thread of a cell is still there
        self.began = time.monotonic()  # the current cell
        self._cell = ""  # its name
        self._joined = dict.fromkeys(range(world_size), -1)  # the last generation that each rank joined
        self._problems: dict[int, str] = {}  # why a rank could not join
        self._port = system.free_port()  # the same for all ranks, also for those that come later
        self._questions = itertools.count()
        self._answers: dict[int, dict[int, Any]] = {}  # number of a question -> rank -> answer

    def next_cell(self, name: str, members: Sequence[int]) -> None:
        """From now on what comes belongs to the cell `name`, which runs on `members`; none runs on nobody."""
        before = self.received
        self.received = {rank: r.next(runs=rank in members) for rank, r in before.items()}
        for rank, r in before.items() if not members else ():
            self.received[rank].lost = r.lost
        self.began, self._cell = time.monotonic(), name

    def keep(self, states: Mapping[int, messages.RankState]) -> None:
        """Remember in what state a cell has left its ranks."""
        for rank, state in states.items():
            self.counts[rank] = state.counts
            self.names[rank] = set(state.names)
            self.gone[rank] -= self.names[rank]
            (self.with_threads.add if state.threads else self.with_threads.discard)(rank)
        # where counters have grown many, all that was sent has come, and nothing is open, a reset changes nothing
        many = any(len(state.counts) > MANY_COUNTS for state in states.values())
        idle = not any(state.open or state.threads for state in states.values())
        ready = many and idle and len(states) == len(self.host.ranks)
        self.can_reset_counts = ready and not under_way(state.counts for state in states.values())

    def pump(self, timeout: float) -> None:
        """Take in whatever has arrived, waiting at most `timeout` seconds for something."""
        for event in self.host.pump(timeout):
            received = self.received[event.rank]
            if isinstance(event, messages.Output):
                (received.stdout if event.stream == "out" else received.stderr).extend(event.data)
            elif isinstance(event, messages.WorkerMessage):
                self._take(event.rank, received, pickle.loads(event.message))
            elif isinstance(event, messages.ProcessExited):
                self.lose(event.rank, event.how, event.stack)

    def _take(self, rank: int, received: Received, message: Any) -> None:
        if isinstance(message, messages.Joined):
            if message.problem:
                self._problems[rank] = message.problem
            else:
                self._joined[rank] = message.generation
        elif isinstance(message, messages.Shown):
            received.show(message.display, update=message.update)
        elif isinstance(message, messages.Answer):
            if message.number in self._answers:
                self._answers[message.number][rank] = message.value
        elif message.cell == self._cell:
            received.done = message

    def lose(self, rank: int, how: str, stack: tuple[Frame, ...] = (), *, by_us: bool = False) -> None:
        """Note that the process of `rank` has ended, having crashed in `stack`, or that we have ended it."""
        received = self.received[rank]
        if received.lost is None or by_us:
            at = received.lost.at if received.lost else time.monotonic() - self.began
            received.lost = RankFailure("RankLost", how, stack, at=at, caused_by_abort=by_us)

    def ask(self, ranks: Sequence[int], about: str, argument: Any = None, *, wait: float) -> dict[int, Any]:
        """Ask the control threads of `ranks`; the answers that came within `wait` seconds. None: it found none."""
        number = next(self._questions)
        answers = self._answers[number] = {}
        self.host.send(ranks, pickle.dumps(messages.Question(number, about, argument)), control=True)
        deadline = time.monotonic() + wait
        while any(r not in answers and self.received[r].lost is None for r in ranks):
            if (left := deadline - time.monotonic()) <= 0:
                break
            self.pump(left)
        return self._answers.pop(number)

    def start_all(self) -> None:
        """Start the ranks, and wait until they have joined their process group."""
        self.received = {rank: Received(runs=False) for rank in range(self.world_size)}
        self.with_threads.clear()
        self._start(self.host.ranks)
        self._await_ready(START_TIMEOUT)

    def restart(self) -> None:
        self.host.end(self.host.ranks)
        self.generation += 1
        self.start_all()

    def repair(self, lost: Sequence[int]) -> str:
        """Replace the `lost` ranks, and have all join a new process group; a sentence if all had to be started anew."""
        self.generation += 1
        try:
            if lost:
                self.host.end(lost)
                self._start(lost)
            self.host.prepare_store(self.generation)
            self.host.send([r for r in self.host.ranks if r not in lost], pickle.dumps(messages.Join(self.generation)))
            self._await_ready(REJOIN_TIMEOUT)
        except errors.StartError:  # a rank died meanwhile
            self.restart()
            return f"All {self.world_size} ranks had to be started anew: their names are gone."
        return ""

    def _start(self, ranks: Sequence[int]) -> None:
        choice, orders = self.host.choice, []
        known = set[str]().union(*self.names.values())  # of a rank that was lost in the cell that defined a name, too
        for rank in ranks:
            self.gone[rank] |= known
            self.received[rank] = Received(runs=False)
            self._joined[rank] = -1
            local_rank, per_node, node = self.host.place_of(rank)
            orders.append(messages.StartRank(
                rank, self.world_size, choice.device, choice.backend, self.host.address_for(rank), self._port,
                self.generation, folder=system.current_folder(), path=tuple(map(str, sys.path)), local_rank=local_rank,
                local_world_size=per_node or self.world_size, node=node, memory_fraction=choice.memory_fraction,
            ))  # fmt: skip
        self.host.start(orders)

    def _await_ready(self, timeout: float) -> None:
        """Wait until all ranks have joined the process group of this generation."""
        self._problems.clear()
        deadline = time.monotonic() + timeout
        while waiting := [r for r in self.host.ranks if self._joined[r] < self.generation]:
            self.pump(min(0.5, max(deadline - time.monotonic(), 0.0)))
            lost = {r: failure for r in waiting if (failure := self.received[r].lost)}
            failed = [r for r in waiting if r in self._problems]
            if not lost and not failed and time.monotonic() < deadline:
                continue
            texts = [self.received[r].stderr.whole() for r in lost] + [self._problems[r] for r in failed]
            if lost:
                what = f"{name_ranks([*lost])} {next(iter(lost.values())).message}"
            elif failed:
                what = f"{name_ranks(failed)} could not join the process group"
            else:
                what = f"{name_ranks(waiting)} did not join the process group within {timeout:.0f} s"
            said = "\n".join(dict.fromkeys(t.strip()[-2000:] for t in texts if t.strip()))
            raise errors.StartError(f"{self.world_size} ranks could not be started: {what}.\n{said}".rstrip())
        self.counts, self.can_reset_counts = {}, False


def under_way(counts: Iterable[Mapping[Any, int]]) -> Counter[Any]:
    """By pair of ranks and tag, how many more sends than receives ranks with these `counts` have called."""
    found: Counter[Any] = Counter()
    for key, count in (item for each in counts for item in each.items()):
        if len(key) > 2:  # of a send or its receive
            found[key[:-1]] += count if key[-1] == "send" else -count
    return Counter({key: n for key, n in found.items() if n})
