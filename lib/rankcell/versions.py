"""Which torch the course was run on, and the two names of torch 2.13, which the lessons use and older ones lack."""

import re
from typing import Any

OLDEST, NEWEST = (2, 11), (2, 15)


def number(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cu130"; (0, 0) if it says nothing of the kind."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def untried(version: str) -> str:
    """A sentence if the course was not run on this `version` of torch, else ""."""
    if OLDEST <= number(version) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    how = f"It goes on; should something look wrong, try `pip install torch=={newest}.*`."
    return f"torch {version} is none of those on which the course was tried, {oldest} to {newest}. {how}"


def complete(dist: Any) -> None:
    """Give `torch.distributed` the names of 2.13 where it lacks them."""
    if not hasattr(dist, "all_gather_single"):
        dist.all_gather_single, dist.reduce_scatter_single = (dist.all_gather_into_tensor, dist.reduce_scatter_tensor)
