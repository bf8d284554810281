"""Ticks: an exercise is solved when its checks have passed; shared only on request; never in the way."""

import json
import threading
import urllib.request
from urllib.error import HTTPError

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell import command, progress, room

FIRST, SECOND = "Exercise 1: halve", "Exercise 2: add up"
CELLS = (
    *[("# 1 Tiny",), ("x = 1", "code")],
    (f"# {FIRST}\nhalf = 3", "code", "solution"),
    *[("assert half", "code"), ("assert half == 3", "code")],
    *[("## More",), ("1 / 0", "code", "raises-exception")],
    (f"%%ranks 2\n# {SECOND}\nx = 1", "code", "solution"),
    ("assert x", "code"),
)


def lesson():
    """A lesson with two exercises, the first with two checks; cell ids by their place."""
    found = new_notebook()
    for source, *tags in CELLS:
        make = new_code_cell if tags else new_markdown_cell
        cell = make(source, metadata={"tags": tags[1:]} if tags[1:] else {})
        cell["id"] = f"c{len(found.cells)}"
        found.cells.append(cell)
    return found


@pytest.fixture
def copy(tmp_path):
    """A student's copy of that lesson."""
    nbformat.write(notebooks.student_copy(lesson(), "tiny"), tmp_path / "01_tiny.ipynb")
    return tmp_path / "01_tiny.ipynb"


@pytest.fixture
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


def states(copy):
    return progress.Progress(copy).view().rows.get("01_tiny")


def test_solved_when_all_checks_passed_since_the_answer_ran(copy):
    mine = progress.Progress(copy)
    for cell in ("c1", "c2", "c3"):
        mine.heard(cell, None)
    assert states(copy) == {FIRST: "", SECOND: ""}  # one check is missing
    mine.heard("c2", None)
    mine.heard("c4", None)
    assert states(copy)[FIRST] == ""  # the first check has seen an older answer
    mine.heard("c3", None)
    assert states(copy) == {FIRST: "solved", SECOND: ""}
    assert repr(mine.view()).startswith("01_tiny  1 of 2  ✓ ·\n")
    mine.heard("c8", None)
    assert repr(mine.view()).startswith("01_tiny  2 of 2  ✓ ✓  ✓ lesson")
    assert "Exercise 2: add up: solved" in mine.view()._repr_html_()


def test_a_wrong_answer_is_noted_with_what_it_was_told(copy):
    mine = progress.Progress(copy)
    mine.heard("c2", NotImplementedError(FIRST))  # the stub is no try
    for cell in ("c0", "c1", "c6", "unknown", None):  # deliberate errors and other cells
        mine.heard(cell, ZeroDivisionError())
    assert not (copy.parent / progress.FILE).exists()
    mine.heard("c3", AssertionError("half of 6 is 12\nand more"))
    mine.heard("c4", AssertionError("half of 6 is 12"))
    kept = json.loads((copy.parent / progress.FILE).read_text("utf-8"))["lessons"]["01_tiny"][FIRST]
    assert (kept["state"], kept["tries"], kept["last"]) == ("tried", 2, "AssertionError: half of 6 is 12")
    mine.heard("c8", None)
    assert states(copy) == {FIRST: "tried", SECOND: "solved"}


def test_what_cannot_be_kept_is_said_and_costs_nothing(copy, monkeypatch):
    (copy.parent / progress.FILE).write_text('{"lessons": 3')  # half a file is begun anew
    mine = progress.Progress(copy)
    mine.heard("c8", None)
    assert states(copy)[SECOND] == "solved"

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(progress.Path, "write_text", refuse)
    mine.heard("c8", None)
    assert f"Nothing is kept: {progress.FILE} cannot be written in the notebook's folder" in repr(mine.view())
    nbformat.write(lesson(), copy)
    assert not progress.Progress(copy).view().rows  # the lesson's own solutions are not counted
    with pytest.raises(progress.ProgressError, match="Jupyter has not told this kernel which notebook"):
        progress.Progress(None).share("shared", "Ada")


def test_nothing_leaves_the_folder_unless_asked(copy, shared):
    mine = progress.Progress(copy)
    mine.heard("c8", None)
    assert list(shared.iterdir()) == []
    assert "and the name Ada L. go to" in mine.share(str(shared), "Ada L.")
    (file,) = shared.iterdir()
    sent = json.loads(file.read_text("utf-8"))
    assert set(sent) == {"version", "name", "at", "lessons"} and sent["name"] == "Ada L."
    assert f"Shared as Ada L. with {shared}" in repr(mine.view())
    assert mine.keep_private() == f"Nothing is shared any more with {shared}."
    assert list(shared.iterdir()) == []


def test_a_place_that_does_not_take_it_is_told(copy, tmp_path):
    mine = progress.Progress(copy)
    place, none = tmp_path / "none", "http://127.0.0.1:1/x"
    refused = [(place, "Ada", r"written to \(No such file or directory\)"), (tmp_path, "../x", "is no name")]
    for where, name, said in [*refused, (none, "Ada", f"no room answers at {none}")]:
        with pytest.raises(progress.ProgressError, match=said):
            mine.share(str(where), name)
    assert mine.read()["share"] is None


# The room


@pytest.fixture
def served():
    server = room.Server(("127.0.0.1", 0), room.Room())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_page_shows_who_is_where_and_what_fails_most(copy, served):
    server, address = served
    mine = progress.Progress(copy)
    mine.heard("c8", None)
    mine.heard("c3", AssertionError("<b>half</b> of 6 is 12"))
    mine.share(f"{address}/{server.join_key}", "Ada")
    with urllib.request.urlopen(f"{address}/{server.page_key}", timeout=60) as answer:
        text, headers = answer.read().decode(), answer.headers
    assert "<h1>1 in the room</h1>" in text and "<td>Ada</td>" in text and " min ago</td><td>1</td>" in text
    assert "&lt;b&gt;half&lt;/b&gt; of 6 is 12" in text and "<b>half" not in text
    assert "<td>01_tiny, Exercise 1: halve</td><td>1</td>" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("path", "data", "code"),
    [
        *[(path, None, 404) for path in ("", "x", "{0.join_key}", "{0.page_key}/x")],
        *[(path, b"{}", 404) for path in ("x", "{0.page_key}")],
        ("{0.join_key}", b"{}", 400),
        ("{0.join_key}", b'{"name": "../x", "at": 1, "lessons": {}}', 400),
        ("{0.join_key}", b'{"name": "Ada", "at": 1, "lessons": {"a": {"b": {"state": []}}}}', 400),
        ("{0.join_key}", b"x" * ((1 << 18) + 1), 413),
    ],
)
def test_no_key_and_no_progress_are_refused(served, path, data, code):
    server, address = served
    with pytest.raises(HTTPError) as refused:
        urllib.request.urlopen(f"{address}/{path.format(server)}", data=data, timeout=60)
    assert refused.value.code == code
    refused.value.close()
    assert server.room.students() == []


def test_a_shared_folder_feeds_the_room(copy, shared, capsys):
    (shared / "noise.json").write_text("[")
    progress.Progress(copy).share(str(shared), "Ada")
    (one,) = room.Room(shared).students()
    assert one["name"] == "Ada" and one["lessons"] == {}
    page = room.page([one], one["at"] + 130)
    assert "has joined" in page and "2 min ago" in page and "Nobody is stuck." in page
    assert command.main(["room", "--folder", str(shared / "none")]) == 2
    assert "none is no folder." in capsys.readouterr().out
