"""Starts ranks, by `torch.multiprocessing.start_processes`, and ends them with all that they have started.

With the start method "forkserver" a rank is a fork of a process that has imported torch (`preloaded.py`), which takes
milliseconds; "spawn" is what `torch.multiprocessing.spawn` does: each rank is a new Python that imports torch itself.

The fork server is an object of the standard library's own class, beside the one that `multiprocessing` keeps for
everybody: the learner's own use of `multiprocessing`, whichever start method, neither disturbs it nor inherits
anything from it. Private reaches into the standard library: `start_processes` asks the module
`multiprocessing.forkserver` for a process, so that our object answers in its place while ranks start (`start`), and
the "alive" descriptor is closed in ranks and in forks of the notebook, as it would keep the server up (`_let_go`).
"""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, reduction, util
from multiprocessing.process import BaseProcess
from operator import methodcaller
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil

from .. import errors
from . import system
from .messages import CRASHED, FOLDER, StartRank

METHODS = ("forkserver", "spawn")
server = forkserver.ForkServer()
_lock = threading.RLock()
_folder = ""  # only this user can enter it; each world has a folder of its own in there


def warm_up() -> None:
    """Start the fork server, if it does not run; it imports torch while the notebook goes on."""
    with _lock, _undisturbed():
        server.set_forkserver_preload(["rankcell.engine.preloaded"])
        # its socket, too, lies in our folder, which it removes when the notebook is gone in whatever way
        with _environment(), mock.patch.object(util, "get_temp_dir", _parent_folder):
            server.ensure_running()


def start(orders: Sequence[tuple[StartRank, Sequence[int]]], method: str) -> list[BaseProcess]:
    """Start a rank for each order, which gets copies of the descriptors beside it. Raises StartError when torch cannot
    be imported, or the system gives no more processes.
    """
    started: list[BaseProcess] = []
    try:
        from torch.multiprocessing import start_processes

        with _lock:
            if method == "forkserver":
                warm_up()
            ours = mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process)
            with _undisturbed(), ours:
                for order, descriptors in orders:
                    given = (order, *map(_Descriptor, descriptors))
                    started += start_processes(run_rank, given, join=False, start_method=method).processes
    except BaseException as error:
        for process in started:
            end(process)
        if isinstance(error, ImportError):
            why = f"torch cannot be imported ({error}). Does `import torch` work in a fresh Python of this environment?"
            raise errors.StartError(f"ranks could not be started: {why}") from None
        if isinstance(error, (EOFError, ConnectionError, BlockingIOError, ChildProcessError)):
            gave = f"the system gave {len(started)} of {len(orders)} processes ({type(error).__name__})"
            why = "the limit of processes is reached (`ulimit -u`), or memory is"
            raise errors.StartError(f"{gave}: {why}. Start fewer ranks, or end other processes.") from None
        raise
    return started


def end(process: BaseProcess) -> None:
    """End a rank at once, and what it has started, also if it has ended itself."""
    number = process.pid or 0
    if process.exitcode is None:
        for kill in (os.killpg, os.kill):  # a rank that has just been started leads no process group yet
            with contextlib.suppress(OSError):
                kill(number, signal.SIGKILL)
        return
    try:
        os.killpg(number, 0)
    except OSError:
        return  # nothing is left of its group
    # its number may be another's by now, such as that of a kernel; but that leads a session, and no rank does
    for left in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getpgid(left) == number != os.getsid(left):
                os.kill(left, signal.SIGKILL)


def make_folder() -> str:
    """A new folder that only this user can enter: the ranks meet in it. It is gone when this process is."""
    return tempfile.mkdtemp(prefix="world-", dir=_parent_folder())


def run_rank(_: int, order: StartRank, *descriptors: int) -> NoReturn:
    """In the new process: be a rank until the notebook is gone, and never come back."""
    _let_go(forkserver._forkserver)  # type: ignore[attr-defined]
    from . import preloaded, worker  # noqa: F401 - only a spawned rank imports `preloaded` here

    code = 0
    try:
        worker.main(order, *descriptors)
    except SystemExit:
        code = 1
    except BaseException:  # noqa: BLE001 - told to the notebook, which reads it
        traceback.print_exc()
        code = CRASHED
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(code)


class _Descriptor:
    """A descriptor that travels to a process which is being started; there it is a number again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return methodcaller("detach"), (reduction.DupFd(self._fd),)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """What `multiprocessing` looks at is not the learner's meanwhile: the main module, which a new process would run
    once more; the current folder, which may be removed; and the default start method.
    """
    main, method = sys.modules["__main__"], multiprocessing.get_start_method(allow_none=True)
    removed = None if system.current_folder() else os.open(".", os.O_RDONLY)
    sys.modules["__main__"] = types.ModuleType("__main__")
    if removed is not None:
        os.chdir("/")
    try:
        yield
    finally:
        if removed is not None:
            os.fchdir(removed)
            os.close(removed)
        sys.modules["__main__"] = main
        multiprocessing.set_start_method(method, force=True)  # type: ignore[arg-type]


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What the fork server finds in its environment and in `sys.path`.

    A file in the learner's folder that is called like a module of the standard library is for the ranks to import, not
    for torch. The last entry is for a package of ours that lies in that folder only.
    """
    path, names = list(sys.path), ("PYTHONPATH", "PYTHONSAFEPATH", FOLDER)
    before = {name: os.environ[name] for name in names if name in os.environ}
    sys.path[:] = [p for p in path if p and str(Path(p).absolute()) != system.current_folder()]
    sys.path.append(str(Path(__file__).absolute().parents[2]))
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1")
    with contextlib.suppress(OSError):  # nothing can be written: `make_folder` says so
        os.environ[FOLDER] = _parent_folder()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def _parent_folder() -> str:
    global _folder
    if not _folder:
        _folder = tempfile.mkdtemp(prefix="rankcell-")
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    Path(_folder).mkdir(mode=0o700, exist_ok=True)  # it may have been cleaned away
    return _folder


def _let_go(known: forkserver.ForkServer) -> None:
    """Forget a fork server that another process has started, and do not keep it up."""
    if (fd := known._forkserver_alive_fd) is not None:  # type: ignore[attr-defined]
        os.close(fd)
        known._forkserver_alive_fd = known._forkserver_pid = None  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=lambda: _let_go(server))
