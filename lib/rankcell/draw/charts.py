"""Charts from numbers: a ladder of rates or times, lines on linear or log axes, tables, and maps of hardware.

Pure functions from numbers to a `Figure` (or a `Table`). Measured marks are solid, published or predicted
ones are outlined. Everything is 600 px wide with text of 20 px, so that it reads on a phone. Nothing here
measures, and what the ranks did is drawn elsewhere in this package.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..hardware import EACH_WAY, GPU, Machine, NumaNode, Speed, Topology, path_kind
from .svg import (
    COLOURS,
    INK,
    LINE,
    MUTED,
    PAPER,
    RANK_COLOURS,
    Figure,
    drawing,
    format_bytes,
    format_seconds,
    label,
    line,
    rect,
)

WIDTH = 600
SIZE = 20  # px of text; 380/600 of it is over 12 px on a phone
_EDGE = 10
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


def text_width(text: str, size: float = SIZE) -> float:
    """About how many px `text` takes: a little more than the fonts we name need."""
    return (
        sum(0.3 if c in " .,:;il|'()[]/-" else 0.62 if c.islower() or c.isdigit() else 0.72 for c in text)
        * size
    )


def format_rate(bytes_per_s: float) -> str:
    """A rate with a decimal unit: 1 GB/s = 10^9 B/s. The one place that formats rates."""
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= factor:
            return f"{_three(bytes_per_s / factor)} {unit}"
    return f"{_three(bytes_per_s)} B/s"


def _three(x: float) -> str:
    """Three digits, never in exponent form for what fits a chart."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    text = f"{x:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class Table:
    """Rows under a header, shown as a table on a page and as aligned text elsewhere.

    A cell is text, or `(text, address)` for a link. Columns named in `right` hold numbers and are set to the
    right.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str | tuple[str, str], ...], ...]
    right: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"A row has {len(row)} cells, the header {len(self.header)}: {row}. Give one per column."
                )

    def __repr__(self) -> str:
        rows = [self.header, *(tuple(c if isinstance(c, str) else c[0] for c in row) for row in self.rows)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(self.header))]
        return "\n".join(
            "  ".join(
                text.rjust(w) if name in self.right else text.ljust(w)
                for text, w, name in zip(row, widths, self.header, strict=True)
            ).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        def cell(tag: str, content: str | tuple[str, str], name: str) -> str:
            side = "right" if name in self.right else "left"
            text, address = (content, "") if isinstance(content, str) else content
            shown = html.escape(text)
            if address:
                shown = f'<a href="{html.escape(address)}">{shown}</a>'
            return f'<{tag} style="text-align:{side}">{shown}</{tag}>'

        head = "".join(cell("th", name, name) for name in self.header)
        body = "".join(
            "<tr>" + "".join(cell("td", c, n) for c, n in zip(row, self.header, strict=True)) + "</tr>"
            for row in self.rows
        )
        return f'<table class="dataframe"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def speeds(items: Iterable[Speed]) -> Table:
    """The facts of some speeds: rate, arithmetic, source and date; for links also both ways added."""
    items = tuple(items)
    links = all(s.direction == EACH_WAY for s in items)
    rows = []
    for s in items:
        rate = (
            (format_rate(s.bytes_per_s), format_rate(s.both_ways)) if links else (format_rate(s.bytes_per_s),)
        )
        said = f"{s.source.name} ({s.source.date})"
        source: str | tuple[str, str] = (said, s.source.url) if s.source.url else said
        notes = (s.note,) if any(item.note for item in items) else ()
        rows.append((s.name, *rate, s.arithmetic or "as the source prints it", *notes, source))
    numbers = ("each way", "both ways") if links else ("reads and writes",)
    note = ("note",) if any(item.note for item in items) else ()
    return Table(("", *numbers, "arithmetic", *note, "source"), tuple(rows), right=numbers)


def shares(pairs: Iterable[tuple[Speed, Speed]]) -> Table:
    """What was measured beside the published rate of the same link, and the share of it that was reached."""
    rows = tuple(
        (
            got.name,
            *map(format_rate, (got.bytes_per_s, peak.bytes_per_s)),
            f"{got.bytes_per_s / peak.bytes_per_s:.0%}",
        )
        for got, peak in pairs
    )
    numbers = ("measured", "published, each way", "share")
    return Table(("", *numbers), rows, right=numbers)


@dataclass(frozen=True)
class Rung:
    """One bar of a ladder, `value` in its unit. `measured` is solid, published or predicted is outlined."""

    name: str
    value: float
    measured: bool = False


def ladder(
    rungs: Sequence[Rung],
    *,
    unit: str,
    alt: str,
    format_value: Callable[[float], str] = format_rate,
    outlined: str = "published",
    solid: str = "measured here",
) -> Figure:
    """Horizontal bars on a log axis, in the order given.

    `unit` names the axis ("bytes per second, each way"), `format_value` writes the numbers beside the bars
    and the ticks. The bars start at the left end of a log axis, so compare where they end, not how long they
    are.
    """
    if not rungs:
        raise ValueError("A ladder needs at least one rung.")
    if bad := [r.name for r in rungs if not r.value > 0]:
        raise ValueError(f"A log axis has no place for values of 0 or below: {', '.join(bad)}.")
    low = math.floor(math.log10(min(r.value for r in rungs)) - 0.2)
    high = math.log10(max(r.value for r in rungs))
    high = math.ceil(high) if math.ceil(high) - high < 0.5 else high + 0.1
    left, right, top, row = _EDGE, WIDTH - _EDGE - 6, 44, 54

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (right - left)

    kinds = {r.measured for r in rungs}
    marks = [
        _key(
            ((solid, True), (outlined, False))
            if len(kinds) == 2
            else ((solid if True in kinds else outlined, True in kinds),)
        )
    ]
    bottom = top + row * len(rungs)
    powers = range(low, math.floor(high) + 1)
    step = max(1, math.ceil(len(powers) * 92 / (right - left)))
    ticks, last = [], -1e9
    for p in powers:
        marks.append(line(x(10.0**p), top, x(10.0**p), bottom + 4, stroke=LINE))
        if (p - low) % step == 0:
            text = format_value(10.0**p)
            half = text_width(text) / 2
            centre = min(max(x(10.0**p), left + half), right + 6 - half)
            if centre - half > last:
                ticks.append(label(centre, bottom + 24, text, anchor="middle", fill=MUTED))
                last = centre + half + 6
    for k, rung in enumerate(rungs):
        y = top + row * k
        shown = format_value(rung.value)
        marks += [
            label(left, y + 20, rung.name),
            label(right, y + 20, shown, anchor="end", bold=True),
            _bar(left, y + 27, x(rung.value) - left, rung.measured, f"{rung.name}: {shown}"),
        ]
    marks += [*ticks, label(WIDTH / 2, bottom + 50, f"{unit}, log scale", anchor="middle", fill=MUTED)]
    width = max(len(r.name) for r in rungs)
    text = "\n".join(
        f"{r.name.ljust(width)}  {format_value(r.value).rjust(10)}  {solid if r.measured else outlined}"
        for r in rungs
    )
    return drawing(WIDTH, bottom + 62, *marks, alt=alt, text=f"{unit}\n{text}")


def _bar(x: float, y: float, width: float, filled: bool, title: str = "") -> str:
    """A bar 16 px high: solid, or an outline of 2 px that a phone still shows."""
    colour = COLOURS["all_reduce"]
    mark = rect(x, y, width, 16, fill=colour if filled else PAPER, stroke=colour, title=title)
    return mark.replace("<rect", '<rect stroke-width="2"', 1)


def _key(entries: Sequence[tuple[str, bool]]) -> str:
    """Squares that say what solid and outlined mean, in one row at the top."""
    marks, at = [], float(_EDGE)
    for text, filled in entries:
        colour = COLOURS["all_reduce"]
        marks.append(
            rect(at, 12, 18, 16, fill=colour if filled else PAPER, stroke="none" if filled else colour)
        )
        marks.append(label(at + 26, 27, text, fill=MUTED))
        at += 26 + text_width(text) + 26
    return "".join(marks)


@dataclass(frozen=True)
class Series:
    """Points of one line. `measured` is solid, published or predicted is dashed with hollow marks."""

    name: str
    points: Sequence[tuple[float, float]]
    measured: bool = True
    colour: str = ""


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    alt: str,
    x_log: bool = True,
    y_log: bool = True,
    x_base: int = 10,
    x_format: Callable[[float], str] = "{:g}".format,
    y_format: Callable[[float], str] = "{:g}".format,
    x_ticks: Sequence[float] = (),
    y_ticks: Sequence[float] = (),
    marks: Sequence[tuple[float, str]] = (),
    height: float = 440,
) -> Figure:
    """Lines with marks on linear or log axes; `marks` are dotted upright lines with a word on top.

    Ticks that are not given are powers of 10 (of `x_base` along x) on a log axis and round numbers on a
    linear one.
    """
    if not any(s.points for s in series):
        raise ValueError("There is nothing to draw: every series is empty.")
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    for name, values, log in (("x", xs, x_log), ("y", ys, y_log)):
        if log and min(values) <= 0:
            raise ValueError(f"A log axis has no place for {name} = {min(values):g}. Use {name}_log=False.")
    x_range = _range([*xs, *x_ticks], x_log, pad=0.03)
    y_range = _range([*ys, *y_ticks], y_log, pad=0.06)
    x_ticks = tuple(x_ticks) or _ticks(x_range, x_log, x_base, most=5)
    y_ticks = tuple(y_ticks) or _ticks(y_range, y_log, 10, most=6)

    entries = _wrap_key([s.name for s in series])
    left = _EDGE + max(text_width(y_format(t)) for t in y_ticks) + 8
    right, top = WIDTH - _EDGE - 8, 12 + 28 * (entries[-1][1] + 1) + 28 + (26 if marks else 0)
    bottom = height - 66

    def at(value: float, bounds: tuple[float, float], log: bool, start: float, end: float) -> float:
        low, high = bounds
        share = (math.log(value / low) / math.log(high / low)) if log else (value - low) / (high - low)
        return start + share * (end - start)

    def px(value: float) -> float:
        return at(value, x_range, x_log, left, right)

    def py(value: float) -> float:
        return at(value, y_range, y_log, bottom, top)

    out: list[str] = []
    for t in y_ticks:
        out.append(line(left, py(t), right, py(t)))
        out.append(label(left - 8, py(t) + 7, y_format(t), anchor="end", fill=MUTED))
    last = -1e9
    for t in x_ticks:
        out.append(line(px(t), bottom, px(t), bottom + 5, stroke=MUTED))
        half = text_width(x_format(t)) / 2
        centre = min(px(t), WIDTH - 4 - half)
        if centre - half > last:
            out.append(label(centre, bottom + 26, x_format(t), anchor="middle", fill=MUTED))
            last = centre + half + 6
    out.append(line(left, bottom, right, bottom, stroke=MUTED))
    last = -1e9
    for value, word in sorted(marks):  # from left to right: a word without room is left out
        if not x_range[0] <= value <= x_range[1]:
            continue
        out.append(line(px(value), top - 4, px(value), bottom, stroke=MUTED, dash="2 4"))
        half = text_width(word) / 2
        if px(value) - half > last:
            out.append(label(px(value), top - 10, word, anchor="middle", fill=MUTED))
            last = px(value) + half + 6
    out.append(label(_EDGE, top - (36 if marks else 10), y_label, fill=MUTED))
    out.append(label((left + right) / 2, height - 12, x_label, anchor="middle", fill=MUTED))
    for k, (s, (x0, row)) in enumerate(zip(series, entries, strict=True)):
        colour = s.colour or RANK_COLOURS[k % len(RANK_COLOURS)]
        points = [(px(x), py(y)) for x, y in s.points]
        dash = "" if s.measured else "7 5"
        for (xa, ya), (xb, yb) in pairwise(points):
            out.append(line(xa, ya, xb, yb, stroke=colour, width=3, dash=dash))
        for (x, y), (xv, yv) in zip(points, s.points, strict=True):
            out.append(_mark(k, x, y, colour, s.measured, f"{s.name}: {x_format(xv)}, {y_format(yv)}"))
        y_key = 26 + 28 * row
        out.append(line(x0, y_key - 6, x0 + 30, y_key - 6, stroke=colour, width=3, dash=dash))
        out.append(_mark(k, x0 + 15, y_key - 6, colour, s.measured, s.name))
        out.append(label(x0 + 38, y_key, s.name))
    text = "\n".join(
        f"{s.name}: " + ", ".join(f"{x_format(x)}: {y_format(y)}" for x, y in s.points) for s in series
    )
    return drawing(WIDTH, height, *out, alt=alt, text=f"{y_label} against {x_label}\n{text}")


def by_size(
    series: Sequence[Series],
    *,
    alt: str,
    marks: Sequence[tuple[float, str]] = (),
    x_label: str = "size",
    y_label: str = "bytes per second",
) -> Figure:
    """Rates in bytes/s against sizes in bytes, both axes logarithmic: the picture of every bandwidth test."""
    return lines(
        series,
        x_label=x_label,
        y_label=y_label,
        alt=alt,
        x_base=2,
        x_format=format_bytes,
        y_format=format_rate,
        marks=marks,
    )


def generations(gpus: Sequence[GPU]) -> Figure:
    """The published rates around some GPUs against the year each was announced."""
    curves = [
        Series("HBM, read + write", [(g.year, g.memory.bytes_per_s) for g in gpus], measured=False),
        Series("NVLink, each way", [(g.year, g.nvlink.bytes_per_s) for g in gpus], measured=False),
        Series("PCIe x16, each way", [(g.year, g.pcie.bytes_per_s) for g in gpus], measured=False),
        Series("network port", [(g.year, g.network.bytes_per_s) for g in gpus if g.network], measured=False),
    ]
    grew = ", ".join(
        f"{c.name.split(',')[0]} {c.points[-1][1] / c.points[0][1]:.2g} times" for c in curves[:3]
    )
    return lines(
        curves,
        x_log=False,
        x_ticks=[g.year for g in gpus],
        x_label="year: " + ", ".join(g.name.split()[0] for g in gpus),
        y_label="published rate per GPU",
        y_format=format_rate,
        alt=f"From {gpus[0].name} to {gpus[-1].name} rates grew: {grew}.",
    )


def _mark(kind: int, x: float, y: float, colour: str, filled: bool, title: str) -> str:
    """A point of series number `kind`: circle, square, diamond or triangle, so that colour is never alone."""
    tip = f"<title>{html.escape(title)}</title>"
    style = f'fill="{colour if filled else PAPER}" stroke="{colour}" stroke-width="2.5"'
    match kind % 4:
        case 0:
            return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="6" {style}>{tip}</circle>'
        case 1:
            corners = ((-5.5, -5.5), (5.5, -5.5), (5.5, 5.5), (-5.5, 5.5))
        case 2:
            corners = ((0, -7.5), (7.5, 0), (0, 7.5), (-7.5, 0))
        case _:
            corners = ((0, -7), (7, 6), (-7, 6))
    points = " ".join(f"{x + dx:.2f},{y + dy:.2f}" for dx, dy in corners)
    return f'<polygon points="{points}" {style}>{tip}</polygon>'


def _wrap_key(names: Sequence[str]) -> list[tuple[float, int]]:
    """Where each entry of the key begins: px from the left, and its row."""
    places, at, row = [], float(_EDGE), 0
    for name in names:
        width = 38 + text_width(name)
        if at > _EDGE and at + width > WIDTH - _EDGE:
            at, row = float(_EDGE), row + 1
        places.append((at, row))
        at += width + 22
    return places


def _range(values: Sequence[float], log: bool, pad: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        spread = math.log(high / low) or math.log(10)
        return low * math.exp(-pad * spread), high * math.exp(pad * spread)
    low = min(low, 0.0) if low < 0.5 * high else low
    spread = (high - low) or abs(high) or 1.0
    return (low if low == 0 else low - pad * spread), high + pad * spread


def _ticks(bounds: tuple[float, float], log: bool, base: int, most: int) -> tuple[float, ...]:
    low, high = bounds
    if log:
        first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
        if last - first >= 1:
            step = max(1, math.ceil((last - first + 1) / most))
            return tuple(float(base) ** k for k in range(first, last + 1, step))
        steps = [m * 10.0 ** math.floor(math.log10(low) + d) for d in (0, 1) for m in (1, 2, 5)]
        return tuple(t for t in steps if low <= t <= high) or (low, high)
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    return tuple(k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1))


def machine_map(machine: Machine) -> Figure:
    """Cores above caches above memory, one frame per NUMA node; a cache is as wide as the cores that share
    it.

    At most four cores of a node and two nodes are drawn; the picture says how many more there are.
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
    cell = min(72.0, (WIDTH - left - _EDGE) / len(names))
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
        marks.append(rect(_EDGE, y + 4, 18, 18, fill=_PATH_COLOURS[kind.code], radius=4))
        marks.append(label(_EDGE + 28, y + 20, kind.code, bold=True))
        for part in _fold(kind.meaning, WIDTH - 110 - _EDGE):
            marks.append(label(110, y + 20, part))
            y += 26
        y += 4
    if many:
        marks.append(label(_EDGE, y + 20, "G is a GPU, N a network card (NIC).", fill=MUTED))
        y += 30
    near = used[0] if used else path_kind("X")
    far = used[-1] if used else near
    alt = (
        f"Paths between {len(topology.gpus)} GPUs and {len(topology.nics)} network cards: "
        f"the nearest are {near.code} ({near.meaning}), the farthest {far.code} ({far.meaning})."
    )
    return drawing(WIDTH, y + 8, *marks, alt=alt, text=repr(topology))


def _fold(text: str, width: float) -> list[str]:
    """`text` in pieces that fit `width` px."""
    rows = [""]
    for word in text.split():
        candidate = f"{rows[-1]} {word}".strip()
        if rows[-1] and text_width(candidate) > width:
            rows.append(word)
        else:
            rows[-1] = candidate
    return rows


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
        marks.append(line(_EDGE, y - 7, _EDGE + 40, y - 7, stroke=colour, width=wide(speed)))
        marks.append(label(_EDGE + 52, y, f"{where}: {format_rate(speed.bytes_per_s)} each way"))
        y += 30
    marks.append(label(_EDGE, y, "In each GPU: rank above, local rank below.", fill=MUTED))
    ratio = nvlink.bytes_per_s / network.bytes_per_s
    alt = (
        f"{nodes} nodes of {per_node} GPUs. NVSwitch joins the GPUs inside a node at "
        f"{format_rate(nvlink.bytes_per_s)} each way; across nodes each GPU has "
        f"{format_rate(network.bytes_per_s)}, {ratio:.3g} times less."
    )
    text = "\n".join(f"{where}: {speed!r}" for _, speed, where in rows)
    return drawing(WIDTH, y + 14, *marks, alt=alt, text=text)


__all__ = [
    "Rung",
    "Series",
    "Table",
    "by_size",
    "cluster_map",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "generations",
    "ladder",
    "lines",
    "link_matrix",
    "machine_map",
    "shares",
    "speeds",
    "text_width",
]
