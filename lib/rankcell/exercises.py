"""The exercises of a lesson: which cells they are, what a student gets of them, and what a judge has to run.

A solution is a code cell with the tag `solution` (in a student's copy: `exercise`) whose first comment is
`# Exercise N: what to do`. The cells below it, up to the next solution, heading or deliberate error, are its checks.
Whoever makes student copies, tests the lessons, judges answers or ticks them off asks here. Nothing here runs a cell,
and nothing here knows how a notebook is stored beyond its JSON: cells are the mappings of nbformat 4.
"""

import argparse
import ast
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import source as cell_source
from .cluster import dataflow

# The first line of a solution, below a cell magic if there is one. Students get it as the text of an error.
EXERCISE = re.compile(r"^#\s*(Exercise (\d+): \S.*)$")
# The lines of a solution that a student does not get, where the others stay.
BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"
# In a student's copy a cell that judges an answer says so: there it may fail without holding up "Run All".
CHECK = "check"
_SLURM = re.compile(r"\A%%slurm\b.*\n")
LONG = 8  # lines of a cell, from which on what is no part of the lesson is folded away

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
            found = cell["metadata"].get("tags", [])
            cell["metadata"]["tags"] = [tag for tag in found if isinstance(tag, str)]
            cell["cell_type"], cell["id"] = str(cell["cell_type"]), str(cell.get("id", ""))
    except OSError as error:
        raise ExerciseError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ExerciseError(f"{path.name} is no notebook of format 4") from None
    return cells


def tags(cell: Cell) -> list[str]:
    """The tags of one cell."""
    return cell["metadata"].get("tags", [])


def is_code(cell: Cell) -> bool:
    """Whether the cell has something to run."""
    return cell["cell_type"] == "code" and bool(cell["source"].strip())


def is_exercise(cell: Cell) -> bool:
    """Whether the cell holds a solution, or what a student has put into its place."""
    return cell["cell_type"] == "code" and bool({"solution", "exercise"} & set(tags(cell)))


def exercise_text(cell: Cell) -> str | None:
    """The words of `# Exercise N: ...` at the head of a solution cell, or None where they are missing.

    A student's copy keeps them beside the cell: the student may write over its head.
    """
    kept = cell["metadata"].get("rankcell")
    if isinstance(kept, dict) and isinstance(kept.get("exercise"), str):
        return kept["exercise"]
    lines = cell["source"].splitlines()
    if lines and lines[0].startswith("%%"):
        lines = lines[1:]
    match = EXERCISE.match(lines[0]) if lines else None
    return match[1] if match else None


def stub(cell: Cell) -> str:
    """What a student gets for the solution: the cell with an error that states the task in place of its marked
    lines, or of all its lines where none is marked.
    """
    error = f"raise NotImplementedError({json.dumps(exercise_text(cell), ensure_ascii=False)})"
    first, *lines = cell["source"].split("\n")
    if not any(line.strip() in (BEGIN, END) for line in lines):
        return f"{first}\n{error}" if first.startswith("%%") else error
    kept, within = [first], None
    for line in lines:
        text, indent = line.strip(), line[: len(line) - len(line.lstrip())]
        if text not in (BEGIN, END):
            kept += [line] if within is None else []
        elif (text == BEGIN) != (within is None):
            raise ExerciseError(f"`{text}` without its other half")
        elif text == BEGIN:
            within = indent
            kept += [f"{indent}# your code", f"{indent}{error}"]
        elif indent != within:
            raise ExerciseError(f"`{BEGIN}` and `{END}` do not begin in the same column")
        else:
            within = None
    if within is not None:
        raise ExerciseError(f"`{BEGIN}` without its other half")
    return "\n".join(kept)


def checks_of(cells: Sequence[Cell], index: int) -> list[int]:
    """The places of the code cells that judge the solution at `index`: up to the next solution, heading or
    deliberate error.
    """
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


def only_check(cells: Sequence[Cell]) -> list[int]:
    """The places of the long cells in which a reader would look for the verdict alone, so that their code is folded.

    They end in a check, are checks for a third at least (the rest prepares them), and define nothing that a cell
    without a check uses; or they judge an exercise.
    """
    bodies = {place: body for place, cell in enumerate(cells) if (body := _ends_in_a_check(cell))}
    judges = {
        place for index, cell in enumerate(cells) if is_exercise(cell) for place in checks_of(cells, index)
    }
    found = []
    for place, body in bodies.items():
        lines = cells[place]["source"].count("\n") + 1
        checked = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in body if _checks(node))
        defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        others = [c["source"] for i, c in enumerate(cells) if i > place and is_code(c) and i not in bodies]
        used = any(re.search(rf"\b{name}\b", source) for name in defined for source in others)
        if lines >= LONG and (place in judges or (3 * checked >= lines and not used)):
            found.append(place)
    return found


def _ends_in_a_check(cell: Cell) -> list[ast.stmt]:
    """The statements of a cell that ends in a check; none if it does not, is no plain Python, or is an exercise."""
    source = _SLURM.sub("", cell["source"])  # such a cell is Python of the notebook, where there is a cluster
    if not is_code(cell) or is_exercise(cell) or source.startswith("%"):
        return []
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a line that begins with ! or %
        return []
    return body if body and _checks(body[-1]) else []


def _checks(node: ast.stmt) -> bool:
    return "check." in ast.unparse(node)


def dependents(cells: Sequence[Cell]) -> list[int]:
    """The places of the code cells that use what an exercise defines, or what such a cell has made of it."""
    found: list[int] = []
    names: set[str] = set()
    for place, cell in enumerate(cells):
        effects = _effects(cell["source"]) if is_code(cell) else []
        uses = any((s.uses | s.later) & names for s in effects)
        if uses and not is_exercise(cell):
            found.append(place)
        if uses or is_exercise(cell):
            names |= {name for s in effects for name in s.binds}
        else:
            names -= {name for s in effects if isinstance(s.node, _DEFINITE) for name in s.binds}
    return found


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson: the place of its solution in the lesson's cells, and those of its checks."""

    lesson: str
    text: str
    index: int
    checks: tuple[int, ...]
    solution: str
    stub: str

    @property
    def name(self) -> str:
        """What a table calls it: "Exercise 2"; with its words where a lesson has two of that number."""
        return self.text.split(":")[0]


class Lesson:
    """The lesson at `path`: its cells and its exercises. Raises ExerciseError where it is no notebook."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.cells = read(path)
        self.exercises: list[Exercise] = []
        for index, cell in enumerate(self.cells):
            text = exercise_text(cell) if is_exercise(cell) else None
            if text is not None:
                checks = tuple(checks_of(self.cells, index))
                self.exercises.append(Exercise(self.name, text, index, checks, cell["source"], stub(cell)))

    def in_common(self, cells: Iterable[Cell]) -> int:
        """How many of these cells are, word for word, cells of the lesson."""
        ours = {cell["source"].strip() for cell in self.cells}
        return sum(cell["source"].strip() in ours for cell in cells)

    def answers(self, cells: Sequence[Cell]) -> dict[int, list[str]]:
        """What a student has written in place of each solution: the code cells that stand between the neighbours that
        it has in the lesson, by the solution's place. Cells are known by their id, or by their words where an editor
        has given them new ids. What the student has changed in cells of the lesson is not in there.
        """
        partner = self._partners(cells)
        fixed = {i: j for i, j in partner.items() if not is_exercise(self.cells[i])}
        taken = set(fixed.values())
        found = {}
        for exercise in self.exercises:
            first = max((j for i, j in fixed.items() if i < exercise.index), default=-1)
            after = [j for i, j in fixed.items() if i > exercise.index and j > first]
            places = range(first + 1, min(after, default=len(cells)))
            inside = [j for j in places if j not in taken and is_code(cells[j])]
            if exercise.index in partner and partner[exercise.index] not in inside:  # moved elsewhere
                inside = [partner[exercise.index]]
            found[exercise.index] = [cells[j]["source"] for j in inside]
        return found

    def _partners(self, cells: Sequence[Cell]) -> dict[int, int]:
        """The place of a cell of the lesson -> its place among `cells`."""
        ids = {cell.get("id"): j for j, cell in enumerate(cells) if cell.get("id")}
        by_id = {i: ids[cell["id"]] for i, cell in enumerate(self.cells) if cell.get("id") in ids}
        if len(by_id) * 2 >= len(self.cells):
            return by_id
        ours, theirs = ([c["source"].strip() for c in some] for some in (self.cells, cells))
        blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        return {a + k: b + k for a, b, size in blocks for k in range(size)}

    def needs(self, exercise: Exercise, answer: Sequence[str], *, changes: bool = True) -> list[int]:
        """The places of the earlier cells that must have run before this answer and its checks can, in order.

        They are found by reading: cells that define what is used (with `changes` also those that may change it), and
        so on backwards, in the notebook and on the ranks. A lesson's first cell is always there. Earlier exercises
        come with the lesson's own solutions.
        """
        before = [
            i
            for i, cell in enumerate(self.cells[: exercise.index])
            if is_code(cell) and "raises-exception" not in tags(cell)
        ]
        effects = {i: _effects(self.cells[i]["source"]) for i in before}
        statements = [s for i in before for s in effects[i]]
        linked = dataflow.links(statements) if changes else {}
        imported = {
            name for s in statements if isinstance(s.node, (ast.Import, ast.ImportFrom)) for name in s.binds
        }
        checks = [self.cells[i]["source"] for i in exercise.checks]
        asked = _asked([*answer, *checks]) | _asked([exercise.solution, *checks])
        late: set[str] = set()
        while True:
            needed, chosen = asked | late, []
            calls: set[str] = set()
            for i in reversed(before):
                if i != before[0] and not any(
                    s.binds & needed or (changes and _changes(s, needed, linked, imported, statements))
                    for s in effects[i]
                ):
                    continue
                chosen.append(i)
                for s in reversed(effects[i]):
                    if isinstance(s.node, _DEFINITE) or s.pulled:
                        needed -= s.binds
                    needed |= s.uses
                    calls |= s.later
            if calls <= late:
                return chosen[::-1]
            late |= calls

    def before(self, exercise: Exercise) -> list[int]:
        """The places of all code cells above an exercise."""
        return [i for i, cell in enumerate(self.cells[: exercise.index]) if is_code(cell)]


_DEFINITE = (ast.Assign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _changes(
    statement: dataflow.Statement,
    needed: set[str],
    linked: Mapping[str, set[str]],
    imported: set[str],
    statements: Sequence[dataflow.Statement],
) -> bool:
    """Whether the statement may change an object that is needed."""
    touched = {name for n in needed for name in linked.get(n, {n})}
    changed = statement.changes & (touched - imported) and not dataflow.only_shows(statement, statements)
    return bool(changed or dataflow.sets_up(statement.node) in needed)


def _asked(sources: Sequence[str]) -> set[str]:
    """The names that cells in a row use and have not defined before."""
    needed: set[str] = set()
    later: set[str] = set()
    for s in reversed([s for source in sources for s in _effects(source)]):
        if isinstance(s.node, _DEFINITE) or s.pulled:
            needed -= s.binds
        needed |= s.uses
        later |= s.later
    return needed | later


def binds(source: str) -> frozenset[str]:
    """The names that a cell gives to the notebook."""
    return frozenset(name for s in _effects(source) for name in s.binds if ":" not in name)


def _effects(source: str) -> list[dataflow.Statement]:
    """What the statements of a cell use and define. A name of a world of 4 ranks is called "4:name"."""
    first, _, rest = source.lstrip("\n").partition("\n")
    words = first.split()
    if words[:1] == ["%%ranks"]:
        try:
            options = cell_source.parse(words[1:])
        except (argparse.ArgumentError, argparse.ArgumentTypeError):
            return []
        return _on_ranks(options, rest)
    if first.startswith("%%"):
        return []
    return _statements(source)


def _on_ranks(options: Any, body: str) -> list[dataflow.Statement]:
    world = f"{options.world_size}:"

    def there(names: Iterable[str]) -> frozenset[str]:
        return frozenset(world + name for name in names if name not in cell_source.LENT)

    pushed = frozenset(options.push or ())
    handed = [*(options.pull or ()), *filter(None, [options.out])]
    found = [dataflow.Statement("", there([name]), uses=frozenset([name]), pulled=True) for name in pushed]
    found += [dataflow.Statement("", frozenset(), uses=frozenset(filter(None, [options.against])))]
    for s in _statements(body):
        found.append(
            dataflow.Statement(
                s.source, there(s.binds), there(s.changes), there(s.uses), there(s.later), s.node
            )
        )
    uses = there(options.pull or ())
    found += [dataflow.Statement("", frozenset([name]), uses=uses, pulled=True) for name in handed]
    return found


def _statements(source: str) -> list[dataflow.Statement]:
    tree = dataflow.parsed(source)
    if tree is None:
        return []
    lines = dataflow.transformed(source).splitlines()
    shown = not cell_source.is_silenced(source)
    return [
        statement
        for node in tree.body
        for statement in dataflow.statements_of(
            node, lines, shown=shown and node is tree.body[-1], obstacle_of=lambda _: ""
        )
    ]
