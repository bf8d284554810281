"""On which device and over which backend a world talks, and why: pure functions of what the machine has.

    enough GPUs                  nccl, a GPU for each rank
    fewer, NCCL 2.30 or newer    nccl, ranks share GPUs round-robin; where CUDA MPS runs they compute side by side
    fewer, older NCCL            gloo on CUDA tensors, which go through the memory of the host; asked for only

Beside nccl, tensors on the CPU go over gloo. Several GPUs have not been tried (`notebooks/recorded`).
"""

import contextlib
import ctypes
import os
import subprocess
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import errors

SHARES = (2, 30)  # the first NCCL that lets ranks share a GPU
CTAS = 8  # of NCCL's kernels on one GPU, divided among its ranks: they must all fit at the same time
MEMORY = 0.9  # of a GPU, divided among its ranks: the rest is for their CUDA contexts
MPS_ANSWERS = 2.0  # seconds for an answer of the control program of CUDA MPS


class Machine(NamedTuple):
    """What decides: GPUs (of every node together), the version of NCCL (empty: torch has none), a running CUDA MPS."""

    gpus: int = 0
    nccl: tuple[int, ...] = ()
    mps: bool = False


@dataclass(frozen=True)
class Choice:
    """What a world talks over. `note` says why, to follow "4 ranks talk over"."""

    device: str
    backend: str
    note: str
    better: str = ""  # a sentence: how to get a better one
    shared: int = 1  # ranks on the fullest GPU
    environment: dict[str, str] = field(default_factory=dict)  # for the ranks

    @property
    def memory_fraction(self) -> float | None:
        """The part of a GPU's memory that one rank may take; None if it has the GPU to itself."""
        return MEMORY / self.shared if self.shared > 1 else None


def choose(world_size: int, device: str, machine: Machine) -> Choice:
    """What `world_size` ranks talk over on `device` ("auto", "cpu" or "cuda"). Raises ValueError: no such device, and
    WorldSizeError: cuda was asked for, and there is no GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r} does not exist. Choose cpu, cuda or auto.")
    gpus = machine.gpus
    if device == "cpu":
        return Choice("cpu", "gloo", "gloo on the CPU, as asked")
    if gpus >= world_size and machine.nccl:
        return Choice("cuda", "nccl", f"nccl, one of {gpus} GPUs for each rank")
    few = f"{gpus} GPUs are" if gpus > 1 else "1 GPU is"
    why = f"{few} too few for {world_size} ranks" if gpus < world_size else "this torch has no nccl"
    if device == "auto":
        if not gpus:
            return Choice("cpu", "gloo", "gloo on the CPU: no GPU here")
        better = "`--device cuda` lets the ranks share what GPUs there are."
        return Choice("cpu", "gloo", f"gloo on the CPU: {why}", better)
    if not gpus:
        raise errors.WorldSizeError("this machine has no GPU that torch can use. Use `--device cpu`.")
    shared, version = -(-world_size // gpus), ".".join(map(str, machine.nccl))
    if machine.nccl[:2] < SHARES:
        reason = f"NCCL {version} does not let ranks share a GPU" if version else "this torch has no nccl"
        return Choice(
            "cuda", "gloo", f"gloo on CUDA tensors, through the memory of the host: {reason}",
            "With NCCL 2.30 or newer, ranks that share a GPU talk over nccl: `pip install 'nvidia-nccl-cu13>=2.30'` "
            "(CUDA 12: nvidia-nccl-cu12) puts it in the place of an older one.",
            shared=shared,
        )  # fmt: skip
    # https://docs.nvidia.com/deeplearning/nccl, NCCL 2.30, environment variables. NVLS is for GPUs of one rank each.
    # The kernels of all ranks of a GPU wait for each other: they must fit on it together.
    note, ctas = f"nccl {version}, sharing {gpus} GPU{'s' * (gpus > 1)}", str(max(1, CTAS // shared))
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": ctas}
    if machine.mps:
        return Choice("cuda", "nccl", f"{note} side by side (CUDA MPS)", "", shared, environment)
    better = (
        "CUDA MPS lets ranks that share a GPU compute side by side, and an all-reduce that waits does not take "
        "the GPU from the others: `nvidia-cuda-mps-control -d` in a shell of this machine, then a new kernel."
    )
    return Choice("cuda", "nccl", f"{note} in turns", better, shared, environment)


def look(gpus: int | None = None, *, mps: bool = True) -> Machine:
    """What this machine has; `gpus` of all nodes together, where there are several. Starts no CUDA here."""
    import torch

    count = torch.cuda.device_count() if gpus is None else gpus
    return Machine(count, nccl_version(), mps and _mps_runs()) if count else Machine()


def nccl_version() -> tuple[int, ...]:
    """The NCCL that is loaded, (2, 30, 7), which may be newer than torch's own says; empty if torch has none."""
    import torch

    if not torch.distributed.is_nccl_available():
        return ()
    with contextlib.suppress(OSError, AttributeError):  # it is part of torch's own library
        said = ctypes.c_int()
        loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        if loaded.ncclGetVersion(ctypes.byref(said)) == 0 and said.value >= 20900:
            return said.value // 10_000, said.value // 100 % 100, said.value % 100
    return tuple(n for n in torch.cuda.nccl.version() if isinstance(n, int))


def _mps_runs() -> bool:
    """Whether a daemon of CUDA's Multi-Process Service answers this user."""
    ask: Any = {"input": "get_server_list\n", "capture_output": True, "text": True, "timeout": MPS_ANSWERS}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # on most machines there is no such program
        done = subprocess.run("nvidia-cuda-mps-control", check=False, **ask)
        return done.returncode == 0 and "Cannot find" not in done.stdout + done.stderr
    return False
