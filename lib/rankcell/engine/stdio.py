"""Inside a rank: stdout and stderr are pipes that the notebook reads, so that everything is caught: prints, C
libraries, subprocesses. How the two take turns is noted, since two pipes cannot tell.
"""

import contextlib
import ctypes
import io
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

MAX_TURNS = 10_000  # of stdout and stderr in a cell, that are noted


class _Pipe(io.FileIO):
    """A raw file that counts what was written through Python, and says so before it writes more."""

    def __init__(self, fd: int, written: int, before: Callable[[], None] | None = None) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.written, self._before = written, before

    def write(self, data: Any) -> int:
        if self._before is not None:
            self._before()
        count = super().write(data) or 0
        self.written += count
        return count


class Stdio:
    def __init__(self, stdout_fd: int, stderr_fd: int) -> None:
        for fd, number in ((stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(fd, number)
            os.close(fd)
        self._libc = ctypes.CDLL(None)
        self._out_began = self._err_began = 0  # bytes written before the cell
        # of this cell: from which byte of stderr on so many bytes of stdout stood before it
        self.turns: list[tuple[int, int]] = []
        self._open(0, 0)
        os.register_at_fork(before=self._flush_both, after_in_child=self._write_lines)

    def _write_lines(self) -> None:
        """A process that the rank has forked may live longer than the cell: its lines go out as they are printed."""
        with contextlib.suppress(ValueError):  # closed
            self._stdout.reconfigure(line_buffering=True)

    def _open(self, out: int, err: int) -> None:
        """Open both, to which so many bytes have been written."""
        # what was printed to stdout before goes first, and how much that was is noted
        self._out, self._err = _Pipe(1, out), _Pipe(2, err, self._turn)
        how: Any = {"encoding": "utf-8", "errors": "backslashreplace"}
        self._stdout = io.TextIOWrapper(io.BufferedWriter(self._out, 1 << 16), **how)
        self._stderr = io.TextIOWrapper(io.BufferedWriter(self._err, 1 << 16), line_buffering=True, **how)
        sys.stdout = sys.__stdout__ = self._stdout  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = self._stderr  # type: ignore[misc]

    def begin(self, quiet: int | None) -> None:
        """A new cell begins: what an earlier one did to the streams is undone. `quiet` is our own thread."""
        if self._out.closed or self._err.closed:  # the learner closed a stream: nothing came any more
            self._open(self._out.written, self._err.written)
        for name, ours in (("stdout", self._stdout), ("stderr", self._stderr)):
            stream = getattr(sys, name, None)
            silenced = getattr(stream, "name", "") == os.devnull  # as scripts do on all ranks but 0
            if silenced or not hasattr(stream, "write") or getattr(stream, "closed", False):
                setattr(sys, name, ours)
        self.flush()
        self.late: set[str] = set()  # threads of earlier cells that print in this one
        threads = {t.ident for t in threading.enumerate()} - {quiet, threading.get_ident()}
        for stream in (self._stdout, self._stderr):
            vars(stream).pop("write", None)
            if threads:
                stream.write = partial(self._write_late, stream, threads)  # type: ignore[method-assign]
        self._out_began, self._err_began = self._out.written, self._err.written
        self.turns = []

    def _write_late(self, stream: io.TextIOWrapper, threads: set[int | None], text: str) -> int:
        """Write as a stream does, and note the `threads` of earlier cells that do so."""
        if threading.get_ident() in threads:
            self.late.add(threading.current_thread().name)
        return io.TextIOWrapper.write(stream, text)

    def _turn(self) -> None:
        """Something goes to stderr, and what was printed to stdout stands before it."""
        out = self.place()
        if len(self.turns) < MAX_TURNS and (not self.turns or self.turns[-1][1] != out):
            self.turns.append((self._err.written - self._err_began, out))

    def place(self) -> int:
        """How many bytes of stdout the cell has written."""
        self._flush(sys.stdout)
        return self._out.written - self._out_began

    def flush(self) -> None:
        """Send what lies in buffers, those of C libraries too."""
        self._flush_both()
        self._libc.fflush(None)

    def _flush_both(self) -> None:
        self._flush(sys.stdout)
        self._flush(sys.stderr)

    @staticmethod
    def _flush(stream: Any) -> None:
        with contextlib.suppress(Exception):  # the learner closed it, replaced it, or made it None
            stream.flush()
