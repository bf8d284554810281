"""`rankcell grade FOLDER`: many students' notebooks, judged by the course's own checks."""

import sys
import time
from pathlib import Path
from typing import Any

from ..engine import system
from . import grading, reports, sandbox, submissions

_WALLED = "Answers ran behind bubblewrap: with processes and a network of their own, and no file outside their folder."
_OPEN = (
    "Answers were NOT walled off: they could reach the network and your files. Install bubblewrap (`bwrap`, Linux), or "
    "judge as a user who owns nothing."
)


def add_command(commands: Any) -> None:
    """Add `grade` to the sub-commands of an argument parser."""
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
    add("--seconds", type=float, default=10.0, help="of an answer, beyond twice what the solution takes (10)")
    add("--jobs", type=int, default=0, metavar="N", help="notebooks at a time (one for each core)")
    add("--csv", type=Path, metavar="FILE", help="write a row for each exercise of each student")
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Judge as the options say and print the table; the number for the shell."""
    try:
        lessons = grading.lessons_of(options.course)
        found = submissions.find(options.folder, lessons)
        if not found:
            names = ", ".join(lesson.name for lesson in lessons)
            raise grading.GradeError(f"{options.folder} holds no notebook of the course (lessons: {names}).")
    except grading.GradeError as error:
        print(f"rankcell grade: {error}", file=sys.stderr)
        return 2
    jobs, walled, began = max(0, options.jobs) or system.available_cores(), sandbox.walls(), time.monotonic()
    print(f"{len(found)} notebooks, {jobs} at a time ...", file=sys.stderr, flush=True)
    grader = grading.Grader(options.course, lessons, seconds=options.seconds, jobs=jobs, walled=walled)
    try:
        judgements = grader.grade(found, lambda one: print(f"  {one.student} {one.lesson}", file=sys.stderr))
    except KeyboardInterrupt:
        print("rankcell grade: interrupted.", file=sys.stderr)
        return 130
    print(reports.table(judgements))
    took = time.monotonic() - began
    print(f"\n{len(judgements)} exercises in {took:.0f} s. {_WALLED if walled else _OPEN}")
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        reports.as_csv(judgements, options.csv)
    passed, count = reports.score(judgements)
    return 2 if not count else int(passed < count)
