"""Charts from fixed numbers: which marks there are, where they stand, and that every word fits."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rankcell import hardware as hw
from rankcell.draw import charts, maps
from rankcell.draw.charts import Rung, Series
from rankcell.draw.parts import WIDTH, text_width

SVG = "{http://www.w3.org/2000/svg}"
BLUE = "#0072b2"


def marks(figure, tag):
    """All elements of one kind, in drawing order."""
    return list(ElementTree.fromstring(figure.svg).iter(SVG + tag))


def words(figure):
    """All texts of the picture."""
    return [t.text for t in marks(figure, "text")]


def number(element, name):
    return float(element.get(name))


def example_ladder():
    rungs = [Rung("NVLink", 450e9), Rung("copy", 9e9, measured=True), Rung("1 GbE", 0.125e9)]
    return charts.ladder(rungs, unit="bytes per second", alt="NVLink is fastest.")


def example_lines(**options):
    series = [
        Series("measured", [(2**10, 1e9), (2**20, 1e10), (2**30, 1e11)]),
        Series("published", [(2**10, 1e11), (2**30, 1e11)], measured=False),
    ]
    axes = {"x_label": "size", "y_label": "rate", "x_base": 2, "alt": "It grows."} | options
    return charts.lines(series, x_format=charts.format_bytes, y_format=charts.format_rate, **axes)


def example_machine(n_cores=2, n_nodes=1, threads=1):
    cores = tuple(tuple(k + t * n_cores for t in range(threads)) for k in range(n_cores))
    per = n_cores // n_nodes
    groups = [tuple(c for core in cores[n * per : (n + 1) * per] for c in core) for n in range(n_nodes)]
    caches = [hw.Cache(1, "Data", 2**15, core) for core in cores]
    caches += [hw.Cache(1, "Instruction", 2**15, core) for core in cores]
    caches += [hw.Cache(2, "Unified", 2**19, core) for core in cores]
    caches += [hw.Cache(3, "Unified", 2**25, group) for group in groups]
    numa = tuple(hw.NumaNode(n, group, 2**34) for n, group in enumerate(groups))
    return hw.Machine("Example", cores, tuple(caches), numa, n_nodes * 2**34)


def all_figures():
    h100 = hw.GPUS["H100 SXM"]
    return {
        "ladder": example_ladder(),
        "ladder of one": charts.ladder(
            [Rung("a", 3.0)], unit="s", alt="a", format_value=charts.format_seconds
        ),
        "lines": example_lines(marks=[(2**15, "L1d"), (2**25, "L3")]),
        "linear lines": charts.lines(
            [Series("loss", [(0, 2.0), (10, 1.5), (20, 1.0)])],
            x_label="step",
            y_label="loss",
            alt="It falls.",
            x_log=False,
            y_log=False,
        ),
        "by size": charts.by_size([Series("copy", [(2**12, 3e9), (2**28, 9e9)])], alt="It grows."),
        "generations": charts.generations([hw.GPUS[n] for n in ("V100 SXM2", "A100 SXM 80GB", "B200 SXM")]),
        "small machine": maps.machine_map(example_machine()),
        "large machine": maps.machine_map(example_machine(128, 8, 2)),
        "machine that says little": maps.machine_map(hw.Machine("x", ((0,), (1,)), (), (), None)),
        "macOS": maps.machine_map(hw.Machine("x", ((0,), (1,)), (hw.Cache(1, "Data", 2**16),), (), 2**34)),
        "NVLink server": maps.link_matrix(hw.parse_topology(hw.EXAMPLE_NVLINK_SERVER)),
        "PCIe server": maps.link_matrix(hw.parse_topology(hw.EXAMPLE_PCIE_SERVER)),
        "cluster": maps.cluster_map(nvlink=h100.nvlink, pcie=h100.pcie, network=h100.network),
        "small cluster": maps.cluster_map(
            nvlink=h100.nvlink, pcie=h100.pcie, network=h100.network, per_node=4, nodes=2
        ),
    }


@pytest.mark.parametrize(("name", "figure"), all_figures().items(), ids=list(all_figures()))
def test_every_picture_reads_on_a_phone_and_in_a_terminal(name, figure):
    root = ElementTree.fromstring(figure.svg)
    width, height = (float(v) for v in root.get("viewBox").split()[2:])
    assert width == WIDTH
    assert len(figure.svg) < 100_000
    assert figure.alt.strip() and figure.alt == root.get("aria-label")
    assert figure.text.strip() and repr(figure) == figure.text
    for text in root.iter(SVG + "text"):
        size, x, y = number(text, "font-size"), number(text, "x"), number(text, "y")
        assert size * 380 / width > 11, f"{text.text!r} is under 11 px on a phone"
        span = text_width(text.text, size)
        left = {"start": x, "middle": x - span / 2, "end": x - span}[text.get("text-anchor")]
        assert left >= -1 and left + span <= width + 4, f"{text.text!r} leaves the picture"
        assert size * 0.7 <= y <= height, f"{text.text!r} leaves the picture"


@pytest.mark.parametrize(("name", "figure"), all_figures().items(), ids=list(all_figures()))
def test_no_two_words_of_one_line_touch(name, figure):
    spans = []
    for text in marks(figure, "text"):
        size, x = number(text, "font-size"), number(text, "x")
        span = text_width(text.text, size) * 0.92  # the estimate is generous
        left = {"start": x, "middle": x - span / 2, "end": x - span}[text.get("text-anchor")]
        spans.append((number(text, "y"), left, left + span, text.text))
    for (y1, _, end, first), (y2, begin, _, second) in pairwise(sorted(spans)):
        assert y1 != y2 or begin >= end - 4, f"{first!r} touches {second!r}"


# Ladder


def test_ladder_points_stand_where_their_values_are():
    points = marks(example_ladder(), "circle")[2:]  # after the key
    places = [number(p, "cx") for p in points]
    decades = (places[0] - places[1]) / (places[1] - places[2])
    assert decades == pytest.approx(1.69897 / 1.85733, rel=1e-3)  # log10(450/9) and log10(9/0.125)
    assert [p.get("fill") for p in points] == ["#ffffff", BLUE, "#ffffff"]
    assert {p.get("stroke") for p in points} == {BLUE}


def test_ladder_says_by_what_factor_each_rung_differs_from_the_last():
    assert [w for w in words(example_ladder()) if w[0] in "÷×"] == ["÷ 50", "÷ 72"]
    rungs = [Rung("a", 1.0), Rung("b", 3.0), Rung("c", 3.0), Rung("d", 4500.0)]
    assert [w for w in words(charts.ladder(rungs, unit="s", alt="d", format_value=str)) if w[0] in "÷×"] == [
        "× 3",
        "× 1,500",
    ]


def test_ladder_says_its_unit_its_key_and_its_values():
    said = words(example_ladder())
    assert said[:2] == ["measured here", "published"]
    assert {"450 GB/s", "9 GB/s", "125 MB/s", "bytes per second; each line is 10 times the last"} <= set(said)
    assert repr(example_ladder()).splitlines() == [
        "bytes per second",
        "NVLink    450 GB/s  published",
        "copy        9 GB/s  measured here",
        "1 GbE     125 MB/s  published",
    ]


def test_ladder_key_shows_only_what_is_there():
    figure = charts.ladder([Rung("a", 1.0), Rung("b", 2.0)], unit="s", alt="b is twice a", format_value=str)
    assert "measured here" not in words(figure)


def test_ladder_without_rungs_or_with_zero():
    with pytest.raises(ValueError, match="at least one rung"):
        charts.ladder([], unit="s", alt="")
    with pytest.raises(ValueError, match="no place for values of 0 or below: a"):
        charts.ladder([Rung("a", 0.0)], unit="s", alt="")


# Lines


def test_lines_on_log_axes_are_straight_where_the_numbers_are_powers():
    circles = marks(example_lines(), "circle")
    first, second, third, key = circles
    assert number(second, "cx") - number(first, "cx") == pytest.approx(
        number(third, "cx") - number(second, "cx"), abs=0.02
    )
    assert number(first, "cy") > number(second, "cy") > number(third, "cy")
    assert {c.get("fill") for c in (first, second, third, key)} == {BLUE}


def test_lines_show_predictions_hollow_and_dashed():
    figure = example_lines()
    assert {p.get("fill") for p in marks(figure, "polygon")} == {"#ffffff"}
    dashes = [
        line.get("stroke-dasharray") for line in marks(figure, "line") if line.get("stroke-width") == "3"
    ]
    assert dashes == [None, None, None, "7 5", "7 5"]  # two pieces and a key, one piece and a key


def test_lines_have_units_on_both_axes_and_a_text_twin():
    said = words(example_lines())
    assert {"size", "rate", "1 KiB", "1 MiB", "1 GB/s", "100 GB/s", "measured", "published"} <= set(said)
    assert repr(example_lines()).splitlines() == [
        "rate against size",
        "measured: 1 KiB: 1 GB/s, 1 MiB: 10 GB/s, 1 GiB: 100 GB/s",
        "published: 1 KiB: 100 GB/s, 1 GiB: 100 GB/s",
    ]


def test_lines_mark_places_along_x_and_skip_those_outside():
    said = words(example_lines(marks=[(2**15, "L1d"), (2**50, "far")]))
    assert "L1d" in said and "far" not in said


def test_lines_refuse_zero_on_a_log_axis_and_no_points():
    with pytest.raises(ValueError, match=r"no place for x = 0\. Use x_log=False\."):
        charts.lines([Series("a", [(0, 1.0), (1, 2.0)])], x_label="", y_label="", alt="")
    with pytest.raises(ValueError, match="every series is empty"):
        charts.lines([Series("a", [])], x_label="", y_label="", alt="")


def test_generations_say_how_much_each_rate_grew():
    figure = charts.generations([hw.GPUS["V100 SXM2"], hw.GPUS["B200 SXM"]])
    assert figure.alt == (
        "From V100 SXM2 to B200 SXM rates grew: HBM 8.9 times, NVLink 6 times, PCIe x16 4 times."
    )
    assert "year: V100, B200" in words(figure)


# Tables and rates


def test_shares_are_of_the_published_rate():
    table = charts.shares(hw.REPORTED.values())
    assert table.rows[0] == ("host to H200", "55.4 GB/s", "63 GB/s", "88%")


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (450e9, "450 GB/s"),
        (3.35e12, "3.35 TB/s"),
        (63.015e9, "63 GB/s"),
        (125e6, "125 MB/s"),
        (2.5e3, "2.5 kB/s"),
        (7, "7 B/s"),
    ],
)
def test_rates_are_decimal(rate, text):
    assert charts.format_rate(rate) == text


def test_table_of_links_says_both_directions_and_where_it_is_from():
    table = charts.speeds([hw.PCIE[5], hw.PCIE[7]])
    assert table.header == ("", "each way", "both ways", "arithmetic", "note", "source")
    assert table.rows[0][:3] == ("PCIe 5 x16", "63 GB/s", "126 GB/s")
    assert table.rows[1][4] == "newer than the servers of these GPUs"
    assert re.search(
        r'<a href="https://[^"]+">ml-engineering, network \(read 2026-11-21\)</a>', table._repr_html_()
    )
    assert repr(table).splitlines()[1].startswith("PCIe 5 x16   63 GB/s   126 GB/s  32 GT/s")


def test_table_of_memories_has_one_rate():
    assert charts.speeds([hw.HOST_MEMORY]).header == ("", "reads and writes", "arithmetic", "note", "source")


def test_table_escapes_text_and_counts_cells():
    assert "&lt;b&gt;" in charts.Table(("a",), (("<b>",),))._repr_html_()
    with pytest.raises(ValueError, match="A row has 2 cells, the header 1"):
        charts.Table(("a",), (("1", "2"),))


# Maps


def test_machine_map_draws_each_cache_over_the_cores_that_share_it():
    figure = maps.machine_map(example_machine())
    assert [t for t in words(figure) if t[0] == "L"] == ["L1d 32 KiB"] * 2 + ["L2 512 KiB"] * 2 + [
        "L3 32 MiB"
    ]
    boxes = {t: number(b, "width") for t, b in zip(("L1d", "L2", "L3"), cache_boxes(figure), strict=True)}
    assert boxes["L1d"] == boxes["L2"] < boxes["L3"] / 2
    assert figure.alt == (
        "This machine: 2 cores with 2 hardware threads, 1 NUMA node; 2 threads share each L3 of 32 MiB."
    )


def cache_boxes(figure):
    """The first box of each level of cache."""
    colours = list(maps._CACHE_COLOURS.values())
    return [next(b for b in marks(figure, "rect") if b.get("fill") == colour) for colour in colours]


def test_machine_map_says_what_it_leaves_out():
    said = words(maps.machine_map(example_machine(128, 8, 2)))
    assert said.count("cores") == 2
    assert "+ 6 more NUMA nodes like these" in said
    assert any(re.fullmatch(r"\+ 1\d", t) for t in said)


def test_link_matrix_colours_and_explains_the_codes_that_occur():
    figure = maps.link_matrix(hw.parse_topology(hw.EXAMPLE_PCIE_SERVER))
    cells = [b for b in marks(figure, "rect") if b.find(SVG + "title") is not None]
    assert len(cells) == 25
    titles = [b.find(SVG + "title").text for b in cells]
    assert titles[1] == "GPU0 to GPU1: PXB, PCIe, several bridges, but not the host bridge"
    said = words(figure)
    assert said.count("SYS") == 12 + 1 and said.count("PHB") == 2 + 1  # in the cells and in the key
    assert "NV#" not in said and "NODE" not in said


def test_copy_paths_say_what_each_way_costs():
    figure = maps.copy_paths(pageable="returns after 27 ms", pinned="returns after 1 ms")
    assert "a buffer of the driver first: it returns after 27 ms." in figure.alt
    assert figure.svg.count(">copy engine<") == 2 and figure.svg.count(">the CPU<") == 1


def test_cluster_map_draws_links_as_wide_as_they_are_fast():
    h100 = hw.GPUS["H100 SXM"]
    figure = maps.cluster_map(nvlink=h100.nvlink, pcie=h100.pcie, network=h100.network)
    widths = {line.get("stroke"): number(line, "stroke-width") for line in marks(figure, "line")}
    assert widths["#56b4e9"] / widths["#d55e00"] == pytest.approx(9, rel=0.01)
    assert widths["#56b4e9"] / widths["#009e73"] == pytest.approx(450 / 63.015, rel=0.01)
    said = words(figure)
    assert [t for t in said if t.isdigit()] == [str(n) for k in range(16) for n in (k, k % 8)]
    assert "GPU to NVSwitch: 450 GB/s each way" in said
    assert figure.alt.endswith("across nodes each GPU has 50 GB/s, 9 times less.")
