"""What became of the answers, as a table, JUnit XML, CSV, and the files that other systems read.

nbgrader: the columns of `nbgrader export` (nbgrader/plugins/export.py, read 2026-11), which scripts for learning
management systems read. GitHub Classroom: the JSON that `autograding-grading-reporter` reads (its src/main.js and
src/notify-classroom.js, read 2026-11). This module runs nothing.
"""

import base64
import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PASSED, FAILED, UNTOUCHED, NOT_JUDGED = "passed", "failed", "not begun", "not judged"
_MARKS = {PASSED: "✓", FAILED: "✗", UNTOUCHED: "·", NOT_JUDGED: "?"}
_MEASURES = ("bytes", "calls", "idle share", "peak bytes", "overlap")
_LESS_IS_MORE = ("bytes", "calls", "idle share", "peak bytes")
NBGRADER = (
    "assignment",
    "duedate",
    "timestamp",
    "student_id",
    "last_name",
    "first_name",
    "email",
    "raw_score",
    "late_submission_penalty",
    "score",
    "max_score",
)


@dataclass(frozen=True)
class Judgement:
    """One exercise of one student: `status`, the feedback that the student would read, what was measured.

    `seconds` is what the answer and its checks took; `limit` names the limit that it broke ("time", "memory",
    "processes", "killed"), if it did.
    """

    student: str
    lesson: str
    exercise: str
    status: str
    feedback: str = ""
    seconds: float = 0.0
    limit: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)


def by_notebook(judgements: Iterable[Judgement]) -> dict[tuple[str, str], list[Judgement]]:
    """Student and lesson -> judgements, in the order in which they came."""
    found: dict[tuple[str, str], list[Judgement]] = {}
    for one in judgements:
        found.setdefault((one.student, one.lesson), []).append(one)
    return found


def score(judgements: Sequence[Judgement]) -> tuple[int, int]:
    """How many passed, and of how many that could be judged."""
    return sum(j.status == PASSED for j in judgements), sum(j.status != NOT_JUDGED for j in judgements)


def table(judgements: Sequence[Judgement]) -> str:
    """A row for each notebook, below it the feedback of what failed; then what failed most; then the board."""
    lines = []
    rows = by_notebook(judgements)
    width = max((len(student) for student, _ in rows), default=0)
    lessons = max((len(lesson) for _, lesson in rows), default=0)
    for (student, lesson), found in rows.items():
        passed, count = score(found)
        marks = "  ".join(f"{_short(j.exercise)} {_MARKS[j.status]}" for j in found)
        lines.append(f"{student:{width}}  {lesson:{lessons}}  {passed}/{count}  {marks}")
        for j in found:
            if j.feedback and j.status != UNTOUCHED:
                lines.append(f"{'':{width}}    {_short(j.exercise)}: {_line(j.feedback, 110)}")
    lines += ["", "✓ passed   ✗ failed   · not begun   ? not judged", *_most_missed(judgements)]
    return "\n".join([*lines, *board(judgements)])


def _most_missed(judgements: Sequence[Judgement]) -> list[str]:
    failed = Counter((j.lesson, j.exercise) for j in judgements if j.status == FAILED)
    lines = ["", "Failed most often:"] if failed else []
    for (lesson, exercise), count in failed.most_common(5):
        same = [j for j in judgements if (j.lesson, j.exercise) == (lesson, exercise)]
        said = Counter(_line(j.feedback, 90) for j in same if j.status == FAILED)
        tried = sum(j.status in (PASSED, FAILED) for j in same)
        lines.append(f"  {lesson}, {exercise}: {count} of {tried}. Most often: {said.most_common(1)[0][0]}")
    return lines


def board(judgements: Sequence[Judgement], places: int = 3) -> list[str]:
    """The best of those who passed an exercise, by what its checks measured; where at least two differ."""
    lines: list[str] = []
    passed: dict[tuple[str, str], list[Judgement]] = {}
    for j in judgements:
        if j.status == PASSED and j.measured:
            passed.setdefault((j.lesson, j.exercise), []).append(j)
    for (lesson, exercise), found in passed.items():
        for measure in _LESS_IS_MORE:
            ranked = sorted((j.measured[measure], j.student) for j in found if measure in j.measured)
            if len(ranked) < 2 or ranked[0][0] == ranked[-1][0]:
                continue
            best = ", ".join(f"{student} {value:,.6g}" for value, student in ranked[:places])
            lines.append(f"  {lesson}, {exercise}, fewest {measure}: {best}")
    return ["", "Board:", *lines] if lines else []


def _short(exercise: str) -> str:
    return exercise.split(":")[0].removeprefix("Exercise ")


def _line(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def as_csv(judgements: Sequence[Judgement], path: Path) -> None:
    """A row for each exercise of each student, with what was measured."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["student", "lesson", "exercise", "status", "feedback", "seconds", "limit", *_MEASURES]
        )
        for j in judgements:
            numbers = [j.measured.get(measure, "") for measure in _MEASURES]
            row = [
                j.student,
                j.lesson,
                j.exercise,
                j.status,
                j.feedback,
                f"{j.seconds:.2f}",
                j.limit,
                *numbers,
            ]
            writer.writerow(row)


def as_nbgrader(judgements: Sequence[Judgement], path: Path) -> None:
    """Grades as `nbgrader export` writes them: a point for each exercise."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, NBGRADER, restval="")
        writer.writeheader()
        for (student, lesson), found in by_notebook(judgements).items():
            passed, count = map(float, score(found))
            row = {"assignment": lesson, "student_id": student, "raw_score": passed, "score": passed}
            writer.writerow({**row, "late_submission_penalty": 0.0, "max_score": count})


def as_junit(judgements: Sequence[Judgement], path: Path) -> None:
    """A test suite for each notebook, a test case for each exercise."""
    suites = ElementTree.Element("testsuites")
    for (student, lesson), found in by_notebook(judgements).items():
        counts = Counter(j.status for j in found)
        suite = ElementTree.SubElement(
            suites,
            "testsuite",
            name=_xml(f"{student}/{lesson}"),
            tests=str(len(found)),
            failures=str(counts[FAILED] + counts[UNTOUCHED]),
            skipped=str(counts[NOT_JUDGED]),
            time=f"{sum(j.seconds for j in found):.2f}",
        )
        for j in found:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=_xml(f"{student}.{lesson}"),
                name=_xml(j.exercise),
                time=f"{j.seconds:.2f}",
            )
            if j.status == NOT_JUDGED:
                ElementTree.SubElement(case, "skipped", message=_xml(_line(j.feedback, 500)))
            elif j.status != PASSED:
                failure = ElementTree.SubElement(
                    case,
                    "failure",
                    type=j.limit or j.status,
                    message=_xml(_line(j.feedback or j.status, 500)),
                )
                failure.text = _xml(j.feedback)
    ElementTree.indent(suites)
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """`text` without the characters that XML 1.0 does not have."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)


def as_classroom(judgements: Sequence[Judgement], path: Path) -> None:
    """The JSON of a runner of GitHub Classroom; inside a workflow also its output `result`, in base64."""
    passed, count = score(judgements)
    several = len({j.lesson for j in judgements}) > 1
    tests: list[dict[str, Any]] = [
        {
            "name": f"{j.lesson}, {j.exercise}" if several else j.exercise,
            "status": "pass" if j.status == PASSED else "fail",
            "score": int(j.status == PASSED),
            "message": j.feedback or None,
            "test_code": f"rankcell grade: {j.lesson}, {j.exercise}",
            "filename": f"{j.lesson}.ipynb",
            "line_no": 0,
            "execution_time": f"{j.seconds:.2f}s",
        }
        for j in judgements
        if j.status != NOT_JUDGED
    ]
    said = {"version": 1, "status": "pass" if passed == count else "fail", "max_score": count, "tests": tests}
    text = json.dumps(said, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", "utf-8")
    if out := os.environ.get("GITHUB_OUTPUT"):
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(f"result={base64.b64encode(text.encode()).decode()}\n")
