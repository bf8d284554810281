"""The process that answers are forked from, and the keeper of each of them.

    grade          asks for a judgement with a socket, sends the order through it, gets one line of JSON back
      stage        imports torch, IPython and rankcell once; forks a keeper for each order (this file, `main`)
        keeper     stays outside the walls, watches time, memory and processes, ends them all (`_keep`)
          init     the first process inside: it reaps, and when it ends the kernel ends all the rest (`_inside`)
            judge  runs the cells (`judge.py`), with the ranks it starts

No code of a student runs in the stage or in a keeper. A judgement costs a fork, not a start of Python.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import sandbox

_LOOK = 0.1  # seconds between two looks at the processes of an answer
_BUSY = 6  # times the limit, at most, that an answer gets on a machine that has no core for it
_MORE = 0.5  # seconds that it gets at a time then
_CONTEXT = 240.0  # seconds for the course's own cells: generous, they are known to end
_ROOM = 1 << 20  # bytes that an answer can tell its keeper
_CROWD = 24  # processes: more than any answer of the course needs
_TOLD = 2000  # characters of an error that are kept
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(fd: int) -> None:
    """Serve the grader at the other end of socket `fd` until it is gone."""
    _import_everything()
    sealing = probe()
    asks = socket.socket(fileno=fd)
    asks.sendall(json.dumps(vars(sealing)).encode() + b"\n")
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        ready, _, _ = select.select([asks], [], [], 1.0)
        if not ready:
            continue
        head, descriptors, _, _ = socket.recv_fds(asks, 1, 1)
        if not head or not descriptors:
            os._exit(0)
        if os.fork() == 0:
            asks.close()
            try:
                _keep(socket.socket(fileno=descriptors[0]), sealing)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _import_everything() -> None:
    """What lessons import, so that a fork has it; with one thread, as a fork of a process with more is not safe."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported
    import torch.distributed  # noqa: F401

    for package in ("draw", "parallel", "planner"):
        module = importlib.import_module(f"rankcell.{package}")
        for found in pkgutil.iter_modules(module.__path__):
            importlib.import_module(f"rankcell.{package}.{found.name}")
    for name in ("judge", "sandbox"):
        importlib.import_module(f"rankcell.grade.{name}")
    for name in (
        "check",
        "costs",
        "hardware",
        "models",
        "schedules",
        "simulate",
        "twin",
        "against",
        "magics",
    ):
        importlib.import_module(f"rankcell.{name}")


def probe() -> sandbox.Sealing:
    """Which walls this system offers: tried in a child."""

    def works(try_it: Callable[[str], None]) -> bool:
        with tempfile.TemporaryDirectory(prefix="rankcell-grade-") as folder:
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    try_it(folder)
                    os._exit(0)
                os._exit(1)
            return os.waitpid(pid, 0)[1] == 0

    def namespaces(folder: str) -> None:
        sandbox.leave_namespaces()
        pid = os.fork()
        if pid == 0:
            sandbox.furnish(folder, sandbox.Limits())
            os._exit(0)
        os._exit(os.waitpid(pid, 0)[1] != 0)

    def landlock(folder: str) -> None:
        sandbox.write_only_in([folder])

    return sandbox.Sealing(works(namespaces), sandbox.landlock_version() > 0 and works(landlock))


def _keep(asker: socket.socket, sealing: sandbox.Sealing) -> None:
    """Have one answer judged, end whatever it has started, say what became of it."""
    with asker.makefile("rb") as file:
        order = json.loads(file.readline())
    limits = sandbox.Limits(**order["limits"])
    sandbox.adopt_orphans()
    folder = tempfile.mkdtemp(prefix="rankcell-grade-")
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hear)
        asker.close()
        with contextlib.suppress(BaseException):
            _inside(order, limits, sealing, folder, tell)
        os._exit(1)
    os.close(tell)
    with contextlib.suppress(OSError):  # root may: whoever watches a fork bomb needs a core when it wants one
        os.nice(-5)
    verdict = {"passed": False, "where": "answer", "error": "the judge failed"}
    try:
        verdict = _watch(order, limits, hear, asker)
    finally:
        verdict["left"] = _end_all()
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            asker.sendall(json.dumps(verdict).encode() + b"\n")


def _inside(
    order: Mapping[str, Any], limits: sandbox.Limits, sealing: sandbox.Sealing, folder: str, tell: int
) -> None:
    """Go behind the walls, and have a child judge there; says how the child ended, if it has not said so itself."""
    sandbox.end_with_parent()
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    if sealing.namespaces:
        sandbox.leave_namespaces()
        first = os.fork()
        if first:
            os.close(tell)
            os.waitpid(first, 0)
            os._exit(0)
        sandbox.end_with_parent()
        sandbox.furnish(folder, limits)
    os.chdir(folder)
    os.environ.update(
        HOME=folder, TMPDIR=folder, IPYTHONDIR=folder, MPLCONFIGDIR=folder, XDG_CACHE_HOME=folder
    )
    for name in [n for n in os.environ if n.startswith(("SLURM_", "JPY_"))]:
        del os.environ[name]
    tempfile.tempdir = None
    judge = os.fork()
    if judge == 0:
        os.setsid()
        sandbox.limit(limits, cpu_seconds=int(_CONTEXT + order["seconds"]))
        if sealing.landlock:
            sandbox.write_only_in([folder, *([shm] if Path(shm := "/dev/shm").is_dir() else [])])
        from . import judge as judging

        try:
            judging.run(order, tell)
        except BaseException as error:  # noqa: BLE001 - told to the keeper
            text = f"{type(error).__name__}: {error}"
            os.write(
                tell, json.dumps({"what": "over", "passed": False, "where": "judge", "error": text}).encode()
            )
        os._exit(1)
    status = 0
    while True:
        ended, code = os.waitpid(-1, 0)
        if ended == judge:
            status = code
            break
    said = {"what": "ended", "how": os.waitstatus_to_exitcode(status)}
    os.write(tell, b"\n" + json.dumps(said).encode() + b"\n")
    os._exit(0)


def _watch(
    order: Mapping[str, Any], limits: sandbox.Limits, hear: int, asker: socket.socket
) -> dict[str, Any]:
    """Listen to the judge until it has said what became of the answer, or has taken more than it may."""
    deadline, began, said, looked = time.monotonic() + _CONTEXT, 0.0, b"", 0.0
    own = sandbox.private_memory(os.getpid())  # what all forks of the stage share
    before: dict[int, float] = {}  # what each process had waited for a core when the answer began
    had = 0.0  # core seconds that they had had together
    while True:
        now = time.monotonic()
        if began and now > deadline and now < began + _BUSY * order["seconds"]:
            # on a busy machine an answer that gets no core is not slow; ranks that wait for each other's core are
            pids = sandbox.descendants(os.getpid())
            starved = max((sandbox.waited_for_a_core(p) - before.get(p, 0.0) for p in pids), default=0.0)
            if sum(map(sandbox.core_seconds, pids)) - had < order["seconds"]:
                deadline = max(deadline, min(began + order["seconds"] + starved, now + _MORE))
        if now > deadline:
            if not began:
                return _failed(
                    "context", f"the cells before the exercise did not end within {_CONTEXT:.0f} s"
                )
            crowd = len(sandbox.descendants(os.getpid()))
            limit = "processes" if crowd > _CROWD else "time"  # a fork bomb may keep its keeper from counting
            return _failed("answer", f"did not end within {order['seconds']:g} s", limit, now - began)
        ready, _, _ = select.select([hear, asker.fileno()], [], [], min(_LOOK, deadline - now))
        if asker.fileno() in ready:  # nobody waits for the verdict any more
            return {**_failed("answer", "given up"), "lost": True}
        if hear in ready:
            part = os.read(hear, 1 << 16)
            said = (said + part)[-_ROOM:]
            *lines, said = said.split(b"\n")
            for line in lines:
                message = _read(line)
                what = message.get("what")
                if what == "ready" and not began:
                    began = time.monotonic()
                    deadline = began + order["seconds"]
                    pids = sandbox.descendants(os.getpid())
                    before = {p: sandbox.waited_for_a_core(p) for p in pids}
                    had = sum(map(sandbox.core_seconds, pids))
                elif what == "over":
                    return _verdict(message, time.monotonic() - began if began else 0.0)
                elif what == "ended":
                    where = "answer" if began else "context"
                    return _failed(where, _how(message.get("how")), "killed", time.monotonic() - began)
            if not part:
                return _failed("answer", "all its processes have ended", "killed")
        if time.monotonic() - looked > _LOOK:
            looked = time.monotonic()
            pids = sandbox.descendants(os.getpid())
            if len(pids) > limits.processes:
                sentence = f"had {len(pids)} processes at once; {limits.processes} are allowed"
                return _failed("answer", sentence, "processes", looked - began)
            if (used := sum(max(0, sandbox.private_memory(p) - own) for p in pids)) > limits.memory:
                sentence = (
                    f"took {used / 2**30:.1f} GiB of memory; {limits.memory / 2**30:.1f} GiB are allowed"
                )
                return _failed("answer", sentence, "memory", looked - began)


def _failed(where: str, error: str, limit: str = "", seconds: float = 0.0) -> dict[str, Any]:
    return {"passed": False, "where": where, "error": error, "limit": limit, "seconds": seconds}


def _read(line: bytes) -> dict[str, Any]:
    """What a line says, if it is one of ours: an answer may write to the pipe, too."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _verdict(message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What a judge has said of an answer, with nothing in it that the grader would stumble over."""
    where, measured = message.get("where"), message.get("measured")
    numbers = measured.items() if isinstance(measured, dict) else ()
    return {
        "passed": message.get("passed") is True,
        "where": where if where in ("context", "check", "judge") else "answer",
        "error": plain(str(message.get("error", ""))[:_TOLD]),
        "skipped": message.get("skipped") is True,
        "measured": {str(k)[:20]: v for k, v in numbers if isinstance(v, (int, float)) and abs(v) < 1e18},
        "seconds": seconds,
    }


def plain(text: str) -> str:
    """`text` without what would move a terminal's cursor or cannot be written as UTF-8."""
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode()


def _how(code: Any) -> str:
    if isinstance(code, int) and code < 0:
        with contextlib.suppress(ValueError):
            return f"the notebook's process was ended by {signal.Signals(-code).name}"
    return f"the notebook's process ended itself (exit code {code})"


def _end_all() -> int:
    """End all descendants, whatever they fork meanwhile; how many are left after a minute (none)."""
    deadline = time.monotonic() + 60.0
    while True:
        pids = sandbox.descendants(os.getpid())
        groups = set()
        for pid in pids:
            with contextlib.suppress(OSError):
                groups.add(os.getpgid(pid))
        groups.discard(os.getpgid(0))
        for group in groups:  # all of a group at once: none of them can fork in between
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not pids or time.monotonic() > deadline:
            return len(pids)
        time.sleep(0.005)


if __name__ == "__main__":
    main(int(sys.argv[1]))
