"""Stacks of Python processes: of this one, of one that answers a signal, and what py-spy and faulthandler print.

It only reads. Which line matters is for `verdict`.
"""

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
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
class Thread:
    """One thread of a process: its frames, outermost first."""

    name: str
    frames: tuple[Frame, ...]
    active: bool | None = None  # whether it runs; None where unknown


@dataclass(frozen=True)
class Process:
    """The threads of one process, the main thread first."""

    threads: tuple[Thread, ...]
    pid: int = 0
    command: str = ""


def is_own(filename: str) -> bool:
    """Whether a file is part of the program itself, not of a library."""
    return bool(filename) and not _LIBRARY.search(filename)


def own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of the program itself; all if there are none."""
    return tuple(f for f in frames if is_own(f.filename)) or tuple(frames)


def of_frame(frame: Any) -> tuple[Frame, ...]:
    """A stack of this process, outermost first, with the text of its lines."""
    import linecache

    found: list[Frame] = []
    while frame is not None and len(found) < MAX_FRAMES:
        code = frame.f_code
        text = linecache.getline(code.co_filename, frame.f_lineno or 0).strip()
        found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name, text))
        frame = frame.f_back
    return tuple(reversed(found))


# --- a process that answers a signal

# files that faulthandler writes to must stay open; the second where the program has enabled faulthandler for crashes
_held: list[Any] = []
_held_for_the_signal: list[Any] = []


def answer(folder: str) -> None:
    """From now on this process, and every fork of it, writes its stack into `folder` when it is sent `SIGNAL`."""

    def register() -> None:
        with contextlib.suppress(OSError):
            file = open(f"{folder}/{os.getpid()}", "w")  # noqa: PTH123 - kept open
            faulthandler.register(SIGNAL, file=file, all_threads=True)
            if _held or not faulthandler.is_enabled():
                faulthandler.enable(
                    file=file, all_threads=False
                )  # what a crash, such as of a C library, leaves
                _held[:] = [file]
            else:
                _held_for_the_signal[:] = [file]

    register()
    os.register_at_fork(after_in_child=register)


def new_folder() -> str:
    """A folder for such stacks, that only this user can read."""
    return tempfile.mkdtemp(prefix="rankcell-")


def ask(pid: int, folder: str) -> tuple[Thread, ...]:
    """The stack of a process of this machine that answers; empty if it does not."""
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
    return faulthandler_threads(path.read_text()[before:])


def last(pid: int, folder: str) -> str:
    """What a process of this machine has written when it crashed."""
    try:
        return (Path(folder) / str(pid)).read_text()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have (Linux); empty elsewhere."""
    found: list[int] = []
    for task in _files(Path(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *children(int(child))]
    return found


def state_of(pid: int) -> str:
    """The kernel's letter for a process: "R", "S", "D", "T", "Z"; "" where unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


# --- what others print

_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread|Stack) ?(0x[0-9a-f]+)?(.*?) ?\(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$')
_SPY_PROCESS = re.compile(r"^Process (\d+): (.*)$")
_SPY_THREAD = re.compile(r'^Thread (\S+) ?(?:\((.*?)\))?(?:: "(.*)")?$')
_SPY_FRAME = re.compile(r"^ {4}(\S.*?) \((.+):(\d+)\)$")


def faulthandler_threads(text: str) -> tuple[Thread, ...]:
    """The threads in what `faulthandler` prints. The main thread, which it prints last, comes first."""
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if begins := _FAULT_THREAD.match(line):
            found.append((begins[2].strip(" []"), []))
        elif found and (frame := _FAULT_FRAME.match(line)):
            found[-1][1].append(Frame(frame[1], int(frame[2]), frame[3], _source(frame[1], int(frame[2]))))
    return tuple(Thread(name, tuple(reversed(frames))) for name, frames in reversed(found))


def py_spy_text(text: str) -> list[Process]:
    """The processes in what `py-spy dump` prints."""
    found: list[Process] = []
    threads: list[tuple[str, bool | None, list[Frame]]] = []
    head: tuple[int, str] | None = None

    def close() -> None:
        if head is not None and threads:
            made = [Thread(name, tuple(reversed(frames)), active) for name, active, frames in threads]
            found.append(Process(_main_first(made), *head))
        threads.clear()

    for line in text.splitlines():
        if begins := _SPY_PROCESS.match(line):
            close()
            head = int(begins[1]), begins[2]
        elif head is not None and (begins := _SPY_THREAD.match(line)):
            status = begins[2] or ""
            active = "active" in status if status else None
            threads.append((begins[3] or "", active, []))
        elif threads and (frame := _SPY_FRAME.match(line)):
            threads[-1][2].append(Frame(frame[2], int(frame[3]), frame[1], _source(frame[2], int(frame[3]))))
    close()
    return found


def py_spy_json(content: Any) -> list[Process]:
    """The processes in what `py-spy dump --json` prints; empty if it is something else."""
    by_pid: dict[int, list[Thread]] = {}
    commands: dict[int, str] = {}
    for item in content if isinstance(content, list) else ():
        if not isinstance(item, dict) or not isinstance(item.get("frames"), list):
            return []
        about = item.get("process_info") or {}
        pid = int(item.get("pid") or about.get("pid") or 0)
        commands[pid] = str(about.get("command_line") or "")
        frames = [
            Frame(
                str(f.get("filename") or ""),
                int(f.get("line") or 0),
                str(f.get("name") or ""),
                _source(str(f.get("filename") or ""), int(f.get("line") or 0)),
            )
            for f in item["frames"]
            if isinstance(f, dict)
        ]
        name = str(item.get("thread_name") or "")
        by_pid.setdefault(pid, []).append(Thread(name, tuple(reversed(frames)), item.get("active")))
    return [Process(_main_first(threads), pid, commands[pid]) for pid, threads in by_pid.items()]


def _main_first(threads: Iterable[Thread]) -> tuple[Thread, ...]:
    def place(thread: Thread) -> tuple[bool, bool]:
        outermost = thread.frames[0].name if thread.frames else ""
        return thread.name != "MainThread", outermost != "<module>"

    return tuple(sorted(threads, key=place))


def _source(filename: str, line: int) -> str:
    """The text of a line, where the file is at hand."""
    import linecache

    return linecache.getline(filename, line).strip() if is_own(filename) else ""
