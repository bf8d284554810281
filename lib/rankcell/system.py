"""What only some operating systems offer, each behind one function with an honest fallback.

Linux has /proc, prctl, larger pipes and per-thread CPU clocks. Elsewhere these functions answer None, an
empty list or do nothing, and their callers say what they cannot know.
"""

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_F_SETPIPE_SZ = 1031  # linux/fcntl.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h
LOOPBACK = "lo" if LINUX else "lo0"


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux). Elsewhere only the control channel
    tells.
    """
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enlarge_pipe(fd: int, nbytes: int = 1 << 20) -> None:
    """Let a pipe hold `nbytes`, so that a rank that prints much is not slowed by its reader (Linux)."""
    if LINUX:
        import fcntl

        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, nbytes)
        except (
            PermissionError
        ):  # the user's share of pipe memory is used up: the default size works, only slower
            return


def shared_file(nbytes: int) -> int:
    """A descriptor of `nbytes` zeroed bytes that processes can map together and that has no name on disk."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(nbytes)
        return os.dup(file.fileno())


def process_memory(pid: int) -> int | None:
    """Bytes of memory of process `pid` (PSS: shared pages counted in parts); None where unknown."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def available_memory() -> int | None:
    """Bytes of memory that new processes can have; None where unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def open_file_limit() -> int:
    """How many descriptors this process may hold, after raising its soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
        except (ValueError, OSError):  # macOS refuses values above its own maximum
            return soft
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def thread_cpu_seconds(ident: int) -> float | None:
    """CPU seconds that the thread `ident` of this process has used; None where unknown (macOS)."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(ident)) if clock else None


def keep_alive(sock: socket.socket, *, reads_always: bool) -> None:
    """Have the kernel notice within about 4 s that the machine at the other end of `sock` is gone.

    `reads_always`: the other end never stops reading, so that bytes which nobody takes mean that it is gone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if LINUX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        if reads_always:  # while something is under way, no probes are sent
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)


def _interfaces() -> dict[str, str]:
    """Network interface -> its IPv4 address (Linux); empty elsewhere."""
    found: dict[str, str] = {}
    if not LINUX:
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def addresses() -> list[str]:
    """The IPv4 addresses of this machine that others can reach."""
    return [a for a in _interfaces().values() if not a.startswith("127.")]


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where unknown."""
    return next((name for name, a in _interfaces().items() if a == address), None)


def tcp_connections() -> dict[int, int]:
    """Inode -> descriptor of every connected TCP socket of this process; empty where /proc is missing."""
    found: dict[int, int] = {}
    if not LINUX:
        return found
    for link in list(Path("/proc/self/fd").iterdir()):
        fd = int(link.name)
        try:
            target = str(link.readlink())
            if not target.startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(fd)) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    s.getpeername()
                    found[int(target[8:-1])] = fd
        except OSError:  # closed meanwhile, or not connected
            continue
    return found


def duplicate(inodes: set[int]) -> list[socket.socket]:
    """Sockets of our own for those TCP connections of this process, to ask them and to shut them down."""
    found = []
    for inode, fd in tcp_connections().items():
        if inode in inodes:
            try:
                found.append(socket.socket(fileno=os.dup(fd)))
            except OSError:  # closed meanwhile
                continue
    return found


def shut_down(sockets: Iterable[socket.socket]) -> None:
    """Shut down those TCP connections: whoever waits on them, here or at the other end, gets an error.

    Measured: this frees a rank from a blocked gloo operation in 2-4 ms, where abort(), SIGINT and a shorter
    timeout do not free it at all.
    """
    for s in sockets:
        try:
            s.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was faster
            continue


def bytes_moved(sockets: Iterable[socket.socket]) -> dict[tuple[str, str], tuple[int, int]] | None:
    """(our end, the other end) -> payload bytes sent and received since the connection began.

    From the kernel's TCP counters: tcpi_bytes_sent (retransmissions included) and tcpi_bytes_received of
    linux/tcp.h (Linux 4.19 and newer); None elsewhere.
    """
    if not LINUX:
        return None
    found = {}
    for s in sockets:
        try:
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            if len(info) < 208:
                return None
            (sent,), (received,) = struct.unpack_from("Q", info, 200), struct.unpack_from("Q", info, 128)
            found[_end(s.getsockname()), _end(s.getpeername())] = sent, received
        except OSError:  # shut down
            continue
    return found


def _end(name: tuple[str, int]) -> str:
    """One end of a connection as text: IPv4 addresses that are mapped into IPv6 look alike at both ends."""
    return f"{name[0].removeprefix('::ffff:')}:{name[1]}"
