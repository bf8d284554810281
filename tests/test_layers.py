"""Imports point one way, and no module, class or function is too long to be held in mind."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).parent.parent / "lib" / "rankcell"
MODULES = sorted(LIB.rglob("*.py"))
# What a rank cell passes through; it imports no other part.
CORE = "__init__ magics extensions command source results errors check versions engine draw/page draw/parts draw/svg"
# Of each other part what it may import beside the core and itself.
ALLOWED = """
draw: schedules hardware   compare:   planner:   nodes:   cluster:
jobs: draw   parallel: models schedules   models:   schedules:   simulate:
teaching: cluster   stand_ins: costs: observers: hardware: figures: doctor:
"""
# Of the engine's notebook side what its rank side may not import, and the other way round.
NOTEBOOK_SIDE = "world cell diagnose devices local"
RANK_SIDE = "worker control report stdio shell groups record operation listen"
SIZES = {ast.Module: 450, ast.ClassDef: 250, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}  # lines


def allowed():
    found, part = {}, ""
    for word in ALLOWED.split():
        if word.endswith(":"):
            part = word[:-1]
            found[part] = set()
        else:
            found[part].add(word)
    return found


def imported(path):
    """Modules of the package that the file imports, as paths without their ends."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("rankcell")):
            base = path.parents[node.level - 1] if node.level else LIB.parent
            module = base.joinpath(*(node.module or "").split("."))
            found |= {module / a.name if module.is_dir() else module for a in node.names}
    return {str(f.relative_to(LIB)) for f in found if f.with_suffix(".py").exists() or f.is_dir()} - {"."}


def part_of(name):
    return "core" if name in CORE.split() or name.split("/")[0] in CORE.split() else name.split("/")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(LIB)))
def test_imports_point_one_way(path):
    name = str(path.relative_to(LIB).with_suffix(""))
    part = part_of(name)
    assert part == "core" or part in allowed(), f"say in ALLOWED what {part} may import"
    others = {part_of(other) for other in imported(path)} - {part, "core"}
    assert others <= allowed().get(part, set())
    for own, other in ((NOTEBOOK_SIDE, RANK_SIDE), (RANK_SIDE, NOTEBOOK_SIDE)):
        if name.removeprefix("engine/") in own.split():
            assert not imported(path) & {f"engine/{module}" for module in other.split()}
    # what another module needs is public where it lives
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    inside = [n for n in imports if n.level or (n.module or "").startswith("rankcell")]
    assert [a.name for n in inside for a in n.names if a.name.startswith("_")] == []


def test_the_core_is_small():
    core = [p for p in MODULES if part_of(str(p.relative_to(LIB).with_suffix(""))) == "core"]
    assert sum(len(p.read_text().splitlines()) for p in core) <= 8_000


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(LIB)))
def test_nothing_is_too_long_to_hold_in_mind(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= SIZES[ast.Module]
    for node in ast.walk(ast.parse("\n".join(lines))):
        if type(node) in SIZES and not isinstance(node, ast.Module):
            long = node.end_lineno - node.lineno + 1
            assert long <= SIZES[type(node)], f"{node.name} has {long} lines"


@pytest.mark.parametrize(
    ("module", "without"),
    [("rankcell", "'torch'"), ("rankcell.parallel.ddp", "'IPython', 'cloudpickle'")],
)
def test_an_import_brings_no_more_than_it_needs(module, without):
    code = f"import sys, {module}; sys.exit(bool({{{without}}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
