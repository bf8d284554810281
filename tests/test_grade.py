"""`rankcell grade`: right answers pass, wrong ones fail, and what is meant to do harm harms only its own student."""

import csv
import itertools
import json
import os
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell import command, exercises
from rankcell.grade import command as grade_command
from rankcell.grade import grading, results, sandbox, stage, submissions
from rankcell.grade.results import Judgement

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")

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


def built(cells):
    """A notebook of markdown texts and of code cells with their tags."""
    found = []
    for source, *kind in cells:
        make = new_code_cell if kind else new_markdown_cell
        found.append(make(source, metadata={"tags": kind[1:]} if kind[1:] else {}))
    return new_notebook(cells=found)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course of one lesson with two exercises."""
    folder = tmp_path_factory.mktemp("course")
    nbformat.write(built(CELLS), folder / "01_tiny.ipynb")
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


# Which cells


def test_the_cells_that_an_exercise_needs_are_found(lesson):
    first, second = lesson.exercises
    assert lesson.needs(first, [first.solution]) == [1, 2]
    assert lesson.needs(second, [second.solution]) == [1, 4]
    assert lesson.needs(first, ["def half(x):\n    return len(far)"]) == [
        1,
        2,
        5,
    ]  # what the student uses, too
    assert lesson.before(first) == [1, 2, 3, 4, 5]
    assert (first.checks, second.checks) == ((8,), (11,))


def test_what_changes_a_name_is_needed_too(tmp_path):
    cells = [
        ("# 1 Tiny",),
        (SETUP, "code"),
        ("kept = []", "code"),
        ("kept.append(2)", "code"),
        ("print(kept)", "code"),
        (HALF.replace("unit", "kept[0]"), "code", "solution"),
    ]
    nbformat.write(built(cells), tmp_path / "01_tiny.ipynb")
    lesson = exercises.Lesson(tmp_path / "01_tiny.ipynb")
    (exercise,) = lesson.exercises
    assert lesson.needs(exercise, [exercise.solution]) == [1, 2, 3]
    assert lesson.needs(exercise, [exercise.solution], changes=False) == [1, 2]


def test_answers_are_found_whatever_an_editor_does(course, lesson, tmp_path):
    def new_ids_and_a_helper(notebook):
        for k, cell in enumerate(notebook.cells):
            cell["id"] = f"new{k}"
        notebook.cells.insert(7, new_code_cell("helper = 2"))
        notebook.cells[9].source = "True  # a check that is content with anything"

    hand_in(course, tmp_path, "ada", "half = lambda x: x / helper", change=new_ids_and_a_helper)
    found = lesson.answers(exercises.read(tmp_path / "ada" / "01_tiny.ipynb"))
    first, second = lesson.exercises
    assert found[first.index][:2] == ["helper = 2", "half = lambda x: x / helper"]
    assert found[second.index] == [second.stub]


def test_a_changed_check_is_not_part_of_the_answer(course, lesson, tmp_path):
    def easy(notebook):
        notebook.cells[8].source = "True"

    hand_in(course, tmp_path, "ada", "half = None", change=easy)
    found = lesson.answers(exercises.read(tmp_path / "ada" / "01_tiny.ipynb"))
    assert found[lesson.exercises[0].index] == ["half = None"]


def test_students_and_lessons_are_found(course, lesson, tmp_path):
    hand_in(course, tmp_path, "ada/late")
    hand_in(course, tmp_path, ".hidden")
    copy = (tmp_path / "ada" / "late" / "01_tiny.ipynb").read_text("utf-8")
    (tmp_path / "ben-01_tiny.ipynb").write_text(copy, "utf-8")
    (tmp_path / "broken_01_tiny.ipynb").write_text('{"cells": 3}')
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), tmp_path / "another.ipynb")
    found = submissions.find(tmp_path, [lesson])
    assert [(s.student, s.lesson, s.problem) for s in found] == [
        ("ada", "01_tiny", ""),
        ("ben", "01_tiny", ""),
        ("broken", "01_tiny", "broken_01_tiny.ipynb is no notebook of format 4"),
    ]


def test_of_several_copies_the_newest_counts(course, lesson, tmp_path):
    hand_in(course, tmp_path, "ada", "half = 'old'")
    hand_in(course, tmp_path, "ada/again", "half = 'new'")
    os.utime(tmp_path / "ada" / "01_tiny.ipynb", (1, 1))
    (one,) = submissions.find(tmp_path, [lesson])
    assert one.answers[lesson.exercises[0].index] == ["half = 'new'"]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"cells": [3]}',
        '{"cells": [{"cell_type": "code", "source": [3], "metadata": {}}]}',
        '{"cells": [{"cell_type": "code", "source": "1", "metadata": {"tags": 5}}]}',
    ],
)
def test_a_damaged_notebook_is_its_students_problem(course, lesson, tmp_path, text):
    (tmp_path / "ada-01_tiny.ipynb").write_text(text)
    (one,) = submissions.find(tmp_path, [lesson])
    assert one.problem == "ada-01_tiny.ipynb is no notebook of format 4"


def test_what_a_deceiver_tells_the_keeper_is_taken_as_numbers_and_text():
    said = {
        "passed": 1,
        "where": ["x"],
        "error": "\x1b]0;x\x07 \ud800",
        "measured": {"bytes": "many", "calls": 1e300},
    }
    found = stage._verdict(said, 1.0)
    assert found["passed"] is False and found["where"] == "answer"
    assert found["error"] == "]0;x ?" and found["measured"] == {}


# A class


HARM = {
    "hang": "while True:\n    pass",
    "bomb": "import os\nwhile True:\n    os.fork()",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    "        time.sleep(600)\n    os._exit(0)\n1 / 0",
    "writer": "open(OUTSIDE, 'w').write('I was here')",
}


def processes():
    """The command lines of all processes of this machine that were started by a grader."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(") ")[2][0]
        except OSError:
            continue
        if b"rankcell.grade" in line and state != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def graded(course, tmp_path_factory):
    """What the command makes of a class; its exit status, folder, and the processes that were there before."""
    folder = tmp_path_factory.mktemp("class")
    right = HALF.replace("    # BEGIN SOLUTION\n", "").replace("    # END SOLUTION", "")
    wrong = right.replace("/", "*")
    flood = "for i in range(200_000):\n    print('x' * 100)\n" + right
    cheat = "import rankcell.check as c\nc.close_to = lambda *a, **b: None\nall = None\nhalf = float"
    hand_in(course, folder, "ada", right, TOTAL)
    hand_in(
        course, folder, "ben", wrong, TOTAL.replace("dist.all_reduce(x)", "dist.all_reduce(x)\nx += rank")
    )
    hand_in(course, folder, "cheat", cheat)
    hand_in(course, folder, "flood", flood, TOTAL.replace("# BEGIN", "print('y' * 10**7)\n# BEGIN"))
    hand_in(
        course, folder, "lost", "half = unknown_name", "%%ranks 2 -o run\nimport os\nos.kill(os.getpid(), 9)"
    )
    hand_in(course, folder, "stub")
    outside = folder / "outside"
    for name, code in HARM.items():
        hand_in(course, folder, name, code.replace("OUTSIDE", repr(str(outside))))
    files = {
        name: folder.parent / f"{folder.name}.{name}" for name in ("junit", "csv", "nbgrader", "classroom")
    }
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    before = processes()
    status = command.main(
        ["grade", str(folder), "--course", str(course), "--seconds", "15", "--jobs", "2", *words]
    )
    with files["csv"].open(encoding="utf-8") as file:
        rows = {(row["student"], row["exercise"][:10]): row for row in csv.DictReader(file)}
    return status, folder, rows, files, before


@LINUX_ONLY
@pytest.mark.slow
def test_a_class_is_judged_right(graded):
    status, _, rows, _, _ = graded
    assert status == 1
    first = {student: row["status"] for (student, exercise), row in rows.items() if exercise == "Exercise 1"}
    second = {student: row["status"] for (student, exercise), row in rows.items() if exercise == "Exercise 2"}
    assert first == {
        "ada": "passed",
        "flood": "passed",
        "stub": "not begun",
        **dict.fromkeys(["ben", "cheat", "lost", *HARM], "failed"),
    }
    assert {s for s, status in second.items() if status == "passed"} == {"ada", "flood"}
    assert second["ben"] == second["lost"] == "failed"


@LINUX_ONLY
@pytest.mark.slow
def test_feedback_says_what_happened(graded):
    rows = graded[2]
    said = {student: row["feedback"] for (student, exercise), row in rows.items() if exercise == "Exercise 1"}
    limits = {student: row["limit"] for (student, exercise), row in rows.items() if exercise == "Exercise 1"}
    assert said["ben"].startswith("CheckFailed: 2 of 2 numbers differ.")
    assert said["lost"].startswith("NameError: name 'unknown_name' is not defined")
    assert said["cheat"].startswith("CheckFailed: 2 of 2 numbers differ.")
    assert said["hang"].startswith("did not end within ")
    assert said["killed"] == "the notebook's process was ended by SIGKILL"
    assert said["daemon"].startswith("ZeroDivisionError")
    assert (limits["hang"], limits["killed"], limits["ben"]) == ("time", "killed", "")
    assert limits["bomb"] in ("processes", "time")
    assert "SIGKILL" in rows["lost", "Exercise 2"]["feedback"]


@LINUX_ONLY
@pytest.mark.slow
def test_nothing_is_left_behind(graded):
    _, folder, rows, _, before = graded
    assert set(processes()) <= set(before)
    if sandbox.landlock_version():
        assert not (folder / "outside").exists()
        assert rows["writer", "Exercise 1"]["feedback"].startswith("PermissionError")


@LINUX_ONLY
@pytest.mark.slow
def test_what_the_ranks_sent_is_measured(graded):
    row = graded[2]["ada", "Exercise 2"]
    assert (float(row["calls"]), float(row["bytes"])) == (1, 24)  # two ranks put in 3 floats each


@LINUX_ONLY
@pytest.mark.slow
def test_other_systems_can_read_the_results(graded):
    _, _, rows, files, _ = graded
    suites = ElementTree.parse(files["junit"]).getroot()
    assert len(suites) == 11 and len(suites.findall(".//testcase")) == len(rows) == 22
    assert suites.find("testsuite[@name='ada/01_tiny']").get("failures") == "0"
    with files["nbgrader"].open(encoding="utf-8") as file:
        grades = {row["student_id"]: row for row in csv.DictReader(file)}
    assert tuple(grades["ada"]) == results.NBGRADER
    assert (grades["ada"]["assignment"], grades["ada"]["score"], grades["ada"]["max_score"]) == (
        "01_tiny",
        "2.0",
        "2.0",
    )
    said = json.loads(files["classroom"].read_text("utf-8"))
    assert (said["version"], said["status"], said["max_score"]) == (1, "fail", 22)
    assert sum(test["score"] for test in said["tests"]) == 4


# What is not judged


@LINUX_ONLY
@pytest.mark.slow
def test_what_was_judged_before_an_interrupt_is_kept(course, tmp_path, monkeypatch, capsys):
    right = HALF.replace("    # BEGIN SOLUTION\n", "").replace("    # END SOLUTION", "")
    hand_in(course, tmp_path, "ada", right)
    hand_in(course, tmp_path, "ben", HARM["hang"])
    hand_in(course, tmp_path, "cid", right)
    heard = grade_command._Progress.heard

    def interrupt(progress, judgement):
        heard(progress, judgement)
        if judgement.status == results.PASSED:  # the main thread gets it, as from the keyboard
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(grade_command._Progress, "heard", interrupt)
    before, table = processes(), tmp_path / "table.csv"
    words = ["--course", str(course), "--jobs", "1", "--seconds", "300", "--csv", str(table)]
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert command.main(["grade", str(tmp_path), *words]) == 130
    finally:
        signal.signal(signal.SIGINT, ours)
    assert set(processes()) <= set(before)
    with table.open(encoding="utf-8") as file:
        rows = {(row["student"], row["exercise"][:10]): row for row in csv.DictReader(file)}
    assert [rows[student, "Exercise 1"]["status"] for student in ("ada", "ben", "cid")] == [
        "passed",
        "not judged",
        "not judged",
    ]
    assert rows["cid", "Exercise 1"]["feedback"].startswith("the judging was interrupted before")
    assert "interrupted; what was not judged says so" in capsys.readouterr().err


def test_a_stage_that_is_ended_while_an_answer_is_sent_to_it_is_not_started_anew(monkeypatch):
    """As by Ctrl-C: the answer would have gone on until its time was over."""
    process = grading.Stage()

    class Gone:
        def sendmsg(self, *_):
            process._ended = True
            raise BrokenPipeError

        def close(self):
            pass

    process._asks = Gone()
    monkeypatch.setattr(process, "start", lambda: pytest.fail("it was started anew"))
    assert process.judge({})["lost"]


@pytest.mark.parametrize(("had_no_core", "least", "most"), [(True, 60, 70), (False, 10, 20)])
def test_only_an_answer_that_gets_no_core_may_take_longer(monkeypatch, had_no_core, least, most):
    """Four ranks that spin keep each other waiting: that is no reason to wait for them."""
    ticks = itertools.count()
    monkeypatch.setattr(stage, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(stage, "_LOOK", 0.0)
    monkeypatch.setattr(sandbox, "descendants", lambda _: [1])
    monkeypatch.setattr(sandbox, "waited_for_a_core", lambda _: next(ticks) - 1.0)
    monkeypatch.setattr(sandbox, "core_seconds", lambda _: 0.0 if had_no_core else float(next(ticks)))
    hear, tell = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(hear), os.fdopen(tell, "w") as out:
        out.write(json.dumps({"what": "ready"}) + "\n")
        out.flush()
        verdict = stage._watch({"seconds": 10.0}, sandbox.Limits(), hear, theirs)
    assert verdict["limit"] == "time"
    assert least <= verdict["seconds"] <= most


@LINUX_ONLY
@pytest.mark.slow
def test_an_answer_that_hangs_is_given_up_when_its_stage_is_ended():
    """As by Ctrl-C: neither the grader nor a core waits for the hundreds of seconds that the answer still has."""
    process, verdicts = grading.Stage(), []
    order = {
        "context": [],
        "deliberate": [],
        "answer": [HARM["hang"]],
        "checks": [],
        "solution": "",
        "binds": [],
    }
    order |= {"seconds": 900.0, "limits": vars(sandbox.Limits())}
    before = processes()
    process.start()
    asks = threading.Thread(target=lambda: verdicts.append(process.judge(order)))
    asks.start()
    while not process._waiting or len(sandbox.descendants(process._process.pid)) < 3:
        assert asks.is_alive()
    process.close()
    asks.join(300)
    assert verdicts[0]["lost"]
    assert set(processes()) <= set(before)


def test_an_interrupt_before_the_first_judgement_writes_nothing(course, tmp_path, monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    hand_in(course, tmp_path, "ada", "half = 3", "1")
    monkeypatch.setattr(grading.Stage, "start", lambda _: None)
    monkeypatch.setattr(grading.Grader, "context", lambda *_: interrupt(_))
    assert command.main(["grade", str(tmp_path), "--course", str(course)]) == 130
    assert "nothing was written" in capsys.readouterr().err


def test_an_exercise_whose_own_solution_fails_is_not_judged(course, lesson, tmp_path, monkeypatch):
    """A machine without Slurm, say: nobody is told that an answer is wrong."""
    hand_in(course, tmp_path, "ada", "half = 3", "1")
    grader = grading.Grader([lesson])
    failed = {"passed": False, "where": "check", "error": "OSError: no such thing"}
    monkeypatch.setattr(grader.stage, "start", lambda: None)
    monkeypatch.setattr(grader.stage, "judge", lambda order: dict(failed))
    first, second = grader.grade(submissions.find(tmp_path, [lesson]))
    assert first.status == second.status == results.NOT_JUDGED
    assert first.feedback == "the course's own solution fails on this machine: OSError: no such thing"


def test_an_answer_that_needs_other_cells_gets_all(course, lesson, tmp_path, monkeypatch):
    """Where the few cells of the solution do not do for an answer, all that stand above are run for it."""
    hand_in(course, tmp_path, "ada", "half = 3")
    grader = grading.Grader([lesson])
    asked = []

    def judge(order):
        asked.append((order["answer"], order["context"]))
        enough = order["answer"] != ["half = 3"] or len(order["context"]) > 2
        return {
            "passed": enough,
            "where": "check" if enough else "context",
            "error": "no name",
            "seconds": 1.0,
        }

    monkeypatch.setattr(grader.stage, "start", lambda: None)
    monkeypatch.setattr(grader.stage, "judge", judge)
    first, _ = grader.grade(submissions.find(tmp_path, [lesson]))
    assert first.status == results.PASSED
    few, all_above = (context for answer, context in asked if answer == ["half = 3"])
    assert (len(few), len(all_above)) == (2, 5)


@pytest.mark.parametrize("namespaces", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_who_suffered_from_others_is_judged_again(
    course, lesson, tmp_path, monkeypatch, namespaces, together
):
    """Beside an answer that takes all processes, that is; one that ran before or after it has not suffered."""
    for student in ("ada", "ben", "cid", "dan"):
        hand_in(course, tmp_path, student, f"half = {student}")
    grader = grading.Grader([lesson], jobs=4 if together else 1)
    asked, all_run = [], threading.Barrier(3)

    def judge(order):
        (answer,) = order["answer"]
        asked.append(answer)
        if together and asked.count(answer) == 1 and answer in ("half = ben", "half = cid", "half = dan"):
            all_run.wait(30)
        fine = {"passed": True, "where": "check", "error": "", "seconds": 1.0}
        if answer == "half = ada" and asked.count(answer) == 1:
            return {"passed": False, "where": "answer", "error": "its judge was ended", "lost": True}
        if answer == "half = ben" and asked.count(answer) == 1:
            return {**fine, "passed": False, "error": "no more processes"}
        if answer == "half = dan" and asked.count(answer) == 1:
            return {**fine, "passed": False, "error": "did not end", "limit": "time"}
        if answer == "half = cid":
            return {**fine, "passed": False, "error": "had 99 processes", "limit": "processes"}
        return fine

    monkeypatch.setattr(grader.stage, "start", lambda: None)
    monkeypatch.setattr(grader.stage, "judge", judge)
    monkeypatch.setattr(grader.stage, "sealing", sandbox.Sealing(namespaces, True))
    first = [
        j for j in grader.grade(submissions.find(tmp_path, [lesson])) if j.exercise.startswith("Exercise 1")
    ]
    ben = results.PASSED if together and not namespaces else results.FAILED
    dan = results.PASSED if together else results.FAILED
    assert [j.status for j in first] == [results.PASSED, ben, results.FAILED, dan]
    assert asked.count("half = cid") == 1


def test_commands_that_cannot_judge_say_why(course, tmp_path, capsys):
    assert command.main(["grade", str(tmp_path), "--course", str(course)]) == 2
    assert "holds no notebook of the course (lessons: 01_tiny)" in capsys.readouterr().err
    assert command.main(["grade", str(tmp_path), "--course", str(tmp_path)]) == 2
    assert "holds no lesson with solutions" in capsys.readouterr().err
    assert command.main(["grade", str(tmp_path), "--course", str(course), "--lesson", "07"]) == 2
    assert "there is no lesson 07. There are 01_tiny." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["grade", str(tmp_path), "--memory", "4"])
    assert "'4' is no size. Write for example 4GiB or 512MiB." in capsys.readouterr().err


def test_a_long_judging_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(grade_command, "_EVERY", 0.0)
    progress = grade_command._Progress()
    for _ in range(2):
        progress.heard(Judgement("ada", "01_tiny", "Exercise 1", results.PASSED))
    assert "  2 exercises judged so far\n" in capsys.readouterr().err


def test_the_board_names_the_best_and_the_table_what_failed_most():
    def judged(student, **measured):
        return Judgement(student, "04", "Exercise 5: send little", results.PASSED, measured=measured)

    failed = [
        Judgement(s, "04", "Exercise 1: x", results.FAILED, "CheckFailed: no\nmore") for s in ("eva", "fay")
    ]
    text = results.table([judged("ada", bytes=45, calls=4), judged("ben", bytes=36, calls=4), *failed])
    assert "04, Exercise 5: send little, fewest bytes: ben 36, ada 45" in text
    assert "fewest calls" not in text  # all the same
    assert "04, Exercise 1: x: 2 of 2. Most often: CheckFailed: no more" in text


def test_a_github_workflow_gets_its_output(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "GITHUB_OUTPUT", str(tmp_path / "output"))
    results.as_classroom([Judgement("ada", "04", "Exercise 1: x", results.PASSED)], tmp_path / "c.json")
    assert (tmp_path / "output").read_text().startswith("result=")
    assert json.loads((tmp_path / "c.json").read_text())["status"] == "pass"


def test_what_could_not_be_judged_counts_neither_way():
    statuses = (results.PASSED, results.PASSED, results.FAILED, results.NOT_JUDGED)
    judgements = [Judgement("ada", "01", f"Exercise {k}", status) for k, status in enumerate(statuses)]
    assert results.score(judgements) == (2, 3)


def test_text_that_xml_does_not_have_is_left_out(tmp_path):
    results.as_junit(
        [Judgement("a\x00", "04", "Exercise 1", results.FAILED, "\x1b[1m \ud800")], tmp_path / "j.xml"
    )
    (failure,) = ElementTree.parse(tmp_path / "j.xml").getroot().iter("failure")
    assert failure.text == "�[1m �"
