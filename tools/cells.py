"""What the tools find out by reading the cells of a notebook: which only check, and which build on an exercise."""

import ast
import re
import symtable
from collections.abc import Sequence

from IPython.core.inputtransformer2 import TransformerManager

from rankcell.teaching.exercises import Cell, checks_of, exercise_text, is_code, is_exercise

LONG = 8  # lines of a cell, from which on what is no part of the lesson is folded away
_SLURM = re.compile(r"\A%%slurm\b.*\n")


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


def builds_on(cells: Sequence[Cell]) -> dict[int, list[str]]:
    """The place of each code cell that uses what an exercise defines, or what such a cell has made of it, and the texts
    of those exercises. Found by the names that cells use and bind, on the ranks or in the notebook.
    """
    found: dict[int, list[str]] = {}
    origins: dict[str, list[str]] = {}  # name -> the exercises that it comes from
    for place, cell in enumerate(cells):
        if not is_code(cell):
            continue
        uses, binds = _names(cell["source"])
        texts = list(dict.fromkeys(text for name in sorted(uses) for text in origins.get(name, ())))
        if is_exercise(cell):
            texts.append(exercise_text(cell) or "")
        elif texts:
            found[place] = texts
        origins |= dict.fromkeys(binds, texts)
    return found


def _names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell reads before it binds them, functions' bodies included, and the names that it binds."""
    first, _, body = source.lstrip("\n").partition("\n")
    uses: set[str] = set()
    binds: set[str] = set()
    handed: set[str] = set()
    if first.startswith("%%ranks"):
        source = body
        for option, value in re.findall(r"(--push|--pull|--out|-o)[ =](\S+)", first):
            (uses if option == "--push" else handed).update(value.split(","))
    try:
        statements = ast.parse(TransformerManager().transform_cell(_SLURM.sub("", source.lstrip("\n")))).body
    except SyntaxError:
        statements = []
    for node in statements:
        table = symtable.symtable(ast.unparse(node), "cell", "exec")
        read = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
        inner = list(table.get_children())
        while inner:
            scope = inner.pop()
            inner += scope.get_children()
            read |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
        uses |= read - binds
        binds |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    return uses, binds | handed
