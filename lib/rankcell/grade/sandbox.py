"""What a student's code is kept in: processes, network, files and memory of its own, all of which end together.

On Linux with user namespaces (most desktops and servers; not inside every container) an answer sees only its own
processes, has a network of its own with nothing but a loopback, and its folder is a disk in memory that nobody has to
clean. With Landlock (Linux 5.13 and newer) it can write nowhere else. Where the system offers neither, resource limits
and a watch over all descendants remain; `Sealing` says which of them holds. This module starts no process itself.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

# linux/sched.h
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
# linux/prctl.h
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 36, 38
# linux/mount.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
# linux/landlock.h; the numbers of the system calls are the same on all machines
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE = 1 << 1
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 13))  # remove and make files, folders, links, devices
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@dataclass(frozen=True)
class Limits:
    """What one answer may take.

    `memory` in bytes: of all its processes together, and by each beyond what it has at first; `processes` at once, each
    with four threads where only threads can be counted; `file_bytes` of one file and of its whole folder; `files` open
    at once. Few processes: those of a fork bomb compete for the cores with whoever is to end them.
    """

    memory: int = 4 << 30
    processes: int = 64
    file_bytes: int = 1 << 29
    files: int = 2048


@dataclass(frozen=True)
class Sealing:
    """Which walls the system offers: processes and network of its own, and files outside that cannot be written."""

    namespaces: bool
    landlock: bool

    def __str__(self) -> str:
        if self.namespaces:
            parts = ["processes and a network of their own"]
        else:
            parts = [
                "NO processes of their own (no user namespaces here): they are watched and counted instead"
            ]
        parts.append(
            "no file outside their folder can be written"
            if self.landlock
            else "files outside their folder CAN be written (no Landlock here)"
        )
        return "; ".join(parts)


def _call(function: Callable[..., int], *arguments: object) -> int:
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        _call(_LIBC.prctl, option, ctypes.c_ulong(value), 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends (Linux)."""
    _prctl(_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parents end, so that none of them is lost (Linux)."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def leave_namespaces() -> None:
    """Give this process's children processes, mounts and a network of their own. Raises OSError where not allowed."""
    uid, gid = os.getuid(), os.getgid()
    _call(_LIBC.unshare, _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC)
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def furnish(folder: str, limits: Limits) -> None:
    """In the first process of the new namespaces: its own /proc, its folder and /dev/shm in memory, and a loopback.

    Raises OSError where the system does not allow it.
    """
    own = _MS_NOSUID | _MS_NODEV
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", own | _MS_NOEXEC)
    for place in (folder, "/dev/shm"):
        _mount("tmpfs", place, "tmpfs", own, f"size={limits.file_bytes},nr_inodes=20000,mode=700")
    with contextlib.suppress(OSError):  # since Linux 6.14 a limit of processes that holds for root, too
        Path("/proc/sys/kernel/pid_max").write_text(str(max(4 * limits.processes, 301) + 1))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(s, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    _call(
        _LIBC.mount,
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() if options else None,
    )


def landlock_version() -> int:
    """Which version of Landlock the kernel has; 0 if none."""
    try:
        return max(0, _LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    except AttributeError:  # not Linux
        return 0


def write_only_in(folders: Iterable[str]) -> None:
    """From now on this process and its descendants change files in these folders only. Raises OSError."""
    version = landlock_version()
    rights = _WRITE_FILE | _CHANGE_FOLDERS
    rights |= (1 << 13 if version >= 2 else 0) | (
        1 << 14 if version >= 3 else 0
    )  # links across folders; truncate
    head = struct.pack("Q", rights)
    rules = _call(_LIBC.syscall, _LANDLOCK_CREATE, head, ctypes.c_size_t(len(head)), 0)
    to_files = _WRITE_FILE | (1 << 14 if version >= 3 else 0)
    wanted = [(folder, rights) for folder in folders] + [("/dev", to_files), ("/proc", to_files)]
    for folder, allowed in wanted:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, fd)
        _call(_LIBC.syscall, _LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(fd)
    _prctl(_SET_NO_NEW_PRIVS, 1)
    _call(_LIBC.syscall, _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def limit(limits: Limits, cpu_seconds: int) -> None:
    """Set the limits that the kernel keeps for each process, hard and soft."""
    own = _address_space()
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.files,
    }
    if own:
        wanted[resource.RLIMIT_AS] = own + limits.memory
    if (
        os.getuid()
    ):  # the kernel counts all processes of a user (of a namespace), and lets root have any number
        wanted[resource.RLIMIT_NPROC] = _threads_of_user() + 4 * limits.processes
    for kind, most in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS knows some of them by name only
            resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError):
        os.nice(5)  # whoever watches comes first


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _threads_of_user() -> int:
    """Threads of this user that can be seen: in namespaces of their own, only those in there."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.stat().st_uid == os.getuid():
                found += int((entry / "stat").read_text().rpartition(")")[2].split()[17])
    return found


def private_memory(pid: int) -> int:
    """Bytes of memory of process `pid` that belong to no file; 0 where unknown.

    Pages that forks share count in each. This waits for no lock of the process, as the exact number (PSS) does: of a
    hundred processes that fork all the time it would take a minute.
    """
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def waited_for_a_core(pid: int) -> float:
    """Seconds that the main thread of a process was ready to run and had no core; 0 where nobody knows."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def core_seconds(pid: int) -> float:
    """Seconds of a core that a process and those of its children that have ended have had; 0 where nobody knows."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def descendants(pid: int) -> list[int]:
    """Process ids of all children of `pid`, their children, and so on; without those that have ended already."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if words[0] not in "ZX":
            children.setdefault(int(words[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        mine = children.get(todo.pop(), [])
        found += mine
        todo += mine
    return found
