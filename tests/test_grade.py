"""`rankcell grade`: right answers pass, wrong ones fail, and what is meant to do harm harms only its own student."""

import csv
import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell import command, exercises
from rankcell.grade import command as grade_command
from rankcell.grade import grading, results, sandbox, submissions
from rankcell.grade.results import Judgement


def behind_walls(test):
    """A slow test of what holds on Linux."""
    return pytest.mark.slow(pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")(test))


SETUP = "%load_ext rankcell\nfrom rankcell import check"
HALF = "# Exercise 1: halve the number\ndef half(x):\n    # BEGIN SOLUTION\n    return x / unit\n    # END SOLUTION"
TOTAL = (
    "%%ranks 2 -o run\n# Exercise 2: add up\nx = torch.ones(3) * step\n# BEGIN SOLUTION\ndist.all_reduce(x)\n"
    "# END SOLUTION\nx"
)
CELLS = [
    ("# 1 Tiny",),
    (SETUP, "code"),
    ("unit = 2", "code"),
    ("1 / 0", "code", "raises-exception"),
    ("%%ranks 2 -o run\nstep = 3", "code"),
    ("far = 'from here'", "code"),
    ("**Exercise 1: halve the number.**",),
    (HALF, "code", "solution"),
    ("check.close_to([half(6), half(5)], [3, 2.5])", "code"),
    ("**Exercise 2: add up.**",),
    (TOTAL, "code", "solution"),
    ("check.close_to(run.values, [[6, 6, 6]] * 2)", "code"),
    ("## The end",),
]
RIGHT = HALF.replace("    # BEGIN SOLUTION\n", "").replace("    # END SOLUTION", "")
HARM = {
    "hang": "while True:\n    pass",
    "bomb": "import os\nwhile True:\n    os.fork()",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    "        time.sleep(6000)\n    os._exit(0)\nopen(OUTSIDE, 'w').write('I was here')",
}


def stored(cells, path):
    """A notebook of markdown texts and of code cells with their tags."""
    found = []
    for source, *kind in cells:
        make = new_code_cell if kind else new_markdown_cell
        found.append(make(source, metadata={"tags": kind[1:]} if kind[1:] else {}))
    nbformat.write(new_notebook(cells=found), path)
    return path


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course of one lesson with two exercises."""
    folder = tmp_path_factory.mktemp("course")
    stored(CELLS, folder / "01_tiny.ipynb")
    return folder


@pytest.fixture(scope="module")
def lesson(course):
    return exercises.Lesson(course / "01_tiny.ipynb")


def hand_in(course, folder, student, *answers, change=lambda notebook: None):
    """The student's copy with these answers in place of the first stubs."""
    copy = notebooks.student_copy(notebooks.read(course / "01_tiny.ipynb"), "tiny")
    stubs = [cell for cell in copy.cells if "exercise" in exercises.tags(cell)]
    for cell, answer in zip(stubs, answers, strict=False):
        cell.source = answer
    change(copy)
    (folder / student).mkdir(parents=True)
    nbformat.write(copy, folder / student / "01_tiny.ipynb")


def processes():
    """The processes of this machine that were started by a grader."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            found |= {int(entry.name)} if b"rankcell.grade" in line and ") Z" not in state else set()
        except OSError:
            continue
    return found


# Which cells


def test_the_cells_that_an_exercise_needs_are_found(lesson, tmp_path):
    first, second = lesson.exercises
    assert lesson.needs(first, [first.solution]) == [1, 2]
    assert lesson.needs(second, [second.solution]) == [1, 4]
    assert lesson.needs(first, ["def half(x):\n    return len(far)"]) == [1, 2, 5]  # what the student uses
    assert lesson.before(first) == [1, 2, 3, 4, 5]
    assert (first.checks, second.checks) == ((8,), (11,))
    cells = [(source, "code") for source in (SETUP, "kept = []", "kept.append(2)", "print(kept)")]
    cells = [("# 1 Tiny",), *cells, (HALF.replace("unit", "kept[0]"), "code", "solution")]
    changed = exercises.Lesson(stored(cells, tmp_path / "01_tiny.ipynb"))
    (exercise,) = changed.exercises
    assert changed.needs(exercise, [exercise.solution]) == [1, 2, 3]
    assert changed.needs(exercise, [exercise.solution], changes=False) == [1, 2]


def test_answers_are_found_whatever_an_editor_does(course, lesson, tmp_path):
    def edited(notebook):
        notebook.cells[8].source = "True  # a check that is content with anything"

    def new_ids_and_a_helper(notebook):
        edited(notebook)
        for k, cell in enumerate(notebook.cells):
            cell["id"] = f"new{k}"
        notebook.cells.insert(7, new_code_cell("helper = 2"))

    first, second = lesson.exercises
    hand_in(course, tmp_path, "ada", "half = lambda x: x / helper", change=new_ids_and_a_helper)
    found = lesson.answers(exercises.read(tmp_path / "ada" / "01_tiny.ipynb"))
    assert found[first.index][:2] == ["helper = 2", "half = lambda x: x / helper"]
    assert found[second.index] == [second.stub]
    hand_in(course, tmp_path, "ben", "half = None", change=edited)
    found = lesson.answers(exercises.read(tmp_path / "ben" / "01_tiny.ipynb"))
    assert found[first.index] == ["half = None"]


DAMAGED = ("[" * 100_000, '{"cells": 3}', '{"cells": [3]}', '{"cells": [{"cell_type": "code", "sour')
DAMAGED += ('{"cells": [{"cell_type": "code", "source": "1", "metadata": {"tags": 5}}]}',)


def test_students_lessons_and_damaged_files_are_found(course, lesson, tmp_path):
    hand_in(course, tmp_path, "ada", "half = 'old'")
    hand_in(course, tmp_path, "ada/again", "half = 'new'")
    os.utime(tmp_path / "ada" / "01_tiny.ipynb", (1, 1))  # of several copies the newest counts
    hand_in(course, tmp_path, ".hidden")
    copy = (tmp_path / "ada" / "01_tiny.ipynb").read_text("utf-8")
    (tmp_path / "ben-01_tiny.ipynb").write_text(copy, "utf-8")
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), tmp_path / "another.ipynb")
    for k, text in enumerate(DAMAGED):
        (tmp_path / f"cut{k}_01_tiny.ipynb").write_text(text)
    found = submissions.find(tmp_path, [lesson])
    assert [(s.student, s.lesson, s.problem) for s in found[:2]] == [
        ("ada", "01_tiny", ""),
        ("ben", "01_tiny", ""),
    ]
    problems = [f"cut{k}_01_tiny.ipynb is no notebook of format 4" for k in range(len(DAMAGED))]
    assert [s.problem for s in found[2:]] == problems
    assert found[0].answers[lesson.exercises[0].index] == ["half = 'new'"]


# A class


@pytest.fixture(scope="module")
def graded(course, tmp_path_factory):
    """What the command makes of a class: exit status, file outside, rows, files, processes that were there before."""
    folder = tmp_path_factory.mktemp("class")
    flood = "for i in range(200_000):\n    print('x' * 100)\n" + RIGHT
    cheat = "import rankcell.check as c\nc.close_to = lambda *a, **b: None\nall = None\nhalf = float"
    hand_in(course, folder, "ada", RIGHT, TOTAL)
    own = TOTAL.replace("dist.all_reduce(x)", "dist.all_reduce(x)\nx += rank")
    hand_in(course, folder, "ben", RIGHT.replace("/", "*"), own)
    hand_in(course, folder, "cheat", cheat)
    hand_in(course, folder, "flood", flood, TOTAL.replace("# BEGIN", "print('y' * 10**7)\n# BEGIN"))
    killed = "%%ranks 2 -o run\nimport os\nos.kill(os.getpid(), 9)"
    hand_in(course, folder, "lost", "half = unknown_name", killed)
    hand_in(course, folder, "stub")
    outside = folder / "outside"
    for name, code in HARM.items():
        hand_in(course, folder, name, code.replace("OUTSIDE", repr(str(outside))))
    files = {name: folder.parent / f"class.{name}" for name in ("junit", "csv", "nbgrader", "classroom")}
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    before = processes()
    status = command.main(["grade", str(folder), "--course", str(course), "--jobs", "2", *words])
    with files["csv"].open(encoding="utf-8") as file:
        rows = {(row["student"], row["exercise"][:10]): row for row in csv.DictReader(file)}
    return status, outside, rows, files, before


@behind_walls
def test_a_class_is_judged_right(graded):
    status, _, rows, _, _ = graded
    found = {n: {s: row["status"] for (s, e), row in rows.items() if e == f"Exercise {n}"} for n in (1, 2)}
    wrong = dict.fromkeys(["ben", "cheat", "lost", *HARM], "failed")
    assert status == 1
    assert found[1] == {"ada": "passed", "flood": "passed", "stub": "not begun", **wrong}
    assert {s for s, status in found[2].items() if status == "passed"} == {"ada", "flood"}
    assert {s for s, status in found[2].items() if status == "failed"} == {"ben", "lost"}
    row = rows["ada", "Exercise 2"]
    assert (float(row["calls"]), float(row["bytes"])) == (1, 24)  # two ranks put in 3 floats each
    said = {student: row["feedback"] for (student, e), row in rows.items() if e == "Exercise 1"}
    limits = {student: row["limit"] for (student, e), row in rows.items() if e == "Exercise 1"}
    assert said["ben"].startswith("CheckFailed: 2 of 2 numbers differ.")
    assert said["cheat"].startswith("CheckFailed: 2 of 2 numbers differ.")
    assert said["lost"].startswith("NameError: name 'unknown_name' is not defined")
    assert said["hang"].startswith("did not end within ")
    assert said["killed"] == "the notebook's process was ended by SIGKILL"
    assert (limits["hang"], limits["killed"], limits["ben"]) == ("time", "killed", "")
    assert limits["bomb"] in ("processes", "time")
    assert "SIGKILL" in rows["lost", "Exercise 2"]["feedback"]


@behind_walls
def test_nothing_is_left_but_results_that_others_can_read(graded):
    _, outside, rows, files, before = graded
    assert processes() <= before
    if sandbox.landlock_version():
        assert not outside.exists()
        assert rows["daemon", "Exercise 1"]["feedback"].startswith("PermissionError")
    suites = ElementTree.parse(files["junit"]).getroot()
    assert len(suites) == 10 and len(suites.findall(".//testcase")) == len(rows) == 20
    assert suites.find("testsuite[@name='ada/01_tiny']").get("failures") == "0"
    with files["nbgrader"].open(encoding="utf-8") as file:
        grades = {row["student_id"]: row for row in csv.DictReader(file)}
    assert tuple(grades["ada"]) == results.NBGRADER
    assert [grades["ada"][name] for name in ("assignment", "score", "max_score")] == ["01_tiny", "2.0", "2.0"]
    said = json.loads(files["classroom"].read_text("utf-8"))
    assert (said["version"], said["status"], said["max_score"]) == (1, "fail", 20)
    assert sum(test["score"] for test in said["tests"]) == 4


def test_what_the_solution_needs_decides_what_is_run(course, lesson, tmp_path, monkeypatch):
    """An answer for which few cells do not do gets all; where the solution itself fails, nobody is said to be wrong."""
    hand_in(course, tmp_path, "ada", "half = 3", "1")
    asked = []

    def judge(order):
        asked.append((order["answer"], len(order["context"]), order["seconds"]))
        if "run.values" in order["checks"][0]:  # no Slurm here, say
            return {"passed": False, "where": "check", "error": "OSError: no such thing"}
        enough = order["answer"] != ["half = 3"] or len(order["context"]) > 2
        where = "check" if enough else "context"
        return {"passed": enough, "where": where, "error": "no name", "seconds": 1.0}

    grader = grading.Grader([lesson])
    monkeypatch.setattr(grader.stage, "start", lambda: None)
    monkeypatch.setattr(grader.stage, "judge", judge)
    first, second = grader.grade(submissions.find(tmp_path, [lesson]))
    assert (first.status, second.status) == (results.PASSED, results.NOT_JUDGED)
    assert second.feedback == "the course's own solution fails on this machine: OSError: no such thing"
    assert results.score([first, second]) == (1, 1)
    # it may take 10 s beyond twice what the solution takes
    assert [rest for answer, *rest in asked if answer == ["half = 3"]] == [[2, 12.0], [5, 12.0]]


# What is said


def test_commands_that_cannot_judge_say_why(course, tmp_path, capsys):
    for folder, words, said in (
        (course, [], "holds no notebook of the course (lessons: 01_tiny)"),
        (tmp_path, [], "holds no lesson with solutions"),
        (course, ["--lesson", "07"], "there is no lesson 07. There are 01_tiny."),
    ):
        assert command.main(["grade", str(tmp_path), "--course", str(folder), *words]) == 2
        assert said in capsys.readouterr().err
    assert grade_command._size("1.5 GiB") == 3 << 29 and grade_command._size("512MiB") == 1 << 29


def test_the_board_names_the_best_and_what_failed_most():
    def judged(student, **measured):
        return Judgement(student, "04", "Exercise 5: send little", results.PASSED, measured=measured)

    said = "CheckFailed: no\nmore"
    failed = [Judgement(student, "04", "Exercise 1: x", results.FAILED, said) for student in ("eva", "fay")]
    text = results.table([judged("ada", bytes=45, calls=4), judged("ben", bytes=36, calls=4), *failed])
    assert "04, Exercise 5: send little, fewest bytes: ben 36, ada 45" in text
    assert "fewest calls" not in text  # all the same
    assert "04, Exercise 1: x: 2 of 2. Most often: CheckFailed: no more" in text
    assert "ada  04  1/1  5 ✓" in text and "eva  04  0/1  1 ✗" in text


def test_files_hold_what_their_readers_take(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    results.as_classroom([Judgement("ada", "04", "Exercise 1: x", results.PASSED)], tmp_path / "c.json")
    assert (tmp_path / "output").read_text().startswith("result=")
    odd = Judgement("a\x00", "04", "Exercise 1", results.FAILED, "\x1b[1m \ud800")  # what XML does not have
    results.as_junit([odd, Judgement("a\x00", "04", "Exercise 2", results.NOT_JUDGED)], tmp_path / "j.xml")
    suites = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert [suites[0].get(name) for name in ("tests", "failures", "skipped")] == ["2", "1", "1"]
    assert next(suites.iter("failure")).text == "�[1m �"
