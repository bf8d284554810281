"""`rankcell doctor` and `%ranks doctor`: what of a machine lets ranks work, what will not work on it, and what to do.

Nothing is changed, and no rank is started. torch is asked in a process of its own, so that an import that fails, or
a GPU that does not answer, is a finding. It says what a newcomer meets; `python -m torch.utils.collect_env` lists more.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import errors, versions
from .engine import devices, local, system

PROBE = 60.0  # seconds that torch gets to say what it sees: the driver of a GPU just started takes 20


class Finding(NamedTuple):
    """One sentence on the machine: `kind` is "works", "note" or "problem"; `do` is what to do about it."""

    kind: str
    text: str
    do: str = ""


def findings() -> list[Finding]:
    """What this machine means for rank cells: problems first, then notes, then what works."""
    said, apart = _ask_torch(), system.interface_problem(os.environ.get("GLOO_SOCKET_IFNAME"))
    shm, dev = Path("/dev/shm"), Path("/dev")
    device_files = [*dev.glob("nvidia[0-9]*"), *dev.glob("dxg")]  # dxg: WSL2
    found = [
        *of_torch(said),
        *of_room(system.available_cores(), *local.room()),
        *of_gpus(said, os.environ.get("CUDA_VISIBLE_DEVICES"), bool(device_files)),
        *([Finding("problem", f"the ranks of one machine cannot reach each other: {apart}")] if apart else []),
        *of_shared_memory(shutil.disk_usage(shm).free if shm.is_dir() else None),
    ]
    return sorted(found, key=lambda f: ("problem", "note", "works").index(f.kind))


def of_torch(said: Mapping[str, Any]) -> Iterator[Finding]:
    """What it means that torch said this (`probe`)."""
    if why := said.get("problem"):
        yield Finding("problem", why)
    elif untried := versions.untried(said["torch"]):
        yield Finding("note", untried)
    else:
        yield Finding("works", f"torch {said['torch']} on Python {'.'.join(map(str, sys.version_info[:3]))}.")


def of_room(cores: int, most: int, why: str) -> Iterator[Finding]:
    """What it means that this process may use so many cores, and has room for so many ranks (`local.room`)."""
    if most < 4:
        do = "end other programs, or ask for more memory (`--mem` of sbatch, the container's limit)."
        yield Finding("problem", f"the lessons use 4 ranks: {why}", do)
    elif cores < 4:
        turns = f"this process may use {cores} cores: four ranks take turns on them."
        text = f"{turns} All answers are right, and times on the CPU are longer than those in the lessons."
        yield Finding("note", text, "in a container or a Slurm job, ask for more (`--cpus-per-task=8`).")
    else:
        yield Finding("works", f"four ranks on the CPU over gloo, on {cores} cores.")


def of_gpus(said: Mapping[str, Any], visible: str | None, has_gpu: bool) -> Iterator[Finding]:
    """What it means that torch said this, CUDA_VISIBLE_DEVICES is `visible`, and the system has a GPU's device file."""
    if "torch" not in said:
        return
    gpus, cuda = said["gpus"], said["cuda"]
    if problem := said.get("gpu_problem"):
        yield Finding("problem", f"the GPU does not work: {problem}.")
    if gpus:
        names = ", ".join(f"{gpus.count(n)} x {n}" for n in dict.fromkeys(gpus))
        yield Finding("works", f"{names}; CUDA {cuda}. `%%ranks 4 --device cuda`: {said['choice']}.")
        if said["better"]:
            yield Finding("note", said["better"])
    elif visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        do = "`unset CUDA_VISIBLE_DEVICES`; in a Slurm job ask for GPUs (`--gpus-per-node=1`)."
        yield Finding("note", f"CUDA_VISIBLE_DEVICES is {visible!r}: it hides every GPU.", do)
    elif has_gpu:
        why = f"(CUDA {cuda}) sees none" if cuda else "is built for the CPU"
        what = "install the build for CUDA: `pip install --force-reinstall torch==2.13.0`, or see pytorch.org."
        if cuda:
            what = "update the driver: `nvidia-smi` prints the newest CUDA that it knows."
        yield Finding("problem", f"there is a GPU, and this torch, {said['torch']}, {why}.", what)
    else:
        yield Finding("works", "no GPU: `--device cuda` says so, everything else runs on the CPU.")


def of_shared_memory(free: int | None) -> Iterator[Finding]:
    """What it means that so many bytes are free in /dev/shm; None where there is none."""
    if free is not None and free < 256 << 20:
        text = f"/dev/shm has {free >> 20} MiB free: rank cells work; nccl and the workers of a DataLoader want more."
        do = "`docker run --shm-size=2g`, or `--ipc=host`; in Kubernetes an emptyDir with medium: Memory there."
        yield Finding("note", text, do)


def report(found: Sequence[Finding]) -> str:
    """What was found, as text of at most 120 columns."""
    lines = [f"rankcell doctor on {socket.gethostname()}"]
    for finding in found:
        for head, text in ((f"  {finding.kind:<8} ", finding.text), (" " * 11 + "-> ", finding.do)):
            below = textwrap.wrap(head + text, 120, subsequent_indent=" " * len(head), break_on_hyphens=False)
            lines += below if text else []
    return "\n".join(lines)


def _ask_torch() -> dict[str, Any]:
    """What a process that imports torch says (`probe`), or {"problem": why it says nothing}."""
    command = [sys.executable, "-P", "-c", "from rankcell.doctor import probe; probe()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE, check=False)
    except subprocess.TimeoutExpired:
        why = f"torch did not answer within {PROBE:.0f} s: a slow file system, or a GPU that does not answer."
        return {"problem": why}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return {"problem": f"`import torch` fails in this environment: {last}"}


def probe() -> None:
    """Print what torch says in this process as JSON."""
    import torch

    said: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    said["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if said["gpus"]:
        try:
            choice = devices.choose(4, "cuda", devices.look())
            said |= {"choice": choice.note, "better": choice.better}
        except errors.WorldSizeError as error:
            said |= {"choice": "not possible", "better": str(error)}
        try:
            torch.ones(2, device="cuda").sum().item()
        except RuntimeError as error:
            said["gpu_problem"] = str(error).partition("\n")[0].rstrip(".")
    print(json.dumps(said))


def main(*_: Any) -> int:
    """Print the report on this machine; 1 if there is a problem."""
    found = findings()
    print(report(found))
    return int(any(f.kind == "problem" for f in found))


def line(words: Sequence[str]) -> None:
    main()


def add_command(commands: Any) -> None:
    about = "what of this machine works for rank cells, what does not, and what to do"
    commands.add_parser("doctor", help=about).set_defaults(run=main)
