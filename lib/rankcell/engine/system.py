"""What only some operating systems offer, each behind one function with an honest fallback.

Linux has /proc, prctl, larger pipes and per-thread CPU clocks. Elsewhere these functions answer None, an empty list or
do nothing, and their callers say what they cannot know. What psutil tells of every system is asked from psutil.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOPBACK = "lo" if LINUX else "lo0"


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux). Elsewhere only the channel tells."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def interrupt_children() -> None:
    """Send SIGINT to all that this process has started, and to what that has started."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            child.send_signal(signal.SIGINT)


def enlarge_pipe(fd: int, nbytes: int = 1 << 20) -> None:
    """Let a pipe hold `nbytes`, so that a rank that prints much is not slowed by its reader (Linux)."""
    if LINUX:
        import fcntl

        with contextlib.suppress(PermissionError):  # the user's share of it is used up: slower, no worse
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, nbytes)


def current_folder() -> str:
    """The current folder; "" if it was removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()  # noqa: PTH109
    return ""


def shared_file(nbytes: int) -> int:
    """A descriptor of `nbytes` zeroed bytes without a name, for several processes to map. OSError: there is no room."""
    if LINUX:
        fd = os.memfd_create("rankcell")
        os.truncate(fd, nbytes)
        return fd
    with tempfile.TemporaryFile() as file:
        file.write(bytes(nbytes))  # in a file that only has a length, a write to a full disk is a SIGBUS
        file.flush()
        return os.dup(file.fileno())


def available_memory() -> int:
    """Bytes of memory that new processes can have: what is free, and what the cgroups of this process still allow."""
    left = [psutil.virtual_memory().available]
    for folder in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # there is no limit, or "max"
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            droppable = re.search(r"^inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            left.append(max(0, limit - used + int(droppable[1] if droppable else 0)))  # pages of files can go
    return min(left)


def available_cores() -> int:
    """How many processors this process may use: by its affinity and its cgroups."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for folder in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            cores = min(cores, quota / period)
    return max(1, int(cores))


def _cgroups() -> list[Path]:
    """The folders of this process's cgroup (version 2), with all that it lies in (Linux); empty elsewhere."""
    root = Path("/sys/fs/cgroup")
    try:
        path = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        return []
    # in a container the path may be that of the host: then the root is what is ours
    folder = root / path[1] if path else root
    return [f for f in (folder, *folder.parents) if f.is_relative_to(root)]


def open_file_limit() -> int:
    """How many descriptors this process may hold, after raising its soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 16
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else 1 << 20
    with contextlib.suppress(ValueError, OSError):  # macOS refuses values above its own maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def process_cpu_seconds(pid: int) -> float:
    """CPU seconds that a process of this machine has used; 0 where unknown."""
    with contextlib.suppress(psutil.Error):
        return sum(psutil.Process(pid).cpu_times()[:2])  # of the user, and of the system for it
    return 0.0


def thread_cpu_seconds(ident: int) -> float | None:
    """CPU seconds that the thread `ident` of this process has used; None where unknown (macOS)."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(ident)) if clock else None


def thread_switches(ident: int) -> int | None:
    """How often the thread `ident` of this process has left its core, to wait or for another's turn; None where unknown
    (macOS). Who waits for the interpreter's lock leaves it 200 times a second, and uses next to no CPU time.
    """
    main = ident == threading.main_thread().ident  # its number is wrong in Python after some forks
    found = [t.native_id for t in threading.enumerate() if t.ident == ident and not main]
    try:
        text = Path(f"/proc/self/task/{os.getpid() if main else found[0]}/status").read_text()
    except (OSError, IndexError):
        return None
    return sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)


def wants_a_core() -> bool:
    """Whether another thread of this process runs, or waits for a core or a disk, as on a machine that is busy: then
    what used no CPU time does not stand still for that. False where unknown (macOS).
    """
    own, tasks = str(threading.get_native_id()), Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if task.name != own and (task / "stat").read_text().rpartition(") ")[2][:1] in "RD":
                return True
    return False


def keep_alive(sock: socket.socket, *, reads_always: bool) -> None:
    """Have the kernel notice within about 4 s that the machine at the other end of `sock` is gone. `reads_always`: the
    other end never stops reading, so that bytes which nobody takes mean that it is gone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if LINUX:
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if reads_always:  # while something is under way, no probes are sent
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)


def _interfaces() -> dict[str, str]:
    """Network interface that is up -> its IPv4 address."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    entries = ((name, entry) for name, of in psutil.net_if_addrs().items() if name in up for entry in of)
    return {name: entry.address for name, entry in entries if entry.family == socket.AF_INET}


def interface_problem(name: str | None) -> str:
    """Why gloo cannot talk over the network interface `name` (the loopback if None), or ""."""
    found = _interfaces()
    if (name or LOOPBACK) in found:
        return ""
    have = ", ".join(found) or "none"
    if name is not None:
        missing = f"this machine has no such network interface with an IPv4 address (it has: {have})"
        how = "Remove it with `%env -u GLOO_SOCKET_IFNAME`, or name one of these."
        return f"GLOO_SOCKET_IFNAME is {name!r}, and {missing}. {how}"
    missing = f"the loopback interface {LOOPBACK} is down or has no IPv4 address (interfaces with one: {have})"
    return f"{missing}. Bring it up with `ip link set {LOOPBACK} up`, or name another one in GLOO_SOCKET_IFNAME."


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def addresses() -> list[str]:
    """The IPv4 addresses of this machine that others can reach."""
    return [a for a in _interfaces().values() if not a.startswith("127.")]


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where unknown."""
    return next((name for name, a in _interfaces().items() if a == address), None)


def _sockets() -> Iterator[tuple[int, int]]:
    """Inode and descriptor of every socket of this process (Linux)."""
    for link in list(Path("/proc/self/fd").iterdir()) if LINUX else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = str(link.readlink())
            if target.startswith("socket:["):
                yield int(target[8:-1]), int(link.name)


def tcp_connections() -> dict[int, int]:
    """Inode -> descriptor of every connected TCP socket of this process; empty where /proc is missing."""
    found: dict[int, int] = {}
    for number, fd in list(_sockets()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:  # closed, or not connected
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                s.getpeername()
                found[number] = fd
    return found


def still_used(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Those of our own sockets for whose connection this process has another descriptor; the others are closed."""
    ours = {s.fileno(): s for s in sockets}
    used = {number for number, fd in _sockets() if fd not in ours}
    gone = [s for fd, s in ours.items() if os.fstat(fd).st_ino not in used]
    for s in gone:
        s.close()
    return [s for s in ours.values() if s not in gone]


def shut_down(sockets: Iterable[socket.socket]) -> None:
    """Shut down those TCP connections: whoever waits on them, here or at the other end, gets an error.

    Measured: this frees a rank from a blocked gloo operation in 2-4 ms, where abort(), SIGINT and a shorter
    timeout do not free it at all.
    """
    for s in sockets:
        with contextlib.suppress(OSError):  # the other end was faster
            s.shutdown(socket.SHUT_RDWR)


def bytes_moved(sockets: Iterable[socket.socket]) -> dict[tuple[str, str], tuple[int, int]] | None:
    """(our end, the other end) -> payload bytes sent and received since the connection began.

    From the kernel's TCP counters: tcpi_bytes_sent (retransmissions included) and tcpi_bytes_received of
    linux/tcp.h (Linux 4.19 and newer); None elsewhere.
    """
    if not LINUX:
        return None
    found = {}
    for s in sockets:
        with contextlib.suppress(OSError):  # shut down
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            (sent,), (received,) = struct.unpack_from("Q", info, 200), struct.unpack_from("Q", info, 128)
            found[_end(s.getsockname()), _end(s.getpeername())] = sent, received
    return found


def _end(name: tuple[str, int]) -> str:
    """One end of a connection as text: IPv4 addresses that are mapped into IPv6 look alike at both ends."""
    return f"{name[0].removeprefix('::ffff:')}:{name[1]}"
