"""What a script made from a notebook needs in place of rankcell. Copied into the script as it stands here.

Joins the process group that torchrun or srun started the process for, and prints what the cells gave, by
rank. Imports nothing of ours. All names begin with an underscore, so that none hides one of the notebook's.
"""

import argparse as _argparse
import contextlib as _contextlib
import os as _os
import subprocess as _subprocess
import sys as _sys
import tempfile as _tempfile
from collections.abc import Iterator as _Iterator
from typing import Any as _Any

import torch
import torch.distributed as dist

for _new, _old in (  # names since torch 2.13, and those before
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
):
    if not hasattr(dist, _new):
        setattr(dist, _new, getattr(dist, _old))


def _join(world_size: int, *, cpu: bool = False) -> tuple[int, int, torch.device]:
    """Rank, world size and device of this process, once all ranks have met."""
    environment = _os.environ
    if "RANK" not in environment and "SLURM_PROCID" in environment:  # started by srun; torchrun sets them all
        environment["RANK"] = environment["SLURM_PROCID"]
        environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
        environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
        nodes = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
        first = _subprocess.run(nodes, capture_output=True, text=True, check=True).stdout.split()[0]
        environment.setdefault("MASTER_ADDR", first)
        environment.setdefault("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 10000))
    started = int(environment.get("WORLD_SIZE", "1"))
    if "RANK" not in environment or started != world_size:
        _sys.exit(
            f"These cells ran on {world_size} ranks in the notebook; this is {started}. Start them with\n"
            f"  torchrun --standalone --nproc-per-node={world_size} {_sys.argv[0]}"
        )
    _sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)  # as in the notebook: the sums come out the same
    local_rank, gpus = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    ranks_here = int(
        environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_NTASKS_PER_NODE") or world_size
    )
    if not cpu and gpus and (gpus >= ranks_here or "SLURM_GPUS_PER_TASK" in environment):
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)  # before the group is joined
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    if int(environment.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        # what one rank writes and others read must lie where all nodes see it
        _tempfile.tempdir = environment.get("SLURM_SUBMIT_DIR", _os.getcwd())  # noqa: PTH109
    return dist.get_rank(), dist.get_world_size(), device


class _Results:
    """What the cells gave, by rank: printed by rank 0, and kept for `--save`."""

    def __init__(self) -> None:
        parser = _argparse.ArgumentParser(description="The rank cells of a notebook, as one program.")
        parser.add_argument("--save", metavar="FILE", help="keep all values there, for torch.load")
        self.path = parser.parse_args().save
        self.cells: dict[str, dict[str, list[_Any]]] = {}

    def show(self, cell: str, ranks: tuple[int, ...] | None = None, **named: _Any) -> None:
        """Print what stands under `named` on the ranks that ran the cell. All ranks must call it."""
        everywhere: list[_Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, {name: _plain(value) for name, value in named.items()})
        if dist.get_rank():
            return
        ran = range(len(everywhere)) if ranks is None else ranks
        found = {name: [everywhere[r][name] for r in ran] for name in named}
        self.cells[cell] = found
        for name, values in found.items():
            if name == "value" and all(value is None for value in values):
                continue
            print(cell if name == "value" else f"{cell}, {name}")
            texts = [text if len(text) < 500 else f"{text[:500]} ..." for text in map(repr, values)]
            if len(texts) > 1 and len(set(texts)) == 1:
                print(f"  all {len(texts)} ranks: {texts[0]}")
            else:
                print(*(f"  rank {r}: {text}" for r, text in zip(ran, texts, strict=True)), sep="\n")

    def leave(self) -> None:
        """Save the values if asked to, wait for all ranks, and leave the process group."""
        if self.path and dist.get_rank() == 0:
            torch.save(self.cells, self.path)
        dist.barrier()
        dist.destroy_process_group()


def _plain(value: _Any) -> _Any:
    """`value` with its tensors on the CPU; what only this process understands as text."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v) for v in value) if type(value) in (list, tuple) else repr(value)
    if type(value) is dict:
        return {
            k if isinstance(k, (str, int, float, tuple)) else repr(k): _plain(v) for k, v in value.items()
        }
    return value if value is None or isinstance(value, (bool, int, float, complex, str)) else repr(value)


def _pull(value: _Any) -> list[_Any]:
    """`value` of every rank in a list, as `--pull` gives it to the notebook."""
    values: list[_Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@_contextlib.contextmanager
def _as_notebook() -> _Iterator[None]:
    """Random numbers of the notebook's own process: what it makes is the same on every rank."""
    mine = torch.get_rng_state()
    torch.set_rng_state(_notebook_random[0])
    yield
    _notebook_random[0] = torch.get_rng_state()
    torch.set_rng_state(mine)


_first_random = torch.get_rng_state()
_notebook_random = [_first_random]


@_contextlib.contextmanager
def _span(name: str) -> _Iterator[None]:
    """In the notebook this records the time spent inside; here it does nothing."""
    yield
