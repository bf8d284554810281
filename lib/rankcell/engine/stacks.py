"""Stacks of Python processes: of this one, and what it writes when it crashes. Which line matters is for `verdict`."""

import contextlib
import faulthandler
import linecache
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..results import Frame

MAX_FRAMES = 60
_LIBRARY = re.compile(
    r"/site-packages/|/dist-packages/|/lib/python\d|/rankcell/(engine|jobs)/|^<frozen|^torch/|"
    r"/torch/(distributed|nn|autograd|utils|optim|multiprocessing|_\w+)/"
)
_CRASH_FRAME = re.compile(r'^ *File "(?!<string>)(.+)", line (\d+) in (.+)$', re.MULTILINE)


def own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of the program itself, not of a library; none if it has none."""
    return tuple(f for f in frames if f.filename and not _LIBRARY.search(f.filename))


def place(frames: Sequence[Frame]) -> tuple[str, int]:
    """File and line of the program in which a stack stands; ("", 0) if it is nowhere in the program."""
    found = own(frames)
    return (found[-1].filename, found[-1].lineno) if found else ("", 0)


def below(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of libraries in which the program stands: all below its own last one."""
    return tuple(takewhile(lambda f: _LIBRARY.search(f.filename), reversed(frames)))[::-1]


def of_frame(frame: Any) -> tuple[Frame, ...]:
    """A stack of this process, outermost first, with the text of its lines; of a library's function the name says the
    module, too: "FileBaton.wait of torch.utils.file_baton".
    """
    found: list[Frame] = []
    while frame is not None and len(found) < MAX_FRAMES:
        code = frame.f_code
        of_library = f"{code.co_qualname} of {frame.f_globals.get('__name__')}"
        name = of_library if _LIBRARY.search(code.co_filename) else code.co_name
        found.append(_frame(code.co_filename, frame.f_lineno or 0, name))
        frame = frame.f_back
    return tuple(reversed(found))


def _frame(file: str, line: int, name: str) -> Frame:
    return Frame(file, line, name, linecache.getline(file, line).strip())


def keep_crashes(file: str | int) -> None:
    """From now on this process writes into `file` where it stood when it crashed, if the program does not do so."""
    if not faulthandler.is_enabled():
        faulthandler.enable(file=open(file, "w"), all_threads=False)  # noqa: PTH123 - it keeps the file


def crash_in(file: str | int) -> tuple[str, tuple[Frame, ...]]:
    """What a crash has left in a file: the name of the signal, and the stack; ("", ()) if there was none."""
    with contextlib.suppress(OSError), open(file, closefd=isinstance(file, str)) as opened:
        opened.seek(0)
        _, begins, text = opened.read().rpartition("Fatal Python error: ")  # a fork may have crashed before
        if begins:
            frames = [_frame(file, int(line), name) for file, line, name in _CRASH_FRAME.findall(text)]
            return text.partition("\n")[0], tuple(reversed(frames))
    return "", ()


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have (Linux); empty elsewhere."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                found += [int(child), *children(int(child))]
    return found
