"""`rankcell doctor` and `%ranks doctor`: what of a machine lets ranks work, what will not work on it, and what to do.

`gather` looks at the machine, in one place; what is said of it is a pure function of the `Facts` it returns. Nothing is
changed, and no rank is started. torch is asked in a process of its own, so that an import that fails, or a GPU that
does not answer, is a finding. It says what a newcomer meets; `python -m torch.utils.collect_env` lists all else.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import errors, versions
from .engine import devices, system
from .engine.local import FILES_PER_RANK, MEMORY_PER_RANK

PROBE = (
    60.0  # seconds that torch gets to say what it sees: the driver of a GPU that was just started takes 20
)
GIB = 2**30


@dataclass(frozen=True)
class Facts:
    """What `gather` has found on one machine. Sizes in bytes; None where the machine does not tell."""

    host: str = ""
    linux: bool = True
    python: str = ""
    cores: int = 4  # that this process may use
    memory: int | None = None  # that new processes can have
    files: int = 4096  # that this process may open; -1: no limit
    loopback: str = ""  # why gloo could not talk over it
    shared: int | None = None  # free in /dev/shm; -1: it cannot be written
    temporary: int | None = None  # free in the folder for temporary files; -1: it cannot be written
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    has_gpu: bool = False  # the system has a device file of one
    torch: str = ""  # its version
    torch_problem: str = ""  # why it said nothing
    cuda: str = ""  # version that torch was built for
    gpus: Sequence[str] = ()
    gpu_problem: str = ""
    choice: str = ""  # what four ranks would do with the GPUs
    better: str = ""  # and what would be better


@dataclass(frozen=True)
class Finding:
    """One sentence on the machine: `kind` is "works", "note" or "problem"; `do` is what to do about it."""

    kind: str
    text: str
    do: str = ""


def findings(facts: Facts) -> list[Finding]:
    """What `facts` mean for rank cells: problems first, then notes, then what works."""
    found = [finding for look in (_torch, _room, _gpus, _places) for finding in look(facts)]
    return sorted(found, key=lambda f: ("problem", "note", "works").index(f.kind))


def _torch(f: Facts) -> Iterator[Finding]:
    if f.torch_problem:
        yield Finding("problem", f.torch_problem)
    elif said := versions.untried(f.torch):
        yield Finding("note", said)
    else:
        yield Finding("works", f"torch {f.torch} on Python {f.python}.")


def _room(f: Facts) -> Iterator[Finding]:
    by_memory = 4 if f.memory is None else f.memory // MEMORY_PER_RANK
    by_files = 4 if f.files < 0 else max(0, f.files - 200) // FILES_PER_RANK
    if min(by_memory, by_files) < 4:
        yield Finding(
            "problem",
            f"there is room for {min(by_memory, by_files)} ranks, and the lessons use 4 (a rank takes about "
            f"{MEMORY_PER_RANK >> 20} MiB and {FILES_PER_RANK} open files).",
            "raise `ulimit -n` in the shell that starts Jupyter."
            if by_files < 4
            else "end other programs, or ask for more memory (`--mem` of sbatch, the container's limit).",
        )
    elif f.cores < 4:
        yield Finding(
            "note",
            f"this process may use {f.cores} cores: four ranks take turns on them. All answers are right, and times on "
            f"the CPU are longer than those in the lessons.",
            "in a container or a Slurm job, ask for more (`--cpus-per-task=8`).",
        )
    else:
        yield Finding("works", f"four ranks on the CPU over gloo, on {f.cores} cores.")
    if f.memory is not None and f.memory < 2 * GIB:
        yield Finding(
            "note",
            f"{f.memory / GIB:.1f} GiB of memory are left for new processes: the system may end lessons 7 and 9.",
            "have 4 GiB free, or ask for them (`--mem=8G` of sbatch, `-m 8g` of docker).",
        )


def _gpus(f: Facts) -> Iterator[Finding]:
    if f.torch_problem:
        return
    if f.gpu_problem:
        yield Finding("problem", f"the GPU does not work: {f.gpu_problem}.")
    if f.gpus:
        names = ", ".join(f"{f.gpus.count(n)} x {n}" for n in dict.fromkeys(f.gpus))
        yield Finding("works", f"{names}; CUDA {f.cuda}. `%%ranks 4 --device cuda`: {f.choice}.")
        if f.better:
            yield Finding("note", f.better)
    elif f.visible is not None and f.visible.strip() in ("", "-1", "NoDevFiles"):
        yield Finding(
            "note",
            f"CUDA_VISIBLE_DEVICES is {f.visible!r}: it hides every GPU.",
            "`unset CUDA_VISIBLE_DEVICES`; in a Slurm job ask for GPUs (`--gpus-per-node=1`).",
        )
    elif f.has_gpu:
        built = f"(CUDA {f.cuda}) sees none" if f.cuda else "is built for the CPU"
        yield Finding(
            "problem",
            f"there is a GPU, and this torch, {f.torch}, {built}.",
            "update the driver: `nvidia-smi` prints the newest CUDA that it knows."
            if f.cuda
            else "install the build for CUDA: `pip install --force-reinstall torch==2.13.0`, or see pytorch.org.",
        )
    else:
        yield Finding("works", "no GPU: `--device cuda` says so, everything else runs on the CPU.")


def _places(f: Facts) -> Iterator[Finding]:
    if f.shared is not None and f.shared < 256 << 20:
        yield Finding(
            "note",
            f"/dev/shm {_room_in(f.shared)}: rank cells work; nccl and the workers of a DataLoader want more.",
            "`docker run --shm-size=2g`, or `--ipc=host`; in Kubernetes an emptyDir with medium: Memory there.",
        )
    if f.temporary is not None and f.temporary < 64 << 20:
        yield Finding(
            "problem",
            f"the folder for temporary files {_room_in(f.temporary)}: ranks meet there.",
            "name another folder in TMPDIR, and restart the kernel.",
        )
    if f.loopback:
        yield Finding("problem", f"the ranks of one machine cannot reach each other: {f.loopback}")
    if not f.linux:
        yield Finding("note", "this is not Linux: bytes on the wire and memory of ranks are unknown here.")


def _room_in(free: int) -> str:
    return "cannot be written" if free < 0 else f"has {free >> 20} MiB free"


def report(facts: Facts) -> str:
    """What `findings` say, as text of at most 120 columns."""
    lines = [f"rankcell doctor on {facts.host}"]
    for finding in findings(facts):
        said = [(f"  {finding.kind:<8} ", finding.text)]
        said += [(" " * 11 + "-> ", finding.do)] if finding.do else []
        for head, text in said:
            lines += textwrap.wrap(
                head + text, 120, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
    return "\n".join(lines)


def gather() -> Facts:
    """Look at this machine; it takes as long as `import torch`."""
    try:
        temporary = _free(tempfile.gettempdir())
    except FileNotFoundError:  # nothing can be written anywhere
        temporary = -1
    return Facts(
        host=socket.gethostname(),
        linux=system.LINUX,
        python=".".join(map(str, sys.version_info[:3])),
        cores=system.available_cores(),
        memory=system.available_memory(),
        files=system.open_file_limit(),
        loopback=system.interface_problem(os.environ.get("GLOO_SOCKET_IFNAME")),
        shared=_free("/dev/shm"),
        temporary=temporary,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        has_gpu=any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),  # dxg: Windows' WSL2
        **_ask_torch(),
    )


def _free(folder: str) -> int | None:
    """Bytes free in a folder; -1 where it cannot be written, None where there is none."""
    if not Path(folder).is_dir():
        return None
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK | os.X_OK) else -1


def _ask_torch() -> dict[str, Any]:
    """What a process that imports torch says of it: fields of `Facts`."""
    command = [sys.executable, "-P", "-c", "from rankcell.doctor import probe; probe()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE, check=False)
    except subprocess.TimeoutExpired:
        why = f"torch did not answer within {PROBE:.0f} s: a slow file system, or a GPU that does not answer."
        return {"torch_problem": why}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return {"torch_problem": f"`import torch` fails in this environment: {last}"}


def probe() -> None:
    """Print what torch says in this process as JSON: fields of `Facts`."""
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


def main() -> int:
    """Print the report on this machine; 1 if there is a problem."""
    facts = gather()
    print(report(facts))
    return int(any(f.kind == "problem" for f in findings(facts)))


def line(words: Sequence[str]) -> None:
    """`%ranks doctor`."""
    main()


def add_command(commands: Any) -> None:
    """Add `doctor` to the sub-commands of `rankcell`."""
    about = "what of this machine works for rank cells, what does not, and what to do"
    commands.add_parser("doctor", help=about).set_defaults(run=lambda options: main())
