"""The throw-away cluster of tests/mini-slurm as a `Slurm` that tests, the bench and lessons 23 and 24 give jobs to.

`%slurm up ../tests/mini_slurm.py` calls `up`. The shell script starts and ends the daemons; this file holds
the cluster while a process uses it, and takes it down when that process ends, however it ends.
"""

import atexit
import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankcell.cluster.slurm import NoSlurm, Slurm

SCRIPT = Path(__file__).resolve().with_name("mini-slurm")
NEEDED = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "slurmctld", "slurmd", "munged")


def up() -> "MiniSlurm":
    """A cluster of two nodes."""
    return MiniSlurm()


class MiniSlurm(Slurm):
    """A throw-away cluster on this machine: slurmctld and one slurmd per node. Gone when this process is.

    Each node has a network, a host name and processes of its own where the rights allow it.

    Args:
        nodes: how many nodes; each has 4 CPUs and 2 pretended GPUs, whatever the machine has.

    Raises:
        NoSlurm: its packages or the rights are missing, or it did not come up; says what is missing.
    """

    mode = "net"

    def __init__(self, *, nodes: int = 2) -> None:
        self.nodes = nodes
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        if missing := [name for name in NEEDED if shutil.which(name, path=path) is None]:
            raise NoSlurm(f"Slurm is not installed: no {', '.join(missing)}")
        self.mode = "net" if may_make_namespaces() else "plain"
        self.state = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))  # short: it holds sockets
        self.state.chmod(0o755)
        self.folder = self.state / "jobs"
        self.folder.mkdir()
        shims = self.state / "bin"
        self.environment = {
            "PATH": f"{shims}:{Path(sys.prefix) / 'bin'}:{path}",
            "MINI_SLURM_DIR": str(self.state),
            "SLURM_CONF": str(self.state / "etc" / "slurm.conf"),
        }
        self._guard: Any = subprocess.Popen(
            [SCRIPT, "guard"],
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.down)
        try:
            self.run(str(SCRIPT), "shims", str(shims))
            self.boot()
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            self.down()
            said = error.stderr if isinstance(error.stderr, str) else ""
            raise NoSlurm(f"a throw-away Slurm did not come up: {' '.join(said.split())[-300:]}") from None

    @property
    def about(self) -> str:
        own = "each with a network of its own" if self.mode == "net" else "on one network"
        return f"a throw-away Slurm of {self.nodes} nodes on this machine, {own}"

    def boot(self) -> None:
        """Bring up all nodes that are not."""
        self.run(str(SCRIPT), "up", "--nodes", str(self.nodes), "--mode", self.mode)

    def kill_node(self, node: str) -> None:
        """Cut the power of `node`: all its processes are killed. `boot` brings it back."""
        self.run(str(SCRIPT), "kill-node", node)

    def shape(self, rate: str) -> None:
        """Limit what each node sends and gets to `rate`, such as "250mbit"; "off" takes the limit away.

        Raises:
            NoSlurm: the nodes have no networks of their own.
        """
        if self.mode != "net":
            raise NoSlurm("the nodes share one network here: that needs root and network namespaces")
        self.run(str(SCRIPT), "shape", rate)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        with super().inside(), self._network():
            yield

    @contextlib.contextmanager
    def _network(self) -> Iterator[None]:
        """This thread in the network of the login node: the nodes can be reached from there only."""
        if self.mode != "net":
            yield
            return
        libc = ctypes.CDLL(None, use_errno=True)
        pid = (self.state / "pid" / "login").read_text().split()[0]
        with Path("/proc/thread-self/ns/net").open() as home, Path(f"/proc/{pid}/ns/net").open() as there:
            if libc.setns(there.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns: cannot enter the network of the login node")
            try:
                yield
            finally:
                libc.setns(home.fileno(), 0)

    def down(self) -> None:
        """End every process of the cluster and remove its files."""
        if self._guard is not None:
            self._guard.stdin.close()  # the guard's sign to take all of it down
            self._guard.wait(60)
            self._guard = None
            atexit.unregister(self.down)


def may_make_namespaces() -> bool:
    """Whether this process may make networks, process tables and mounts of its own."""
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
