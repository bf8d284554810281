"""The exercises of a lesson: which cells they are, and what a student gets of them. A solution is a code cell with the
tag `solution` (in a student's copy: `exercise`) whose first comment is `# Exercise N: what to do`. The cells below it,
up to the next solution, heading or deliberate error, are its checks. Cells are the mappings of nbformat 4.
"""

import ast
import contextlib
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The first line of a solution, below a cell magic if there is one. Students get it as the text of an error.
EXERCISE = re.compile(r"^#\s*(Exercise (\d+): \S.*)$")
# The lines of a solution that a student does not get, where the others stay.
BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"
_MARKED = re.compile(rf"(?ms)^([ \t]*){BEGIN}[ \t]*$(?:(?!{BEGIN}).)*?^\1{END}[ \t]*$")
# In a student's copy a cell that judges an answer says so: there it may fail without holding up "Run All".
CHECK = "check"

Cell = Mapping[str, Any]


class ExerciseError(Exception):
    """What is wrong with an exercise or a notebook, in words for its author."""


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of the notebook at `path`, each source one text; an `ExerciseError` says why it cannot be read."""
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        for cell in cells:
            if not isinstance(cell["source"], str):
                cell["source"] = "".join(cell["source"])
            cell["metadata"]["tags"] = [tag for tag in tags(cell) if isinstance(tag, str)]
            cell["cell_type"], cell["id"] = str(cell["cell_type"]), str(cell.get("id", ""))
    except OSError as error:
        raise ExerciseError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ExerciseError(f"{path.name} is no notebook of format 4") from None
    return cells


def tags(cell: Cell) -> list[str]:
    return cell["metadata"].get("tags", [])


def is_code(cell: Cell) -> bool:
    """Whether the cell has something to run."""
    return cell["cell_type"] == "code" and bool(cell["source"].strip())


def is_exercise(cell: Cell) -> bool:
    """Whether the cell holds a solution, or what a student has put into its place."""
    return cell["cell_type"] == "code" and bool({"solution", "exercise"} & set(tags(cell)))


def only_defines(cell: Cell) -> bool:
    """Whether the cell has functions, classes and imports, for the notebook or for ranks, and nothing else to run."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    with contextlib.suppress(SyntaxError, ValueError):
        parts = ast.parse(re.sub(r"\A%%ranks.*\n", "", cell["source"])).body
        return is_code(cell) and all(isinstance(part, kinds) for part in parts)
    return False


def exercise_text(cell: Cell) -> str | None:
    """The words of `# Exercise N: ...` at the head of a solution cell, or None where they are missing."""
    kept = cell["metadata"].get("rankcell")  # of a student's copy: the student may write over the cell's head
    if isinstance(kept, dict) and isinstance(kept.get("exercise"), str):
        return kept["exercise"]
    match = EXERCISE.match(re.sub(r"\A%%.*\n", "", cell["source"]).split("\n")[0])
    return match[1] if match else None


def short_name(text: str) -> str:
    """The words before the colon: "Exercise 2"."""
    return text.split(":")[0]


def stub(cell: Cell) -> str:
    """What a student gets for the solution: the cell with an error that states the task in place of its marked
    lines, or of all its lines where none is marked.
    """
    error = stub_error(exercise_text(cell) or "")
    text, count = _MARKED.subn(lambda found: f"{found[1]}# your code\n{found[1]}{error}", cell["source"])
    if BEGIN in text or END in text:
        raise ExerciseError(f"`{BEGIN}` and `{END}` come in pairs that begin in the same column")
    if count:
        return text
    first = text.split("\n")[0]
    return f"{first}\n{error}" if first.startswith("%%") else error


def stub_error(text: str) -> str:
    """The line of a stub by which it fails, as long as the student leaves it there."""
    return f"raise NotImplementedError({json.dumps(text, ensure_ascii=False)})"


def checks_of(cells: Sequence[Cell], index: int) -> list[int]:
    """The places of the code cells that judge the solution at `index`."""
    found = []
    for place, cell in enumerate(cells[index + 1 :], index + 1):
        if cell["cell_type"] == "markdown" and re.search(r"(?m)^#+ ", cell["source"]):
            break
        if cell["cell_type"] == "code":
            deliberate = "raises-exception" in tags(cell) and CHECK not in tags(cell)
            if is_exercise(cell) or deliberate:
                break
            found.append(place)
    return found


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson: the place of its solution in the lesson's cells, and those of its checks."""

    text: str
    index: int
    checks: tuple[int, ...]
    solution: str
    stub: str


class Lesson:
    """The lesson at `path`: its cells and its exercises. Raises ExerciseError where it is no notebook."""

    def __init__(self, path: Path) -> None:
        self.name, self.cells = path.stem, read(path)
        self.exercises: list[Exercise] = []
        for index, cell in enumerate(self.cells):
            if (text := exercise_text(cell) if is_exercise(cell) else None) is not None:
                checks = tuple(checks_of(self.cells, index))
                self.exercises.append(Exercise(text, index, checks, cell["source"], stub(cell)))

    def begun(self, cells: Sequence[Cell]) -> dict[int, list[str]]:
        """The answers that are not missing, and not still the stub, by the places of the solutions. What the student
        defines above, in cells of their own, belongs to each.
        """
        partner = self._partners(cells)
        answers = self._answers(cells, partner)
        taken = {*partner.values(), *(j for places in answers.values() for j in places)}
        own = [j for j, cell in enumerate(cells) if j not in taken and only_defines(cell)]
        found = {}
        for exercise in self.exercises:
            answer = [cells[j]["source"] for j in answers[exercise.index]]
            if [source.strip() for source in answer] not in ([], [exercise.stub.strip()]):
                above = [cells[j]["source"] for j in own if j < answers[exercise.index][0]]
                found[exercise.index] = above + answer
        return found

    def _answers(self, cells: Sequence[Cell], partner: Mapping[int, int]) -> dict[int, list[int]]:
        """Where a student has written something in place of each solution, by its place: in the code cells between
        the neighbours that it has in the lesson.
        """
        fixed = {i: j for i, j in partner.items() if not is_exercise(self.cells[i])}
        taken = set(fixed.values())
        found = {}
        for exercise in self.exercises:
            first = max((j for i, j in fixed.items() if i < exercise.index), default=-1)
            after = [j for i, j in fixed.items() if i > exercise.index and j > first]
            places = range(first + 1, min(after, default=len(cells)))
            inside = [j for j in places if j not in taken and is_code(cells[j])]
            if (moved := partner.get(exercise.index)) is not None and moved not in inside and is_code(cells[moved]):
                inside = [moved]
            found[exercise.index] = inside
        return found

    def _partners(self, cells: Sequence[Cell]) -> dict[int, int]:
        """The place of a cell of the lesson -> its place among `cells`, by their ids, or by their words where an editor
        has given them new ids.
        """
        ids = {cell.get("id"): j for j, cell in enumerate(cells) if cell.get("id")}
        by_id = {i: ids[cell["id"]] for i, cell in enumerate(self.cells) if cell.get("id") in ids}
        if len(by_id) * 2 >= len(self.cells):
            return by_id
        ours, theirs = ([c["source"].strip() for c in some] for some in (self.cells, cells))
        blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        return {a + k: b + k for a, b, size in blocks for k in range(size)}
