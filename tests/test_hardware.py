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
    for speed in ALL_SPEEDS:
        assert speed.source.name and speed.source.date
        assert speed.source.url.startswith("http") or speed.source.date == "definition"
        memory = "HBM" in speed.name or "DDR" in speed.name or " L" in speed.name
        assert speed.direction == (hw.READ_AND_WRITE if memory else hw.EACH_WAY)


def test_what_a_speed_says():
    assert hw.PCIE[5].arithmetic == "32 GT/s x 16 lanes x 128/130 / 8 bits"
    assert hw.NVLINK[4].seconds(14e9) == pytest.approx(14 / 450) and hw.NVLINK[4].both_ways == 900e9
    assert hw.PCIE[6].note and not hw.PCIE[5].note
    with pytest.raises(
        ValueError, match="H100 L2 counts reads and writes together: no second direction to add"
    ):
        hw.ON_CHIP["H100 L2"].both_ways  # noqa: B018 - it raises


def test_the_caches_of_this_machine_can_be_read(monkeypatch, tmp_path):
    assert all(cache.nbytes > 0 for cache in hw.read_machine().caches)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hw.read_machine() == hw.Machine()  # a system without lscpu
    caches = [{"name": "L1d", "one-size": "49152"}, {"name": "L3", "one-size": "1073741824"}]
    said = json.dumps({"caches": caches})
    (tmp_path / "lscpu").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "lscpu").chmod(0o755)
    assert hw.read_machine().cache("L3") == (hw.Cache("L3", 2**30),) and not hw.read_machine().cache("L2")
