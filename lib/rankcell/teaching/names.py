"""Which exercises a cell builds on, by the names that cells read and bind, on the ranks or in the notebook: from
sources alone, which is all that a kernel knows of its notebook.
"""

import ast
import re
import symtable
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from IPython.core.inputtransformer2 import TransformerManager

SLURM = re.compile(r"\A%%slurm\b.*\n")  # such a cell is Python of the notebook, where there is a cluster


def behind(cells: Iterable[tuple[str, str | None]]) -> list[list[str]]:
    """Of each cell the texts of the exercises without which it fails: it uses their names, or what was made of them.

    A cell is its source and, if it is an exercise, the text of that.
    """
    found = []
    origins: dict[str, frozenset[str]] = {}  # name -> the exercises without which it is not there
    for source, exercise in cells:
        texts: set[str] = set()
        for reads, binds in _steps(source):
            texts |= {text for name in reads for text in origins.get(name, ())}
            origins |= dict.fromkeys(binds, frozenset(texts | {exercise} if exercise else texts))
        found.append(sorted(texts - {exercise}))
    return found


def _steps(source: str) -> Iterator[tuple[set[str], set[str]]]:
    """The names that each statement of a cell reads, in functions too, and those it binds; a rank's begin with %."""
    first, _, body = source.lstrip("\n").partition("\n")
    ranks = first.startswith("%%ranks")
    mark = "%" if ranks else ""
    given: dict[str, set[str]] = {"push": set(), "pull": set(), "o": set(), "out": set()}
    for option, names in re.findall(r" --?(push|pull|out|o)[ =](\S+)", first if ranks else ""):
        given[option] |= set(names.split(","))
    yield given["push"], {f"%{name}" for name in given["push"]}
    try:
        code = TransformerManager().transform_cell(body if ranks else SLURM.sub("", source.lstrip("\n")))
        statements = ast.parse(code).body
    except SyntaxError:
        statements = []
    made: set[str] = set()
    for node in _in_order(statements):
        table = symtable.symtable(ast.unparse(node), "cell", "exec")
        reads = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            reads.add(node.target.id)
        inner = list(table.get_children())
        for scope in inner:  # which grows meanwhile
            inner += scope.get_children()
            reads |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
        filled = {n.value.id for n in ast.walk(node) if _fills(n, node) and isinstance(n.value, ast.Name)} & made
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # `fill(found)`
            filled |= {n.id for n in node.value.args if isinstance(n, ast.Name)} & made
        made |= {s.get_name() for s in table.get_symbols() if s.is_assigned()}
        binds = filled | {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
        yield {mark + name for name in reads}, {mark + name for name in binds}
    yield {f"%{name}" for name in given["pull"]}, given["pull"] | given["o"] | given["out"]


def _fills(node: ast.AST, statement: ast.stmt) -> TypeGuard[ast.Attribute | ast.Subscript]:
    """Whether it is the head of `found.append(...)`, a statement of its own, or of `found[0] = ...`."""
    called = isinstance(statement, ast.Expr) and isinstance(node, ast.Attribute)
    return called or (isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store))


def _in_order(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, what stands inside loops and the like behind the line that leads there."""
    for node in statements:
        inside: list[ast.stmt] = []
        if isinstance(node, ast.For | ast.While | ast.If | ast.With):
            inside, node.body = node.body, [ast.Pass()]
            if not isinstance(node, ast.With):
                inside, node.orelse = [*inside, *node.orelse], []
        yield node
        yield from _in_order(inside)
