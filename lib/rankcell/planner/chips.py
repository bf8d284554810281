"""The GPUs a plan can be made for, from chips.csv: peaks (dense) by number format, memory, and two kinds of link. A GPU
stands in a domain of `node` GPUs joined by NVLink (or Infinity Fabric); between domains each has a network port of its
own. All rates are bytes per second of ONE direction.
"""

from dataclasses import dataclass

from .shapes import look_up, table


@dataclass(frozen=True)
class Chip:
    """One GPU: `peaks` in FLOP/s by format, `memory_bytes`, `hbm` in bytes/s, link rates in bytes/s.

    `bus` is the bus bandwidth that long all-reduces inside a domain reach, measured where anybody published it,
    else nine tenths of the link's rate. `ring` is that of all other collectives, in which no switch helps. `matmul`
    is the share of the bf16 peak that the best matrix product reached in a public test, and `sustained` the share of
    the peak that a lower power limit leaves. `alpha` and `alpha_across` are the seconds that each step of a ring takes
    besides its bytes, inside a domain and between, as 64 MiB on 8 H100 and 256 MiB on 32 B200 have them
    (dgxc-benchmarking v25.10.02; ml-engineering@744d01e, network).
    """

    name: str
    family: str
    peaks: dict[str, float]
    memory_bytes: float
    hbm: float
    bus: float
    ring: float
    network: float
    node: int = 8
    matmul: float = 0.78
    sustained: float = 1.0
    alpha: float = 5e-6
    alpha_across: float = 15e-6

    def peak(self, number_format: str) -> float:
        """FLOP/s of dense matrix products; the next wider format that the GPU has, where it lacks this one."""
        for name in {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16")}.get(number_format, (number_format,)):
            if name in self.peaks:
                return self.peaks[name] * self.sustained
        return self.peaks["bf16"] / 2 * self.sustained  # TF32 runs at half of the rate of bf16


def _chip(name: str, family: str, memory: str, node: str, **numbers: str) -> Chip:
    peaks = {kind: float(rate) for kind in ("bf16", "fp8", "fp4") if (rate := numbers.pop(kind))}
    size, _, unit = memory.partition(" ")
    nbytes = float(size) * {"GiB": 2**30, "GB": 1e9}[unit]
    return Chip(name, family, peaks, nbytes, node=int(node), **{k: float(n) for k, n in numbers.items()})


CHIPS = {row["name"]: _chip(**row) for row in table("chips.csv")}
_ALIASES = {"v100": "V100-32", "a100": "A100-80", "h100": "H100-80"}


def find(name: str) -> Chip:
    """The GPU called `name`: "h100", "A100-40". Raises ValueError with the nearest names if it is unknown."""
    return look_up(_ALIASES.get(name.lower(), name), CHIPS, "GPU")
