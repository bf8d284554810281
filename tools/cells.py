"""What the tools find out by reading the cells of a notebook: which only check, and which build on an exercise."""

import ast
import re
from collections.abc import Sequence

from rankcell.teaching.exercises import Cell, checks_of, exercise_text, is_code, is_exercise
from rankcell.teaching.names import SLURM, behind

LONG = 8  # lines of a cell, from which on what is no part of the lesson is folded away


def only_check(cells: Sequence[Cell]) -> list[int]:
    """The places of the long cells in which a reader would look for the verdict alone, so that their code is folded.

    They end in a check, are checks for a third at least (the rest prepares them), and define nothing that a cell
    without a check uses; or they judge an exercise; or they say so in their first comment, "for the check".
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
    said = [
        i for i, c in enumerate(cells) if is_code(c) and re.match(r"(%%.*\n)?# for the check\b", c["source"])
    ]
    return sorted({*found, *said})


def _ends_in_a_check(cell: Cell) -> list[ast.stmt]:
    """The statements of a cell that ends in a check; none if it does not, is no plain Python, or is an exercise."""
    source = SLURM.sub("", cell["source"])  # such a cell is Python of the notebook, where there is a cluster
    if not is_code(cell) or is_exercise(cell) or source.startswith("%"):
        return []
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a line that begins with ! or %
        return []
    return body if body and _checks(body[-1]) else []


def _checks(node: ast.stmt) -> bool:
    return "check." in ast.unparse(node)


def builds_on(cells: Sequence[Cell]) -> dict[int, list[str]]:
    """The place of each code cell that uses what an exercise defines, or what such a cell has made of it, and the texts
    of those exercises.
    """
    code = [(place, cell) for place, cell in enumerate(cells) if is_code(cell)]
    found = behind((cell["source"], exercise_text(cell) if is_exercise(cell) else None) for _, cell in code)
    pairs = zip(code, found, strict=True)
    return {place: texts for (place, cell), texts in pairs if texts and not is_exercise(cell)}
