"""On the notebook's side: what has come from one rank in the current cell, and the result it becomes.

Everything that a learner's program can make without end is bounded here: text, displays.
"""

import pickle
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from ..results import Display, NotSent, RankFailure, RankResult
from .messages import Outcome

HEAD, TAIL = 2 << 20, 1 << 20  # bytes kept of what a rank writes in a cell: its beginning and its end
LIVE_LINES = 30  # shown of each rank while the cell runs: the newest
MAX_DISPLAYS, MAX_DISPLAY_NBYTES = 300, 64 << 20  # of one rank and cell; the oldest go


class Text:
    """What a rank wrote to one stream: of a flood the beginning and the end."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_nbytes = 0
        self.dropped = 0  # bytes between the two

    def __bool__(self) -> bool:
        return bool(self._head)

    def extend(self, data: bytes) -> None:
        """More was written."""
        space = HEAD - len(self._head)
        if space > 0:
            self._head += data[:space]
            data = data[space:]
        if data:
            self._tail.append(data)
            self._tail_nbytes += len(data)
            while self._tail_nbytes - len(self._tail[0]) >= TAIL:
                gone = self._tail.popleft()
                self._tail_nbytes -= len(gone)
                self.dropped += len(gone)

    def _note(self) -> str:
        return f"\n[... {self.dropped / 1e6:,.1f} MB of output were not kept ...]\n" if self.dropped else ""

    def whole(self) -> str:
        """All that is kept, with a line that says what is not."""
        return (
            self._head.decode("utf-8", "replace")
            + self._note()
            + b"".join(self._tail).decode("utf-8", "replace")
        )

    def place(self, offset: int) -> int:
        """Where byte `offset` of what was written stands in `whole`, in bytes."""
        if offset <= len(self._head):
            return offset
        note = len(self._note())
        return len(self._head) + note + max(0, offset - len(self._head) - self.dropped)

    def newest(self, lines: int) -> str:
        """The last lines, after a line that says how many bytes stand before them."""
        end = b"".join(self._tail)[-(1 << 16) :] if self._tail else bytes(self._head[-(1 << 16) :])
        kept = end.decode("utf-8", "replace").splitlines(keepends=True)[-lines:]
        text = "".join(kept)
        before = len(self._head) + self._tail_nbytes + self.dropped - len(text.encode())
        return (
            text if before <= 0 else f"[... the newest lines of {before / 1e3:,.0f} kB and more ...]\n{text}"
        )


@dataclass
class Part:
    """What has come from one rank in the current cell."""

    runs: bool = True
    stdout: Text = field(default_factory=Text)
    stderr: Text = field(default_factory=Text)
    stdout_before: int = 0  # bytes of `stdout` that a thread wrote before the cell began
    stderr_before: int = 0
    displays: list[Display] = field(default_factory=list)
    outcome: Outcome | None = None
    lost: RankFailure | None = None
    freed: bool = False  # we ended its cell: what it raised then is our doing

    @property
    def over(self) -> bool:
        """Whether nothing more comes from this rank in the cell."""
        return not self.runs or self.outcome is not None or self.lost is not None

    def inherit(self, idle: "Part") -> None:
        """Begin with what a thread of the rank's printed while it ran no cell."""
        if idle.runs:
            return
        if idle.stdout:
            self.stdout, self.stdout_before = idle.stdout, len(idle.stdout.whole().encode())
        if idle.stderr:
            self.stderr, self.stderr_before = idle.stderr, len(idle.stderr.whole().encode())

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

    def so_far(self, rank: int, node: str) -> RankResult:
        """The result while the cell runs: the newest lines only, and no value."""
        outcome = self.outcome
        state = "skipped" if not self.runs else "running"
        data: dict[str, Any] = {}
        if self.lost is not None:
            state = "lost"
        elif outcome is not None:
            state, data = ("error" if outcome.error else "ok"), outcome.data
        return RankResult(
            rank=rank,
            node=node,
            state=state,
            stdout=self.stdout.newest(LIVE_LINES),
            stderr=self.stderr.newest(LIVE_LINES),
            displays=tuple(replace(d, stdout_offset=1 << 60) for d in self.displays[-3:]),
            error=self.lost or (outcome.error if outcome else None),
            data=data,
        )

    def result(self, rank: int, node: str) -> RankResult:
        """The result when the cell is over."""
        outcome = self.outcome
        before = self.stdout_before
        common: dict[str, Any] = {
            "rank": rank,
            "node": node,
            "stdout": self.stdout.whole(),
            "stderr": self.stderr.whole(),
            "displays": tuple(
                replace(d, stdout_offset=self.stdout.place(d.stdout_offset + before)) for d in self.displays
            ),
        }
        if not self.runs:
            return RankResult(**common, state="skipped")
        if self.lost is not None:
            return RankResult(**common, state="lost", error=self.lost)
        if outcome is None:
            return RankResult(**common, state="running")
        error = outcome.error
        if error and self.freed and not error.mismatch:
            message = "freed from an operation that could not finish, or interrupted"
            error = replace(error, type="RankFreed", message=message, caused_by_abort=True)
        order = tuple(
            (self.stderr.place(err + self.stderr_before), self.stdout.place(out + before))
            for err, out in outcome.order
        )
        return RankResult(
            **common,
            state="error" if error else "ok",
            value=unpack(outcome.value),
            data=outcome.data,
            error=error,
            seconds=outcome.seconds,
            events=outcome.events,
            connections=outcome.wire,
            dropped=outcome.dropped,
            memory=outcome.memory,
            trace=outcome.trace,
            mismatch=outcome.mismatch,
            order=order,
        )


def _nbytes(display: Display) -> int:
    return sum(len(v) if isinstance(v, (str, bytes)) else 100 for v in display.data.values())


def unpack(packed: Any) -> Any:
    """A value from its pickle, or what stands for a value that stayed on its rank."""
    if not isinstance(packed, bytes):
        return NotSent("", packed) if isinstance(packed, str) else packed
    try:
        return pickle.loads(packed)
    except BaseException as error:  # noqa: BLE001 - kept as the reason why there is no value
        return NotSent("", f"cannot be read here: {type(error).__name__}: {error}")
