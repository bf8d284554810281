"""Stacks of Python processes: of this one, of one that answers a signal, and what py-spy and faulthandler print.

It only reads. Which line matters is for `verdict`.
"""

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import Frame

SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + 9  # far from those that programs use
ANSWERS = 0.5  # seconds that a process has to write its stack
MAX_FRAMES = 60
_LIBRARY = re.compile(
    r"/site-packages/|/dist-packages/|/lib/python\d|/rankcell/(engine|jobs)/|^<frozen|^torch/|"
    r"/torch/(distributed|nn|autograd|utils|optim|multiprocessing|_\w+)/"
)


@dataclass(frozen=True)
class ThreadStack:
    """One thread of a process: its frames, outermost first."""

    name: str
    frames: tuple[Frame, ...]


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


# --- a process that answers a signal

_held: dict[str, Any] = {}  # files that faulthandler writes to must stay open


def answer(folder: str) -> None:
    """From now on this process, and every fork of it, writes its stack into `folder` when it is sent `SIGNAL`."""

    def register() -> None:
        with contextlib.suppress(OSError):
            file = open(f"{folder}/{os.getpid()}", "w")  # noqa: PTH123 - kept open
            faulthandler.register(SIGNAL, file=file, all_threads=True)
            if "crash" in _held or not faulthandler.is_enabled():  # the program has its own way with crashes
                faulthandler.enable(file=file, all_threads=False)
                _held["crash"] = file
            _held["signal"] = file

    register()
    os.register_at_fork(after_in_child=register)


def ask(pid: int, folder: str) -> tuple[Frame, ...]:
    """The main thread's stack of a process of this machine that answers; empty if it does not."""
    path = Path(folder) / str(pid)
    try:
        before = path.stat().st_size
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        if caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
            return ()  # it has become another program since: the signal would end it
        os.kill(pid, SIGNAL)
    except OSError:  # it has ended, or does not answer
        return ()
    end, size = time.monotonic() + ANSWERS, before
    while time.monotonic() < end:
        time.sleep(0.02)
        now = path.stat().st_size
        if now > before and now == size:
            break
        size = now
    threads = printed(path.read_text()[before:])
    return threads[0].frames if threads else ()


def last_words(pid: int, folder: str) -> str:
    """What a process of this machine has written when it crashed."""
    path = Path(folder) / str(pid)
    return path.read_text() if path.exists() else ""


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have (Linux); empty elsewhere."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                found += [int(child), *children(int(child))]
    return found


# --- what py-spy and faulthandler print

_PROCESS = re.compile(r"^Process (\d+): .*$", re.MULTILINE)  # py-spy
_THREAD = re.compile(
    r'^(?:Current thread|Thread|Stack)\b(?:.*\(most recent call first\):| \S+ \(.+?\)(?:: "(.*)")?$)'
)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$|^ {4}(\S.*?) \((.+):(\d+)\)$')


def by_process(text: str) -> list[tuple[int, tuple[ThreadStack, ...]]]:
    """The threads of each process in what one of them prints, with its pid, 0 where it is not told; else empty."""
    if "most recent call first" in text:
        return [(0, printed(text))]
    _, *rest = _PROCESS.split(text)  # pid, text, pid, text, ...
    found = [(int(pid), printed(body)) for pid, body in zip(rest[::2], rest[1::2], strict=True)]
    return [(pid, threads) for pid, threads in found if threads]


def printed(text: str) -> tuple[ThreadStack, ...]:
    """The threads of one process, the main thread first, which faulthandler prints last and py-spy names."""
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            found.append((begins[1] or "", []))
        elif found and (frame := _FRAME.match(line)):
            file, number, name = (
                (frame[1], int(frame[2]), frame[3]) if frame[1] else (frame[5], int(frame[6]), frame[4])
            )
            source = linecache.getline(file, number).strip() if is_own(file) else ""
            found[-1][1].append(Frame(file, number, name, source))
    threads = [ThreadStack(name, tuple(reversed(frames))) for name, frames in reversed(found)]
    return tuple(sorted(threads, key=lambda t: t.name != "MainThread"))
