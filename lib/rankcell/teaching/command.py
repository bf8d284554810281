"""`rankcell grade FOLDER`: many students' notebooks, judged by the course's own checks, as a table and as CSV."""

import argparse
import contextlib
import csv
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine import system
from ..results import grouped
from . import grading, sandbox
from .exercises import ExerciseError, Lesson, short_name
from .grading import FAILED, NOT_JUDGED, PASSED, UNTOUCHED, Judgement

_MARKS = {PASSED: "✓", FAILED: "✗", UNTOUCHED: "·", NOT_JUDGED: "?"}
_WIDTH = 110
_WALLED = "Answers ran behind bubblewrap, with their own processes and network. They could write to their folder only."
_OPEN = (
    "Answers were NOT walled off: they could reach the network and your files. Install bubblewrap (`bwrap`, Linux), or "
    "judge as a user who owns nothing."
)


def add_command(commands: Any) -> None:
    command = commands.add_parser(
        "grade",
        help="judge the notebooks of many students by the course's own checks",
        description="Judge the notebooks in FOLDER, one folder for each student (or FOLDER/NAME_LESSON.ipynb). The "
        "exit status is 0 if all exercises passed, 1 if some did not, 2 if nothing could be judged.",
    )
    add = command.add_argument
    add("folder", type=Path, metavar="FOLDER")
    course = "the course's notebooks, with solutions (./notebooks)"
    add("--course", type=Path, metavar="FOLDER", default=Path("notebooks"), help=course)
    add("--seconds", type=_seconds, default=10.0, help="of an answer, beyond twice what the solution takes (10)")
    add("--jobs", type=int, default=0, metavar="N", help="notebooks at a time (one for each core)")
    add("--csv", type=Path, metavar="FILE", help="write a row for each exercise of each student")
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Judge as the options say and print the table; the number for the shell."""
    try:
        if not options.folder.is_dir():
            raise ExerciseError(f"there is no folder {options.folder}.")
        lessons = [lesson for path in sorted(options.course.glob("*.ipynb")) if (lesson := Lesson(path)).exercises]
        if not lessons:
            why = "--course names the course's own notebooks."
            raise ExerciseError(f"{options.course} holds no lesson with solutions. {why}")
        found = grading.submissions(options.folder, lessons, lambda said: print(f"  {said}", file=sys.stderr))
        if not found:
            names = ", ".join(lesson.name for lesson in lessons)
            raise ExerciseError(f"{options.folder} holds no notebook of the course (lessons: {names}).")
        if options.csv:
            options.csv.parent.mkdir(parents=True, exist_ok=True)
            options.csv.open("a", encoding="utf-8").close()  # rather now than after the work
    except (ExerciseError, OSError) as error:
        print(f"rankcell grade: {error}", file=sys.stderr)
        return 2
    jobs, walled, began = max(0, options.jobs) or system.available_cores(), sandbox.walls(), time.monotonic()
    print(f"{len(found)} notebooks, {jobs} at a time ...", file=sys.stderr, flush=True)
    grader = grading.Grader(options.course, lessons, seconds=options.seconds, jobs=jobs, walled=walled)
    judgements = grader.grade(found, lambda one: print(f"  {one.student} {one.lesson}", file=sys.stderr))
    print(table(judgements))
    print(f"\n{len(judgements)} exercises in {time.monotonic() - began:.0f} s. {_WALLED if walled else _OPEN}")
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Judgement._fields, *judgements])
    passed, count = score(judgements)
    if grader.interrupted:
        print("rankcell grade: interrupted.", file=sys.stderr)
        return 130
    return 2 if not count else int(passed < count)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")


def score(judgements: Sequence[Judgement]) -> tuple[int, int]:
    """How many passed, and of how many that could be judged."""
    return sum(j.status == PASSED for j in judgements), sum(j.status != NOT_JUDGED for j in judgements)


def table(judgements: Sequence[Judgement]) -> str:
    """A row for each notebook, below it the feedback of what failed; then what failed most."""
    rows = grouped(((j.student, j.lesson), j) for j in judgements)
    width, lessons = (max((len(key[k]) for key in rows), default=0) for k in (0, 1))
    lines = []
    for (student, lesson), found in rows.items():
        numbers = [short_name(j.exercise).removeprefix("Exercise ") for j in found]
        passed, count = score(found)
        marks = "  ".join(f"{number} {_MARKS[j.status]}" for number, j in zip(numbers, found, strict=True))
        lines.append(f"{student:{width}}  {lesson:{lessons}}  {passed}/{count}  {marks}")
        for number, j in zip(numbers, found, strict=True):
            if j.feedback:
                said = f"{number}: {' '.join(j.feedback.split())}"
                lines += textwrap.wrap(said, _WIDTH, initial_indent="    ", subsequent_indent=" " * 7)
    lines += ["", "✓ passed   ✗ failed   · not begun   ? not judged"]
    failed = Counter((j.lesson, j.exercise) for j in judgements if j.status == FAILED)
    lines += ["", "Failed most often:"] if failed else []
    for (lesson, exercise), count in failed.most_common(5):
        same = [j for j in judgements if (j.lesson, j.exercise) == (lesson, exercise)]
        tried = sum(j.status in (PASSED, FAILED) for j in same)
        (said, often), *_ = Counter(j.feedback for j in same if j.status == FAILED).most_common(1)
        why = f" Most often: {textwrap.shorten(said, _WIDTH)}" if often > 1 else ""
        lines.append(f"  {lesson}, {exercise}: {count} of {tried}.{why}")
    return "\n".join(lines)
