"""The tasks of a job array against time: how long each waited, when it ran, how it ended.

One row per task in the order submitted. A light bar waits, a dark one runs, one that failed has another
colour and says so. It draws tasks that it is given and starts nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .parts import WIDTH, key, round_ticks, swatch, text_width
from .svg import COLOURS, LINE, MUTED, PAPER, Figure, drawing, format_seconds, label, line, rect

_LEFT, _RIGHT, _TOP, _ROW, _BAR = 92, 16, 44, 32, 22
_RUNS, _WAITS, _FAILED = "#0072b2", COLOURS["wait"], "#d55e00"


@dataclass(frozen=True)
class Task:
    """One task of a job array: its number, when it started and ended (seconds, any zero), its exit code.

    A negative exit code is the signal that ended it, as `subprocess` reports it.
    """

    number: int
    start: float
    end: float
    exit_code: int = 0

    @property
    def state(self) -> str:
        """How it ended, in words."""
        if self.exit_code < 0:
            return "killed"
        return f"exit {self.exit_code}" if self.exit_code else "completed"


def at_once(tasks: Sequence[Task]) -> int:
    """The largest number of tasks that ran at the same time."""
    moments = sorted([(t.start, 1) for t in tasks] + [(t.end, -1) for t in tasks])
    running = most = 0
    for _, step in moments:
        running += step
        most = max(most, running)
    return most


def schedule(tasks: Sequence[Task], *, title: str = "") -> Figure:
    """When each task waited and ran; all were submitted when the first of them started.

    Raises:
        ValueError: there are no tasks.
    """
    if not tasks:
        raise ValueError("There is nothing to draw: no task was given.")
    zero = min(t.start for t in tasks)
    end = max(t.end for t in tasks) - zero or 1e-6
    bottom = _TOP + _ROW * len(tasks)

    def x(seconds: float) -> float:
        return _LEFT + seconds / end * (WIDTH - _LEFT - _RIGHT)

    entries = [("waits", swatch(_WAITS)), ("runs", swatch(_RUNS))]
    entries += [("failed", swatch(_FAILED))] * any(t.exit_code for t in tasks)
    marks, _ = key(entries, 10, gap=22)
    for t in round_ticks(0.0, end, most=6):
        marks.append(line(x(t), _TOP, x(t), bottom + 5, stroke=LINE))
        marks.append(label(x(t), bottom + 26, f"{t:g}", anchor="middle", fill=MUTED))
    marks.append(
        label((_LEFT + WIDTH) / 2, bottom + 54, "seconds since the first began", anchor="middle", fill=MUTED)
    )
    for k, task in enumerate(tasks):
        y, begin, finish = _TOP + _ROW * k + 4, x(task.start - zero), x(task.end - zero)
        told = f"task {task.number}: {task.state} after {format_seconds(task.end - task.start)}"
        fill = _FAILED if task.exit_code else _RUNS
        marks.append(label(10, y + 18, f"task {task.number}"))
        marks.append(rect(_LEFT, y + 7, begin - _LEFT, 8, fill=_WAITS))
        marks.append(rect(begin, y, max(finish - begin, 3), _BAR, fill=fill, title=told))
        if task.exit_code:
            inside = finish + 8 + text_width(task.state) <= WIDTH - 4
            place, anchor = (finish + 8, "start") if inside else (begin - 8, "end")
            wide = text_width(task.state) + 8
            marks.append(rect(place - 4 if inside else place - wide, y, wide, _BAR, fill=PAPER))
            marks.append(label(place, y + 18, task.state, anchor=anchor, fill=_FAILED, bold=True))
    alt = _finding(tasks, end)
    width = max(len(str(t.number)) for t in tasks)
    text = "\n".join(f"task {t.number:>{width}}  {_characters(t, zero, end)}  {t.state}" for t in tasks)
    return drawing(WIDTH, bottom + 66, *marks, alt=f"{title}. {alt}" if title else alt, text=f"{alt}\n{text}")


def _finding(tasks: Sequence[Task], end: float) -> str:
    bad = [t for t in tasks if t.exit_code]
    how = ", ".join(f"task {t.number} {t.state}" for t in bad) or "all completed"
    count = f"{len(tasks)} task{'s' * (len(tasks) != 1)}"
    return f"{count}, at most {at_once(tasks)} at a time, done after {format_seconds(end)}: {how}."


def _characters(task: Task, zero: float, end: float, columns: int = 40) -> str:
    """One row of the text twin: dots wait, signs run."""
    first = int((task.start - zero) / end * (columns - 1))
    last = max(int((task.end - zero) / end * (columns - 1)), first)
    return ("." * first + "#" * (last - first + 1)).ljust(columns)
