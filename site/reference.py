"""The page "Reference": what a notebook can call, from the docstrings in the source (MyST source).

The library is read, not imported, so that the page costs no time; tests/test_pages.py compares it with what can be
imported.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

import course

# Heading, and the modules below it
GROUPS = {
    "Checks": ["check"],
    "Pictures": [
        *(
            "draw.timeline",
            "draw.traffic",
            "draw.collectives",
            "draw.messages",
            "draw.waits",
            "draw.schedule",
        ),
        *(
            "draw.memory",
            "draw.mesh",
            "draw.charts",
            "draw.bars",
            "draw.splits",
            "draw.held",
            "draw.matrices",
        ),
        *("draw.streams", "draw.sketches", "draw.svg"),
    ],
    "Strategies": [
        *("parallel.ddp", "parallel.tensor", "parallel.vocabulary"),
        *(
            "parallel.transformer",
            "parallel.pipeline",
            "parallel.context",
            "parallel.experts",
        ),
    ],
    "Arithmetic": ["costs", "schedules"],
    "Planner": ["planner.layout", "planner.search"],
}
FROM_RESULTS = ("Run", "RankResult", "Event", "Memory")
ON_RANKS = ("span", "spans", "watch", "memory", "trace")


def public(module: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes that a module offers: those of its `__all__`, else those without an underscore."""
    body = course.module(module).body
    named = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
            return [n for n in named if n.name in listed]
    return [n for n in named if not n.name.startswith("_")]


def find(module: str, name: str) -> Any:
    """A function or class of a module, by its name."""
    return next(n for n in course.module(module).body if getattr(n, "name", None) == name)


def page() -> str:
    """All of it."""
    parts = [
        "# Reference\n",
        "What a notebook can call. In a notebook, `%%ranks?` and `check.close_to?` show the same texts.\n",
        *_magics(),
        "## The value of a rank cell\n",
        "`%%ranks 4 -o run` names it; `rankcell.run(...)` returns it in a script. Both are frozen data.\n",
    ]
    for name in FROM_RESULTS:
        parts += _entry("rankcell", find("results", name))
    parts.append("## Without a notebook\n")
    parts += _entry("rankcell", find("engine.world", "run"))
    parts += _entry("rankcell", find("engine.world", "Ranks"))
    parts.append("## On a rank, and in the notebook\n")
    for name in ON_RANKS:
        parts += _entry("rankcell", find("__init__", name))
    for heading, modules in GROUPS.items():
        parts.append(f"## {heading}\n")
        for module in modules:
            parts.append(f"### {module}\n")
            parts += text_of(ast.get_docstring(course.module(module)) or "")
            for node in public(module):
                parts += _entry(module, node)
    return "\n".join(parts)


def _magics() -> Iterator[str]:
    """`%%ranks`, its options, and `%ranks`."""
    magic = next(n for n in find("magics", "RankMagics").body if getattr(n, "name", "") == "ranks")
    yield "## %%ranks, a cell\n"
    yield "```\n%%ranks N [options]\n```\n"
    text, _, line = (ast.get_docstring(magic) or "").partition("As a line: ")
    yield from text_of(text)
    rows = ["| option | what it does |\n|---|---|\n"]
    for flags, value, words in options():
        written = " ".join(course.literal(f"{flag} {value}".strip()) for flag in flags)
        rows.append(f"| {written} | {_inline(course.in_a_table(words))} |\n")
    yield "".join(rows)
    yield "## %ranks, a line\n"
    yield (
        "\n".join(f"* {part.strip()}" for part in re.split(r", (?=`)", " ".join(line.rstrip(".").split())))
        + "\n"
    )


def options() -> list[tuple[tuple[str, ...], str, str]]:
    """Flags, the word for the value, and the help of each option of `%%ranks`."""
    for node in course.module("source").body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "OPTIONS":
            found = []
            for option in node.value.elts:
                flags, how = option.elts
                given = {
                    key.value: value.value
                    for key, value in zip(how.keys, how.values, strict=True)
                    if isinstance(value, ast.Constant)
                }
                value = given.get(
                    "metavar", "" if "action" in given else ast.literal_eval(flags)[-1].strip("-").upper()
                )
                found.append(
                    (ast.literal_eval(flags), value, given["help"] % ())
                )  # argparse wants each % twice
            return found
    raise ValueError("source.py has no OPTIONS")


def _entry(module: str, node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """A function, or a class with its fields, properties and methods."""
    prefix = "" if module == "rankcell" else f"{module.rpartition('.')[2]}."
    name = f"{prefix}{node.name}"
    if isinstance(node, ast.FunctionDef):
        yield _head(f"{name}{_signature(node)}", f"{module}-{node.name}")
        yield from text_of(ast.get_docstring(node) or "")
        return
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")]
    start = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
    yield _head(f"class {name}{_signature(start) if start else ''}", f"class-{module}-{node.name}")
    yield from text_of(ast.get_docstring(node) or "")
    lines = _lines(module if module != "rankcell" else "results")
    if fields:
        yield (
            "\n".join(f"* {course.literal(ast.unparse(f.target))}: {_field(f, lines)}" for f in fields) + "\n"
        )
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    for method in methods:
        is_property = any("property" in ast.unparse(d) for d in method.decorator_list)
        text = " ".join((ast.get_docstring(method) or "").split("\n\n")[0].split())
        signature = "" if is_property else _signature(method)
        yield f"* {course.literal(f'.{method.name}{signature}')} {_inline(text)}"
    if methods:
        yield ""


def _field(field: ast.AnnAssign, lines: list[str]) -> str:
    """The comment beside a field, else its type."""
    comment = lines[field.end_lineno - 1].partition("  # ")[2]
    return _inline(comment) if comment else course.literal(ast.unparse(field.annotation))


def _lines(module: str) -> list[str]:
    path = course.ROOT / "lib" / "rankcell" / f"{module.replace('.', '/')}.py"
    return path.read_text("utf-8").splitlines() if path.exists() else []


def _head(signature: str, name: str) -> str:
    anchor = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return f"[{course.literal(signature)}]{{#ref-{anchor} .signature}}\n"


def _signature(function: ast.FunctionDef) -> str:
    """The arguments without their types, which the docstring says in words."""
    given = function.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument:
            argument.annotation = None
    if given.args and given.args[0].arg in ("self", "cls"):
        given.args = given.args[1:]
    return f"({ast.unparse(given)})"


# Docstrings


def text_of(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, examples as code, `Args:` and `Raises:` as lists."""
    for block in re.split(r"\n\s*\n", docstring.strip()):
        lines = block.split("\n")
        head = re.fullmatch(r"(Args|Raises|Returns|Yields):", lines[0].strip())
        if head:
            yield f"*{'Arguments' if head[1] == 'Args' else head[1]}*\n"
            yield "\n".join(_items(lines[1:])) + "\n"
        elif _is_code(lines):
            yield f"```python\n{_dedented(lines)}\n```\n"
        else:
            yield _inline(" ".join(" ".join(lines).split())) + "\n"


def _items(lines: Iterable[str]) -> list[str]:
    items: list[str] = []
    for line in lines:
        match = re.match(r"    ?\s{0,1}(\*{0,2}[\w, *]+): (.*)", line)
        if match and not line.startswith("        "):
            items.append(f"* {course.literal(match[1])}: {_inline(match[2])}")
        elif items:
            items[-1] += " " + _inline(line.strip())
        else:
            items.append(f"* {_inline(line.strip())}")
    return items


def _is_code(lines: list[str]) -> bool:
    """An example stands indented, after >>>, or is a call that parses and is no sentence."""
    if lines[0].startswith(("    ", ">>>", "%%")):
        return True
    text = "\n".join(lines)
    if re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", text.split("#")[0].split('"')[0]):
        return False
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return "(" in text or "=" in text


def _dedented(lines: list[str]) -> str:
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines)


def _inline(text: str) -> str:
    """Prose for Markdown: what stands in backticks stays, the rest means nothing but itself."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        part if part.startswith("`") and len(part) > 1 else re.sub(r"([\\*_<>\[\]$#{}~|])", r"\\\1", part)
        for part in parts
    )
