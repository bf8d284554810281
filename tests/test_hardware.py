"""The facts follow from their parts and agree with what is published; the readers parse and never guess."""

import json

import pytest

from rankcell import hardware as hw

TABLES = (hw.PCIE, hw.NVLINK, hw.INFINIBAND, hw.ETHERNET, hw.ON_CHIP, hw.HBM)
ALL_SPEEDS = [s for table in TABLES for s in table.values()] + [gpu.memory for gpu in hw.GPUS.values()]
ALL_SPEEDS += [hw.HOST_MEMORY, *(s for pair in hw.REPORTED.values() for s in pair)]
# GB/s each way: https://github.com/stas00/ml-engineering/blob/744d01e/network/README.md, tables PCIe and
# NVLink (its 31 is 31.5 cut off), Ethernet by its name; the memories: AnandTech 18780 and 16529, and Chips and Cheese
PUBLISHED = {
    3: 15.75, 4: 31.5, 5: 63, 6: 121, 7: 242, "N1": 80, "N2": 150, "N3": 300, "N4": 450, "N5": 900,
    "EDR": 12.5, "HDR": 25, "NDR": 50, "XDR": 100,
    "E1": 0.125, "E10": 1.25, "E25": 3.125, "E100": 12.5, "E200": 25, "E400": 50, "E800": 100,
    "H100 L1": 33450, "H100 L2": 5500, "H100 SXM": 3350, "H100 PCIe": 2050, "H100 NVL": 3920,
}  # fmt: skip


def test_every_speed_is_published_and_has_a_source():
    found = dict(hw.PCIE) | dict(hw.INFINIBAND) | dict(hw.ON_CHIP) | dict(hw.HBM)
    found |= {f"N{g}": s for g, s in hw.NVLINK.items()} | {f"E{g}": s for g, s in hw.ETHERNET.items()}
    assert {k: s.bytes_per_s / 1e9 for k, s in found.items()} == pytest.approx(PUBLISHED, rel=0.002)
    assert hw.HOST_MEMORY.bytes_per_s / 1e9 == pytest.approx(204.8)  # 8 channels of DDR4-3200
    assert [gpu.year for gpu in hw.GPUS.values()] == [2017, 2020, 2022, 2023, 2024]
    for speed in ALL_SPEEDS:
        assert speed.source.name and speed.source.date
        assert speed.source.url.startswith("http") or speed.source.date == "definition"
        memory = "HBM" in speed.name or "DDR" in speed.name or " L" in speed.name
        assert speed.direction == (hw.READ_AND_WRITE if memory else hw.EACH_WAY)


def test_what_a_speed_says():
    assert repr(hw.PCIE[5]) == "PCIe 5 x16: 63.015 GB/s each way = 32 GT/s x 16 lanes x 128/130 / 8 bits"
    assert hw.NVLINK[4].seconds(14e9) == pytest.approx(14 / 450) and hw.NVLINK[4].both_ways == 900e9
    assert hw.PCIE[6].note and not hw.PCIE[5].note
    with pytest.raises(
        ValueError, match="H100 L2 counts reads and writes together: no second direction to add"
    ):
        hw.ON_CHIP["H100 L2"].both_ways  # noqa: B018 - it raises


# Format examples of `nvidia-smi topo -m`, written by hand: with tabs and an underlined header; with older names
WITH_TABS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPHB\tNODE\t0-15,32-47\t0\t\tN/A\nGPU1\tPHB\t X \tPIX\t0-15,32-47\t0\t\tN/A\n"
    "NIC0\tNODE\tPIX\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
OLD = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0 X NV2 PHB 0-7\nGPU1 NV2 X PHB 0-7\nmlx5_0 PHB PHB X\n"


def test_the_matrix_of_paths_is_read():
    server = hw.parse_topology(hw.EXAMPLE_NVLINK_SERVER)
    assert server.gpus == tuple(f"GPU{k}" for k in range(8)) and server.nics == ("NIC0", "NIC1")
    assert server.path("GPU0", "GPU7") == "NV18"
    assert [server.path(f"GPU{k}", "NIC0") for k in range(5)] == ["PIX", "PXB", "NODE", "NODE", "SYS"]
    assert (server.cpus["GPU7"], server.numa["GPU7"]) == ("48-95", "1")
    tabs, old = hw.parse_topology(WITH_TABS), hw.parse_topology(OLD)
    assert tabs.codes == (("X", "PHB", "NODE"), ("PHB", "X", "PIX"), ("NODE", "PIX", "X"))
    assert tabs.cpus == {"GPU0": "0-15,32-47", "GPU1": "0-15,32-47"} and tabs.numa["GPU1"] == "0"
    assert old.nics == ("mlx5_0",) and old.numa == {"GPU0": "N/A", "GPU1": "N/A"}
    assert repr(old).splitlines()[1] == "GPU0    X     NV2   PHB     0-7   N/A"
    for text in (hw.EXAMPLE_NVLINK_SERVER, hw.EXAMPLE_PCIE_SERVER):
        codes = hw.parse_topology(text).codes
        assert codes == tuple(zip(*codes, strict=True))
    near_to_far = [hw.path_kind(code).order for code in ("X", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS")]
    assert near_to_far == list(range(7))


def test_what_is_no_matrix_is_said():
    with pytest.raises(ValueError, match="No line starts with GPU0"):
        hw.parse_topology("Failed to initialize NVML")
    with pytest.raises(ValueError, match="'ABC' is no path of `nvidia-smi topo -m`"):
        hw.path_kind("ABC")


def lscpu(n_threads, per_core=2, per_node=4):
    """What `lscpu` says, by hand, of cores of two threads and nodes of four, in which a last cache is shared."""
    rows = [
        {"cpu": n, "core": n // per_core, "node": n // per_node,
         "l1d:l1i:l2:l3": f"{n // per_core}:{n // per_core}:{n // per_core}:{n // per_node}"}
        for n in range(n_threads)
    ]  # fmt: skip
    sizes = (("L1d", 49152), ("L1i", 512), ("L2", 1 << 21), ("L3", 1 << 30))
    caches = [{"name": name, "one-size": str(nbytes)} for name, nbytes in sizes]
    return [json.dumps(said) for said in ({"cpus": rows}, {"caches": caches})]


def test_lscpu_names_cores_caches_and_nodes():
    machine = hw.parse_lscpu(*lscpu(8))
    assert machine.cores == ((0, 1), (2, 3), (4, 5), (6, 7)) and machine.threads == 8
    assert [c.name for c in machine.caches] == ["L1d"] * 4 + ["L1i"] * 4 + ["L2"] * 4 + ["L3"] * 2
    sizes = [machine.cache(name)[0].nbytes for name in ("L1d", "L1i", "L2", "L3")]
    assert sizes == [48 * 2**10, 512, 2 * 2**20, 2**30]
    assert [c.cpus for c in machine.cache("L3")] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert machine.numa == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_this_machine_can_be_read(monkeypatch):
    machine = hw.read_machine()
    assert machine.threads >= len(machine.cores) >= 1
    monkeypatch.setenv("PATH", "")
    assert hw.read_topology() is None
    bare = hw.read_machine()  # a system without lscpu
    assert bare.cores and not bare.caches
