"""`rankcell grade FOLDER`: many students' notebooks, judged by the course's own checks."""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from .. import exercises
from ..engine import system
from . import grading, results, sandbox, submissions

_EVERY = 20.0  # seconds between two words of progress


def _size(text: str) -> int:
    """Bytes from "4GiB", "512 MiB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(MiB|GiB)\s*", text, re.I)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write for example 4GiB or 512MiB.")
    return int(float(match[1]) * (1 << 30 if match[2].lower() == "gib" else 1 << 20))


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0.")
    return int(text)


def add_command(commands: Any) -> None:
    """Add `grade` to the sub-commands of an argument parser."""
    command = commands.add_parser(
        "grade",
        help="judge the notebooks of many students by the course's own checks",
        description="Judge the notebooks in FOLDER, one folder for each student (or FOLDER/NAME_LESSON.ipynb). Each "
        "answer runs alone, with limits; the exit status is 0 if all exercises passed, 1 if some did not, 2 if nothing "
        "could be judged.",
    )
    command.add_argument("folder", type=Path, metavar="FOLDER")
    command.add_argument(
        "--course", type=Path, metavar="FOLDER", help="the course's notebooks, with solutions (./notebooks)"
    )
    command.add_argument(
        "--lesson", action="append", metavar="NAME", help="judge only this lesson, such as 04"
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="what an answer may take, beyond what the solution takes (10)",
    )
    command.add_argument("--memory", type=_size, default=4 << 30, metavar="SIZE", help="of one answer (4GiB)")
    command.add_argument(
        "--processes", type=_count, default=64, metavar="N", help="of one answer at once (64)"
    )
    command.add_argument("--jobs", type=_count, metavar="N", help="answers at a time (one for each core)")
    for name, what in (
        ("junit", "JUnit XML"),
        ("csv", "a row for each exercise, with what was measured"),
        ("nbgrader", "grades in the columns of `nbgrader export`"),
        ("classroom", "the JSON of a GitHub Classroom runner"),
    ):
        command.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Judge as the options say and print the table; the number for the shell."""
    try:
        lessons = grading.lessons_of(_course(options.course))
        if options.lesson:
            lessons = _chosen(lessons, options.lesson)
        if not options.folder.is_dir():
            raise grading.GradeError(f"{options.folder} is no folder.")
        found = submissions.find(options.folder, lessons)
        if not found:
            raise grading.GradeError(
                f"{options.folder} holds no notebook of the course (lessons: {', '.join(one.name for one in lessons)})."
            )
        limits = sandbox.Limits(memory=options.memory, processes=options.processes)
        jobs = options.jobs or system.available_cores()
        grader = grading.Grader(lessons, seconds=options.seconds, jobs=jobs, limits=limits)
        began = time.monotonic()
        print(f"{len(found)} notebooks, {jobs} answers at a time ...", file=sys.stderr, flush=True)
        judgements = grader.grade(found, _Progress().heard)
    except grading.GradeError as error:
        print(f"rankcell grade: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "rankcell grade: interrupted before an answer was judged; nothing was written.", file=sys.stderr
        )
        return 130
    print(results.table(judgements))
    print(
        f"\n{len(judgements)} exercises in {time.monotonic() - began:.0f} s. Answers had {grader.stage.sealing}."
    )
    for name in ("junit", "csv", "nbgrader", "classroom"):
        if path := getattr(options, name):
            path.parent.mkdir(parents=True, exist_ok=True)
            getattr(results, f"as_{name}")(judgements, path)
    if grader.interrupted:
        print("rankcell grade: interrupted; what was not judged says so.", file=sys.stderr)
        return 130
    passed, count = results.score(judgements)
    return 2 if not count else int(passed < count)


class _Progress:
    """Says on stderr every now and then how far the judging is: a class takes minutes."""

    def __init__(self) -> None:
        self._count, self._said = 0, time.monotonic()

    def heard(self, judgement: results.Judgement) -> None:
        """One more answer is judged; called from several threads, in which a line too many does no harm."""
        self._count += 1
        if time.monotonic() > self._said + _EVERY:
            self._said = time.monotonic()
            print(f"  {self._count} exercises judged so far", file=sys.stderr, flush=True)


def _course(folder: Path | None) -> Path:
    """The folder of the lessons: the one named, the one here, or that of the checkout the package lies in."""
    if folder is not None:
        return folder
    places = [Path("notebooks"), Path(__file__).parents[3] / "notebooks"]
    for place in places:
        if any(place.glob("*.ipynb")):
            return place
    raise grading.GradeError("where are the course's notebooks? Name their folder: `--course notebooks`.")


def _chosen(lessons: list[exercises.Lesson], names: list[str]) -> list[exercises.Lesson]:
    found = [
        one for one in lessons if any(one.name.startswith(name.removesuffix(".ipynb")) for name in names)
    ]
    if not found:
        known = ", ".join(one.name for one in lessons)
        raise grading.GradeError(f"there is no lesson {', '.join(names)}. There are {known}.")
    return found
