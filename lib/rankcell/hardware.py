"""What the machines of this course can move per second, and what the machine at hand looks like.

Published numbers first: memories, PCIe, NVLink, InfiniBand, Ethernet, each with its direction, generation,
lanes, arithmetic, source and date. Then the readers: cores, caches and NUMA nodes of this machine, and the
matrix of `nvidia-smi topo -m` where there is an NVIDIA GPU. It measures nothing and draws nothing: lessons
measure, `draw` draws.

All rates are bytes per second with GB = 10^9 bytes. A link's rate is the rate of ONE direction; the sum of
both, which data sheets like to print, is called `both_ways`. A memory's rate counts reads and writes
together.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

EACH_WAY = "each way"
READ_AND_WRITE = "reads and writes together"


@dataclass(frozen=True)
class Source:
    """Where a number comes from. `date` is the day it was published, or the day we read it."""

    name: str
    url: str
    date: str


@dataclass(frozen=True, repr=False)
class Speed:
    """How many bytes per second something can move, and how we know.

    `bytes_per_s` is the rate in `direction`: one direction of a link ("each way"), or the reads and writes of
    a memory together. `arithmetic` says how the number follows from smaller ones; without it the source
    prints it. `lanes` are the wires in parallel (pairs per direction for PCIe and InfiniBand, links for
    NVLink).
    """

    name: str
    bytes_per_s: float
    source: Source
    direction: str = EACH_WAY
    generation: str = ""
    lanes: int | None = None
    arithmetic: str = ""
    note: str = ""
    unit: str = "bytes/s"

    @property
    def both_ways(self) -> float:
        """Bytes per second of both directions added: the number on the box of a link. A link alone has it."""
        if self.direction != EACH_WAY:
            raise ValueError(
                f"{self.name} counts {self.direction}: no second direction to add. Use `bytes_per_s`."
            )
        return 2 * self.bytes_per_s

    def seconds(self, nbytes: float) -> float:
        """Seconds that `nbytes` bytes take at this rate, in one direction, with nothing else in the way."""
        return nbytes / self.bytes_per_s

    def __repr__(self) -> str:
        how = f" = {self.arithmetic}" if self.arithmetic else ""
        return f"{self.name}: {self.bytes_per_s / 1e9:.5g} GB/s {self.direction}{how}"


_NETWORK = Source(
    "ml-engineering, network",
    "https://github.com/stas00/ml-engineering/blob/744d01e/network/README.md",
    "read 2026-11-21",
)
_ACCELERATOR = Source(
    "ml-engineering, accelerators",
    "https://github.com/stas00/ml-engineering/blob/744d01e/compute/accelerator/README.md",
    "read 2026-11-21",
)
_SCALING_BOOK = Source(
    "How to Scale Your Model, GPUs",
    "https://jax-ml.github.io/scaling-book/gpus/",
    "2025-08-18",
)
_CHIPS = Source(
    "Chips and Cheese, measured on the PCIe card",
    "https://chipsandcheese.com/2023/07/02/nvidias-h100-funny-l2-and-tons-of-bandwidth/",
    "2023-07-02",
)
_BANKS = Source(
    "CUDA programming guide, shared memory",
    "https://docs.nvidia.com/cuda/cuda-programming-guide/02-basics/",
    "read 2026-11-21",
)
_H100_TABLE = Source(
    "AnandTech, table of three H100s",
    "https://www.anandtech.com/show/18780",
    "2023-03-21",
)
_GEN6 = Source(
    "G. Lockwood, PCIe Gen6",
    "https://glennklockwood.com/garden/PCIe-Gen6",
    "read 2026-11-21",
)
_MILAN = Source(
    "AnandTech, AMD EPYC 7003",
    "https://www.anandtech.com/show/16529",
    "2021-03-15",
)
_ETHERNET = Source("the rate is the name", "", "definition")


def pcie(generation: int, lanes: int = 16) -> Speed:
    """PCI Express `generation` with `lanes` lanes, one direction, after the encoding, from GT/s."""
    # Payload: 128 of 130 bits up to generation 5; later 242 of a flit of 256 bytes (8 for CRC, 6 for
    # correction).
    transfers = {3: 8, 4: 16, 5: 32, 6: 64, 7: 128}  # GT/s per lane, one bit each
    if generation not in transfers:
        raise ValueError(
            f"PCIe generation {generation} is not in the table. Choose {', '.join(map(str, transfers))}."
        )
    payload, total = (128, 130) if generation <= 5 else (242, 256)
    return Speed(
        f"PCIe {generation} x{lanes}",
        transfers[generation] * 1e9 * lanes * payload / total / 8,
        _NETWORK if generation <= 5 else _GEN6,
        generation=str(generation),
        lanes=lanes,
        arithmetic=f"{transfers[generation]} GT/s x {lanes} lanes x {payload}/{total} / 8 bits",
        note="newer than the servers of these GPUs" if generation >= 6 else "",
    )


def _nvlink(generation: int, lane_gb_s: float, lanes_per_link: int, links: int, gpu: str) -> Speed:
    return Speed(
        f"NVLink {generation}",
        lane_gb_s * 1e9 * lanes_per_link * links,
        _NETWORK,
        generation=str(generation),
        lanes=links,
        arithmetic=f"{links} links x {lanes_per_link} lanes x {lane_gb_s:g} GB/s",
        note=gpu,
    )


def infiniband(generation: str, lanes: int = 4) -> Speed:
    """InfiniBand `generation` ("EDR", "HDR", "NDR", "XDR") with `lanes` lanes, one direction, from Gbit/s."""
    gbit = {"EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}  # Gbit/s per lane
    if generation not in gbit:
        raise ValueError(f"InfiniBand {generation!r} is not in the table. Choose one of {', '.join(gbit)}.")
    return Speed(
        f"InfiniBand {generation} {lanes}x",
        gbit[generation] * 1e9 * lanes / 8,
        _NETWORK,
        generation=generation,
        lanes=lanes,
        arithmetic=f"{gbit[generation]} Gbit/s x {lanes} lanes / 8 bits",
    )


def ethernet(gbit_per_s: float) -> Speed:
    """Ethernet of `gbit_per_s` Gbit/s, one direction."""
    return Speed(
        f"Ethernet {gbit_per_s:g} GbE",
        gbit_per_s * 1e9 / 8,
        _ETHERNET,
        generation=f"{gbit_per_s:g} GbE",
        arithmetic=f"{gbit_per_s:g} Gbit/s / 8 bits",
    )


PCIE: Mapping[int, Speed] = {g: pcie(g) for g in (3, 4, 5, 6, 7)}
NVLINK: Mapping[int, Speed] = {
    1: _nvlink(1, 2.5, 8, 4, "P100"),
    2: _nvlink(2, 3.125, 8, 6, "V100"),
    3: _nvlink(3, 6.25, 4, 12, "A100"),
    4: _nvlink(4, 12.5, 2, 18, "H100, H200"),
    5: _nvlink(5, 25.0, 2, 18, "B200"),
}
INFINIBAND: Mapping[str, Speed] = {name: infiniband(name) for name in ("EDR", "HDR", "NDR", "XDR")}
ETHERNET: Mapping[float, Speed] = {g: ethernet(g) for g in (1, 10, 25, 100, 200, 400, 800)}


def memory(name: str, *, bus_bits: int, gbit_per_pin: float, source: Source, note: str = "") -> Speed:
    """A memory of `bus_bits` data pins with `gbit_per_pin` Gbit/s each, reads and writes together."""
    return Speed(
        name,
        bus_bits * gbit_per_pin * 1e9 / 8,
        source,
        direction=READ_AND_WRITE,
        lanes=bus_bits,
        arithmetic=f"{bus_bits} pins x {gbit_per_pin:g} Gbit/s / 8 bits",
        note=note,
    )


def _hbm(name: str, tb_s: float, source: Source, note: str = "") -> Speed:
    return Speed(name, tb_s * 1e12, source, direction=READ_AND_WRITE, note=note)


ON_CHIP: Mapping[str, Speed] = {
    # 32 banks of 32 bits per clock in each SM (CUDA guide); 132 SMs, top clock 1.98 GHz (How to Scale Your
    # Model)
    "H100 L1": Speed(
        "H100 L1 / shared memory",
        132 * 32 * 4 * 1.98e9,
        _BANKS,
        direction=READ_AND_WRITE,
        arithmetic="132 SMs x 32 banks x 4 bytes x 1.98 GHz",
        note="256 KiB in each SM",
    ),
    "H100 L2": Speed(
        "H100 L2",
        5.5e12,
        _CHIPS,
        direction=READ_AND_WRITE,
        arithmetic="measured; NVIDIA prints none",
        note="50 MB for all SMs",
    ),
}
HBM: Mapping[str, Speed] = {
    "H100 SXM": memory("HBM3, H100 SXM", bus_bits=5120, gbit_per_pin=5.23, source=_H100_TABLE),
    "H100 PCIe": memory("HBM2e, H100 PCIe", bus_bits=5120, gbit_per_pin=3.2, source=_H100_TABLE),
    "H100 NVL": memory(
        "HBM3, H100 NVL (one card)",
        bus_bits=6144,
        gbit_per_pin=5.1,
        source=_H100_TABLE,
        note="sold as a bridged pair: 2 x 3.9 = 7.8 TB/s is the pair",
    ),
}
HOST_MEMORY = memory(
    "DDR4, one EPYC 7003 socket",
    bus_bits=8 * 64,
    gbit_per_pin=3.2,
    source=_MILAN,
    note="8 channels of 64 bits",
)


@dataclass(frozen=True)
class GPU:
    """One GPU product. Rates in bytes/s, sizes in bytes, `bf16_flops` dense (no 2:4 sparsity) per second.

    `network` is the port per GPU of NVIDIA's own server with it, one direction. `year` is the year it was
    announced.
    """

    name: str
    year: int
    memory_bytes: float
    memory: Speed
    nvlink: Speed
    pcie: Speed
    bf16_flops: float
    network: Speed | None = None
    source: Source = _ACCELERATOR


# Years: V100 tweaktown.com/news/57488 (GTC 2017); A100 wikimili.com/en/NVLink (14 May 2020); H100
# tweaktown.com/news/85197 (22 Mar 2022); H200 geektopia.es (13 Nov 2023); B200 aiwiki.ai (18 Mar 2024).
GPUS: Mapping[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("V100 SXM2", 2017, 32e9, _hbm("HBM2, V100", 0.90, _SCALING_BOOK), NVLINK[2], PCIE[3], 125e12),
        GPU(
            "A100 SXM 80GB",
            2020,
            80e9,
            _hbm("HBM2e, A100 80GB", 2.04, _ACCELERATOR),
            NVLINK[3],
            PCIE[4],
            312e12,
            INFINIBAND["HDR"],  # a port per GPU: arXiv 2205.05198, section 6, 2022-05
        ),
        GPU(
            "H100 SXM",
            2022,
            80e9,
            _hbm("HBM3, H100 SXM", 3.35, _H100_TABLE),
            NVLINK[4],
            PCIE[5],
            989e12,
            INFINIBAND["NDR"],  # 8 x 400 Gbit/s for 8 H100: table of common node setups in _NETWORK
        ),
        GPU("H200 SXM", 2023, 141e9, _hbm("HBM3e, H200", 4.8, _ACCELERATOR), NVLINK[4], PCIE[5], 989e12),
        GPU("B200 SXM", 2024, 180e9, _hbm("HBM3e, B200", 8.0, _SCALING_BOOK), NVLINK[5], PCIE[5], 2250e12),
    )
}

# What others measured, to compare with the published rate beside it.
REPORTED: Mapping[str, tuple[Speed, Speed]] = {
    "host to H200": (Speed("host to H200", 55.4e9, _NETWORK, generation="PCIe 5", lanes=16), PCIE[5]),
    "H200 to H200": (
        Speed("H200 to H200", 396.4e9, _NETWORK, generation="NVLink 4", lanes=18),
        NVLINK[4],
    ),
    "A100 all-reduce": (
        Speed("all-reduce, 8 A100", 235e9, _NETWORK, generation="NVLink 3", lanes=12),
        NVLINK[3],
    ),
    "H200 all-reduce, NVLS": (
        Speed(
            "all-reduce, 8 H200, NVLS",
            482.26e9,
            _NETWORK,
            generation="NVLink 4",
            lanes=18,
            note="the switch adds: fewer bytes cross a link than the formula of bus bandwidth assumes",
        ),
        NVLINK[4],
    ),
}


@dataclass(frozen=True)
class PathKind:
    """What one code of the matrix means. `order` 0 is the device itself, larger is farther."""

    code: str
    meaning: str
    order: int


# The meanings follow the legend that `nvidia-smi topo -m` prints (driver 535 and newer), in our words.
PATHS: Mapping[str, PathKind] = {
    kind.code: kind
    for kind in (
        PathKind("X", "the device itself", 0),
        PathKind("NV#", "# NVLinks together, directly or through NVSwitch", 1),
        PathKind("PIX", "PCIe, at most one bridge (one switch)", 2),
        PathKind("PXB", "PCIe, several bridges, but not the host bridge", 3),
        PathKind("PHB", "PCIe and a host bridge, usually the CPU", 4),
        PathKind("NODE", "PCIe and the link between host bridges of one NUMA node", 5),
        PathKind("SYS", "PCIe and the link between NUMA nodes (between CPU sockets)", 6),
    )
}


def path_kind(code: str) -> PathKind:
    """What `code`, for example "NV18" or "PHB", means."""
    key = "NV#" if re.fullmatch(r"NV\d+", code) else code
    if key not in PATHS:
        raise ValueError(
            f"{code!r} is no path of `nvidia-smi topo -m`. It prints {', '.join(PATHS)}, a number for #."
        )
    return PATHS[key]


@dataclass(frozen=True, repr=False)
class Topology:
    """The matrix of `nvidia-smi topo -m`: `codes[i][j]` is the path from `devices[i]` to `devices[j]`.

    `cpus` and `numa` say, per GPU, which CPUs and which NUMA node are near it, as the tool prints them.
    """

    devices: tuple[str, ...]
    codes: tuple[tuple[str, ...], ...]
    cpus: Mapping[str, str] = field(default_factory=dict)
    numa: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The devices that are GPUs."""
        return tuple(d for d in self.devices if d.startswith("GPU"))

    @property
    def nics(self) -> tuple[str, ...]:
        """The devices that are network cards."""
        return tuple(d for d in self.devices if not d.startswith("GPU"))

    def path(self, a: str, b: str) -> str:
        """The code of the path from `a` to `b`, for example "NV18"."""
        for name in (a, b):
            if name not in self.devices:
                raise ValueError(f"{name!r} is not in this topology. It has {', '.join(self.devices)}.")
        return self.codes[self.devices.index(a)][self.devices.index(b)]

    def nvlinks(self, a: str, b: str) -> int:
        """How many NVLinks join `a` and `b`; 0 where the path is PCIe."""
        code = self.path(a, b)
        return int(code[2:]) if path_kind(code).code == "NV#" else 0

    def __repr__(self) -> str:
        rows = [("", *self.devices, "CPUs", "NUMA")]
        for name, codes in zip(self.devices, self.codes, strict=True):
            rows.append((name, *codes, self.cpus.get(name, ""), self.numa.get(name, "")))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return "\n".join(
            "  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def parse_topology(text: str) -> Topology:
    """The matrix in `text`, the output of `nvidia-smi topo -m`."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()  # the tool underlines its header
    start = next((k for k, line in enumerate(lines) if line.split()[:1] == ["GPU0"]), None)
    if start is None:
        raise ValueError(
            "No line starts with GPU0: this is not a matrix. Give the output of `nvidia-smi topo -m`."
        )
    devices = tuple(lines[start].split("CPU Affinity")[0].split())
    codes, cpus, numa = [], {}, {}
    for name, line in zip(devices, lines[start + 1 :], strict=False):
        first, *rest = line.split()
        if first != name or len(rest) < len(devices):
            raise ValueError(f"The row of {name} is missing or too short: {line.strip()!r}.")
        row = tuple(rest[: len(devices)])
        for code in row:
            path_kind(code)
        codes.append(row)
        after = rest[len(devices) :]
        if name.startswith("GPU") and after:
            cpus[name] = after[0]
            numa[name] = after[1] if len(after) > 1 else "N/A"
    if len(codes) != len(devices):
        raise ValueError(f"The matrix names {len(devices)} devices and has {len(codes)} rows.")
    return Topology(devices, tuple(codes), cpus, numa)


# Format examples, written by hand after the documented format of `nvidia-smi topo -m`. They are no
# measurement: nobody read them off a machine. They stand in where a reader has no GPU, and the tests parse
# them.
EXAMPLE_NVLINK_SERVER = """\
      GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7  NIC0  NIC1  CPU Affinity  NUMA Affinity GPU NUMA ID
GPU0  X     NV18  NV18  NV18  NV18  NV18  NV18  NV18  PIX   SYS   0-47  0     N/A
GPU1  NV18  X     NV18  NV18  NV18  NV18  NV18  NV18  PXB   SYS   0-47  0     N/A
GPU2  NV18  NV18  X     NV18  NV18  NV18  NV18  NV18  NODE  SYS   0-47  0     N/A
GPU3  NV18  NV18  NV18  X     NV18  NV18  NV18  NV18  NODE  SYS   0-47  0     N/A
GPU4  NV18  NV18  NV18  NV18  X     NV18  NV18  NV18  SYS   PIX   48-95 1     N/A
GPU5  NV18  NV18  NV18  NV18  NV18  X     NV18  NV18  SYS   PXB   48-95 1     N/A
GPU6  NV18  NV18  NV18  NV18  NV18  NV18  X     NV18  SYS   NODE  48-95 1     N/A
GPU7  NV18  NV18  NV18  NV18  NV18  NV18  NV18  X     SYS   NODE  48-95 1     N/A
NIC0  PIX   PXB   NODE  NODE  SYS   SYS   SYS   SYS   X     SYS
NIC1  SYS   SYS   SYS   SYS   PIX   PXB   NODE  NODE  SYS   X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
EXAMPLE_PCIE_SERVER = """\
      GPU0  GPU1  GPU2  GPU3  NIC0  CPU Affinity  NUMA Affinity
GPU0  X     PXB   SYS   SYS   PIX   0-15  0
GPU1  PXB   X     SYS   SYS   PXB   0-15  0
GPU2  SYS   SYS   X     PHB   SYS   16-31 1
GPU3  SYS   SYS   PHB   X     SYS   16-31 1
NIC0  PIX   PXB   SYS   SYS   X

NIC Legend:

  NIC0: mlx5_0
"""


@dataclass(frozen=True)
class Cache:
    """One cache: its level, what it holds ("Data", "Instruction", "Unified"), its bytes, the CPUs that share
    it.

    `cpus` is empty where the system does not say who shares it.
    """

    level: int
    kind: str
    nbytes: int
    cpus: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """How people call it: L1d, L1i, L2, L3."""
        return f"L{self.level}" + {"Data": "d", "Instruction": "i"}.get(self.kind, "")


@dataclass(frozen=True)
class NumaNode:
    """Some CPUs and the memory that is near them, in bytes (None where unknown)."""

    number: int
    cpus: tuple[int, ...]
    nbytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """What the operating system says about this machine. CPU numbers are hardware threads.

    `cores` lists the threads of each core. `usable` is how many threads this process may run on. `missing`
    says, in sentences, what could not be read here.
    """

    cpu_name: str
    cores: tuple[tuple[int, ...], ...]
    caches: tuple[Cache, ...]
    numa: tuple[NumaNode, ...]
    memory_bytes: int | None
    usable: int | None = None
    virtual: bool = False
    missing: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """How many hardware threads the cores have together."""
        return sum(len(core) for core in self.cores)

    def cache(self, name: str) -> tuple[Cache, ...]:
        """All caches called `name`, for example "L2"; empty where there is none."""
        return tuple(c for c in self.caches if c.name == name)


def _text(path: Path) -> str | None:
    """The content of a file of /sys or /proc, None where there is none. The one guarded place."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _output(*command: str) -> str | None:
    """What a tool of the system prints; None where the tool is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPU numbers in a list such as "0-3,8"."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _parse_size(text: str) -> int:
    """Bytes of a size such as "32K" as /sys prints it."""
    factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1)
    return int(text.rstrip("KMG")) * factor


def read_machine(root: str | Path = "/") -> Machine:
    """Cores, caches, NUMA nodes and memory of this machine, as its operating system states them.

    Linux is read from /sys and /proc under `root`; macOS is asked with `sysctl`. What a system does not say
    is listed in `missing` and never guessed.
    """
    if sys.platform == "darwin" and Path(root) == Path("/"):
        return _from_sysctl(lambda name: _output("sysctl", "-n", name))
    return _from_files(Path(root))


def _from_files(root: Path) -> Machine:
    system = root / "sys/devices/system"
    missing: list[str] = []
    online = _text(system / "cpu/online")
    cpus = parse_cpus(online) if online else tuple(range(os.cpu_count() or 1))
    cores: dict[tuple[int, ...], None] = {}
    caches: dict[Cache, None] = {}
    for cpu in cpus:
        folder = system / f"cpu/cpu{cpu}"
        siblings = _text(folder / "topology/thread_siblings_list")
        cores[tuple(c for c in parse_cpus(siblings) if c in cpus) if siblings else (cpu,)] = None
        for index in sorted(folder.glob("cache/index*")):
            level, kind, size, shared = (
                _text(index / name) for name in ("level", "type", "size", "shared_cpu_list")
            )
            if level and kind and size:
                caches[Cache(int(level), kind, _parse_size(size), parse_cpus(shared or ""))] = None
    if not online:
        missing.append("which threads share a core is not available here")
    if not caches:
        missing.append("cache sizes are not available here")
    numa = tuple(
        NumaNode(
            int(folder.name[4:]),
            parse_cpus(_text(folder / "cpulist") or ""),
            _total(_text(folder / "meminfo")),
        )
        for folder in sorted(system.glob("node/node[0-9]*"), key=lambda f: int(f.name[4:]))
    )
    if not numa:
        missing.append("NUMA nodes are not available here")
    memory_bytes = _total(_text(root / "proc/meminfo"))
    if memory_bytes is None:
        missing.append("the size of the memory is not available here")
    info = _text(root / "proc/cpuinfo") or ""
    name = re.search(r"^model name\s*:\s*(.+)$", info, flags=re.M)
    usable = len(os.sched_getaffinity(0)) if root == Path("/") and hasattr(os, "sched_getaffinity") else None
    return Machine(
        name[1].strip() if name else "not named by this system",
        tuple(cores),
        tuple(sorted(caches, key=lambda c: (c.level, c.kind, c.cpus))),
        numa,
        memory_bytes,
        usable,
        bool(re.search(r"^flags\s*:.*\bhypervisor\b", info, flags=re.M)),
        tuple(missing),
    )


def _total(meminfo: str | None) -> int | None:
    found = re.search(r"MemTotal:\s+(\d+) kB", meminfo or "")
    return int(found[1]) * 1024 if found else None


def _from_sysctl(ask: Callable[[str], str | None]) -> Machine:
    def number(name: str) -> int | None:
        answer = (ask(name) or "").strip()
        return int(answer) if answer.isdigit() else None

    n_threads = number("hw.logicalcpu") or os.cpu_count() or 1
    n_cores = number("hw.physicalcpu") or n_threads
    per_core = max(1, n_threads // n_cores)
    sizes = (("Data", 1, "hw.l1dcachesize"), ("Instruction", 1, "hw.l1icachesize"))
    sizes += (("Unified", 2, "hw.l2cachesize"), ("Unified", 3, "hw.l3cachesize"))
    caches = tuple(Cache(level, kind, nbytes) for kind, level, name in sizes if (nbytes := number(name)))
    missing = ["which cores share a cache is not available here", "NUMA nodes are not available here"]
    if not caches:
        missing.append("cache sizes are not available here")
    if (memory_bytes := number("hw.memsize")) is None:
        missing.append("the size of the memory is not available here")
    return Machine(
        (ask("machdep.cpu.brand_string") or "").strip() or "not named by this system",
        tuple(tuple(range(k * per_core, (k + 1) * per_core)) for k in range(n_cores)),
        caches,
        (),
        memory_bytes,
        missing=tuple(missing),
    )


def read_topology() -> Topology | None:
    """The matrix of `nvidia-smi topo -m` on this machine; None where there is no NVIDIA GPU."""
    text = _output("nvidia-smi", "topo", "-m")
    return parse_topology(text) if text and "GPU0" in text else None
