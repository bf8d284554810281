"""The process that ranks are forked from: it imports torch and its slow parts, and then forks at once.

Measured on 2 cores: four ranks answer 43 times faster than with spawn, and the first
`DistributedDataParallel` or optimizer takes milliseconds instead of 4 s, because both import torch._dynamo.
Nothing here starts a thread or touches a GPU: a fork of a process with threads is not safe.

Started and used by `forks.py`. It ends with the notebook, and then ends all ranks with all that they started.
"""

import contextlib
import gc
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import traceback
import warnings

gc.disable()  # half of the import time of torch._dynamo is garbage collection
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported: one thread per rank

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.pipelining  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import torch.nn.parallel.distributed  # noqa: E402

from .. import versions  # noqa: E402
from . import worker  # noqa: E402
from .channel import Channel  # noqa: E402
from .messages import CRASHED, Birth  # noqa: E402

_LOOK = 1.0  # seconds between two looks whether the notebook lives: a fork of it may hold our socket open


def main(fd: int) -> None:
    """Serve the notebook at the other end of socket `fd` until it is gone."""
    notebook = os.getppid()
    versions.complete(torch.distributed)
    worker.prepare()
    # these objects stay for good: the collector of a rank never looks at them, so their pages stay shared
    gc.freeze()
    gc.enable()
    channel = Channel(socket.socket(fileno=fd))
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    folders: list[str] = []  # to be removed when the notebook is gone
    try:
        channel.send(("ready", 0, 0))
        while os.getppid() == notebook:
            ready, _, _ = select.select([channel.fileno(), wake_read], [], [], _LOOK)
            if wake_read in ready:
                os.read(wake_read, 4096)
                _bury(children, channel)
            if channel.fileno() in ready:
                _obey(channel, children, folders, wake_read, wake_write)
    except (EOFError, OSError):
        pass
    for pid in children:
        _end(pid)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _obey(channel: Channel, children: set[int], folders: list[str], *pipe: int) -> None:
    head, descriptors, _, _ = socket.recv_fds(channel.socket, 9, 8)
    while 0 < len(head) < 9:
        head += channel.socket.recv(9 - len(head))
    if not head:
        raise EOFError
    order = b""
    size = int.from_bytes(head[1:], "big")
    while len(order) < size:
        if not (part := channel.socket.recv(size - len(order))):
            raise EOFError
        order += part
    if head[:1] == b"d":
        folders.append(pickle.loads(order))
        return
    if head[:1] == b"k":
        for pid in pickle.loads(order):
            if pid in children:
                _end(pid)
        return
    number, birth = pickle.loads(order)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Python 3.12 warns of threads, which torch may have and does not use
            pid = os.fork()
    except OSError:
        channel.send(("born", number, -1))
    else:
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in pipe:
                os.close(inherited)
            channel.close()
            _live(birth, descriptors)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the rank does it too: whoever comes first
        children.add(pid)
        channel.send(("born", number, pid))
    for descriptor in descriptors:
        os.close(descriptor)


def _live(birth: Birth, descriptors: list[int]) -> None:
    """In the fork: be a rank, and never come back."""
    code = 0
    try:
        worker.main(birth, *descriptors)
    except SystemExit:
        code = 1
    except BaseException:  # noqa: BLE001 - told to the notebook, which reads it
        traceback.print_exc()
        code = CRASHED
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(code)


def _bury(children: set[int], channel: Channel) -> None:
    """Reap the ranks that have ended, end what they left behind, and say how they ended."""
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        channel.send(("ended", pid, os.waitstatus_to_exitcode(status)))


def _end(pid: int) -> None:
    """End a child that was not reaped yet, so that its number is still its own, and its process group."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            end(pid, signal.SIGKILL)
