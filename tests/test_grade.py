"""`rankcell grade`: right answers pass, wrong ones fail, and what is meant to do harm harms only its own student."""

import csv
import os
import time

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell import command
from rankcell.teaching import exercises, grading, sandbox
from rankcell.teaching.command import score, table
from rankcell.teaching.grading import Judgement

SETUP = "%load_ext rankcell\nfrom rankcell import check"
HALF = "# Exercise 1: halve the number\ndef half(x):\n    # BEGIN SOLUTION\n    return x / unit\n    # END SOLUTION"
TOTAL = (
    "%%ranks 2 -o run\n# Exercise 2: add up\nx = torch.ones(3) * step\n# BEGIN SOLUTION\ndist.all_reduce(x)\n"
    "# END SOLUTION\nx"
)
CELLS = [  # what stands above the first exercise needs no torch, so that most sessions begin at once
    ("# 1 Tiny",),
    ("unit = 2", "code"),
    ("1 / 0", "code", "raises-exception"),
    ("**Exercise 1: halve the number.**",),
    (HALF, "code", "solution"),
    ("assert [half(6), half(5)] == [3, 2.5], f'half(6) is {half(6)}'", "code"),
    ("## Ranks",),
    (SETUP, "code"),
    ("%%ranks 2 -o run\nstep = 3", "code"),
    ("**Exercise 2: add up.**",),
    (TOTAL, "code", "solution"),
    ("check.close_to(run.values, [[6, 6, 6]] * 2)", "code"),
    ("## The end",),
]
RIGHT = HALF.replace("    # BEGIN SOLUTION\n", "").replace("    # END SOLUTION", "")
HARM = {
    "hang": "while True:\n    pass",
    "bomb": "import os\nwhile True:\n    os.fork()",
    "daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    "        time.sleep(6000)\n    os._exit(0)\nopen(OUTSIDE, 'w').write('I was here')",
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "orphan": "import os\nos.kill(os.getppid(), 9)",
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


def sessions():
    """The processes of this machine that belong to a session of a grader."""
    found = set()
    for process in psutil.process_iter():
        try:
            found |= {process.pid} if "RANKCELL_SESSION" in process.environ() else set()
        except psutil.Error:
            continue
    return found


# Which cells


def test_answers_are_found_whatever_an_editor_does(course, lesson, tmp_path):
    def edited(notebook):
        notebook.cells[5].source = "True  # a check that is content with anything"

    def new_ids_and_a_helper(notebook):
        edited(notebook)
        for k, cell in enumerate(notebook.cells):
            cell["id"] = f"new{k}"
        notebook.cells.insert(4, new_code_cell("helper = 2"))

    first, second = lesson.exercises
    hand_in(course, tmp_path, "ada", "half = lambda x: x / helper", change=new_ids_and_a_helper)
    found = lesson.begun(exercises.read(tmp_path / "ada" / "01_tiny.ipynb"))
    assert found[first.index][:2] == ["helper = 2", "half = lambda x: x / helper"]
    assert second.index not in found
    hand_in(course, tmp_path, "ben", "half = None", change=edited)
    found = lesson.begun(exercises.read(tmp_path / "ben" / "01_tiny.ipynb"))
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
    (tmp_path / "zoe").mkdir()
    (tmp_path / "zoe" / "my own name.ipynb").write_text(copy, "utf-8")
    (tmp_path / "leo").mkdir()
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), tmp_path / "another.ipynb")
    for k, text in enumerate(DAMAGED):
        (tmp_path / f"cut{k}_01_tiny.ipynb").write_text(text)
    told = []
    *found, zoe = grading.submissions(tmp_path, [lesson], told.append)
    assert (zoe.student, zoe.lesson) == ("zoe", "01_tiny")
    assert told == [
        "another.ipynb is left out: it is no lesson with exercises",
        "ada/01_tiny.ipynb is left out: ada/again/01_tiny.ipynb counts",
        "leo has no notebook of the course",
    ]
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
    """What the command makes of a class: exit status, file outside, rows, processes that it has left."""
    folder = tmp_path_factory.mktemp("class")
    flood = "for i in range(200_000):\n    print('x' * 100)\n" + RIGHT
    hand_in(course, folder, "ada", flood, TOTAL.replace("# BEGIN", "print('y' * 10**7)\n# BEGIN"))
    hand_in(course, folder, "ben", RIGHT.replace("/", "*"))
    own = TOTAL.replace("dist.all_reduce(x)", "dist.all_reduce(x)\nx += rank")
    hand_in(course, folder, "shadow", "all = None\nprint = None\nget_ipython = None\nhalf = 3", own)
    hand_in(course, folder, "stub")

    def in_cells_of_its_own(notebook):
        notebook.cells.insert(1, new_code_cell("def two():\n    return 2"))
        at = next(k for k, cell in enumerate(notebook.cells) if "exercise" in exercises.tags(cell))
        below = [new_code_cell("half = lambda x: x / tow()"), new_code_cell("half = lambda x: x / two()")]
        notebook.cells[at + 1 : at + 1] = [*below, new_code_cell("half(1, 2)")]

    hand_in(course, folder, "dan", change=in_cells_of_its_own)
    hand_in(course, folder, "eva", RIGHT, TOTAL.replace(" -o run", ""))
    outside = folder / "outside"
    for name, code in HARM.items():
        second = [f"%%ranks 2 -o run\n{code}"] if name == "killed" else []
        hand_in(course, folder, name, code.replace("OUTSIDE", repr(str(outside))), *second)
    (folder / "cut_01_tiny.ipynb").write_text("[")
    before, rows_at = sessions(), folder / "grades.csv"
    status = command.main(
        ["grade", str(folder), "--course", str(course), "--jobs", "2", "--csv", str(rows_at)]
    )
    with rows_at.open(encoding="utf-8") as file:
        rows = {(row["student"], row["exercise"][:10]): row for row in csv.DictReader(file)}
    return status, outside, rows, sessions() - before


@pytest.mark.slow
def test_a_class_is_judged_right(graded):
    status, outside, rows, left = graded
    found = {n: {s: row["status"] for (s, e), row in rows.items() if e == f"Exercise {n}"} for n in (1, 2)}
    said = {student: row["feedback"] for (student, e), row in rows.items() if e == "Exercise 1"}
    assert status == 1 and left == set()
    assert found[1] == dict.fromkeys(["ben", "shadow", *HARM], "failed") | {
        **dict.fromkeys(["ada", "dan", "eva"], "passed"),
        "stub": "not begun",
    }
    failed = dict.fromkeys(["shadow", "killed", "eva"], "failed")
    assert found[2] == dict.fromkeys(["ben", "dan", "stub", *HARM], "not begun") | {"ada": "passed", **failed}
    name = "NameError: name 'run' is not defined"
    assert rows["eva", "Exercise 2"]["feedback"] == f"{name} Its first line has to keep `%%ranks 2 -o run`."
    assert said["ben"] == "AssertionError: half(6) is 12"
    assert said["hang"].startswith("it did not end within ")
    assert said["bomb"].startswith(("it had ", "it took ", "it did not end within "))
    assert said["killed"] == said["orphan"] == "the notebook's process was ended by SIGKILL"
    # in sessions begun anew: the first was ended, or its names spoilt for the cells below
    assert "SIGKILL" in rows["killed", "Exercise 2"]["feedback"]
    assert rows["shadow", "Exercise 2"]["feedback"].startswith("CheckFailed: 3 of 6 numbers differ.")
    assert rows["cut", "the notebo"]["feedback"] == "cut_01_tiny.ipynb is no notebook of format 4"
    assert outside.exists() != sandbox.walls()
    if sandbox.walls():
        assert "Read-only file system" in said["daemon"]


class Played:
    """A session that notes what it is to run, and fails the cells that `fails` names."""

    def __init__(self, log, fails):
        self.log, self.fails = log, fails
        log.append([])

    def run(self, cells, seconds, given_up, *, may_fail=0, forget=()):
        for place, cell in enumerate(cells):
            self.log[-1].append((cell, seconds))
            if error := self.fails(cell, [c for c, _ in self.log[-1]]):
                return sandbox.Attempt(error, place=place, seconds=1.0)
        return sandbox.Attempt(place=len(cells) - 1, seconds=1.0)

    def close(self):
        pass


@pytest.fixture
def played(course, lesson, tmp_path, monkeypatch):
    """Judges answers in played sessions: what was run in each session, and the judgements."""

    def judge(fails, *answers):
        log = []
        monkeypatch.setattr(grading, "Session", lambda **_: Played(log, fails))
        hand_in(course, tmp_path, "ada", *answers)
        grader = grading.Grader(course, [lesson], seconds=10.0, jobs=1, walled=False)
        return log, grader.grade(grading.submissions(tmp_path, [lesson], print), lambda _: None)

    return judge


def test_a_failed_answer_costs_no_later_one(played, lesson):
    """The lesson's solution runs behind each answer; what fails behind a failed one is tried without it."""

    def fails(cell, before):
        return "no" if cell in ("half = 3", "1 / 0") or (cell == "total" and "half = 3" in before) else ""

    log, (first, second) = played(fails, "half = 3", "total")
    assert (first.status, second.status) == (grading.FAILED, grading.PASSED)
    own, both, alone = log
    assert HALF in [cell for cell, _ in both]  # the lesson's own, behind the answer
    assert ("half = 3", 12.0) in both  # 10 s beyond twice what the solution takes
    assert "half = 3" not in [cell for cell, _ in alone] and ("total", 12.0) in alone
    assert [cell for cell, _ in own].count(HALF) == 2


def test_nobody_fails_where_the_solution_does(played):
    _, (first, second) = played(
        lambda cell, _: "OSError: none" * ("run.values" in cell or cell == "1 / 0"), "1", "2"
    )
    assert (first.status, second.status) == (grading.PASSED, grading.NOT_JUDGED)
    assert second.feedback == "the course's own solution fails on this machine: OSError: none"
    assert score([first, second]) == (1, 1)


def test_what_was_judged_before_an_interrupt_is_kept(course, lesson, tmp_path, monkeypatch):
    class Waits(Played):
        def run(self, cells, seconds, given_up, **how):
            while "half = 4" in cells and not given_up():
                time.sleep(0.01)
            return super().run(cells, seconds, given_up, **how)

    monkeypatch.setattr(grading, "Session", lambda **_: Waits([], lambda cell, _: "no" * (cell == "1 / 0")))
    hand_in(course, tmp_path, "ada", "half = 3")
    hand_in(course, tmp_path, "ben", "half = 4")

    def stop(one):
        if one.student == "ada":
            raise KeyboardInterrupt

    grader = grading.Grader(course, [lesson], seconds=10.0, jobs=1, walled=False)
    found = grader.grade(grading.submissions(tmp_path, [lesson], print), stop)
    assert grader.interrupted
    first = {j.student: (j.status, j.feedback) for j in found if "Exercise 1:" in j.exercise}
    assert first == {"ada": (grading.PASSED, ""), "ben": (grading.NOT_JUDGED, "interrupted")}


# What is said


def test_commands_that_cannot_judge_say_why(course, tmp_path, capsys):
    for folder, said in (
        (course, "holds no notebook of the course (lessons: 01_tiny)"),
        (tmp_path, "holds no lesson with solutions"),
    ):
        assert command.main(["grade", str(tmp_path), "--course", str(folder)]) == 2
        assert said in capsys.readouterr().err
    assert command.main(["grade", str(tmp_path / "none"), "--course", str(course)]) == 2
    assert "there is no folder" in capsys.readouterr().err
    hand_in(course, tmp_path, "ada", "half = 3")
    assert command.main(["grade", str(tmp_path), "--course", str(course), "--csv", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["grade", str(tmp_path), "--seconds", "nan"])
    assert "nan is no number of seconds above 0" in capsys.readouterr().err


def test_the_table_has_the_whole_message_and_what_failed_most():
    advice = "CheckFailed: no\nmore. " + "Look again. " * 20 + "Add them up."
    failed = [Judgement(student, "04", "Exercise 1: x", grading.FAILED, advice) for student in ("eva", "fay")]
    text = table([Judgement("ada", "04", "Exercise 5: send little", grading.PASSED), *failed])
    assert "04, Exercise 1: x: 2 of 2. Most often: CheckFailed: no more" in text
    assert "ada  04  1/1  5 ✓" in text and "eva  04  0/1  1 ✗" in text
    assert text.count("Add them up.") == 2
