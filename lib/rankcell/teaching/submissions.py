"""The notebooks of a folder, by student and lesson. Nothing in them is run here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import exercises


@dataclass(frozen=True)
class Submission:
    """One notebook of one student, and the answers in it by the place of the lesson's solution.

    `problem` says why it could not be read, and is empty otherwise.
    """

    student: str
    path: Path
    lesson: str
    answers: dict[int, list[str]]
    problem: str = ""


def find(folder: Path, lessons: Sequence[exercises.Lesson]) -> list[Submission]:
    """The submissions in `folder`, by student and lesson, whose name stands in that of the file.

    A student is the first folder in `folder` on the way to the notebook; of notebooks in `folder` itself it is what
    the file's name has besides that of the lesson, and the name of `folder` if that is nothing.
    """
    found = []
    for path in sorted(folder.rglob("*.ipynb")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        lesson = next((one for one in lessons if one.name in path.stem), None)
        if lesson is None:
            continue  # another notebook
        answers, problem = dict[int, list[str]](), ""
        try:
            answers = lesson.answers(exercises.read(path))
        except exercises.ExerciseError as error:
            problem = str(error)
        found.append(Submission(_student(folder, inside, lesson.name), path, lesson.name, answers, problem))
    newest = dict[tuple[str, str], Submission]()  # of several copies of a lesson, the one that was saved last
    for one in sorted(found, key=lambda s: (s.path.stat().st_mtime, s.path)):
        newest[one.student, one.lesson] = one
    return sorted(newest.values(), key=lambda s: (s.student, s.lesson))


def _student(folder: Path, inside: Path, lesson: str) -> str:
    rest = re.sub(r"^[\W_]+|[\W_]+$", "", inside.stem.replace(lesson, ""))
    name = inside.parts[0] if len(inside.parts) > 1 else rest or folder.resolve().name
    return "".join(c if c.isprintable() else "?" for c in name)
