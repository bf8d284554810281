"""What machines can move per second, and the caches of this one by `lscpu`. The published numbers stand in
data/hardware.toml, each with its arithmetic, source and date. Rates are bytes per second, GB = 10^9 bytes: of a link in
ONE direction (the sum of both is `both_ways`), of a memory reads and writes together.
"""

import json
import re
import subprocess
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

EACH_WAY, READ_AND_WRITE = "each way", "reads and writes together"


class Source(NamedTuple):
    """Where a number comes from. `date` is the day it was published, or the day we read it."""

    name: str
    url: str
    date: str


class Speed(NamedTuple):
    """How many bytes per second something can move, and how we know.

    `bytes_per_s` is the rate in `direction`: one direction of a link ("each way"), or the reads and writes of a memory
    together. `arithmetic` says how the number follows from smaller ones; without it the source prints it.
    """

    name: str
    bytes_per_s: float
    source: Source
    direction: str = EACH_WAY
    arithmetic: str = ""
    note: str = ""

    @property
    def both_ways(self) -> float:
        """Bytes per second of both directions added: the number on the box of a link. A link alone has it."""
        if self.direction != EACH_WAY:
            raise ValueError(f"{self.name} counts {self.direction}: no second direction to add. Use `bytes_per_s`.")
        return 2 * self.bytes_per_s

    def seconds(self, nbytes: float) -> float:
        """Seconds that `nbytes` bytes take at this rate, in one direction, with nothing else in the way."""
        return nbytes / self.bytes_per_s


class GPU(NamedTuple):
    """One GPU product. Rates in bytes/s, sizes in bytes, `bf16_flops` dense (no 2:4 sparsity) per second.

    `network` is the port per GPU of NVIDIA's own server with it, one direction.
    """

    name: str
    memory_bytes: float
    memory: Speed
    nvlink: Speed
    pcie: Speed
    bf16_flops: float
    network: Speed | None = None


def _rate(arithmetic: str) -> float:
    """Bytes per second of "32 GT/s x 16 lanes x 128/130 / 8 bits"."""
    rate = 1.0
    for sign, number, over, giga in re.findall(r"(?:^| ([x/]) )([\d.]+)(?:/(\d+))?( G)?", arithmetic):
        factor = float(number) / float(over or 1) * (1e9 if giga else 1)
        rate = rate / factor if sign == "/" else rate * factor
    return rate


_FACTS = tomllib.loads(files(__package__).joinpath("data/hardware.toml").read_text("utf-8"))


def _speed(facts: Mapping[str, Any], direction: str = EACH_WAY) -> Speed:
    arithmetic = facts.get("arithmetic", "")
    rate = facts["gb_per_s"] * 1e9 if "gb_per_s" in facts else _rate(arithmetic)
    source = Source(*_FACTS["sources"][facts["source"]])
    return Speed(facts["name"], rate, source, direction, arithmetic, facts.get("note", ""))


def _table(name: str, direction: str = EACH_WAY) -> dict[str, Speed]:
    return {key: _speed(facts, direction) for key, facts in _FACTS[name].items()}


PCIE: Mapping[int, Speed] = {int(g): s for g, s in _table("pcie").items()}  # x16, by generation
NVLINK: Mapping[int, Speed] = {int(g): s for g, s in _table("nvlink").items()}  # per GPU, by generation
INFINIBAND: Mapping[str, Speed] = _table("infiniband")  # 4x
ETHERNET: Mapping[int, Speed] = {int(g): s for g, s in _table("ethernet").items()}  # by Gbit/s
ON_CHIP: Mapping[str, Speed] = _table("on_chip", READ_AND_WRITE)
HBM: Mapping[str, Speed] = _table("hbm", READ_AND_WRITE)
HOST_MEMORY = _table("host", READ_AND_WRITE)["EPYC 7003"]
GPUS: dict[str, GPU] = {}
for _name, _of in _FACTS["gpus"].items():
    _rest = NVLINK[_of["nvlink"]], PCIE[_of["pcie"]], _of["flops"], INFINIBAND.get(_of.get("network", ""))
    GPUS[_name] = GPU(_name, _of["memory_gb"] * 1e9, _speed(_of["memory"], READ_AND_WRITE), *_rest)
# What others measured, and the published rate beside it.
REPORTED: Mapping[str, tuple[Speed, Speed]] = {
    name: (speed, _table(_FACTS["reported"][name]["of"][0])[_FACTS["reported"][name]["of"][1]])
    for name, speed in _table("reported").items()
}


class Cache(NamedTuple):
    """One kind of cache: how people call it (L1d, L1i, L2, L3) and the bytes of each."""

    name: str
    nbytes: int


class Machine(NamedTuple):
    """What the operating system says about this machine."""

    caches: tuple[Cache, ...] = ()

    def cache(self, name: str) -> tuple[Cache, ...]:
        """The caches called `name`, for example "L2"; empty where there is none."""
        return tuple(c for c in self.caches if c.name == name)


def read_machine() -> Machine:
    """The caches of this machine, by `lscpu`; none where there is no `lscpu`, as on macOS."""
    try:
        said = subprocess.run(["lscpu", "-J", "-C", "-B"], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return Machine()
    return Machine(tuple(Cache(c["name"], int(c["one-size"])) for c in json.loads(said)["caches"]))
