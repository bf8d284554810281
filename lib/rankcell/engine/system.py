"""What only some operating systems offer, each behind one function with an honest fallback.

Linux has /proc, prctl, larger pipes and per-thread CPU clocks. Elsewhere these functions answer None, an
empty list or do nothing, and their callers say what they cannot know.
"""

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_F_SETPIPE_SZ = 1031  # linux/fcntl.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h
LOOPBACK = "lo" if LINUX else "lo0"


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux). Elsewhere only the channel tells."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enlarge_pipe(fd: int, nbytes: int = 1 << 20) -> None:
    """Let a pipe hold `nbytes`, so that a rank that prints much is not slowed by its reader (Linux)."""
    if LINUX:
        import fcntl

        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, nbytes)
        except PermissionError:  # the user's share of pipe memory is used up: the default works, only slower
            return


def shared_file(nbytes: int) -> tuple[int, str]:
    """A descriptor of `nbytes` zeroed bytes that processes can map together and that has no name on disk,
    and a sentence if it had to be made in a slower place than /dev/shm ("" if not).

    Raises:
        OSError: no folder has room for it.
    """
    note = ""
    for folder in ("/dev/shm", None):  # None: TMPDIR
        if folder is not None and not Path(folder).is_dir():
            continue
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                if hasattr(os, "posix_fallocate"):
                    # reserved now: in a file that only has a length, a write to a full disk is a SIGBUS
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                else:
                    file.truncate(nbytes)
                return os.dup(file.fileno()), note
        except OSError as error:
            if folder is None:
                raise
            note = (
                f"{folder} cannot hold {nbytes >> 10} KiB ({error.strerror}): the ranks share memory in "
                f"{tempfile.gettempdir()} instead. A DataLoader with workers needs {folder}."
            )
    raise AssertionError("TMPDIR was tried last")


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
    """Bytes of memory that new processes can have: the least of what the machine has free and of what the
    cgroups and the Slurm job of this process still allow; None where unknown.
    """
    found = [
        left
        for left in (_memory_free(), _memory_left_in_cgroups(), _memory_left_in_job())
        if left is not None
    ]
    return min(found, default=None)


def available_cores() -> int:
    """How many processors this process may use: by its affinity, its cgroups and its Slurm job."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for folder in _cgroups():
        quota, period = _words(folder / "cpu.max", 2) or (
            *(_words(folder / "cpu.cfs_quota_us", 1) or ("max",)),
            *(_words(folder / "cpu.cfs_period_us", 1) or ("100000",)),
        )
        if quota.isdecimal():
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def _memory_free() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _memory_left_in_cgroups() -> int | None:
    """What the limits of this process's cgroups leave; pages of files that can be dropped count as free."""
    least = None
    for folder in _cgroups():
        limit = _words(folder / "memory.max", 1) or _words(folder / "memory.limit_in_bytes", 1)
        used = _words(folder / "memory.current", 1) or _words(folder / "memory.usage_in_bytes", 1)
        if not limit or not used or not limit[0].isdecimal() or int(limit[0]) >= 1 << 60:
            continue
        droppable = 0
        with contextlib.suppress(OSError):
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "total_inactive_file"):
                    droppable = max(droppable, int(value))
        left = max(0, int(limit[0]) - int(used[0]) + droppable)
        least = left if least is None else min(least, left)
    return least


def _memory_left_in_job() -> int | None:
    """What `sbatch --mem` gave to this node's part of the job, less what this process has taken already.

    Slurm says it in the environment (man sbatch, OUTPUT ENVIRONMENT VARIABLES), and does not always enforce it.
    """
    whole = os.environ.get("SLURM_MEM_PER_NODE", "")
    each, cores = os.environ.get("SLURM_MEM_PER_CPU", ""), os.environ.get("SLURM_CPUS_ON_NODE", "")
    if whole.isdecimal():
        limit = int(whole) << 20
    elif each.isdecimal() and cores.isdecimal():
        limit = int(each) * int(cores) << 20
    else:
        return None
    return max(0, limit - (process_memory(os.getpid()) or 0)) if limit else None


def _cgroups() -> list[Path]:
    """The folders of this process's cgroups, with all that they lie in (Linux); empty elsewhere."""
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            root = Path("/sys/fs/cgroup") / name
            # in a container the path may be that of the host: then the root is what is ours
            folder = root / path.lstrip("/")
            found += [f for f in (folder, *folder.parents) if f.is_relative_to(root) and f.is_dir()]
    return list(dict.fromkeys(found))


def _words(path: Path, count: int) -> tuple[str, ...] | None:
    """The first `count` words of a small file; None if there are fewer, or it cannot be read."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return tuple(words[:count]) if len(words) >= count else None


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


def memory_limits() -> dict[int, tuple[int, int]]:
    """The limits of this process's memory (address space and data), by kind: soft and hard."""
    return {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)}


def restore_memory_limits(limits: dict[int, tuple[int, int]]) -> None:
    """Set soft limits back to what `memory_limits` said, as far as the hard ones allow."""
    for kind, (soft, _) in limits.items():
        now_soft, now_hard = resource.getrlimit(kind)
        wanted = (
            soft if now_hard == resource.RLIM_INFINITY else now_hard if soft == -1 else min(soft, now_hard)
        )
        if wanted != now_soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (wanted, now_hard))


def process_cpu_seconds(pid: int) -> float:
    """CPU seconds that a process of this machine has used (Linux); 0 where unknown."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
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


def interface_problem(name: str | None) -> str:
    """Why gloo cannot talk over the network interface `name` (the loopback if None), or ""."""
    found = _interfaces()
    if not LINUX or (name or LOOPBACK) in found:
        return ""
    have = ", ".join(found) or "none"
    if name is not None:
        return (
            f"GLOO_SOCKET_IFNAME is {name!r}, and this machine has no such network interface with an IPv4 address "
            f"(it has: {have}). Remove it with `%env -u GLOO_SOCKET_IFNAME`, or name one of these."
        )
    return (
        f"the loopback interface {LOOPBACK} is down or has no IPv4 address (interfaces with one: {have}). "
        f"Bring it up with `ip link set {LOOPBACK} up`, or name another one in GLOO_SOCKET_IFNAME."
    )


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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


def held_elsewhere(sockets: Iterable[socket.socket]) -> set[int]:
    """Inodes of the TCP connections for which this process has descriptors besides those of `sockets`."""
    ours = {s.fileno() for s in sockets}
    found = set()
    if LINUX:
        for link in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if int(link.name) not in ours and target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def inode(s: socket.socket) -> int:
    """The number by which the kernel knows a socket."""
    return os.fstat(s.fileno()).st_ino


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


def wait_readable(fd: int, timeout: float) -> bool:
    """Whether there is something to read at `fd`, after at most `timeout` seconds."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(timeout))
