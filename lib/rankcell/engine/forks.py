"""The process that ranks are forked from, as the notebook's side knows it.

One process for all worlds of a notebook imports torch once (`preload.py`); a rank is a fork of it, which takes
milliseconds. It is ours alone: the learner's own use of `multiprocessing`, whichever start method, neither
disturbs it nor inherits anything from it. It learns by the end of a socket that the notebook is gone, and takes
all ranks, and all that they have started, with it.
"""

import atexit
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import errors
from . import system
from .channel import Channel
from .messages import Birth

START_TIMEOUT = 120.0  # seconds for torch to be imported, on a slow file system too
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rankcell.engine import preload; preload.main(int(sys.argv[1]))"
)


class _Forked:
    """A child by fork, with what a ForkServer asks of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it lives."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the learner's code has waited for all children
                self.returncode = -1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code; raises `subprocess.TimeoutExpired` if it lives on for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Starts ranks and ends them, and knows how each of them ended. Safe to use from several threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | _Forked | None = None
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self._pids: dict[int, int] = {}  # number of a birth -> process id, from "born" to `fork`'s return
        self._ended: dict[int, int] = {}  # process id -> exit code, until somebody has asked
        self._log = tempfile.TemporaryFile()  # what the process says: read if it ends
        self._births = 0
        self._ready = False  # whether torch is imported
        self._folders: list[str] = []
        self._pid = 0  # of the process that has started it: a fork of that one leaves it alone
        atexit.register(self.close)

    def warm_up(self) -> None:
        """Start the process, if it does not run; it imports torch while the notebook goes on."""
        with self._lock:
            if self._process is not None and self._process.poll() is None and self._channel is not None:
                return
            if self._process is not None:
                self._process.wait()
            ours, theirs = socket.socketpair()
            # a file in the learner's folder that is called like a module of the standard library is for the
            # ranks to import, not for torch
            folder = _folder()
            path = [str(p) for p in sys.path if str(p) and Path(p).absolute() != folder]
            path.append(str(Path(__file__).absolute().parents[2]))  # our package may lie in that folder only
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CODE, str(theirs.fileno()), json.dumps(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in a terminal is for the notebook to hear
                )
            self._channel = Channel(ours)
            self._pid = os.getpid()
            self._pids.clear()
            self._ready = False
            for known in self._folders:
                self._order(b"d", known)

    def wait(self, on_wait: Callable[[float], None]) -> None:
        """Return when torch is imported, or cannot be, which `fork` explains. `on_wait` hears each second how many
        seconds that has taken so far.
        """
        with self._lock:
            self.warm_up()
            began = time.monotonic()
            while not self._ready and self._channel is not None and time.monotonic() - began < START_TIMEOUT:
                if system.wait_readable(self._channel.fileno(), 1.0):
                    try:
                        for message in self._channel.poll():
                            self._hear(message)
                    except (EOFError, OSError):
                        return
                else:
                    on_wait(time.monotonic() - began)

    def adopt(self, pid: int, ours: socket.socket) -> None:
        """Use `pid`, a child of this process by fork, which runs `preload.main` at the other end of `ours`."""
        with self._lock:
            self.close()
            self._log = tempfile.TemporaryFile()
            self._process, self._channel, self._pid = _Forked(pid), Channel(ours), os.getpid()

    def fork(self, births: Sequence[tuple[Birth, Sequence[int]]]) -> list[int]:
        """Start a rank for each birth, which gets copies of the descriptors beside it; returns process ids.

        Raises:
            StartError: the process that imports torch has ended, or the system gives no more processes.
        """
        with self._lock:
            self.warm_up()
            assert self._channel is not None
            numbers = []
            for birth, descriptors in births:
                self._births += 1
                numbers.append(self._births)
                order = pickle.dumps((self._births, birth), pickle.HIGHEST_PROTOCOL)
                try:
                    socket.send_fds(
                        self._channel.socket, [b"f" + len(order).to_bytes(8, "big")], list(descriptors)
                    )
                    self._channel.socket.sendall(order)
                except OSError:
                    self._explain()
            deadline = time.monotonic() + START_TIMEOUT
            while not all(n in self._pids for n in numbers):
                self._channel.socket.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    self._hear(self._channel.receive())
                except TimeoutError:
                    raise errors.StartError(
                        f"no rank was started within {START_TIMEOUT:.0f} s: torch is still being imported. "
                        f"Is the file system slow? Run the cell again."
                    ) from None
                except (EOFError, OSError):
                    self._explain()
                finally:
                    if self._channel is not None:  # else it has ended, as the error says
                        self._channel.socket.settimeout(None)
            found = [self._pids.pop(n) for n in numbers]
            if -1 in found:
                self.kill([pid for pid in found if pid > 0])
                raise errors.StartError(
                    f"the system gave {sum(pid > 0 for pid in found)} of {len(found)} processes: the limit of "
                    f"processes is reached (`ulimit -u`), or memory is. Start fewer ranks, or end other processes."
                )
            return found

    def fileno(self) -> int:
        """A descriptor that is readable when a rank has ended; -1 if there is none."""
        return -1 if self._channel is None else self._channel.fileno()

    def kill(self, pids: Sequence[int]) -> None:
        """End these ranks at once, with all processes that they have started."""
        if pids:
            self._order(b"k", list(pids))

    def remove_at_end(self, folder: str) -> None:
        """Remove a folder when this process ends, in whatever way it does."""
        self.warm_up()
        self._folders.append(folder)
        self._order(b"d", folder)

    def forget_folder(self, folder: str) -> None:
        """It is gone."""
        if folder in self._folders:
            self._folders.remove(folder)

    def _order(self, kind: bytes, what: object) -> None:
        with self._lock:
            if self._channel is not None:
                order = pickle.dumps(what)
                try:
                    self._channel.socket.sendall(kind + len(order).to_bytes(8, "big") + order)
                except OSError:  # it has ended, and the ranks with it
                    return

    def exit_code(self, pid: int, *, wait: float = 0.0) -> int | None:
        """How the process of a rank ended, after at most `wait` seconds; None while it lives.

        A negative number is that of a signal. It is said once.
        """
        deadline = time.monotonic() + wait
        while True:
            with self._lock:
                if self._channel is not None:
                    left = min(0.05, deadline - time.monotonic())
                    if left > 0 and pid not in self._ended:
                        system.wait_readable(self._channel.fileno(), left)
                    try:
                        for message in self._channel.poll():
                            self._hear(message)
                    except (EOFError, OSError):  # killed: the kernel ends the ranks with it
                        self._hang_up()
                if pid in self._ended:
                    return self._ended.pop(pid)
                if self._channel is None:
                    return -9
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """End the process, and all ranks with it."""
        with self._lock:
            if self._process is None or os.getpid() != self._pid:
                return
            self._hang_up()
            try:
                self._process.wait(3.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            self._log.close()

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _hear(self, message: tuple[str, int, int]) -> None:
        what, key, value = message
        if what == "born":
            self._pids[key] = value
            self._ended.pop(value, None)  # of an older process with this number, for which nobody asked
        elif what == "ready":
            self._ready = True
        else:
            self._ended[key] = value

    def _explain(self) -> None:
        """Raise what kept the process from living."""
        assert self._process is not None
        self._hang_up()
        try:
            code: int | None = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        self._log.seek(0)
        said = self._log.read()[-2000:].decode(errors="replace").strip()
        raise errors.StartError(
            f"ranks could not be started: the process that imports torch for them ended (exit code {code}).\n{said}"
            f"\nDoes `import torch` work in a fresh Python of this environment?"
        )


def _folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


server = ForkServer()
