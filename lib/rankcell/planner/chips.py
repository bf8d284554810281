"""The GPUs a plan can be made for: peaks by number format, memory, and the two kinds of link around them.

Rates come from `rankcell.hardware` where it has them. A GPU stands in a domain of `node` GPUs joined by NVLink
(or Infinity Fabric); between domains each has a network port of its own. All rates are bytes per second of ONE
direction, all peaks dense.
"""

import difflib
import re
from dataclasses import dataclass

from .. import hardware

FORMATS = {"bf16": "bf16", "fp16": "bf16", "fp32": "tf32", "tf32": "tf32", "fp8": "fp8", "mxfp8": "fp8",
           "fp4": "fp4", "nvfp4": "fp4", "mxfp4": "fp4"}  # fmt: skip


@dataclass(frozen=True)
class Chip:
    """One GPU: `peaks` in FLOP/s by format, `memory_bytes`, `hbm` in bytes/s, link rates in bytes/s.

    `bus` is the bus bandwidth that long collectives inside a domain reach, measured where anybody published it,
    else nine tenths of the link's rate. `matmul` is the share of the bf16 peak that the best matrix product
    reached in a public test, and `sustained` the share of the peak that a lower power limit leaves. `alpha` and
    `alpha_across` are the seconds that each step of a ring takes besides its bytes, inside a domain and between:
    64 MiB on 8 H100 take 324 us where their 480 GB/s would take 245 us, 80 us over 14 steps; 256 MiB on 32 B200
    take 2.27 ms where 382 GB/s would take 1.36 ms, 0.9 ms over 62 steps (dgxc-benchmarking v25.10.02, nccl;
    ml-engineering@744d01e, network).
    """

    name: str
    family: str
    peaks: dict[str, float]
    memory_bytes: float
    hbm: float
    bus: float
    network: float
    node: int = 8
    matmul: float = 0.78
    sustained: float = 1.0
    alpha: float = 5e-6
    alpha_across: float = 15e-6

    def peak(self, number_format: str) -> float:
        """FLOP/s of dense matrix products; the next wider format that the GPU has, where it lacks this one."""
        for name in {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16")}.get(
            number_format, (number_format,)
        ):
            if name in self.peaks:
                return self.peaks[name] * self.sustained
        return self.peaks["bf16"] / 2 * self.sustained  # TF32 runs at half of the rate of bf16


_V100, _A100, _H100 = (hardware.GPUS[n] for n in ("V100 SXM2", "A100 SXM 80GB", "H100 SXM"))
_H200, _B200 = (hardware.GPUS[n] for n in ("H200 SXM", "B200 SXM"))
_HDR, _NDR, _XDR = (hardware.INFINIBAND[n].bytes_per_s for n in ("HDR", "NDR", "XDR"))


# Bus bandwidth of an all-reduce inside a node, bytes/s, longest message: ml-engineering@744d01e, network (A100,
# H200 with in-switch sums, B200), dgxc-benchmarking v25.10.02 (H100), bigscience experiments/bandwidth (V100).
BUS = {
    "V100": 124e9,
    "A100": 235e9,
    "H100": 480e9,
    "H200": 482e9,
    "B200": 846e9,
    "B300": 846e9,
    "GB200": 846e9,
}


def _chip(gpu: hardware.GPU, name: str, memory: float, *, fp8: float = 0, fp4: float = 0, **more) -> Chip:
    peaks = {"bf16": gpu.bf16_flops} | ({"fp8": fp8} if fp8 else {}) | ({"fp4": fp4} if fp4 else {})
    filled = {
        "hbm": gpu.memory.bytes_per_s,
        "network": gpu.network.bytes_per_s if gpu.network else _NDR,
        "family": name.split("-")[0],
        "bus": BUS.get(name.split("-")[0], 0.9 * gpu.nvlink.bytes_per_s),
        **more,
    }
    return Chip(name, peaks=peaks, memory_bytes=memory, **filled)


# What a process can allocate is 2^30-based: an "80 GB" card has 80 x 2^30 bytes less about 0.6 GB.
# The best matrix product (MAMF) over the peak, the GPUs from Blackwell on, and AMD's: ml-engineering@744d01e,
# compute/accelerator. GB200: 2450 and 4900 TFLOP/s as NVIDIA's recipes use; NVLink domain 72.
_GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        _chip(_V100, "V100-16", 16 * _GIB, matmul=0.87, network=hardware.INFINIBAND["EDR"].bytes_per_s / 8),
        _chip(_V100, "V100-32", 32 * _GIB, network=hardware.INFINIBAND["EDR"].bytes_per_s / 8),
        _chip(_A100, "A100-40", 40 * _GIB, hbm=1.555e12, network=_HDR, matmul=0.87),
        _chip(_A100, "A100-80", 80 * _GIB, network=_HDR, matmul=0.87),
        _chip(_H100, "H100-80", 80 * _GIB, fp8=1979e12, matmul=0.80),
        _chip(_H100, "H100-96", 96 * _GIB, fp8=1979e12, hbm=2.4e12, matmul=0.80, sustained=0.73, family="H100"),
        _chip(_H100, "H100-94", 94 * _GIB, fp8=1979e12, hbm=3.9e12, matmul=0.80, family="H100"),
        _chip(_H200, "H200", 141e9, fp8=1979e12, matmul=0.80),
        _chip(_B200, "B200", 180 * _GIB, fp8=4500e12, fp4=9000e12, matmul=0.776),
        _chip(_B200, "B300", 270 * _GIB, fp8=4500e12, fp4=13500e12, matmul=0.776, network=_XDR),
        Chip("GB200", "GB200", {"bf16": 2450e12, "fp8": 4900e12, "fp4": 9800e12}, 186 * _GIB, 8e12,
             BUS["GB200"], _NDR, node=72, matmul=0.744),
        Chip("GB300", "GB300", {"bf16": 2450e12, "fp8": 4900e12, "fp4": 14700e12}, 277 * _GIB, 8e12,
             BUS["GB200"], _XDR, node=72, matmul=0.744),
        Chip("MI300X", "MI300X", {"bf16": 1307e12, "fp8": 2614e12}, 192e9, 5.3e12, 350e9, _NDR, matmul=0.54),
        Chip("MI325X", "MI325X", {"bf16": 1307e12, "fp8": 2614e12}, 256e9, 6.0e12, 350e9, _NDR, matmul=0.54),
        Chip("MI350X", "MI350X", {"bf16": 2300e12, "fp8": 4600e12, "fp4": 9200e12}, 288e9, 8e12, 400e9,
             _NDR, matmul=0.6),
        Chip("MI355X", "MI355X", {"bf16": 2500e12, "fp8": 5000e12, "fp4": 10000e12}, 288e9, 8e12, 400e9,
             _NDR, matmul=0.6),
    )
}  # fmt: skip
_ALIASES = {"v100": "V100-32", "a100": "A100-80", "h100": "H100-80", "h100-nvl": "H100-94"}


def find(name: str) -> Chip:
    """The GPU called `name`: "h100", "H100 SXM 80GB", "A100-40". Raises ValueError with the nearest names."""
    text = re.sub(r"nvidia|amd|instinct|tesla|dgx|hgx|sxm\d?|hbm\d?e?|pcie", " ", name.lower())
    text = re.sub(r"(\d)\s*gi?b\b", r"\1", text)
    text = re.sub(r"[^a-z0-9]+", "-", text).strip("-")
    text = re.sub(r"(?<=-96)-.*500w?$|-500w$", lambda m: "" if "-96" in text else "-96", text)
    known = {key.lower(): chip for key, chip in CHIPS.items()}
    known |= {alias: CHIPS[full] for alias, full in _ALIASES.items()}
    if text in known:
        return known[text]
    family, *rest = text.split("-")
    sizes = [key for key in known if key.split("-")[0] == family]
    if fits := [key for key in sizes if any(r == key.split("-")[-1] for r in rest)]:
        return known[fits[0]]
    if sizes:
        return known.get(family, known[sizes[0]])
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.2) or list(known)[:3]
    raise ValueError(
        f"There is no GPU called {name!r} here. The nearest are {', '.join(known[n].name for n in near)}; "
        f"there are {', '.join(CHIPS)}."
    )


def number_format(name: str) -> str:
    """The format in which `name` multiplies matrices. Raises ValueError if it is unknown."""
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    text = (
        text.replace("bfloat16", "bf16")
        .replace("float16", "fp16")
        .replace("float8", "fp8")
        .removeprefix("amp")
    )
    for key in sorted(FORMATS, key=len, reverse=True):
        if key in text:
            return FORMATS[key]
    raise ValueError(f"There is no number format {name!r} here. There are {', '.join(FORMATS)}.")
