"""On which device and over which backend a world talks, and why: pure functions of what the machine has.

    enough GPUs                  nccl, a GPU for each rank
    fewer, NCCL 2.30 or newer    nccl, ranks share GPUs round-robin; CUDA MPS lets them compute side by side
    fewer, older NCCL            gloo on CUDA tensors, which go through the memory of the host

Beside nccl, tensors on the CPU go over gloo. `notebooks/recorded` says on which GPU this ran last; several GPUs have
not been tried.
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, replace

from .. import errors
from . import system

SHARES = (2, 30)  # the first NCCL that lets ranks share a GPU
CTAS = 8  # of NCCL's kernels on one GPU, divided among its ranks: they must all fit at the same time
MEMORY = 0.9  # of a GPU, divided among its ranks: the rest is for their CUDA contexts
QUICK = 2.0  # seconds for an answer of the control program of CUDA MPS
MPS_STARTS = 5.0  # seconds for a daemon to start, and to end


@dataclass(frozen=True)
class Mps:
    """CUDA's Multi-Process Service on this machine."""

    installed: bool = False  # its control program is there
    running: bool = False  # a daemon answers this user


@dataclass(frozen=True)
class Machine:
    """What decides: GPUs (of every node together), the version of NCCL (empty: torch has none), MPS, nodes."""

    gpus: int = 0
    nccl: tuple[int, ...] = ()
    mps: Mps = Mps()
    nodes: int = 1


@dataclass(frozen=True)
class Choice:
    """What a world talks over. `note` says why, to follow "4 ranks talk over"."""

    device: str
    backend: str
    note: str
    better: str = ""  # a sentence: how to get a better one
    shared: int = 1  # ranks on the fullest GPU
    start_mps: bool = False  # a daemon is to be started for this world
    instead: "Choice | None" = None  # if ranks cannot be started with this one
    environment: dict[str, str] = field(default_factory=dict)  # for the ranks

    @property
    def memory_fraction(self) -> float | None:
        """The part of a GPU's memory that one rank may take; None if it has the GPU to itself."""
        return MEMORY / self.shared if self.shared > 1 else None


def choose(world_size: int, device: str, machine: Machine) -> Choice:
    """What `world_size` ranks talk over on `device` ("auto", "cpu" or "cuda").

    Raises:
        ValueError: no such device. WorldSizeError: cuda was asked for, and there is no GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r} does not exist. Choose cpu, cuda or auto.")
    gpus = machine.gpus
    if device == "cpu":
        return Choice("cpu", "gloo", "gloo on the CPU, as asked")
    if gpus >= world_size and machine.nccl:
        return Choice("cuda", "nccl", f"nccl, one of {gpus} GPUs for each rank")
    if device == "auto":
        if not gpus:
            return Choice("cpu", "gloo", "gloo on the CPU: no GPU here")
        few = f"{gpus} GPUs are" if gpus > 1 else "1 GPU is"
        why = f"{few} too few for {world_size} ranks" if gpus < world_size else "this torch has no nccl"
        return Choice(
            "cpu",
            "gloo",
            f"gloo on the CPU: {why}",
            better="`--device cuda` lets the ranks share what GPUs there are.",
        )
    if not gpus:
        raise errors.WorldSizeError("this machine has no GPU that torch can use. Use `--device cpu`.")
    return _shared(world_size, machine)


def _shared(world_size: int, machine: Machine) -> Choice:
    gpus, version = machine.gpus, ".".join(map(str, machine.nccl))
    shared = -(-world_size // gpus)
    which = f"one of {gpus} GPUs for each rank"
    if shared > 1:
        which = f"sharing {gpus} GPUs" if gpus > 1 else "sharing 1 GPU"
    why = "this torch has no nccl"
    if version:
        able = machine.nccl[:2] >= SHARES
        why = f"NCCL {version} {'did not start on it' if able else 'does not let ranks share a GPU'}"
    gloo = Choice(
        "cuda",
        "gloo",
        f"gloo on CUDA tensors, {which}: {why}, so what they send goes through the memory of the host",
        better="With NCCL 2.30 or newer, ranks that share a GPU talk over nccl: `pip install 'nvidia-nccl-cu13>=2.30'` "
        "(CUDA 12: nvidia-nccl-cu12) puts it in the place of an older one.",
        shared=shared,
    )
    if machine.nccl[:2] < SHARES:
        return gloo
    # From https://docs.nvidia.com/deeplearning/nccl, NCCL 2.30, environment variables. NVLS is for GPUs of one rank
    # each. The kernels of all ranks of a GPU wait for each other: they must fit on it at the same time.
    turns = Choice(
        "cuda",
        "nccl",
        f"nccl {version}, {which} in turns",
        better="CUDA MPS lets ranks that share a GPU compute side by side, and an all-reduce that waits does not take "
        "the GPU from the others: `nvidia-cuda-mps-control -d` in a shell of this machine, then a new kernel.",
        shared=shared,
        environment={
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MAX_CTAS": str(max(1, CTAS // shared)),
        },
        instead=replace(gloo, better=""),
    )
    mps = machine.mps
    if mps.running:
        return replace(turns, note=f"nccl {version}, {which} side by side, as CUDA MPS runs", better="")
    if mps.installed and machine.nodes == 1:
        note = f"nccl {version}, {which} side by side by a CUDA MPS of this world"
        return replace(turns, note=note, better="", start_mps=True, instead=turns)
    return turns


# --- the machine is asked from here on ---


def look(gpus: int | None = None, nodes: int = 1, *, mps: bool = True) -> Machine:
    """What this machine has; `gpus` of all `nodes` together, where there are several. Starts no CUDA here."""
    import torch

    count = torch.cuda.device_count() if gpus is None else gpus
    return Machine(count, nccl_version() if count else (), look_for_mps() if count and mps else Mps(), nodes)


def nccl_version() -> tuple[int, ...]:
    """The NCCL that this process has loaded, (2, 30, 7); empty if torch has none.

    `torch.cuda.nccl.version()` names the one that torch was built with, and another can have been installed since.
    """
    # imports stand in here, as `rankcell doctor` runs the text of this function in a process without rankcell
    import ctypes
    import os

    import torch

    if not torch.distributed.is_nccl_available():
        return ()
    try:
        said = ctypes.c_int()
        loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        if loaded.ncclGetVersion(ctypes.byref(said)) == 0 and said.value >= 20900:
            return said.value // 10_000, said.value // 100 % 100, said.value % 100
    except (OSError, AttributeError):  # it is part of torch's own library
        pass
    return tuple(n for n in torch.cuda.nccl.version() if isinstance(n, int))


def look_for_mps() -> Mps:
    """Whether CUDA's Multi-Process Service is installed, and whether a daemon answers."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return Mps()
    return Mps(installed=True, running=_ask(control, "get_server_list", dict(os.environ)))


# Ends the daemon when the notebook's end of its stdin is closed, in whatever way the notebook ends.
_KEEPER = """
nvidia-cuda-mps-control -d >/dev/null 2>&1 && echo started || echo failed
cat >/dev/null
echo quit -t 1 | nvidia-cuda-mps-control >/dev/null 2>&1
rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
"""


class MpsDaemon:
    """A CUDA MPS for one world, in a folder of its own: it is this user's, and ends with the world."""

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[str] | None = None
        self.environment: dict[str, str] = {}  # for the ranks, once it has started

    def start(self) -> str:
        """Start it; why it could not be started, or ""."""
        folder = tempfile.mkdtemp(prefix="rankcell-mps-")
        ours = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER],
            env={**os.environ, **ours},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal is for the notebook to hear
        )
        assert self._keeper.stdout is not None
        said = ""
        if system.wait_readable(self._keeper.stdout.fileno(), MPS_STARTS):
            said = self._keeper.stdout.readline().strip()
        control = shutil.which("nvidia-cuda-mps-control")
        if (
            said != "started"
            or control is None
            or not _ask(control, "get_server_list", {**os.environ, **ours})
        ):
            self.stop()
            return (
                "nvidia-cuda-mps-control -d did not start"
                if said != "started"
                else "CUDA MPS does not answer"
            )
        self.environment = ours
        return ""

    def stop(self) -> None:
        """End it. Safe to call twice."""
        self.environment = {}
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        for pipe in (keeper.stdin, keeper.stdout):
            if pipe is not None:
                pipe.close()
        try:
            keeper.wait(MPS_STARTS)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()


def _ask(control: str, what: str, environment: dict[str, str]) -> bool:
    """Whether the MPS daemon of this `environment` takes an order."""
    try:
        done = subprocess.run(
            [control],
            input=f"{what}\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=QUICK,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "Cannot find" not in done.stdout + done.stderr
