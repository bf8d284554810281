"""A run as a trace for Perfetto, from hand-written events."""

import json

from rankcell.draw.trace import chrome_trace, save_trace
from rankcell.results import Event, RankResult, Run

SENT = Event(0, "send", 0.001, 0.003, shape=(2,), dtype="float32", nbytes=8, peer=1, seq=1, line=3)
RECEIVED = Event(1, "recv", 0.002, 0.004, shape=(2,), dtype="float32", nbytes=8, peer=0, seq=1)
SPAN = Event(1, "forward", 0.0, 0.002, kind="compute")
RUN = Run("", (RankResult(0, events=(SENT,)), RankResult(1, events=(SPAN, RECEIVED))))


def test_every_rank_is_a_process_and_every_event_a_bar():
    rows = chrome_trace(RUN)["traceEvents"]
    assert [r["args"]["name"] for r in rows if r["name"] == "process_name"] == ["rank 0", "rank 1"]
    bars = {r["name"]: r for r in rows if r["ph"] == "X"}
    assert set(bars) == {"send(float32[2] to rank 1)", "recv(float32[2] from rank 0)", "forward"}
    assert bars["send(float32[2] to rank 1)"]["ts"] == 1000 and bars["forward"]["tid"] == 0
    assert bars["send(float32[2] to rank 1)"]["args"] == {"line": 3, "bytes": 8, "call": 1}


def test_a_message_is_an_arrow():
    flows = [r for r in chrome_trace(RUN)["traceEvents"] if r["ph"] in "sf"]
    assert [(f["ph"], f["pid"], f["ts"]) for f in flows] == [("s", 0, 1000.0), ("f", 1, 4000.0)]


def test_the_file_is_json(tmp_path):
    path = save_trace(RUN, tmp_path / "trace.json")
    assert json.loads(path.read_text())["displayTimeUnit"] == "ms"
