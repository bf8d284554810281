"""Ticks: an exercise is solved when its checks have passed; shared only on request; never in the way."""

import json
import urllib.request
from urllib.error import HTTPError

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell import exercises, progress, room

SOLUTIONS = ("# Exercise 1: halve\nhalf = 3", "%%ranks 2\n# Exercise 2: add up\nx = 1")


@pytest.fixture
def copy(tmp_path):
    """A student's copy of a lesson with two exercises, the first with two checks; cell ids by their place."""
    lesson = new_notebook()
    for source, *tags in (
        ("# 1 Tiny",),
        ("x = 1", "code"),
        (SOLUTIONS[0], "code", "solution"),
        ("assert half", "code"),
        ("assert half == 3", "code"),
        ("## More",),
        ("1 / 0", "code", "raises-exception"),
        (SOLUTIONS[1], "code", "solution"),
        ("assert x", "code"),
    ):
        make = new_code_cell if tags else new_markdown_cell
        cell = make(source, metadata={"tags": tags[1:]} if tags[1:] else {})
        cell["id"] = f"c{len(lesson.cells)}"
        lesson.cells.append(cell)
    student = notebooks.student_copy(lesson, "tiny")
    nbformat.write(student, tmp_path / "01_tiny.ipynb")
    return tmp_path / "01_tiny.ipynb"


def states(copy):
    return progress.Progress(copy).view().rows.get("01_tiny")


def test_an_exercise_is_solved_when_all_its_checks_have_passed_since_its_answer_ran(copy):
    mine = progress.Progress(copy)
    first, second = "Exercise 1: halve", "Exercise 2: add up"
    for cell in ("c1", "c2", "c3"):
        mine.heard(cell, None)
    assert states(copy) == {first: "", second: ""}  # one check is missing
    mine.heard("c2", None)
    mine.heard("c4", None)
    assert states(copy)[first] == ""  # the first check has seen an older answer
    mine.heard("c3", None)
    assert states(copy) == {first: "solved", second: ""}
    mine.heard("c8", None)
    assert states(copy) == {first: "solved", second: "solved"}
    assert repr(mine.view()).startswith("01_tiny  2 of 2  ✓ ✓  ✓ lesson")
    assert "Exercise 2: add up: solved" in mine.view()._repr_html_()


def test_a_wrong_answer_is_noted_with_what_it_was_told(copy):
    mine = progress.Progress(copy)
    mine.heard("c2", NotImplementedError("Exercise 1: halve"))  # the stub is no try
    assert not (copy.parent / progress.FILE).exists()
    mine.heard("c3", AssertionError("half of 6 is 12\nand more"))
    mine.heard("c4", AssertionError("half of 6 is 12"))
    kept = json.loads((copy.parent / progress.FILE).read_text("utf-8"))["lessons"]["01_tiny"][
        "Exercise 1: halve"
    ]
    assert (kept["state"], kept["tries"], kept["last"]) == ("tried", 2, "AssertionError: half of 6 is 12")
    assert states(copy)["Exercise 1: halve"] == "tried"


def test_a_deliberate_error_and_other_cells_are_not_counted(copy):
    mine = progress.Progress(copy)
    for cell in ("c0", "c1", "c6", "unknown", None):
        mine.heard(cell, ZeroDivisionError())
    assert not (copy.parent / progress.FILE).exists()


def test_an_answer_may_be_written_over_the_head_of_the_stub(copy):
    saved = nbformat.read(copy, 4)
    saved.cells[2].source = "half = 3"
    nbformat.write(saved, copy)
    assert list(states(copy)) == ["Exercise 1: halve", "Exercise 2: add up"]


def test_the_lesson_s_own_solutions_are_not_counted(tmp_path):
    lesson = new_notebook(
        cells=[
            new_code_cell(SOLUTIONS[0], id="a", metadata={"tags": ["solution"]}),
            new_code_cell("assert half", id="b"),
        ]
    )
    nbformat.write(lesson, tmp_path / "01_tiny.ipynb")
    mine = progress.Progress(tmp_path / "01_tiny.ipynb")
    mine.heard("a", None)
    mine.heard("b", None)
    assert "counted in the copies for students (`make student`)" in repr(mine.view())
    assert not (tmp_path / progress.FILE).exists()


def test_what_cannot_be_kept_is_said_and_costs_nothing(copy, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(progress.Path, "write_text", refuse)
    mine = progress.Progress(copy)
    mine.heard("c8", None)
    assert f"Nothing is kept: {progress.FILE} cannot be written in the notebook's folder" in repr(mine.view())
    nowhere = progress.Progress(None)
    nowhere.heard("c8", None)
    assert "(`make student`), opened in JupyterLab" in repr(nowhere.view())
    with pytest.raises(progress.ProgressError, match="Jupyter has not told this kernel which notebook"):
        nowhere.share("shared", "Ada")


def test_a_damaged_file_is_begun_anew(copy):
    (copy.parent / progress.FILE).write_text('{"lessons": 3')
    progress.Progress(copy).heard("c8", None)
    assert states(copy)["Exercise 2: add up"] == "solved"


def test_nothing_leaves_the_folder_unless_asked(copy, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    mine = progress.Progress(copy)
    mine.heard("c8", None)
    assert list(shared.iterdir()) == []
    said = mine.share(str(shared), "Ada L.")
    assert "and the name Ada L. go to" in said
    (file,) = shared.iterdir()
    sent = json.loads(file.read_text("utf-8"))
    assert set(sent) == {"version", "name", "at", "lessons"} and sent["name"] == "Ada L."
    assert f"Shared as Ada L. with {shared}" in repr(mine.view())
    assert mine.keep_private() == f"Nothing is shared any more with {shared}."
    assert list(shared.iterdir()) == []


def test_what_is_on_its_way_does_not_come_back(copy, tmp_path, monkeypatch):
    import threading

    shared = tmp_path / "shared"
    shared.mkdir()
    mine = progress.Progress(copy)
    mine.share(str(shared), "Ada")
    deliver, go = progress._deliver, threading.Event()

    def slowly(known):
        go.wait(10)
        return deliver(known)

    monkeypatch.setattr(progress, "_deliver", slowly)
    mine.heard("c8", None)
    threading.Timer(0.2, go.set).start()
    mine.keep_private()
    for thread in threading.enumerate():
        if thread.name == "rankcell progress":
            thread.join()
    assert list(shared.iterdir()) == []


def test_a_place_that_does_not_take_it_is_told(copy, tmp_path):
    mine = progress.Progress(copy)
    with pytest.raises(progress.ProgressError, match=r"cannot be written to \(No such file or directory\)"):
        mine.share(str(tmp_path / "none"), "Ada")
    with pytest.raises(progress.ProgressError, match=r"no room answers at http://127.0.0.1:1/x"):
        mine.share("http://127.0.0.1:1/x", "Ada")
    with pytest.raises(progress.ProgressError, match=r"'\.\./x' is no name"):
        mine.share(str(tmp_path), "../x")
    assert mine.read()["share"] is None


# The room


@pytest.fixture
def served():
    import threading

    server = room.Server(("127.0.0.1", 0), room.Room())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def get(address):
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode(), answer.headers


def test_the_page_shows_who_is_where_and_what_fails_most(copy, served):
    server, address = served
    mine = progress.Progress(copy)
    mine.heard("c8", None)
    mine.heard("c3", AssertionError("<b>half</b> of 6 is 12"))
    mine.share(f"{address}/{server.join_key}", "Ada")
    text, headers = get(f"{address}/{server.page_key}")
    assert "<h1>1 in the room</h1>" in text
    assert "<td>Ada</td><td>✗ 01_tiny, Exercise 1: halve</td>" in text or "Exercise 2: add up" in text
    assert "&lt;b&gt;half&lt;/b&gt; of 6 is 12" in text and "<b>half" not in text
    assert "<td>01_tiny, Exercise 1: halve</td><td>1</td>" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "src=" not in text and "href=" not in text  # nothing is asked for from elsewhere


def test_without_the_key_there_is_nothing(served):
    server, address = served
    for path in ("", "x", server.join_key, f"{server.page_key}/x"):
        with pytest.raises(HTTPError) as refused:
            get(f"{address}/{path}")
        assert refused.value.code == 404
        refused.value.close()


@pytest.mark.parametrize(
    ("key", "data", "code"),
    [
        ("x", b"{}", 404),
        ("page_key", b"{}", 404),
        ("join_key", b"{}", 400),
        ("join_key", b'{"name": "../x", "at": 1, "lessons": {}}', 400),
        ("join_key", b'{"name": "Ada", "at": 1, "lessons": {"a": {"b": {"state": []}}}}', 400),
        ("join_key", b"x" * (1 << 18) + b"x", 413),
    ],
)
def test_what_is_no_progress_is_refused(served, key, data, code):
    server, address = served
    with pytest.raises(HTTPError) as refused:
        urllib.request.urlopen(f"{address}/{getattr(server, key, key)}", data=data, timeout=10)
    assert refused.value.code == code
    refused.value.close()
    assert server.room.students() == []


def test_a_shared_folder_feeds_the_room(copy, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "noise.json").write_text("[")
    mine = progress.Progress(copy)
    mine.share(str(shared), "Ada")
    (one,) = room.Room(shared).students()
    assert one["name"] == "Ada" and one["lessons"] == {}
    assert "has joined" in room.page([one], one["at"] + 130) and "2 min ago" in room.page(
        [one], one["at"] + 130
    )


def test_a_full_room_takes_no_more(monkeypatch):
    monkeypatch.setattr(room, "_MOST_STUDENTS", 2)
    here = room.Room()
    message = '{{"name": "{}", "at": 1, "lessons": {{}}}}'
    assert [here.hear(message.format(name).encode()) for name in ("a", "b", "c", "a")] == [
        True,
        True,
        False,
        True,
    ]


def test_the_command_says_what_does_not_work(tmp_path, capsys):
    from rankcell import command

    assert command.main(["room", "--folder", str(tmp_path / "none")]) == 2
    assert "none is no folder." in capsys.readouterr().out
    assert command.main(["room", "--port", "99999"]) == 2
    assert "port 99999 cannot be opened" in capsys.readouterr().out


def test_students_copies_say_which_cells_are_an_exercise(copy):
    cells = exercises.read(copy)
    assert [exercises.tags(cell) for cell in cells] == [
        [],
        [],
        ["exercise", "raises-exception"],
        ["check", "raises-exception"],
        ["check", "raises-exception"],
        [],
        ["raises-exception"],
        ["exercise", "raises-exception"],
        ["check", "raises-exception"],
    ]
