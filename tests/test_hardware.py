"""The facts follow from their parts and agree with what is published; the readers parse and never guess."""

import pytest

from rankcell import hardware as hw

TABLES = (hw.PCIE, hw.NVLINK, hw.INFINIBAND, hw.ETHERNET, hw.ON_CHIP, hw.HBM)
ALL_SPEEDS = [s for table in TABLES for s in table.values()] + [gpu.memory for gpu in hw.GPUS.values()]
ALL_SPEEDS += [hw.HOST_MEMORY, *(s for pair in hw.REPORTED.values() for s in pair)]
# GB/s each way and lanes: https://github.com/stas00/ml-engineering/blob/744d01e/network/README.md, tables PCIe and
# NVLink (its 31 is 31.5 cut off), Ethernet by its name; the memories: AnandTech 18780 and 16529, and Chips and Cheese
PUBLISHED = {
    3: (15.75, 16), 4: (31.5, 16), 5: (63, 16), 6: (121, 16), 7: (242, 16),
    "N1": (80, 4), "N2": (150, 6), "N3": (300, 12), "N4": (450, 18), "N5": (900, 18),
    "EDR": (12.5, 4), "HDR": (25, 4), "NDR": (50, 4), "XDR": (100, 4),
    "E1": (0.125, None), "E10": (1.25, None), "E25": (3.125, None), "E100": (12.5, None), "E200": (25, None),
    "E400": (50, None), "E800": (100, None), "H100 L1": (33450, None), "H100 L2": (5500, None),
    "H100 SXM": (3350, 5120), "H100 PCIe": (2050, 5120), "H100 NVL": (3920, 6144),
}  # fmt: skip


def test_every_speed_is_the_published_one_with_its_source():
    found = dict(hw.PCIE) | dict(hw.INFINIBAND) | dict(hw.ON_CHIP) | dict(hw.HBM)
    found |= {f"N{g}": s for g, s in hw.NVLINK.items()} | {f"E{g}": s for g, s in hw.ETHERNET.items()}
    assert {k: (s.bytes_per_s / 1e9, s.lanes) for k, s in found.items()} == {
        k: (pytest.approx(rate, rel=0.002), lanes) for k, (rate, lanes) in PUBLISHED.items()
    }
    assert hw.HOST_MEMORY.bytes_per_s / 1e9 == pytest.approx(204.8)  # 8 channels of DDR4-3200
    assert [gpu.year for gpu in hw.GPUS.values()] == [2017, 2020, 2022, 2023, 2024]
    for speed in ALL_SPEEDS:
        assert speed.unit == "bytes/s" and speed.source.name and speed.source.date
        assert speed.source.url.startswith("http") or speed.source.date == "definition"
        memory = "HBM" in speed.name or "DDR" in speed.name or " L" in speed.name
        assert speed.direction == (hw.READ_AND_WRITE if memory else hw.EACH_WAY)


def test_what_a_speed_says():
    assert repr(hw.PCIE[5]) == "PCIe 5 x16: 63.015 GB/s each way = 32 GT/s x 16 lanes x 128/130 / 8 bits"
    assert hw.NVLINK[4].seconds(14e9) == pytest.approx(14 / 450) and hw.NVLINK[4].both_ways == 900e9
    assert hw.pcie(4, 8).lanes == 8 and hw.pcie(4, 8).bytes_per_s == pytest.approx(15.75e9, rel=0.001)
    assert hw.pcie(6).note and not hw.pcie(5).note and hw.infiniband("EDR", 1).bytes_per_s == 3.125e9
    for call, says in (
        (lambda: hw.ON_CHIP["H100 L2"].both_ways, "H100 L2 counts reads and writes together: no second direction to"),
        (lambda: hw.pcie(8), "PCIe generation 8 is not in the table. Choose 3, 4, 5, 6, 7."),
        (lambda: hw.infiniband("GDR"), "InfiniBand 'GDR' is not in the table. Choose one of EDR, HDR"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(says)


# Format examples of `nvidia-smi topo -m`, written by hand: with tabs and an underlined header; with older names
WITH_TABS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPHB\tNODE\t0-15,32-47\t0\t\tN/A\nGPU1\tPHB\t X \tPIX\t0-15,32-47\t0\t\tN/A\n"
    "NIC0\tNODE\tPIX\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
HEAD = "\tGPU0\tGPU1\tCPU Affinity\n"
OLD = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0 X NV2 PHB 0-7\nGPU1 NV2 X PHB 0-7\nmlx5_0 PHB PHB X\n"


def test_the_matrix_of_paths_is_read():
    server = hw.parse_topology(hw.EXAMPLE_NVLINK_SERVER)
    assert server.gpus == tuple(f"GPU{k}" for k in range(8)) and server.nics == ("NIC0", "NIC1")
    assert server.nvlinks("GPU0", "GPU7") == 18 and server.nvlinks("GPU0", "NIC0") == 0
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


@pytest.mark.parametrize(
    ("text", "message"),
    [("Failed to initialize NVML", "No line starts with GPU0"),
     (f"{HEAD}GPU0\t X \tNV2\t0-7\n", "The matrix names 2 devices and has 1 rows"),
     (f"{HEAD}GPU0\t X \nGPU1\tNV2\t X \n", "The row of GPU0 is missing or too short"),
     (f"{HEAD}GPU0\t X \tABC\t0\nGPU1\tABC\t X \t0\n", "'ABC' is no path of `nvidia-smi topo -m`"),
     (OLD, "'GPU9' is not in this topology. It has GPU0, GPU1, mlx5_0.")],
)  # fmt: skip
def test_what_is_not_in_the_matrix_is_said(text, message):
    with pytest.raises(ValueError) as error:
        hw.parse_topology(text).path("GPU0", "GPU9")
    assert str(error.value).startswith(message)


@pytest.fixture
def linux(tmp_path):
    """A folder that looks like /sys and /proc of two sockets with two cores of two threads each."""

    def put(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    system = "sys/devices/system"
    put(f"{system}/cpu/online", "0-7")
    near = [f"{2 * socket}-{2 * socket + 1},{2 * socket + 4}-{2 * socket + 5}" for socket in range(2)]
    for cpu in range(8):
        core = f"{cpu % 4},{cpu % 4 + 4}"
        put(f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list", core)
        caches = [(1, "Data", "48K", core), (1, "Instruction", "512", core), (2, "Unified", "2M", core)]
        for index, values in enumerate([*caches, (3, "Unified", "1G", near[cpu % 4 // 2])]):
            for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
                put(f"{system}/cpu/cpu{cpu}/cache/index{index}/{name}", value)
    for node in range(2):
        put(f"{system}/node/node{node}/cpulist", near[node])
        put(f"{system}/node/node{node}/meminfo", f"Node {node} MemTotal:       1048576 kB")
    put("proc/meminfo", "MemTotal:        2097152 kB\nMemFree: 1 kB")
    put("proc/cpuinfo", "processor\t: 0\nmodel name\t: Example CPU @ 2 GHz\nflags\t\t: fpu hypervisor sse")
    return tmp_path


def test_linux_is_read_from_its_files(linux):
    machine = hw.read_machine(linux)
    assert machine.cpu_name == "Example CPU @ 2 GHz" and machine.virtual and machine.missing == ()
    assert machine.cores == ((0, 4), (1, 5), (2, 6), (3, 7)) and machine.threads == 8
    assert [c.name for c in machine.caches] == ["L1d"] * 4 + ["L1i"] * 4 + ["L2"] * 4 + ["L3"] * 2
    sizes = [machine.cache(name)[0].nbytes for name in ("L1d", "L1i", "L2", "L3")]
    assert sizes == [48 * 2**10, 512, 2 * 2**20, 2**30]
    assert [c.cpus for c in machine.cache("L3")] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert machine.numa == (hw.NumaNode(0, (0, 1, 4, 5), 2**30), hw.NumaNode(1, (2, 3, 6, 7), 2**30))
    assert machine.memory_bytes == 2**31
    system = linux / "sys/devices/system"
    (system / "cpu/online").write_text("0-5\n")  # the second threads of cores 2 and 3 are off
    for node in (2, 10):
        (system / f"node/node{node}").mkdir()
    machine = hw.read_machine(linux)
    assert machine.cores == ((0, 4), (1, 5), (2,), (3,)) and machine.threads == 6
    assert [n.number for n in machine.numa] == [0, 1, 2, 10] and machine.numa[3] == hw.NumaNode(10, (), None)
    assert hw.parse_cpus("0,2-3,9") == (0, 2, 3, 9)


def test_what_a_system_does_not_say_is_not_guessed(tmp_path):
    machine, none = hw.read_machine(tmp_path), " not available here"
    assert machine.cpu_name == "not named by this system" and not machine.virtual
    assert (machine.caches, machine.numa, machine.memory_bytes, machine.usable) == ((), (), None, None)
    assert machine.missing == (f"which threads share a core is{none}", f"cache sizes are{none}",
                               f"NUMA nodes are{none}", f"the size of the memory is{none}")  # fmt: skip
    assert hw._from_sysctl(lambda name: None).missing[1:] == machine.missing[2:3] + machine.missing[1:4:2]
    assert hw._output("false") is hw._output("rankcell-has-no-such-tool") is None


def test_macos_is_asked_with_sysctl():
    """A format example written by hand: `sysctl -n` prints one number a name."""
    answers = {"hw.logicalcpu": 4, "hw.physicalcpu": 2, "hw.l1dcachesize": 32 << 10, "hw.l1icachesize": 48 << 10,
               "hw.l2cachesize": 256 << 10, "hw.l3cachesize": 12 << 20, "hw.memsize": 16 << 30,
               "machdep.cpu.brand_string": "Apple M1"}  # fmt: skip
    machine = hw._from_sysctl(lambda name: f"{answers[name]}\n")
    assert (machine.cpu_name, machine.cores, machine.memory_bytes) == ("Apple M1", ((0, 1), (2, 3)), 2**34)
    caches = [("L1d", 32, ()), ("L1i", 48, ()), ("L2", 256, ()), ("L3", 12 << 10, ())]
    assert [(c.name, c.nbytes >> 10, c.cpus) for c in machine.caches] == caches
    assert (
        machine.missing[0] == "which cores share a cache is not available here" and len(machine.missing) == 2
    )


def test_this_machine_can_be_read(monkeypatch):
    machine = hw.read_machine()
    assert machine.threads >= len(machine.cores) >= 1 and (machine.usable is None or 1 <= machine.usable)
    monkeypatch.setattr(hw.shutil, "which", lambda name: None)
    assert hw.read_topology() is None
