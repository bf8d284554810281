"""Inside a rank: stdout and stderr are pipes that the notebook reads, so that everything is caught: prints, C
libraries, subprocesses. How the two take turns is noted, since two pipes cannot tell.
"""

import ctypes
import io
import os
import sys
from typing import Any

MAX_TURNS = 10_000  # of stdout and stderr in a cell, that are noted


class _Pipe(io.FileIO):
    """A raw file that counts what was written through Python."""

    written = 0

    def write(self, data: Any) -> int:
        count = super().write(data) or 0
        self.written += count
        return count


class _Stderr(_Pipe):
    """stderr: what was printed to stdout before goes first, and how much that was is noted."""

    def __init__(self, fd: int, stdio: "Stdio") -> None:
        super().__init__(fd, "wb", closefd=False)
        self._stdio = stdio

    def write(self, data: Any) -> int:
        self._stdio.turn(self.written)
        return super().write(data)


class Stdio:
    """The rank's stdout and stderr."""

    def __init__(self, stdout_fd: int, stderr_fd: int) -> None:
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        os.close(stdout_fd)
        os.close(stderr_fd)
        self._libc = ctypes.CDLL(None)
        self._raw_out, self._raw_err = _Pipe(1, "wb", closefd=False), _Stderr(2, self)
        self._out_began = self._err_began = 0  # bytes written before the cell
        self._turns: list[tuple[int, int]] = []
        self._open()

    def _open(self) -> None:
        sys.stdout = self._stdout = io.TextIOWrapper(
            io.BufferedWriter(self._raw_out, 1 << 16), encoding="utf-8", errors="backslashreplace"
        )
        sys.stderr = self._stderr = io.TextIOWrapper(
            io.BufferedWriter(self._raw_err, 1 << 16),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]

    def begin(self) -> None:
        """A new cell begins: what an earlier one did to the streams is undone."""
        if self._raw_out.closed or self._raw_err.closed:  # the learner closed a stream: nothing came any more
            out, err = self._raw_out.written, self._raw_err.written
            self._raw_out, self._raw_err = _Pipe(1, "wb", closefd=False), _Stderr(2, self)
            self._raw_out.written, self._raw_err.written = out, err
            self._open()
        for name, ours in (("stdout", self._stdout), ("stderr", self._stderr)):
            stream = getattr(sys, name, None)
            if stream is None or not hasattr(stream, "write") or getattr(stream, "closed", False):
                setattr(sys, name, ours)
        self.flush()
        self._out_began, self._err_began = self._raw_out.written, self._raw_err.written
        self._turns = []

    def turn(self, err_written: int) -> None:
        """Something goes to stderr, and what was printed to stdout stands before it."""
        self._flush(sys.stdout)
        out = self._raw_out.written - self._out_began
        if len(self._turns) < MAX_TURNS and (not self._turns or self._turns[-1][1] != out):
            self._turns.append((err_written - self._err_began, out))

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Of this cell: from which byte of stderr on so many bytes of stdout stood before it."""
        return tuple(self._turns)

    def place(self) -> int:
        """How many bytes of stdout the cell has written."""
        self._flush(sys.stdout)
        return self._raw_out.written - self._out_began

    def flush(self) -> None:
        """Send what lies in buffers, those of C libraries too."""
        self._flush(sys.stdout)
        self._flush(sys.stderr)
        self._libc.fflush(None)

    def flush_from_another_thread(self) -> None:
        """The same for stdout only, which the main thread may be writing to."""
        self._flush(sys.stdout)

    @staticmethod
    def _flush(stream: Any) -> None:
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S110 - the learner closed it, replaced it, or made it None
            pass
