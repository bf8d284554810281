"""On the notebook's side: takes in whatever the ranks of a world say, and sorts it by rank.

Between cells too: a rank may end, or a thread of the learner's may print. It decides nothing.
"""

import itertools
import pickle
import time
from collections.abc import Sequence
from typing import Any

from ..results import RankFailure
from .host import Host
from .messages import (
    Answer,
    Answered,
    Done,
    Failed,
    Output,
    ProcessExited,
    Question,
    Ready,
    Shown,
    WorkerMessage,
)
from .parts import Part


class Mailbox:
    """What has come from the ranks of `host`."""

    def __init__(self, host: Host, world_size: int) -> None:
        self.host = host
        self.parts: dict[int, Part] = {}
        self.began = time.monotonic()  # the current cell
        self.cell = ""  # its name
        self.joined = dict.fromkeys(range(world_size), -1)  # the last process group that each rank joined
        self.problems: dict[int, str] = {}  # why a rank could not join
        self._asked = itertools.count()
        self._answers: dict[int, dict[int, Any]] = {}  # number of a question -> rank -> answer

    def pump(self, timeout: float) -> None:
        """Take in whatever has arrived, waiting at most `timeout` seconds for something."""
        for event in self.host.pump(timeout):
            part = self.parts.get(event.rank)
            if isinstance(event, Output):
                if part is not None:
                    (part.stdout if event.stream == "out" else part.stderr).extend(event.data)
            elif isinstance(event, WorkerMessage):
                self._take(event.rank, part, pickle.loads(event.message))
            elif isinstance(event, Answered):
                answer: Answer = pickle.loads(event.message)
                if answer.number in self._answers:
                    self._answers[answer.number][event.rank] = answer.value
            elif isinstance(event, ProcessExited):
                self.lose(event.rank, event.how)

    def _take(self, rank: int, part: Part | None, message: Ready | Failed | Shown | Done) -> None:
        if isinstance(message, Ready):
            self.joined[rank] = message.generation
            self.problems.pop(rank, None)
        elif isinstance(message, Failed):
            self.problems[rank] = message.why
        elif part is not None and isinstance(message, Shown):
            part.show(message.display, update=message.update)
        elif part is not None and isinstance(message, Done) and message.outcome.cell == self.cell:
            part.outcome = message.outcome

    def lose(self, rank: int, how: str) -> None:
        """Note that the process of `rank` has ended."""
        part = self.parts.get(rank)
        if part is not None and part.lost is None:
            part.lost = RankFailure("RankLost", how, at=time.monotonic() - self.began)

    def is_lost(self, rank: int) -> bool:
        """Whether the process of `rank` has ended."""
        part = self.parts.get(rank)
        return part is not None and part.lost is not None

    def ask(self, ranks: Sequence[int], about: str, argument: Any = None, *, wait: float) -> dict[int, Any]:
        """Ask the control threads of `ranks`; the answers that came within `wait` seconds. None: it found none."""
        number = next(self._asked)
        answers = self._answers[number] = {}
        self.host.ask(ranks, pickle.dumps(Question(number, about, argument)))
        deadline = time.monotonic() + wait
        while any(r not in answers and not self.is_lost(r) for r in ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self.pump(left)
        return self._answers.pop(number)
