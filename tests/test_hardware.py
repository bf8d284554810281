"""The facts follow from their parts and agree with what is published; the readers parse and never guess."""

import dataclasses

import pytest

from rankcell import hardware as hw
from rankcell.draw import maps

ALL_SPEEDS = [
    *hw.PCIE.values(),
    *hw.NVLINK.values(),
    *hw.INFINIBAND.values(),
    *hw.ETHERNET.values(),
    *hw.ON_CHIP.values(),
    *hw.HBM.values(),
    hw.HOST_MEMORY,
    *(gpu.memory for gpu in hw.GPUS.values()),
    *(speed for pair in hw.REPORTED.values() for speed in pair),
]


# Facts


@pytest.mark.parametrize("speed", ALL_SPEEDS, ids=lambda s: s.name)
def test_every_number_has_a_unit_a_direction_a_source_and_a_date(speed):
    assert speed.bytes_per_s > 0
    assert speed.unit == "bytes/s"
    assert speed.direction in (hw.EACH_WAY, hw.READ_AND_WRITE)
    assert speed.source.name and speed.source.date
    assert speed.source.url.startswith("http") or speed.source.date == "definition"


# https://github.com/stas00/ml-engineering/blob/744d01e/network/README.md, tables PCIe and NVLink, in GB/s;
# generation 3 from the same formula. Its 31 is 31.5 cut off.
@pytest.mark.parametrize(
    ("generation", "each_way", "both_ways"),
    [(3, 15.75, 31.5), (4, 31.5, 63), (5, 63, 126), (6, 121, 242), (7, 242, 484)],
)
def test_pcie_from_transfers_lanes_and_encoding(generation, each_way, both_ways):
    link = hw.PCIE[generation]
    assert link.bytes_per_s / 1e9 == pytest.approx(each_way, rel=0.001)
    assert link.both_ways / 1e9 == pytest.approx(both_ways, rel=0.001)
    assert link.lanes == 16
    assert hw.pcie(generation, 4).bytes_per_s == pytest.approx(link.bytes_per_s / 4)


@pytest.mark.parametrize(
    ("generation", "links", "each_way", "both_ways"),
    [(1, 4, 80, 160), (2, 6, 150, 300), (3, 12, 300, 600), (4, 18, 450, 900), (5, 18, 900, 1800)],
)
def test_nvlink_from_links(generation, links, each_way, both_ways):
    link = hw.NVLINK[generation]
    assert link.lanes == links
    assert link.bytes_per_s / 1e9 == pytest.approx(each_way)
    assert link.both_ways / 1e9 == pytest.approx(both_ways)


@pytest.mark.parametrize(("name", "gbit"), [("EDR", 100), ("HDR", 200), ("NDR", 400), ("XDR", 800)])
def test_infiniband_from_lanes(name, gbit):
    assert hw.INFINIBAND[name].bytes_per_s * 8 / 1e9 == pytest.approx(gbit)


def test_ethernet_is_its_name():
    assert {g: s.bytes_per_s for g, s in hw.ETHERNET.items()}[100] == 12.5e9
    assert hw.ETHERNET[1].bytes_per_s == 125e6
    assert list(hw.ETHERNET) == [1, 10, 25, 100, 200, 400, 800]
    assert all(speed.bytes_per_s == g * 1e9 / 8 for g, speed in hw.ETHERNET.items())


def test_lanes_multiply():
    assert hw.pcie(4, 8).lanes == 8 and hw.pcie(6).note and not hw.pcie(5).note
    edr = hw.infiniband("EDR", 1)  # one lane of 25 Gbit/s
    assert (edr.bytes_per_s, edr.lanes, hw.INFINIBAND["EDR"].lanes) == (3.125e9, 1, 4)


# 132 SMs x 32 banks x 4 bytes at 1.98 GHz; https://chipsandcheese.com/2023/07/02/ measures 5.5 to 6 TB/s of L2
def test_memory_on_the_chip():
    assert hw.ON_CHIP["H100 L1"].bytes_per_s == pytest.approx(33.45e12, rel=0.001)
    assert hw.ON_CHIP["H100 L2"].bytes_per_s == 5.5e12


# https://www.anandtech.com/show/18780 prints 3.35, 2 and 3.9 TB/s for one card
@pytest.mark.parametrize(("name", "tb_s"), [("H100 SXM", 3.35), ("H100 PCIe", 2.0), ("H100 NVL", 3.9)])
def test_hbm_from_pins(name, tb_s):
    assert hw.HBM[name].bytes_per_s / 1e12 == pytest.approx(tb_s, rel=0.03)


def test_host_memory_from_channels():
    assert hw.HOST_MEMORY.bytes_per_s / 1e9 == pytest.approx(
        204.8
    )  # as published for 8 channels of DDR4-3200


def test_a_gpu_s_own_number_agrees_with_its_pins():
    assert hw.GPUS["H100 SXM"].memory.bytes_per_s == pytest.approx(hw.HBM["H100 SXM"].bytes_per_s, rel=0.01)


# As NVIDIA's servers with them have it; sources beside the table
@pytest.mark.parametrize(
    ("name", "year", "nvlink", "pcie", "network", "gb", "tb_s", "tflops"),
    [
        ("V100 SXM2", 2017, "2", "3", None, 32, 0.9, 125),
        ("A100 SXM 80GB", 2020, "3", "4", "HDR", 80, 2.04, 312),
        ("H100 SXM", 2022, "4", "5", "NDR", 80, 3.35, 989),
        ("H200 SXM", 2023, "4", "5", None, 141, 4.8, 989),
        ("B200 SXM", 2024, "5", "5", None, 180, 8.0, 2250),
    ],
)
def test_each_gpu_has_the_ports_and_the_memory_of_its_time(
    name, year, nvlink, pcie, network, gb, tb_s, tflops
):
    gpu = hw.GPUS[name]
    assert (gpu.year, gpu.memory.bytes_per_s) == (year, tb_s * 1e12)
    assert (gpu.nvlink.generation, gpu.pcie.generation) == (nvlink, pcie)
    assert (gpu.network.generation if gpu.network else None) == network
    assert (gpu.memory_bytes, gpu.bf16_flops) == (gb * 1e9, tflops * 1e12)


def test_nvlink_to_infiniband_is_nine():
    h100 = hw.GPUS["H100 SXM"]
    assert h100.nvlink.bytes_per_s / h100.network.bytes_per_s == 9


def test_memory_has_no_second_direction():
    with pytest.raises(
        ValueError, match="H100 L2 counts reads and writes together: no second direction to add"
    ):
        hw.ON_CHIP["H100 L2"].both_ways  # noqa: B018


def test_seconds_are_bytes_over_rate():
    assert hw.NVLINK[4].seconds(14e9) == pytest.approx(14 / 450)


def test_a_speed_says_itself():
    assert repr(hw.PCIE[5]) == "PCIe 5 x16: 63.015 GB/s each way = 32 GT/s x 16 lanes x 128/130 / 8 bits"


def test_facts_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hw.PCIE[5].bytes_per_s = 1


def test_unknown_generations_say_which_exist():
    with pytest.raises(ValueError, match=r"PCIe generation 8 is not in the table\. Choose 3, 4, 5, 6, 7\."):
        hw.pcie(8)
    with pytest.raises(ValueError, match=r"InfiniBand 'GDR' is not in the table\. Choose one of EDR, HDR"):
        hw.infiniband("GDR")


def test_what_others_measured_is_what_they_printed():
    """GB/s: network/README.md of ml-engineering@744d01e, beside the peak that each is compared with."""
    found = {name: (got.bytes_per_s / 1e9, got.lanes, peak.name) for name, (got, peak) in hw.REPORTED.items()}
    assert found == {
        "host to H200": (55.4, 16, "PCIe 5 x16"),
        "H200 to H200": (396.4, 18, "NVLink 4"),
        "A100 all-reduce": (235, 12, "NVLink 3"),
        "H200 all-reduce, NVLS": (482.26, 18, "NVLink 4"),
    }


def test_what_others_measured_is_near_the_published_rate():
    for got, peak in hw.REPORTED.values():
        assert 0.75 < got.bytes_per_s / peak.bytes_per_s < 1.08


# The matrix of `nvidia-smi topo -m`. The texts are format examples, written by hand after the documented
# format (tabs, an underlined header, the legend); they were not read off a machine.

WITH_TABS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPHB\tNODE\t0-15,32-47\t0\t\tN/A\n"
    "GPU1\tPHB\t X \tPIX\t0-15,32-47\t0\t\tN/A\n"
    "NIC0\tNODE\tPIX\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
OLD_NIC_NAMES = """\
        GPU0    GPU1    mlx5_0  CPU Affinity
GPU0     X      NV2     PHB     0-7
GPU1    NV2      X      PHB     0-7
mlx5_0  PHB     PHB      X
"""


def test_topology_of_a_server_with_nvswitch():
    server = hw.parse_topology(hw.EXAMPLE_NVLINK_SERVER)
    assert server.gpus == tuple(f"GPU{k}" for k in range(8))
    assert server.nics == ("NIC0", "NIC1")
    assert {server.path(a, b) for a in server.gpus for b in server.gpus if a != b} == {"NV18"}
    assert server.nvlinks("GPU0", "GPU7") == 18
    assert server.nvlinks("GPU0", "NIC0") == 0
    assert [server.path(f"GPU{k}", "NIC0") for k in range(5)] == ["PIX", "PXB", "NODE", "NODE", "SYS"]
    assert server.cpus["GPU7"] == "48-95"
    assert server.numa["GPU7"] == "1"
    assert server.nic_names == {"NIC0": "mlx5_0", "NIC1": "mlx5_1"}


def test_topology_with_tabs_and_an_underlined_header():
    topology = hw.parse_topology(WITH_TABS)
    assert topology.devices == ("GPU0", "GPU1", "NIC0")
    assert topology.codes == (("X", "PHB", "NODE"), ("PHB", "X", "PIX"), ("NODE", "PIX", "X"))
    assert topology.cpus == {"GPU0": "0-15,32-47", "GPU1": "0-15,32-47"}
    assert topology.numa == {"GPU0": "0", "GPU1": "0"}


def test_topology_with_the_older_names_of_cards():
    topology = hw.parse_topology(OLD_NIC_NAMES)
    assert topology.nics == ("mlx5_0",)
    assert topology.numa == {"GPU0": "N/A", "GPU1": "N/A"}


def test_topology_shows_as_a_matrix():
    assert repr(hw.parse_topology(OLD_NIC_NAMES)).splitlines()[1] == "GPU0    X     NV2   PHB     0-7   N/A"


def test_topologies_are_symmetric():
    for text in (hw.EXAMPLE_NVLINK_SERVER, hw.EXAMPLE_PCIE_SERVER, WITH_TABS, OLD_NIC_NAMES):
        codes = hw.parse_topology(text).codes
        assert codes == tuple(zip(*codes, strict=True))


def test_paths_are_ordered_from_near_to_far():
    order = [hw.path_kind(code).order for code in ("X", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS")]
    assert order == sorted(set(order))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Failed to initialize NVML", "No line starts with GPU0"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-7\n", "The matrix names 2 devices and has 1 rows"),
        (
            "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \nGPU1\tNV2\t X \n",
            "The row of GPU0 is missing or too short",
        ),
        (
            "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tABC\t0\nGPU1\tABC\t X \t0\n",
            "'ABC' is no path of `nvidia-smi topo -m`",
        ),
    ],
)
def test_what_is_no_matrix_is_said(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        hw.parse_topology(text)


def test_a_device_that_is_not_there_is_said():
    with pytest.raises(ValueError, match=r"'GPU9' is not in this topology\. It has GPU0, GPU1, mlx5_0\."):
        hw.parse_topology(OLD_NIC_NAMES).path("GPU0", "GPU9")


def test_nvlinks_of_each_gpu():
    # a format example written by hand, as above
    text = "GPU 0: H100 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: H100\n"
    assert hw.parse_nvlinks(text) == {"GPU0": (26.562e9, None), "GPU1": ()}
    assert hw.parse_nvlinks("") == {}


def test_no_gpu_is_no_error(monkeypatch):
    monkeypatch.setattr(hw.shutil, "which", lambda name: None)
    assert hw.read_topology() is None
    assert hw.read_nvlinks() == {}


# The machine at hand


@pytest.fixture
def linux(tmp_path):
    """A folder that looks like /sys and /proc of two sockets with two cores of two threads each."""

    def put(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    put("sys/devices/system/cpu/online", "0-7")
    for cpu in range(8):
        core, socket = cpu % 4, cpu % 4 // 2
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        put(f"{folder}/topology/thread_siblings_list", f"{core},{core + 4}")
        shared = f"{2 * socket}-{2 * socket + 1},{2 * socket + 4}-{2 * socket + 5}"
        for index, (level, kind, size, cpus) in enumerate(
            [
                (1, "Data", "48K", f"{core},{core + 4}"),
                (1, "Instruction", "32K", f"{core},{core + 4}"),
                (2, "Unified", "2M", f"{core},{core + 4}"),
                (3, "Unified", "32768K", shared),
            ]
        ):
            names = ("level", "type", "size", "shared_cpu_list")
            for name, value in zip(names, (level, kind, size, cpus), strict=True):
                put(f"{folder}/cache/index{index}/{name}", str(value))
    for node in range(2):
        put(
            f"sys/devices/system/node/node{node}/cpulist",
            f"{2 * node}-{2 * node + 1},{2 * node + 4}-{2 * node + 5}",
        )
        put(f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       1048576 kB")
    put("proc/meminfo", "MemTotal:        2097152 kB\nMemFree: 1 kB")
    put("proc/cpuinfo", "processor\t: 0\nmodel name\t: Example CPU @ 2 GHz\nflags\t\t: fpu hypervisor sse")
    return tmp_path


def test_linux_is_read_from_its_files(linux):
    machine = hw.read_machine(linux)
    assert machine.cpu_name == "Example CPU @ 2 GHz"
    assert machine.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert machine.threads == 8
    assert [c.name for c in machine.caches] == ["L1d"] * 4 + ["L1i"] * 4 + ["L2"] * 4 + ["L3"] * 2
    assert machine.cache("L1d")[0].nbytes == 48 * 1024
    assert machine.cache("L2")[0].nbytes == 2 * 2**20
    assert [c.cpus for c in machine.cache("L3")] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    nodes = [(n.number, n.cpus, n.nbytes) for n in machine.numa]
    assert nodes == [
        (0, (0, 1, 4, 5), 2**30),
        (1, (2, 3, 6, 7), 2**30),
    ]
    assert machine.memory_bytes == 2**31
    assert machine.virtual
    assert machine.missing == ()


def test_cpus_that_are_off_and_nodes_beyond_nine(linux):
    system = linux / "sys/devices/system"
    (system / "cpu/online").write_text("0-5\n")  # the second threads of cores 2 and 3 are off
    for node in (2, 10):
        (system / f"node/node{node}").mkdir()
    machine = hw.read_machine(linux)
    assert machine.cores == ((0, 4), (1, 5), (2,), (3,)) and machine.threads == 6
    assert [node.number for node in machine.numa] == [0, 1, 2, 10]
    assert machine.numa[3] == hw.NumaNode(10, (), None)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("48K", 49_152), ("2M", 2_097_152), ("1G", 2**30), ("512", 512)]
)
def test_sizes_of_caches(text, nbytes):
    assert hw._parse_size(text) == nbytes


def test_a_linux_that_says_little_is_not_guessed_at(tmp_path):
    machine = hw.read_machine(tmp_path)
    assert machine.cpu_name == "not named by this system"
    assert machine.caches == () and machine.numa == () and machine.memory_bytes is None
    assert machine.missing == (
        "which threads share a core is not available here",
        "cache sizes are not available here",
        "NUMA nodes are not available here",
        "the size of the memory is not available here",
    )
    assert not machine.virtual


def test_macos_is_asked_with_sysctl():
    answers = {  # a format example written by hand: `sysctl -n` prints one number a name
        "hw.logicalcpu": "8\n",
        "hw.physicalcpu": "8\n",
        "hw.l1dcachesize": "65536\n",
        "hw.l2cachesize": "4194304\n",
        "hw.memsize": "17179869184\n",
        "machdep.cpu.brand_string": "Apple M1\n",
    }
    machine = hw._from_sysctl(answers.get)
    assert machine.cpu_name == "Apple M1"
    assert len(machine.cores) == machine.threads == 8
    assert [(c.name, c.nbytes, c.cpus) for c in machine.caches] == [("L1d", 65536, ()), ("L2", 4194304, ())]
    assert machine.memory_bytes == 16 * 2**30
    assert machine.missing == (
        "which cores share a cache is not available here",
        "NUMA nodes are not available here",
    )


def test_macos_with_two_threads_a_core():
    sizes = {"hw.l1dcachesize": 32 << 10, "hw.l1icachesize": 48 << 10, "hw.l2cachesize": 256 << 10}
    sizes |= {"hw.l3cachesize": 12 << 20}
    answers = {"hw.logicalcpu": 4, "hw.physicalcpu": 2, **sizes}
    machine = hw._from_sysctl(lambda name: f"{answers[name]}\n" if name in answers else None)
    assert machine.cores == ((0, 1), (2, 3))
    assert [(c.name, c.nbytes >> 10) for c in machine.caches] == [
        ("L1d", 32),
        ("L1i", 48),
        ("L2", 256),
        ("L3", 12 << 10),
    ]
    assert machine.memory_bytes is None
    assert machine.missing[-1] == "the size of the memory is not available here"


def test_macos_that_answers_nothing():
    machine = hw._from_sysctl(lambda name: None)
    assert machine.threads >= 1
    assert "cache sizes are not available here" in machine.missing


def test_this_machine_can_be_read_and_drawn():
    machine = hw.read_machine()
    assert machine.threads >= len(machine.cores) >= 1
    assert machine.usable is None or 1 <= machine.usable
    assert maps.machine_map(machine).alt.startswith("This machine: ")


def test_a_tool_that_fails_or_is_missing_answers_nothing():
    assert hw._output("false") is None
    assert hw._output("rankcell-has-no-such-tool") is None


@pytest.mark.parametrize(("text", "cpus"), [("0-3", (0, 1, 2, 3)), ("0,2-3,9", (0, 2, 3, 9)), ("", ())])
def test_lists_of_cpus(text, cpus):
    assert hw.parse_cpus(text) == cpus
