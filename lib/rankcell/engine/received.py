"""On the notebook's side: what has come from one rank in the current cell, and the result that it becomes.

Everything that a learner's program can make without end is bounded here: text, displays.
"""

import pickle
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import LATE
from ..results import Display, NotSent, RankFailure, RankResult
from .messages import Done

_IN_A_GROUP = ". It holds a process group, as a model in DDP does: pull what is in it, its `.module` or a state_dict()"

HEAD, TAIL = 2 << 20, 1 << 20  # bytes kept of what a rank writes in a cell: its beginning and its end
MAX_DISPLAYS, MAX_DISPLAY_NBYTES = 300, 64 << 20  # of one rank and cell; the oldest go


class Text:
    """What a rank wrote to one stream: of a flood the beginning and the end."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_nbytes = 0
        self._dropped = 0  # bytes between the two
        self.before = 0  # bytes that a thread wrote before the cell began

    def __bool__(self) -> bool:
        return bool(self._head)

    def extend(self, data: bytes) -> None:
        space = max(0, HEAD - len(self._head))
        self._head += data[:space]
        if rest := data[space:]:
            self._tail.append(rest)
            self._tail_nbytes += len(rest)
            while self._tail_nbytes - len(self._tail[0]) >= TAIL:
                gone = self._tail.popleft()
                self._tail_nbytes -= len(gone)
                self._dropped += len(gone)

    def _note(self) -> str:
        return f"\n[... {self._dropped / 1e6:,.1f} MB of output were not kept ...]\n" if self._dropped else ""

    def whole(self) -> str:
        """All that is kept, with a line that says what is not."""
        head, tail = self._head.decode("utf-8", "replace"), b"".join(self._tail).decode("utf-8", "replace")
        return head + self._note() + tail

    def place(self, offset: int) -> int:
        """Where byte `offset` of what the cell wrote stands in `whole`, in bytes."""
        offset += self.before
        if offset <= len(self._head):
            return offset
        return len(self._head) + len(self._note()) + max(0, offset - len(self._head) - self._dropped)


@dataclass
class Received:
    runs: bool = True
    stdout: Text = field(default_factory=Text)
    stderr: Text = field(default_factory=Text)
    displays: list[Display] = field(default_factory=list)
    done: Done | None = None
    lost: RankFailure | None = None
    late: str = LATE  # whom its call has waited for until its timeout
    freed: bool = False  # we ended its cell: what it raised then is our doing

    @property
    def over(self) -> bool:
        """Whether nothing more comes from this rank in the cell."""
        return not self.runs or self.done is not None or self.lost is not None

    def next(self, *, runs: bool) -> "Received":
        """What to go on with in the next cell: it begins with what a thread of the rank's printed in no cell."""
        found = Received(runs=runs)
        if not self.runs:
            for name in ("stdout", "stderr"):
                if text := getattr(self, name):
                    text.before = len(text.whole().encode())
                    setattr(found, name, text)
        return found

    def show(self, new: Display, *, update: bool) -> None:
        """Take in what `display(...)` was given; with `update` in the place of the one with the same id."""
        if update and new.display_id is not None:
            for i, old in enumerate(self.displays):
                if old.display_id == new.display_id:
                    self.displays[i] = replace(new, stdout_offset=old.stdout_offset)
                    return
        self.displays.append(new)
        while len(self.displays) > MAX_DISPLAYS or (
            len(self.displays) > 1 and sum(_nbytes(d) for d in self.displays[-20:]) > MAX_DISPLAY_NBYTES
        ):
            del self.displays[0]

    def result(self, rank: int, node: str, *, live: bool) -> RankResult:
        """What the rank has sent, and what it has printed and shown; while the cell is `live` without its value."""
        result = RankResult(rank, "running" if self.runs else "skipped")
        if self.lost is not None:
            result = RankResult(rank, "lost", error=self.lost)
        elif self.done is not None:
            result = self.done.result
            if (error := result.error) is not None:
                error = replace(error, message=error.message.replace(LATE, self.late))
                if self.freed and not error.mismatch:
                    message = "freed from an operation that could not finish, or interrupted"
                    error = replace(error, type="RankFreed", message=message, caused_by_abort=True)
                result = replace(result, error=error)
        out, err = self.stdout.place, self.stderr.place
        displays = tuple(replace(d, stdout_offset=out(d.stdout_offset)) for d in self.displays)
        order = tuple((err(of_err), out(of_out)) for of_err, of_out in result.order)
        texts: Any = {"stdout": self.stdout.whole(), "stderr": self.stderr.whole()}
        value = None if live else unpack(result.value)
        if isinstance(value, NotSent):
            value = replace(value, text=value.text or result.data.get("text/plain", ""), rank=rank)
        return replace(result, node=node, value=value, displays=displays, order=order, **texts)


def _nbytes(display: Display) -> int:
    return sum(len(v) if isinstance(v, (str, bytes)) else 100 for v in display.data.values())


def unpack(packed: Any) -> Any:
    """A value from its pickle, or what stands for a value that stayed on its rank."""
    if not isinstance(packed, bytes):
        return NotSent("", packed) if isinstance(packed, str) else packed
    try:
        return pickle.loads(packed)
    except BaseException as error:  # noqa: BLE001 - kept as the reason why there is no value
        why = f"cannot be read here: {type(error).__name__}: {error}".rstrip(".")
        return NotSent("", why + _IN_A_GROUP * ("process group" in why))
