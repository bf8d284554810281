"""Snapshots from which a training that was stopped goes on exactly: the same bits as if it had never stopped. Global
rank 0 writes one file (model, optimizer, scheduler, sampler, step, the random state of every rank) under a new name
that then takes the place of the old one; all nodes must see it. Models that are sharded over ranks (FSDP) are not
covered: see torch.distributed.checkpoint. `watching` judges how somebody else's `save` treats the old file.
"""

import contextlib
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


class Sampler(DistributedSampler):
    """A `DistributedSampler` that can go on in the middle of an epoch.

    Count what was trained on: `sampler.seen += len(batch)`. The next iterator begins after `seen` of this
    rank's samples. (The sampler cannot count itself: a loader with workers asks for samples ahead of time.)
    """

    seen = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` from its first sample, unless it is the one that is under way."""
        if epoch != self.epoch:
            self.seen = 0
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[self.seen :])

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many samples of it all ranks together were trained on."""
        return {"epoch": self.epoch, "seen": self.seen * self.num_replicas}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to where `state_dict` was said, also on another number of ranks: samples are dealt like cards,
        so the first ones of all ranks are the first ones of the epoch.
        """
        self.epoch, self.seen = state_dict["epoch"], state_dict["seen"] // self.num_replicas


def save(path: str | Path, step: int, **parts: Any) -> None:
    """Keep `step` and the state of `parts` (`model=model, optimizer=optimizer, ...`) at `path`.

    All ranks of the default group must call it; on return the file is there for all of them. Raises OSError on every
    rank when rank 0 could not write.
    """
    together = dist.is_initialized()
    randoms: list[Any] = [None] * dist.get_world_size() if together else [_random_state()]
    if together:
        dist.all_gather_object(randoms, _random_state())
    trouble: list[str | None] = [None]
    if not together or dist.get_rank() == 0:
        states = {name: _unwrapped(part).state_dict() for name, part in parts.items()}
        new = Path(f"{path}.new")
        try:
            with new.open("wb") as file:
                torch.save({"step": step, "parts": states, "random": randoms}, file)
                file.flush()
                os.fsync(file.fileno())  # on the disk before it has the name
            new.replace(path)
        except OSError as error:
            trouble = [str(error)]
    if together:
        dist.broadcast_object_list(trouble, src=0)  # nobody goes on before the file is there
    if trouble[0] is not None:
        raise OSError(f"The snapshot was not saved: {trouble[0]}")


def load(path: str | Path, **parts: Any) -> int:
    """The step of the snapshot at `path`, whose states `parts` have then; 0 where there is no snapshot.

    In the middle of an epoch give the `DataLoader` a generator of its own (`generator=torch.Generator()`):
    else each iterator draws its seed from the rank's random state, and the resumed training makes one more.
    What loader workers draw themselves is not covered. With another number of ranks than saved it, no rank's
    random state is touched: the training goes on, but not to the same bits. Raises KeyError: it lacks one of `parts`.
    """
    if not Path(path).exists():
        return 0
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    states = snapshot["parts"]
    if missing := parts.keys() - states.keys():
        raise KeyError(f"The snapshot holds {', '.join(states)}, but not {', '.join(sorted(missing))}.")
    for name, part in parts.items():
        _unwrapped(part).load_state_dict(states[name])
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if len(snapshot["random"]) == world_size:
        _set_random_state(snapshot["random"][rank])
    return snapshot["step"]


@dataclass(frozen=True)
class SavesSeen:
    """What `watching` saw of the file at its path, on this rank.

    `writes` has an entry for each file that `torch.save` wrote: whether the one at the path was as before when it was
    done. `gaps` names the calls that left no file where there had been one, such as "os.remove".
    """

    writes: list[bool] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watching(path: str | Path, seconds: float = 0.3) -> Iterator[SavesSeen]:
    """Watch what this rank does to the file at `path`, and see it in what comes back.

    Renaming takes `seconds` more, so that a rank that does not wait for the new file meets the old one.
    """
    path, seen, save_file = Path(path), SavesSeen(), torch.save

    def content() -> bytes | None:
        return path.read_bytes() if path.exists() else None

    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        before = content()
        save_file(obj, f, *args, **kwargs)
        if not isinstance(f, io.BytesIO):  # a tensor on its way to another rank, not to the disk
            seen.writes.append(content() == before)

    def looked(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        before = path.exists()
        if name in ("rename", "replace"):
            time.sleep(seconds)
        call(*args, **kwargs)
        if before and not path.exists():
            seen.gaps.append(f"os.{name}")

    names = ("remove", "unlink", "rename", "replace")
    calls: dict[str, Any] = {name: partial(looked, name, getattr(os, name)) for name in names}
    with mock.patch("torch.save", saved), mock.patch.multiple(os, **calls):
        yield seen


def _unwrapped(part: Any) -> Any:
    """The module inside a DDP wrapper, so that one process can read the snapshot too."""
    inner = getattr(part, "module", None)
    return inner if isinstance(inner, torch.nn.Module) else part


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    of_numpy: Any = numpy.random.get_state()
    name, keys, *rest = of_numpy
    state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
