"""Maps of hardware: the cores and caches of a machine, the links between its GPUs, the servers of a cluster.

Pure functions from what `hardware` describes to a `Figure`. Nothing here looks at a machine: `hardware` reads
this one, and holds the published numbers of others.
"""

from collections.abc import Sequence

from ..hardware import Machine, NumaNode, Speed, Topology, path_kind
from .charts import format_rate
from .parts import EDGE, SIZE, WIDTH, text_width, wrap
from .svg import INK, LINE, MUTED, Figure, drawing, format_bytes, label, line, rect

_CACHE_COLOURS = {1: "#cfe8f7", 2: "#9fd0ee", 3: "#6db6e3"}
_PATH_COLOURS = {
    "X": "#eeeeee",
    "NV#": "#56b4e9",
    "PIX": "#7fd1b3",
    "PXB": "#c5e5a5",
    "PHB": "#f0e442",
    "NODE": "#f2b84b",
    "SYS": "#e88a5a",
}


def machine_map(machine: Machine) -> Figure:
    """Cores above caches above memory, one frame per NUMA node.

    A cache is as wide as the cores that share it. At most four cores of a node and two nodes are drawn; the
    picture says how many more there are.
    """
    nodes = machine.numa or (
        NumaNode(0, tuple(c for core in machine.cores for c in core), machine.memory_bytes),
    )
    marks: list[str] = []
    y = 0.0
    for node in nodes[:2]:
        y = _node_map(machine, node, len(nodes), y, marks)
    if len(nodes) > 2:
        marks.append(
            label(WIDTH / 2, y + 24, f"+ {len(nodes) - 2} more NUMA nodes like these", anchor="middle")
        )
        y += 34
    shared = [c for c in machine.caches if len(c.cpus) > 1]
    top = max(shared, key=lambda c: c.level) if shared else None
    count = f"{len(machine.cores)} cores with {machine.threads} hardware threads"
    n_numa = len(machine.numa) or "an unknown number of"
    alt = f"This machine: {count}, {n_numa} NUMA node{'s' * (len(machine.numa) != 1)}"
    alt += f"; {len(top.cpus)} threads share each {top.name} of {format_bytes(top.nbytes)}." if top else "."
    return drawing(WIDTH, y + 8, *marks, alt=alt, text=_machine_text(machine))


def _node_map(machine: Machine, node: NumaNode, n_nodes: int, y: float, marks: list[str]) -> float:
    cores = [core for core in machine.cores if set(core) & set(node.cpus)] or list(machine.cores)
    left, right, gap = 22.0, WIDTH - 22.0, 10.0
    for n in (4, 3, 2, 1):  # as many as leave room for their names
        shown = cores[:n]
        spare = 92.0 if len(cores) > len(shown) else 0.0
        width = (right - left - spare - gap * (len(shown) - 1)) / len(shown)
        if all(text_width(_threads(core)) <= width - 4 for core in shown):
            break
    start = y + 46
    at = {k: left + k * (width + gap) for k in range(len(shown))}
    for k, core in enumerate(shown):
        marks.append(rect(at[k], start, width, 56, fill="#f4f4f4", stroke=MUTED, radius=6))
        marks.append(_centred(at[k], width, start + 24, f"core {machine.cores.index(core)}", bold=True))
        marks.append(_centred(at[k], width, start + 47, _threads(core)))
    if spare:
        marks.append(label(right, start + 26, f"+ {len(cores) - len(shown)}", anchor="end", bold=True))
        marks.append(label(right, start + 49, "cores", anchor="end"))
    y_row = start + 64
    levels = sorted({c.name for c in machine.caches if c.kind != "Instruction" and c.cpus})
    for name in levels:
        for cache in machine.cache(name):
            span = [k for k, core in enumerate(shown) if set(core) & set(cache.cpus)]
            if not span:
                continue
            x, end = at[span[0]], at[span[-1]] + width
            reaches = spare and len(cache.cpus) > sum(len(shown[k]) for k in span)
            end = right if reaches and span[-1] == len(shown) - 1 else end
            marks.append(rect(x, y_row, end - x, 34, fill=_CACHE_COLOURS.get(cache.level, LINE), radius=6))
            marks.append(_centred(x, end - x, y_row + 24, f"{name} {format_bytes(cache.nbytes)}", name))
        y_row += 42
    if not levels and machine.caches:
        known = ", ".join(
            f"{c.name} {format_bytes(c.nbytes)}" for c in machine.caches if c.kind != "Instruction"
        )
        marks.append(_centred(left, right - left, y_row + 24, known))
        y_row += 42
    nbytes = machine.memory_bytes if n_nodes == 1 else node.nbytes
    amount = format_bytes(nbytes) if nbytes else "of unknown size"
    marks.append(rect(left, y_row, right - left, 38, fill="#f7d9b0", radius=6))
    marks.append(_centred(left, right - left, y_row + 26, f"memory {amount}"))
    title = f"NUMA node {node.number}" if machine.numa else "one node (NUMA is not readable here)"
    marks.insert(0, rect(8, y + 8, WIDTH - 16, y_row + 48 - y - 8, stroke=MUTED, radius=8))
    marks.append(label(left, y + 34, title, fill=MUTED))
    return y_row + 54


def _threads(core: Sequence[int]) -> str:
    return f"CPU{'s' * (len(core) > 1)} {', '.join(map(str, core))}"


def _centred(x: float, width: float, y: float, text: str, short: str = "", *, bold: bool = False) -> str:
    """`text` in the middle of a box, `short` where it does not fit."""
    fits = text_width(text) <= width - 4
    return label(x + width / 2, y, text if fits or not short else short, anchor="middle", bold=bold)


def _machine_text(machine: Machine) -> str:
    lines_ = [f"{machine.cpu_name}: {len(machine.cores)} cores, {machine.threads} hardware threads"]
    for name in sorted({c.name for c in machine.caches}):
        group = machine.cache(name)
        share = f", shared by {len(group[0].cpus)} CPUs each" if group[0].cpus else ""
        lines_.append(f"{name}: {len(group)} x {format_bytes(group[0].nbytes)}{share}")
    for node in machine.numa:
        lines_.append(f"NUMA node {node.number}: {len(node.cpus)} CPUs")
    if machine.memory_bytes:
        lines_.append(f"memory: {format_bytes(machine.memory_bytes)}")
    return "\n".join([*lines_, *machine.missing])


def link_matrix(topology: Topology) -> Figure:
    """The matrix of `nvidia-smi topo -m` in colours, near blue to far red, with what its codes mean."""
    names = topology.devices
    many = len(names) > 8
    left, top = 48.0 if many else 76.0, 40.0
    cell = min(72.0, (WIDTH - left - EDGE) / len(names))
    size = min(float(SIZE), cell / 3)
    marks: list[str] = []
    for k, name in enumerate(names):
        short = name.replace("GPU", "G").replace("NIC", "N") if many else name
        marks.append(label(left + (k + 0.5) * cell, top - 12, short, anchor="middle", fill=MUTED))
        marks.append(label(left - 8, top + (k + 0.5) * cell + 7, short, anchor="end", fill=MUTED))
        for j, code in enumerate(topology.codes[k]):
            x, y = left + j * cell, top + k * cell
            kind = path_kind(code)
            tip = f"{name} to {names[j]}: {code}, {kind.meaning}"
            marks.append(
                rect(x + 1, y + 1, cell - 2, cell - 2, fill=_PATH_COLOURS[kind.code], title=tip, radius=4)
            )
            if code != "X":
                marks.append(
                    label(x + cell / 2, y + cell / 2 + size * 0.35, code, anchor="middle", size=size)
                )
    used = sorted({path_kind(c) for row in topology.codes for c in row if c != "X"}, key=lambda k: k.order)
    y = top + len(names) * cell + 14
    for kind in used:
        marks.append(rect(EDGE, y + 4, 18, 18, fill=_PATH_COLOURS[kind.code], radius=4))
        marks.append(label(EDGE + 28, y + 20, kind.code, bold=True))
        for part in wrap(kind.meaning, WIDTH - 110 - EDGE):
            marks.append(label(110, y + 20, part))
            y += 26
        y += 4
    if many:
        marks.append(label(EDGE, y + 20, "G is a GPU, N a network card (NIC).", fill=MUTED))
        y += 30
    near = used[0] if used else path_kind("X")
    far = used[-1] if used else near
    cards = "card" if len(topology.nics) == 1 else "cards"
    alt = (
        f"Paths between {len(topology.gpus)} GPUs and {len(topology.nics)} network {cards}: "
        f"the nearest are {near.code} ({near.meaning}), the farthest {far.code} ({far.meaning})."
    )
    return drawing(WIDTH, y + 8, *marks, alt=alt, text=repr(topology))


def cluster_map(*, nvlink: Speed, pcie: Speed, network: Speed, per_node: int = 8, nodes: int = 2) -> Figure:
    """Two or more GPU servers and the network between them; a line is as wide as its link is fast.

    Each GPU carries its rank above and its local rank below. NVSwitch joins the GPUs of one node; the network
    cards hang off PCIe; the network joins the nodes.
    """
    gap = 16.0
    width = (WIDTH - 2 * 8 - gap * (nodes - 1)) / nodes
    step = (width - 16) / per_node
    box = min(step - 2, 56.0)
    per_px = nvlink.bytes_per_s / min(18.0, box * 0.6)

    def wide(speed: Speed) -> float:
        return max(1.0, speed.bytes_per_s / per_px)

    y_switch, y_gpu, y_pcie, y_nic, y_net = 44.0, 112.0, 222.0, 290.0, 366.0
    marks: list[str] = []
    for n in range(nodes):
        x0 = 8 + n * (width + gap)
        marks.append(rect(x0, 8, width, y_nic + 46 - 8, stroke=MUTED, radius=8))
        marks.append(label(x0 + 10, 32, f"node {n}", fill=MUTED))
        marks.append(rect(x0 + 8, y_switch, width - 16, 32, fill="#56b4e9", radius=6))
        marks.append(_centred(x0 + 8, width - 16, y_switch + 23, "NVSwitch"))
        for k in range(per_node):
            x = x0 + 8 + (k + 0.5) * step
            marks.append(line(x, y_switch + 32, x, y_gpu, stroke="#56b4e9", width=wide(nvlink)))
            marks.append(line(x, y_gpu + 64, x, y_pcie, stroke="#009e73", width=wide(pcie)))
            marks.append(line(x, y_pcie + 32, x, y_nic, stroke="#009e73", width=wide(pcie)))
            marks.append(line(x, y_nic + 24, x, y_net, stroke="#d55e00", width=wide(network)))
            marks.append(rect(x - box / 2, y_gpu, box, 64, fill="#f4f4f4", stroke=INK, radius=4))
            marks.append(label(x, y_gpu + 26, n * per_node + k, anchor="middle", bold=True))
            marks.append(label(x, y_gpu + 54, k, anchor="middle", fill=MUTED))
            marks.append(rect(x - box / 2, y_nic, box, 24, fill="#fbe3d3", stroke="#d55e00", radius=4))
        marks.append(rect(x0 + 8, y_pcie, width - 16, 32, fill="#bfe6d9", radius=6))
        marks.append(_centred(x0 + 8, width - 16, y_pcie + 23, "PCIe switches, CPUs", "PCIe"))
    marks.append(rect(8, y_net, WIDTH - 16, 34, fill="#f3b48c", radius=6))
    marks.append(_centred(8, WIDTH - 16, y_net + 24, f"switches of the network: {network.name}"))
    y = y_net + 34 + 30
    rows = (
        ("#56b4e9", nvlink, "GPU to NVSwitch"),
        ("#009e73", pcie, "GPU to CPU and network card"),
        ("#d55e00", network, "network card to network"),
    )
    for colour, speed, where in rows:
        marks.append(line(EDGE, y - 7, EDGE + 40, y - 7, stroke=colour, width=wide(speed)))
        marks.append(label(EDGE + 52, y, f"{where}: {format_rate(speed.bytes_per_s)} each way"))
        y += 30
    marks.append(label(EDGE, y, "In each GPU: rank above, local rank below.", fill=MUTED))
    ratio = nvlink.bytes_per_s / network.bytes_per_s
    alt = (
        f"{nodes} nodes of {per_node} GPUs. NVSwitch joins the GPUs inside a node at "
        f"{format_rate(nvlink.bytes_per_s)} each way; across nodes each GPU has "
        f"{format_rate(network.bytes_per_s)}, {ratio:.3g} times less."
    )
    text = "\n".join(f"{where}: {speed!r}" for _, speed, where in rows)
    return drawing(WIDTH, y + 14, *marks, alt=alt, text=text)


__all__ = ["cluster_map", "link_matrix", "machine_map"]


def copy_paths(*, pageable: str, pinned: str) -> Figure:
    """The way of a tensor from host memory to a GPU, from pageable and from pinned memory, one under the other.

    `pageable` and `pinned` say below each way what it costs.
    """
    marks, y = [], 10.0
    ways = {
        "pageable": (("pageable memory", "buffer of the driver", "GPU memory"), pageable),
        "pinned": (("pinned memory", "", "GPU memory"), pinned),
    }
    for name, (stops, cost) in ways.items():
        marks.append(label(EDGE, y + 20, f"from {name} memory", bold=True))
        places = [EDGE, 214.0, 438.0]
        for x, stop in zip(places, stops, strict=True):
            if stop:
                fill = "#f7d9b0" if x == EDGE else "#c5e5a5" if x == places[2] else "#f0e442"
                marks.append(rect(x, y + 34, 152, 58, fill=fill, stroke=MUTED, radius=6))
                for n, text in enumerate(wrap(stop, 146)):
                    marks.append(
                        label(
                            x + 76,
                            y + (58 if len(wrap(stop, 146)) > 1 else 70) + 24 * n,
                            text,
                            anchor="middle",
                        )
                    )
        arrows = (
            [(162, 212, "the CPU"), (366, 436, "copy engine")] if stops[1] else [(162, 436, "copy engine")]
        )
        for begin, end, who in arrows:
            marks.append(line(begin, y + 63, end, y + 63, stroke=INK, width=3, arrow=True))
            marks.append(label((begin + end) / 2, y + 114, who, anchor="middle", fill=MUTED))
        marks.append(label(EDGE, y + 140, cost))
        y += 164
    alt = f"From pageable memory the CPU copies into a buffer of the driver first: it {pageable}."
    alt += f" From pinned memory the copy engine reads by itself: it {pinned}."
    return drawing(WIDTH, y, *marks, alt=alt)
