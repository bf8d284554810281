"""Pictures of numbers: where the marks stand, what is said of them, what is refused."""

from xml.etree import ElementTree

import pytest

from rankcell import hardware as hw
from rankcell.draw import charts, memory
from rankcell.draw.bars import bars
from rankcell.draw.charts import Rung, Series
from rankcell.draw.svg import Figure, Frames, format_bytes, format_seconds
from rankcell.results import Memory

KIB, BLUE = 1024, "#0072b2"


def marks(figure, tag):
    """All elements of one kind, in drawing order."""
    return list(ElementTree.fromstring(figure.svg).iter("{http://www.w3.org/2000/svg}" + tag))


def words(figure):
    """All texts of the picture."""
    return [t.text for t in marks(figure, "text")]


def number(element, name):
    return float(element.get(name))


def tipped(figure, tag="rect"):
    """What has a text for the mouse: by that text, in drawing order."""
    return {found[0].text: found for found in marks(figure, tag) if len(found)}


def test_bytes_seconds_and_rates_have_suitable_units():
    sizes = [0, 1023, 1024, 1536, 2**20, 3 * 2**30, 2**40]
    assert [*map(format_bytes, sizes)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1 MiB", "3 GiB", "1 TiB"]
    times = [2.5, 0.9996, 0.0123, 0.00099951, 4e-6]
    assert [*map(format_seconds, times)] == ["2.5 s", "1 s", "12.3 ms", "1 ms", "4 us"]
    rates = [450e9, 3.35e12, 63.015e9, 125e6, 2.5e3, 7]
    shown = [charts.format_rate(r) for r in rates]
    assert shown == ["450 GB/s", "3.35 TB/s", "63 GB/s", "125 MB/s", "2.5 kB/s", "7 B/s"]


def test_a_slider_stores_every_mark_once():
    one, two = (Figure(f"<svg><a/><b n='{n}'/></svg>", f"finding </{n}>") for n in (1, 2))
    page = Frames((one, two), ("first", "second"), still=1)._repr_html_()
    assert page.count("<a/>") == 1 and '"frames": [[0, 1, 2, 3], [0, 1, 4, 3]]' in page
    assert (
        page.startswith(two._repr_html_()[: -len("</figure>")])
        and 'alt="finding &lt;/2&gt;" src="data:' in page
        and '"finding <\\/1>"' in page
    )
    assert repr(Frames((one, two), ("a", "b"))) == "[a] finding </1>\n[b] finding </2>"


def test_a_ladder_says_its_factors():
    def factors(*rungs):
        said = words(charts.ladder(rungs, unit="s", alt="d", format_value=str, outlined="published"))
        return [w for w in said if w[0] in "÷×"]

    assert factors(Rung("NVLink", 450e9), Rung("copy", 9e9), Rung("1 GbE", 0.125e9)) == ["÷ 50", "÷ 72"]
    assert factors(Rung("a", 1.0), Rung("b", 3.0), Rung("c", 3.0), Rung("d", 4500.0)) == ["× 3", "× 1,500"]


def test_linear_axes_have_the_given_ticks():
    series = [Series("gain", [(0, -2.0), (10, 1.0), (20, 3.0)])]
    axes = {"x_label": "step", "y_label": "change", "alt": "Up.", "x_log": False, "y_log": False}
    figure = charts.lines(series, **axes, y_ticks=(-2, 1))
    assert {"0", "5", "20", "-2", "1"} <= set(words(figure)) and "-1" not in words(figure)
    heights = [number(p, "cy") for p in marks(figure, "circle")[:3]]
    assert (heights[0] - heights[1]) / (heights[1] - heights[2]) == pytest.approx(1.5, rel=0.01)


def test_tables_say_rates_and_sources():
    table = charts.speeds([hw.PCIE[5], hw.PCIE[7]])
    assert table.header == ("", "each way", "both ways", "arithmetic", "note", "source")
    assert table.rows[0][:3] == ("PCIe 5 x16", "63 GB/s", "126 GB/s")
    assert table.rows[1][4] == "newer than the servers of these GPUs"
    assert '">ml-engineering, network (read 2026-11-21)</a>' in table._repr_html_()
    assert repr(table).splitlines()[1].startswith("PCIe 5 x16   63 GB/s   126 GB/s  32 GT/s")
    assert charts.speeds([hw.HOST_MEMORY]).header == ("", "reads and writes", "arithmetic", "note", "source")
    assert charts.shares(hw.REPORTED.values()).rows[0] == ("host to H200", "55.4 GB/s", "63 GB/s", "88%")
    assert "&lt;b&gt;" in charts.Table(("a",), (("<b>",),))._repr_html_()


def one_step(title=""):
    """A step in five changes of memory."""
    return memory.over_time(
        [
            Memory(0, parameters=16 * KIB, phase="forward"),
            Memory(1, parameters=16 * KIB, activations=40 * KIB, phase="forward"),
            Memory(2, parameters=16 * KIB, gradients=8 * KIB, activations=40 * KIB, phase="backward"),
            Memory(3, parameters=16 * KIB, gradients=16 * KIB, phase="backward"),
            Memory(4, parameters=16 * KIB, gradients=16 * KIB, optimizer=32 * KIB, phase="step"),
        ],
        title=title,
    )


def test_memory_over_time_says_its_peak():
    at = "64 KiB: parameters 16 KiB, gradients 8 KiB, activations 40 KiB."
    assert one_step().alt == f"Memory is highest in backward, {at}"
    titled = one_step("Gradients replace activations")
    assert titled.alt == f"Gradients replace activations. Memory is highest in backward, {at}"
    assert "Gradients replace activations" in words(titled)
    piles = [tip.split(":")[0] for tip in tipped(one_step(), "polygon")]
    assert piles == ["parameters", "gradients", "optimizer", "activations"], "in the course's order"


def test_piles_of_bars_have_the_colours_of_memory_and_free_ones():
    figure = bars({"a": {"parameters": 1.0, "cache": 3.0, "buffers": 2.0}, "b": 1.0}, unit="GB")
    edges = [
        tipped(figure)[f"a, {kind}"].get("stroke") for kind in ("parameters: 1", "cache: 3", "buffers: 2")
    ]
    assert edges[0] == BLUE and len(set(edges)) == 3 and not {*edges[1:]} & {*memory.COLOURS.values()}
    assert figure.alt == "a has the longest bar: 6."
