"""Stacks of Python processes: of this one, what it writes when it crashes, and what py-spy and faulthandler print.

It only reads. Which line matters is for `verdict`.
"""

import contextlib
import faulthandler
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import Frame

MAX_FRAMES = 60
_LIBRARY = re.compile(
    r"/site-packages/|/dist-packages/|/lib/python\d|/rankcell/(engine|jobs)/|^<frozen|^torch/|"
    r"/torch/(distributed|nn|autograd|utils|optim|multiprocessing|_\w+)/"
)
_crashes: list[Any] = []  # the file that faulthandler writes to must stay open


@dataclass(frozen=True)
class ThreadStack:
    """One thread of a process: its frames, outermost first."""

    name: str
    frames: tuple[Frame, ...]
    active: bool = False  # it computes


def is_own(filename: str) -> bool:
    """Whether a file is part of the program itself, not of a library."""
    return bool(filename) and not _LIBRARY.search(filename)


def own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of the program itself; none if it has none."""
    return tuple(f for f in frames if is_own(f.filename))


def place(frames: Sequence[Frame]) -> tuple[str, int]:
    """File and line of the program in which a stack stands; ("", 0) if it is nowhere in the program."""
    found = own(frames)
    return (found[-1].filename, found[-1].lineno) if found else ("", 0)


def of_frame(frame: Any) -> tuple[Frame, ...]:
    """A stack of this process, outermost first, with the text of its lines."""
    found: list[Frame] = []
    while frame is not None and len(found) < MAX_FRAMES:
        code, line = frame.f_code, frame.f_lineno or 0
        text = linecache.getline(code.co_filename, line).strip()
        found.append(Frame(code.co_filename, line, code.co_name, text))
        frame = frame.f_back
    return tuple(reversed(found))


def keep_crashes(path: str) -> None:
    """From now on this process writes into `path` where it stood when it crashed, if the program does not do so."""
    if not faulthandler.is_enabled():
        _crashes.append(open(path, "w"))  # noqa: PTH123 - kept open
        faulthandler.enable(file=_crashes[0], all_threads=False)


def crash_in(path: str) -> tuple[str, tuple[Frame, ...]]:
    """What a crash has left in a file: the name of the signal, and the stack; ("", ()) if there was none."""
    with contextlib.suppress(OSError):
        _, begins, text = Path(path).read_text().partition("Fatal Python error: ")
        if begins:
            threads = printed(text)
            return text.partition("\n")[0], threads[0].frames if threads else ()
    return "", ()


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have (Linux); empty elsewhere."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                found += [int(child), *children(int(child))]
    return found


# what faulthandler and py-spy print
_THREAD = re.compile(
    r'^(?:Current thread|Thread|Stack)\b(?:.*\(most recent call first\):| \S+ \((.+?)\)(?:: "(.*)")?$)'
)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$|^ {4}(\S.*?) \((.+):(\d+)\)$')


def printed(text: str) -> tuple[ThreadStack, ...]:
    """The threads in what one of them prints, the main thread first: faulthandler prints it last, py-spy names it."""
    found: list[tuple[str, bool, list[Frame]]] = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            found.append((begins[2] or "", "active" in (begins[1] or ""), []))
        elif found and (frame := _FRAME.match(line)):
            name, file, number = (
                (frame[3], frame[1], frame[2]) if frame[1] else (frame[4], frame[5], frame[6])
            )
            source = linecache.getline(file, int(number)).strip() if is_own(file) else ""
            found[-1][2].append(Frame(file, int(number), name, source))
    threads = [ThreadStack(name, tuple(reversed(frames)), active) for name, active, frames in reversed(found)]
    return tuple(sorted(threads, key=lambda t: t.name != "MainThread"))
