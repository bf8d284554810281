"""What a job script does, found out without a Slurm: bash runs it, and stand-ins take the place of the commands. Two
nodes, node7 and node8, are made up; the script's programs (python, torchrun) only note how they were called: `ran =
dry_run(script)`, then `ran.options.time`, `[call["RANK"] for call in ran.calls]`, `ran.files["train-4242.out"]`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import fake_commands

_FAKED = ("srun", "scontrol", "hostname", "uv", "python", "python3", "torchrun")


class DryRun(NamedTuple):
    """What a job script asked for, and what it left behind."""

    options: argparse.Namespace  # of its #SBATCH lines: options.time, options.array, ...
    tasks: Sequence[int | None]  # of the array; [None] where it is none
    at_once: str  # how many tasks of the array may run at a time; "" where nothing is said
    calls: Sequence[Mapping[str, Any]]  # of each program: its "words", its environment, and its "CPUS"
    files: dict[str, str]  # what stands in the folder afterwards, by name
    ends: Sequence[int]  # the exit status of each task's script
    unread: Sequence[str]  # #SBATCH lines below the first command, which sbatch does not read

    def of(self, name: str) -> list[str | None]:
        """The variable `name` in each call, None where it is not set."""
        return [call.get(name) for call in self.calls]

    @property
    def printed(self) -> str:
        """The last words of all files: what went wrong, if something did."""
        return "".join(self.files.values())[-200:]


def dry_run(script: str, *, job: int = 4242, end_with: int = 0) -> DryRun:
    """Run `script` as the job number `job`, whose programs end with the status `end_with`."""
    options, unread = read_directives(script)
    nodes, cpus = int(options.nodes or 1), int(options.cpus_per_task or 1)
    ntasks = int(options.ntasks or nodes * int(options.ntasks_per_node or 1))
    tasks, at_once = read_array(options.array)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        work, notes = at / "work", at / "notes"
        work.mkdir()
        notes.touch()
        for name in _FAKED:
            call = shlex.join([sys.executable, "-ISs", fake_commands.__file__, name])
            (at / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
            (at / name).chmod(0o755)
        told: dict[str, object] = {"JOB_ID": job, "JOBID": job, "NTASKS": ntasks, "CPUS_PER_TASK": cpus}
        told |= {"NNODES": nodes, "JOB_NUM_NODES": nodes, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "SUBMIT_DIR": work}
        told |= dict.fromkeys(("JOB_NODELIST", "NODELIST"), "node[7-8]")
        env = os.environ | {f"SLURM_{name}": str(value) for name, value in told.items()}
        env |= {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(notes), "END_WITH": str(end_with)}
        env |= {"CPUS": str(cpus * ntasks // nodes), "SLURMD_NODENAME": "node7"}
        ends = []
        for task in tasks:
            array = {} if task is None else {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": str(job)}
            log = options.output or "slurm-%j.out"
            for letter, value in {"%A": job, "%j": job + (task or 0), "%a": task, "%x": "job"}.items():
                log = log.replace(letter, str(value))
            with (work / log).open("a") as output:
                ran = subprocess.run(["bash", "-c", script], cwd=work, env=env | array, stdout=output, stderr=output)
            ends.append(ran.returncode)
        calls = [json.loads(line) for line in notes.read_text().splitlines()]
        files = {path.name: path.read_text() for path in work.iterdir()}
    return DryRun(options, tasks, at_once, calls, files, ends, unread)


def read_directives(script: str) -> tuple[argparse.Namespace, list[str]]:
    """The options that sbatch reads in the script, those above its first command, and the #SBATCH lines below it."""
    options, lines = fake_commands.read_options([]), script.splitlines()
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    for line in lines[:first]:
        if line.startswith("#SBATCH"):  # each alone: an unknown option must not take the others with it
            options = fake_commands.read_options(shlex.split(line[7:], comments=True), options)
    return options, [line for line in lines[first:] if line.startswith("#SBATCH")]


def read_array(array: str | None) -> tuple[list[int | None], str]:
    """The tasks of an array such as "1-4,7%2", and how many may run at a time; [None] and "" of no array."""
    tasks, _, at_once = (array or "").partition("%")
    found: list[int | None] = []
    for part in filter(None, tasks.split(",")):
        (first, _, last), step = part.partition(":")[0].partition("-"), part.partition(":")[2]
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found or [None], at_once


def read_minutes(limit: str | None) -> float | None:
    """The minutes of a limit such as "90", "15:00" or "1-12", or None."""
    days, hyphen, rest = (limit or "").rpartition("-")
    if not (numbers := [int(n) for n in rest.split(":") if n.isdigit()]):
        return None
    at = numbers if hyphen or len(numbers) == 3 else [0, *numbers]
    hours, minutes, seconds = (at + [0, 0, 0])[:3]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60
