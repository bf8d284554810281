"""Hand-written events in, exact bars, arrows and sentences out."""

import re
import xml.etree.ElementTree as ET

import pytest

from rankcell.draw.streams import stacked, streams
from rankcell.draw.svg import COLOURS
from rankcell.results import Event
from rankcell.simulate import Device

SVG = "{http://www.w3.org/2000/svg}"


def overlapped():
    gpu = Device(launch=0.0)
    side = gpu.stream("copies")
    with gpu.use(side):
        gpu.copy(seconds=0.004, pinned=True, non_blocking=True)
    gpu.matmul(seconds=0.010)
    side.wait_stream(gpu.default_stream())
    with gpu.use(side):
        gpu.copy(seconds=0.010, to="host", pinned=True)
    return gpu.events


def texts(figure):
    return [t.text for t in ET.fromstring(figure.svg).iter(f"{SVG}text")]


def test_rows_are_named_and_bars_stand_where_the_time_is():
    figure = streams(overlapped())
    assert [t for t in texts(figure) if t in ("host", "default", "copies")] == ["host", "default", "copies"]
    bars = [r for r in ET.fromstring(figure.svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    by_name = {r.find(f"{SVG}title").text.split(",")[0]: r for r in bars}
    matmul, back = by_name["matmul"], by_name["copy D2H"]
    assert float(matmul.get("width")) == pytest.approx(float(back.get("width")), abs=0.02)  # 10 ms each
    assert float(back.get("x")) + float(back.get("width")) + 1 == pytest.approx(600 - 14, abs=0.02)
    assert matmul.get("stroke") == COLOURS["compute"]


def test_the_sentence_and_the_twin_say_what_the_picture_shows():
    figure = streams(overlapped(), title="Two streams")
    assert figure.alt == (
        "Two streams. Simulated: done after 20 ms; 4 ms of work overlap; the host stands for 20 ms."
    )
    assert repr(figure).splitlines()[1:] == [
        "= computes   > copies   - host waits   (0 to 20 ms)",
        "host     |" + "-" * 60 + "|",
        "default  |" + "=" * 30 + " " * 30 + "|  matmul 0 ms-10 ms",
        "copies   |" + ">" * 12 + " " * 18 + ">" * 30 + "|  copy H2D 0 ms-4 ms, copy D2H 10 ms-20 ms",
    ]


def test_an_arrow_leads_to_the_stream_that_waited():
    assert streams(overlapped()).svg.count("<polygon") == 1
    assert streams([e for e in overlapped() if e.kind != "order"]).svg.count("<polygon") == 0


def test_measured_bars_are_solid():
    events = [Event(0, "matmul", 0.0, 0.01, kind="compute", group="host")]
    assert f'fill="{COLOURS["compute"]}"' in streams(events).svg
    assert streams(events).alt == "Measured: done after 10 ms; nothing overlaps; the host never stands."


def test_stacked_runs_share_their_time_and_their_rows():
    short = Device(launch=0.0)
    short.matmul(seconds=0.010)
    figure = stacked({"long": overlapped(), "short": short.events})
    names = [t for t in texts(figure) if t in ("host", "default", "copies")]
    assert names == ["host", "default", "copies"] * 2
    wide, same = re.findall(r'width="([\d.]+)"[^>]*><title>matmul', figure.svg)
    assert wide == same
    assert "simulated: short" in texts(figure)
    apart = streams(overlapped()).alt, streams(short.events).alt
    assert figure.alt == f"long: {apart[0]} short: {apart[1]}"
    assert "default  |" + "=" * 30 + " " * 30 in repr(figure).split("short.")[1]


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing was enqueued"):
        streams([])
