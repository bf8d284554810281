"""A Slurm to give jobs to, through its commands (sbatch, squeue, ...): this machine's own, or one that a program brings
up for the time being, as tests/mini_slurm.py does. `%load_ext rankcell.cluster.slurm` adds the magics `%slurm` and
`%%slurm`: a cell that begins with `%%slurm` runs where there is a Slurm and is skipped, with the reason, where not.
"""

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..source import split

_OVER = set("BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split())


class NoSlurm(Exception):
    """There is no Slurm here, and why; or one that cannot do what was asked of it."""


class Slurm:
    """The Slurm of this machine, and one folder in which its jobs work.

    Jobs find the Python of this process first on their PATH, as `python` and `torchrun`. Raises NoSlurm when `sinfo` is
    missing or does not answer.
    """

    mode = ""
    about = "the Slurm of this machine"
    told: tuple[str, float] | None = None  # what `wait` and `wait_for` last printed, and when; None: they print nothing

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.environment = {"PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
        if shutil.which("sinfo") is None:
            raise NoSlurm("there is no Slurm on this machine: no command `sinfo`")
        try:
            self.run("sinfo", "--noheader", timeout=10)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            raise NoSlurm("no Slurm answers: `sinfo` fails on this machine") from None
        self.folder.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return self.about

    def run(self, *command: str, timeout: float = 60) -> str:
        """What `command` printed, run in the folder on the node where jobs are submitted. Raises
        subprocess.CalledProcessError: its exit status is not 0, `stderr` says why; subprocess.TimeoutExpired: it took
        longer than `timeout` seconds.
        """
        folder = self.folder if self.folder.is_dir() else None
        how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": True}
        return subprocess.run(command, cwd=folder, env=os.environ | self.environment, timeout=timeout, **how).stdout

    def submit(self, *arguments: str) -> int:
        """The number of the job that `sbatch` made of `arguments`: options, then the script and its words."""
        return int(self.run("sbatch", "--parsable", *arguments).split(";")[0])

    def states(self, job: int) -> dict[str, str]:
        """The state of the job, or of each task of an array: {"7_0": "COMPLETED", "7_1": "RUNNING"}."""
        try:
            lines = self.run("squeue", "-h", "-r", "-t", "all", "-j", str(job), "-o", "%i %T").splitlines()
        except subprocess.CalledProcessError:  # Slurm forgets a job some minutes after its end
            return {}
        found = (line.split() for line in lines)
        return dict(sorted(found, key=lambda entry: [int(n) for n in re.findall(r"\d+", entry[0])]))

    def wait(self, job: int, seconds: float = 300) -> dict[str, str]:
        """The last states of the job, once it is over; a TimeoutError says its state if it is not after `seconds`."""
        begin = time.monotonic()
        while not _OVER.issuperset((states := self.states(job)).values()):
            late = f"job {job} is not over after {seconds:g} s: {states}"
            self._pause(begin, seconds, f"job {job}: {_counted(states)}", late)
        return states

    def wait_for(self, path: str, text: str = "", seconds: float = 300) -> str:
        """What stands in the file `path` of the folder, as soon as `text` is in it. Raises TimeoutError, which ends
        with the file's last lines, when `text` is not there after `seconds`.
        """
        file, begin = self.folder / path, time.monotonic()
        while True:
            found = file.read_text() if file.exists() else "no such file"
            if file.exists() and text in found:
                return found
            late = "\n".join([f"{path} has no {text!r} after {seconds:g} s:", *found.splitlines()[-15:]])
            self._pause(begin, seconds, f"waiting for {text.strip()!r} in {path}", late)

    def _pause(self, begin: float, seconds: float, awaited: str, late: str) -> None:
        """Wait a moment; print what is `awaited` when it changes, but not all the time, and now and then while it does
        not. TimeoutError with `late` if `begin` is `seconds` ago.
        """
        now = time.monotonic()
        if now - begin > seconds:
            raise TimeoutError(late)
        if self.told and now - begin > 1 and now - self.told[1] >= (4 if awaited == self.told[0] else 1.5):
            print(awaited, flush=True)
            self.told = awaited, now
        time.sleep(0.2)

    def down(self) -> None:
        """Take down what `find` has brought up; a Slurm that was here before stays."""

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This process in the place where jobs are submitted: folder, environment, and network."""
        inside = {**self.environment, "OLDPWD": str(Path.cwd())}  # as `cd` leaves it
        old = {name: os.environ.get(name) for name in inside}
        os.environ.update(inside)
        try:
            with contextlib.chdir(self.folder):
                yield
        finally:
            for name, value in old.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def find(program: str | Path = "") -> Slurm:
    """The Slurm of this machine, with the folder slurm-jobs for its jobs, or else the one that `program` brings up.

    `program` is a Python file with a function `up()` that returns a `Slurm`, or raises `NoSlurm`. So does this one, and
    says why, when neither is to be had.
    """
    try:
        return Slurm("slurm-jobs")
    except NoSlurm:
        if not program:
            raise
    if not Path(program).is_file():
        raise NoSlurm(f"there is none on this machine, and no file {program} that would bring one up")
    return runpy.run_path(str(program))["up"]()


def _counted(states: Mapping[str, str]) -> str:
    """The states of a job's tasks in words: "3 COMPLETED, 2 RUNNING"; of one task the state alone."""
    counts = Counter(states.values())
    if len(states) < 2:
        return next(iter(counts), "gone")
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts))


class _Magics:
    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.found: Slurm | None = None
        self.why = "no `%slurm up` has run"

    def line(self, line: str) -> None:
        """`%slurm up PROGRAM` finds a Slurm or runs what brings one up; `%slurm down` takes that down."""
        word, _, program = line.strip().partition(" ")
        if word not in ("up", "down"):
            raise ValueError(f"`%slurm {word}` means nothing. Write `%slurm up PROGRAM` or `%slurm down`.")
        if self.found is not None:
            self.found.down()
            self.found = None
        if word == "down":
            return
        try:
            self.found = find(program.strip())
        except NoSlurm as reason:
            self.why = str(reason)
            print(f"No Slurm: {self.why}. Cells that begin with %%slurm are skipped.")
        else:
            print(f"Jobs go to {self.found}.")
        self.shell.user_ns["slurm"] = self.found

    def cell(self, line: str, cell: str) -> Any:
        """Run the cell where jobs are submitted, or say why not; `%%slurm net`: on separate nodes."""
        if self.found is None:
            print(f"Skipped: {self.why}.")
        elif line.strip() == "net" and self.found.mode != "net":
            print("Skipped: this needs a throw-away cluster whose nodes have networks of their own.")
        else:
            with self.found.inside():
                self.found.told = "", 0.0
                try:
                    return self._execute(cell)
                finally:
                    self.found.told = None
        return None

    def _execute(self, cell: str) -> Any:
        shell, source = self.shell, self.shell.transform_cell(cell)
        tree, last = split(source)
        name = shell.compile.cache(source, shell.execution_count)
        exec(shell.compile(tree, name, "exec"), shell.user_ns)
        return None if last is None else eval(shell.compile(last, name, "eval"), shell.user_ns)


def load_ipython_extension(shell: Any) -> None:
    """Register `%slurm` and `%%slurm`."""
    # outside a throw-away cluster its nodes have no names: torch, once imported, would warn of each of them
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    magics = _Magics(shell)
    shell.register_magic_function(magics.line, "line", "slurm")
    shell.register_magic_function(magics.cell, "cell", "slurm")
