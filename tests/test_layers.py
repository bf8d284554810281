"""Imports point one way: what a module may import of ours is written down here."""

import ast
from pathlib import Path

import pytest

LIB = Path(__file__).parent.parent / "lib" / "rankcell"
ALLOWED = {
    "results": set(),
    "system": set(),
    "boards": set(),
    "channel": set(),
    "models": set(),
    "costs": set(),
    "hardware": set(),
    "cluster": set(),
    "parallel": {"schedules"},
    "schedules": {"results", "errors"},
    "simulate": {"results"},
    "errors": {"results"},
    "check": {"results", "errors"},
    "diagnose": {"results"},
    "meter": {"results"},
    "modules": set(),
    "record": {"results", "errors", "meter", "modules", "boards"},
    "worker": {"results", "errors", "record", "system", "channel", "boards"},
    "preload": {"worker"},
    "local": {"boards", "channel", "system", "worker"},
    "nodes": {"channel", "errors", "local", "system"},
    "world": {"results", "errors", "worker", "diagnose", "local", "nodes"},
    "magics": {"results", "errors", "world", "draw", "cluster"},
    "draw": {"results", "hardware", "schedules"},
    "__init__": {"results", "errors", "meter", "world", "magics", "check", "draw"},
}


def ours(path):
    """Modules of the package that the file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parent
            for _ in range(node.level - 1):
                base = base.parent
            names = [node.module] if node.module else [a.name for a in node.names]
            for name in names:
                target = (
                    (base / name.replace(".", "/")).relative_to(LIB) if base != LIB.parent else Path(name)
                )
                found.add(target.parts[0] if target.parts else name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rankcell"):
            parts = node.module.split(".")[1:] or [a.name for a in node.names]
            found.add(parts[0])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("rankcell.")}
    return {f for f in found if (LIB / f"{f}.py").exists() or (LIB / f).is_dir()}


@pytest.mark.parametrize("path", sorted(LIB.rglob("*.py")), ids=lambda p: str(p.relative_to(LIB)))
def test_imports_point_one_way(path):
    part = path.relative_to(LIB).parts[0].removesuffix(".py")
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    assert ours(path) - {part} <= ALLOWED[part]


def test_importing_the_package_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, rankcell; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(LIB.rglob("*.py")), ids=lambda p: str(p.relative_to(LIB)))
def test_no_module_imports_a_private_name_of_another(path):
    """What another module needs is public where it lives."""
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    ours = [n for n in imports if n.level or (n.module or "").startswith("rankcell")]
    assert [a.name for n in ours for a in n.names if a.name.startswith("_")] == []
