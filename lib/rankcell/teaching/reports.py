"""What became of the answers, as a table and as CSV. Nothing runs here."""

import csv
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from .exercises import short_name

PASSED, FAILED, UNTOUCHED, NOT_JUDGED = "passed", "failed", "not begun", "not judged"
_MARKS = {PASSED: "✓", FAILED: "✗", UNTOUCHED: "·", NOT_JUDGED: "?"}
_WIDTH = 110


@dataclass(frozen=True)
class Judgement:
    """One exercise of one student: `status`, and the feedback that the student would read."""

    student: str
    lesson: str
    exercise: str
    status: str
    feedback: str = ""


def score(judgements: Sequence[Judgement]) -> tuple[int, int]:
    """How many passed, and of how many that could be judged."""
    return sum(j.status == PASSED for j in judgements), sum(j.status != NOT_JUDGED for j in judgements)


def table(judgements: Sequence[Judgement]) -> str:
    """A row for each notebook, below it the feedback of what failed; then what failed most."""
    lines = []
    rows = _by_notebook(judgements)
    width = max((len(student) for student, _ in rows), default=0)
    lessons = max((len(lesson) for _, lesson in rows), default=0)
    for (student, lesson), found in rows.items():
        passed, count = score(found)
        marks = "  ".join(f"{_short(j.exercise)} {_MARKS[j.status]}" for j in found)
        lines.append(f"{student:{width}}  {lesson:{lessons}}  {passed}/{count}  {marks}")
        for j in found:
            if j.feedback:
                said = f"{_short(j.exercise)}: {' '.join(j.feedback.split())}"
                lines += textwrap.wrap(said, _WIDTH, initial_indent="    ", subsequent_indent=" " * 7)
    lines += ["", "✓ passed   ✗ failed   · not begun   ? not judged"]
    failed = Counter((j.lesson, j.exercise) for j in judgements if j.status == FAILED)
    lines += ["", "Failed most often:"] if failed else []
    for (lesson, exercise), count in failed.most_common(5):
        same = [j for j in judgements if (j.lesson, j.exercise) == (lesson, exercise)]
        tried = sum(j.status in (PASSED, FAILED) for j in same)
        said = Counter(j.feedback for j in same if j.status == FAILED).most_common(1)[0][0]
        lines.append(f"  {lesson}, {exercise}: {count} of {tried}. Most often: {textwrap.shorten(said, _WIDTH)}")
    return "\n".join(lines)


def _by_notebook(judgements: Iterable[Judgement]) -> dict[tuple[str, str], list[Judgement]]:
    found: dict[tuple[str, str], list[Judgement]] = {}
    for one in judgements:
        found.setdefault((one.student, one.lesson), []).append(one)
    return found


def _short(exercise: str) -> str:
    return short_name(exercise).removeprefix("Exercise ")


def as_csv(judgements: Sequence[Judgement], path: Path) -> None:
    """A row for each exercise of each student."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Judgement)])
        writer.writerows(map(astuple, judgements))
