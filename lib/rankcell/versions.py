"""Which torch the course was run on, and the two names that the older of them lack.

torch 2.13 gave `all_gather_into_tensor` and `reduce_scatter_tensor` the names `all_gather_single` and
`reduce_scatter_single`, which the lessons use. Nothing else of torch is changed here.
"""

import re
from typing import Any

OLDEST, NEWEST = (2, 11), (2, 15)
RENAMED = {  # the name since 2.13: the one before
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def number(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cu130"; (0, 0) if it says nothing of the kind."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def beyond(version: str) -> str:
    """A sentence if the course was not run on this `version` of torch, else ""."""
    known = f"{_text(OLDEST)} to {_text(NEWEST)}"
    if number(version) > NEWEST:
        return (
            f"torch {version} is newer than those on which the course was tried, {known}. It goes on; should something "
            f"look wrong, try `pip install torch=={_text(NEWEST)}.*`."
        )
    if number(version) < OLDEST:
        return f"torch {version} is older than those on which the course was tried, {known}. It goes on."
    return ""


def complete(dist: Any) -> None:
    """Give `torch.distributed` the names of 2.13 where it lacks them."""
    for new, old in RENAMED.items():
        if not hasattr(dist, new):
            setattr(dist, new, getattr(dist, old))


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
