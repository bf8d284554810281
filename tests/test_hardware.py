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
    bare = hw.read_machine()  # a system without lscpu
    assert bare.cores and not bare.caches
