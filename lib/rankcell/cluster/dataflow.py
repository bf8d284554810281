"""What names the statements of a notebook's ordinary cells read, make and change.

The cells are read, not run. Aliases that only running would show (an object put into a list of another name, say) are
not followed.
"""

import ast
import re
import symtable
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Statement:
    """A statement of an ordinary cell, or (`pulled`) names that a rank cell gave to the notebook.

    It `binds` names, `changes` the objects of others, `uses` what others made, and what it defines uses names
    `later`, when it is called. `obstacle` says why it cannot stand in a script; empty if it can.
    """

    source: str
    binds: frozenset[str]
    changes: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    node: ast.stmt | None = None
    pulled: bool = False
    obstacle: str = ""


def transformed(source: str) -> str:
    """The cell as plain Python: magics and shell commands become calls of get_ipython()."""
    return TransformerManager().transform_cell(source)


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a cell, or None where it is no Python."""
    try:
        return ast.parse(transformed(source))
    except SyntaxError:
        return None


def uses_and_binds(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that `source` reads from outside, functions' bodies included, and the names it defines."""
    tree = _Scopes().visit(ast.parse(source))
    table = symtable.symtable(ast.unparse(ast.fix_missing_locations(tree)), "cell", "exec")
    uses = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    waiting = list(table.get_children())
    while waiting:
        child = waiting.pop()
        waiting += child.get_children()
        for symbol in child.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                uses.add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                binds.add(symbol.get_name())
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            uses.add(node.target.id)
    return frozenset(uses), frozenset(binds)


class _Scopes(ast.NodeTransformer):
    """Turns comprehensions into generator expressions: from Python 3.12 on only these have names of their own."""

    def _generator(self, element: ast.expr, node: ast.ListComp | ast.SetComp | ast.DictComp) -> ast.AST:
        return self.generic_visit(ast.GeneratorExp(element, node.generators))

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._generator(node.elt, node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._generator(node.elt, node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self._generator(ast.Tuple([node.key, node.value], ast.Load()), node)


def _needs(body: Sequence[ast.stmt], bound: frozenset[str] = frozenset()) -> frozenset[str]:
    """The names that statements in a row read and have not surely defined before."""
    needs: frozenset[str] = frozenset()
    for node in body:
        inner = bound
        heads: list[ast.AST] = [node]
        blocks = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
        if isinstance(node, (ast.For, ast.With, ast.If, ast.While, ast.Try)):
            heads = [
                n for n in ast.iter_child_nodes(node) if not isinstance(n, (ast.stmt, ast.ExceptHandler))
            ]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            stored = [n for head in heads for n in ast.walk(head) if isinstance(n, ast.Name)]
            inner = bound | {n.id for n in stored if isinstance(n.ctx, ast.Store)}
            read = [h for h in heads if isinstance(h, ast.expr) and h is not getattr(node, "target", None)]
            entered = [h.context_expr for h in heads if isinstance(h, ast.withitem)]
            heads = [*map(ast.Expr, read), *map(ast.Expr, entered)]
            for block in blocks:
                needs |= _needs(block, inner)
        for head in heads:
            needs |= uses_and_binds(ast.unparse(head))[0] - bound
        bound = bound | uses_and_binds(ast.unparse(node))[1]
    return needs


def statements_of(
    node: ast.stmt, lines: Sequence[str], *, shown: bool, obstacle_of: Callable[[Import], str]
) -> Iterator[Statement]:
    """A top-level statement of an ordinary cell, an import as one for each name.

    Args:
        node: the statement.
        lines: the lines of its cell.
        shown: whether it is the last one, whose value the cell shows.
        obstacle_of: says why an import cannot stand in the script, or nothing.
    """
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            one = (
                ast.Import([alias])
                if isinstance(node, ast.Import)
                else ast.ImportFrom(node.module, [alias], node.level)
            )
            source = ast.unparse(one)
            name = (alias.asname or alias.name).split(".")[0]
            obstacle = f"needs `{source}`" if alias.name == "*" else obstacle_of(one)
            yield Statement(source, frozenset({name}), node=one, obstacle=obstacle)
        return
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    if (first == node.lineno and node.col_offset) or shares_its_last_line(node, lines):
        source = ast.unparse(node)
    else:
        source = "\n".join(lines[first - 1 : node.end_lineno])
    uses, binds = uses_and_binds(ast.unparse(node))
    deferred = isinstance(node, (ast.FunctionDef, ast.ClassDef))
    obstacle = ""
    if "get_ipython" in uses:
        obstacle = "needs a magic or a shell command of the notebook"
    if any(isinstance(n, ast.Global) for n in ast.walk(node)):
        obstacle = "needs a function that assigns to a global name"
    yield Statement(
        source,
        binds,
        frozenset(_changes(node, shown=shown)),
        frozenset() if deferred else _needs([node]),
        uses if deferred else frozenset(),
        node,
        obstacle=obstacle,
    )


def shares_its_last_line(node: ast.stmt, lines: Sequence[str]) -> bool:
    """Whether another statement stands behind it, as in `a = 1; b = 2`."""
    rest = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode().strip()
    return bool(rest) and not rest.startswith("#")


def _changes(node: ast.stmt, *, shown: bool) -> Iterator[str]:
    """Names whose objects the statement may change: assignments into them, calls made for their effect."""
    for inner in _same_scope(node):
        targets: list[ast.expr] = []
        if isinstance(inner, (ast.Assign, ast.Delete)):
            targets = list(inner.targets)
        elif isinstance(inner, (ast.AugAssign, ast.AnnAssign, ast.For)):
            targets = [inner.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, (ast.Subscript, ast.Attribute)) and (name := _root(part)):
                    yield name
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            if shown and inner is node:
                # its value is what the cell shows; only a method may change its object
                if isinstance(inner.value.func, ast.Attribute) and (name := _root(inner.value.func)):
                    yield name
            else:
                yield from (n.id for n in ast.walk(inner.value) if isinstance(n, ast.Name))


def sets_up(node: ast.stmt | None) -> str:
    """The module that the statement changes for all: "torch" for `torch.manual_seed(0)`; mostly none."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return ""
    function = node.value.func
    if isinstance(function, ast.Attribute) and re.match(r"set_|use_|.*seed", function.attr):
        return ast.unparse(function).split(".")[0]
    return ""


def _same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is inside it, but not what happens only when a function is called."""
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _same_scope(child)


def _root(node: ast.expr) -> str:
    """The name at the left end: "a" for `a.b[0].c()`; empty where there is none."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def links(statements: Sequence[Statement]) -> dict[str, set[str]]:
    """For each name the names whose objects may hold parts of its own: `optimizer` and its `model`."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    fixed = {name for s in statements if isinstance(s.node, kinds) for name in s.binds}
    linked: dict[str, set[str]] = {}
    for statement in statements:
        if isinstance(statement.node, kinds) or statement.pulled:
            continue
        group = {
            n for n in statement.binds | (statement.uses if statement.binds else set()) if n not in fixed
        }
        for name in group:
            linked.setdefault(name, {name}).update(group)
    return linked


def only_shows(statement: Statement, statements: Sequence[Statement]) -> bool:
    """Whether it is a call of something that draws, checks or prints."""
    if not isinstance(statement.node, ast.Expr):
        return False
    root = _root(statement.node.value)
    if root in ("print", "display"):
        return True
    for other in statements:
        if isinstance(other.node, ast.ImportFrom) and root in other.binds:
            module = other.node.module or ""
            name = other.node.names[0].name
            if module.startswith(("rankcell.draw", "rankcell.check", "IPython")):
                return True
            if module == "rankcell" and name in ("check", "draw"):
                return True
    return False
