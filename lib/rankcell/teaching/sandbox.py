"""The process of a session from outside: how it is started, what it may take, and how all of it ends. Where bubblewrap
(`bwrap`) is installed and allowed, a session sees only its own processes, has no network but a loopback, and can write
in its own folder alone. Everywhere its time, memory and number of processes are watched, and whatever it has started is
found by a mark in its environment.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

MEMORY = 4 << 30  # bytes of one session, all its processes together
PROCESSES = 64  # of one session at once: the largest world of a lesson, twice
_LOOK = 0.2  # seconds between two looks at them
_BUSY = 6  # times its seconds, at most, that cells get which do not get a core
_MARK = "RANKCELL_SESSION"


class Attempt(NamedTuple):
    """How a few cells ended: the `error` of the one at `place` (empty if all went well), and the seconds they took."""

    error: str = ""
    place: int = 0
    skipped: bool = False  # a cell needs what this machine does not have
    judged: bool = True  # they were run at all
    over: bool = False  # the session has ended
    seconds: float = 0.0


def walls() -> bool:
    """Whether bubblewrap works here."""
    try:
        command = [*_bubblewrap(tempfile.gettempdir()), "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _bubblewrap(folder: str) -> list[str]:
    places = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", folder, folder]
    return ["bwrap", *places, "--unshare-all", "--die-with-parent", "--chdir", folder, "--"]


class Session:
    """One process that runs cells, with a folder of its own; the limit that it breaks ends it.

    `walled`: behind bubblewrap. `recorded`: a folder of records that lessons read beside them.
    """

    def __init__(self, *, walled: bool, recorded: Path) -> None:
        self._walled, self._closed = walled, False
        self._folder = tempfile.mkdtemp(prefix="rankcell-grade-")
        if recorded.is_dir():
            shutil.copytree(recorded, Path(self._folder, "recorded"))
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "JPY_"))}
        homes = ("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME")
        own = {**dict.fromkeys(homes, self._folder), _MARK: self._folder}
        if sys.platform == "linux":
            own["GLOO_SOCKET_IFNAME"] = "lo"
        program = [sys.executable, "-m", "rankcell.teaching.session"]
        command = [*_bubblewrap(self._folder), *program] if walled else program
        how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
        how["start_new_session"] = True  # Ctrl-C is for the grader, who then ends it
        self._process = subprocess.Popen(command, cwd=self._folder, env=kept | own, **how)
        self._orders: Any = self._process.stdin
        self._answers: Any = self._process.stdout

    def run(
        self, cells: Sequence[str], seconds: float, given_up: Callable[[], bool], *, may_fail: int = 0,
        forget: Sequence[str] = (),
    ) -> Attempt:  # fmt: skip
        """Run the cells, without the names `forget`, until one fails; of the first `may_fail` all have to. They may
        take `seconds`, more if they had to wait for a core meanwhile.
        """
        began, used = time.monotonic(), self._core_seconds()
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(json.dumps([cells, may_fail, forget]).encode() + b"\n")
        while True:
            ended = self._process.poll() is not None  # what it has started may hold the pipe open
            ready, _, _ = select.select([self._answers], [], [], 0.0 if ended else _LOOK)
            took = time.monotonic() - began
            if ready and (line := self._answers.readline()).endswith(b"\n"):
                return Attempt(**json.loads(line), seconds=took)
            if ready or ended:
                return self._ended(took)
            error = "it was given up" if given_up() else self._broken_limit()
            if took > seconds and (self._core_seconds() - used > seconds or took > _BUSY * seconds):
                error = f"it did not end within {seconds:.0f} s"
            if error:
                self.close()
                return Attempt(error, over=True, seconds=took)

    def _ended(self, took: float) -> Attempt:
        code = self._process.wait()
        code = 128 - code if self._walled and code > 128 else code  # what bubblewrap makes of a signal
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended itself (exit code {code})"
        self.close()
        return Attempt(f"the notebook's process {how}", over=True, seconds=took)

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _core_seconds(self) -> float:
        """Seconds of a core that its processes have had, together with those of theirs that have ended."""
        found = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                found += sum(process.cpu_times()[:4])
        return found

    def _broken_limit(self) -> str:
        processes = self._processes()
        if len(processes) > PROCESSES:
            return f"it had {len(processes)} processes at once; {PROCESSES} are allowed"
        used = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_info()
                used += memory.rss - getattr(memory, "shared", 0)
        return f"it took {used / 2**30:.1f} GiB of memory; {MEMORY >> 30} GiB are allowed" if used > MEMORY else ""

    def close(self) -> None:
        """End it with all that it has started, and remove its folder."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # a group at once: none of it can fork in between
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._orders.close()
        self._answers.close()
        while strays := self._strays():
            for process in strays:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(strays, timeout=0.1)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _strays(self) -> list[psutil.Process]:
        """What it has started and is alive, in whatever group and of whatever parent."""
        alive = psutil.process_iter(["environ", "status"])
        mine = [p for p in alive if (p.info["environ"] or {}).get(_MARK) == self._folder]
        return [p for p in mine if p.info["status"] != psutil.STATUS_ZOMBIE]
