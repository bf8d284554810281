"""What the fork server imports before ranks are forked from it: torch with its slow parts, and what every rank needs.

Measured on 2 cores: four ranks answer 43 times faster than with spawn, and the first `DistributedDataParallel` or
optimizer takes milliseconds instead of 4 s, because both import torch._dynamo. A rank that is spawned imports this
itself. Nothing here starts a thread or touches a GPU: a fork of a process with threads is not safe.
"""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import warnings

from .messages import FOLDER

folder = os.environ.pop(FOLDER, "")
if folder:  # this process is the fork server
    os.setsid()  # Jupyter kills a kernel's process group, and this one has to clean up; Ctrl-C is not for it either

gc.disable()  # half of the import time of torch._dynamo is garbage collection
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported: one thread per rank

import psutil  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.pipelining  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import torch.nn.parallel.distributed  # noqa: E402

from .. import versions  # noqa: E402
from . import worker  # noqa: E402


def _clean_up(server: int, folder: str) -> None:
    """When the notebook is gone, and the fork server ends: end the ranks and what they have started."""
    if os.getpid() != server:
        return
    for child in psutil.Process().children():
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if folder:
    atexit.register(_clean_up, os.getpid(), folder)
    # Python 3.12 warns of threads, which torch may have and does not use
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="multiprocessing.forkserver")
versions.complete(torch.distributed)
worker.prepare()
gc.freeze()  # these objects stay: the collector of a rank never looks at them, so that their pages stay shared
gc.enable()
