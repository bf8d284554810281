"""Imports point one way: what a module may import of ours is written down here."""

import ast
from pathlib import Path

import pytest

LIB = Path(__file__).parent.parent / "lib" / "rankcell"
ALLOWED = {
    "results": set(),
    "models": set(),
    "costs": set(),
    "hardware": set(),
    "source": set(),
    "versions": set(),
    "doctor": {"hardware", "versions", "engine/devices", "engine/local", "engine/match", "engine/system"},
    "figures": {"models", "engine/world"},
    "cluster": {"source"},
    "parallel": {"models", "schedules", "versions"},
    "schedules": {"results", "errors"},
    "planner": {"hardware", "schedules", "results"},
    "jobs": {"results", "errors", "draw"}
    | {f"engine/{m}" for m in ("channel", "control", "diagnose", "groups", "match", "messages", "nodes")}
    | {f"engine/{m}" for m in ("operation", "record", "report", "streams", "system")},
    "rehearsal": {"results", "errors", "costs", "planner"},
    "exercises": {"source", "cluster"},
    "progress": {"exercises"},
    "room": {"progress", "engine/system"},
    "grade": {
        "exercises",
        "source",
        "results",
        "schedules",
        "check",
        "engine/forks",
        "engine/preload",
        "engine/system",
    },
    "command": {"cluster", "doctor", "grade", "jobs", "planner", "room"},
    "simulate": {"results"},
    "errors": {"results"},
    "layouts": set(),
    "against": {"results", "errors", "layouts"},
    "twin": {"results", "errors", "engine/trace"},
    "check": {"results", "errors", "against"},
    "magics": {
        "results",
        "errors",
        "source",
        "engine/devices",
        "engine/world",
        "draw",
        "cluster",
        "check",
        "twin",
        "doctor",
        "versions",
        "progress",
    },
    "draw": {"results", "hardware", "schedules"},
    "__init__": {
        "results",
        "errors",
        "engine/meter",
        "engine/trace",
        "engine/world",
        "magics",
        "check",
        "draw",
    },
}
# The engine: what the two sides share, the notebook's side, the rank's side.
SHARED = {"engine/messages", "engine/channel", "engine/system", "engine/match"}
ALLOWED |= {
    "engine/__init__": set(),
    "engine/messages": {"results"},
    "engine/channel": set(),
    "engine/system": set(),
    "engine/devices": {"errors", "engine/system"},
    "engine/match": {"results", "errors"},
    "engine/diagnose": {"results", *SHARED},
    "engine/host": SHARED,
    "engine/parts": {"results", *SHARED},
    "engine/mailbox": {"results", "engine/host", "engine/parts", *SHARED},
    "engine/forks": {"errors", *SHARED},
    "engine/local": {"errors", "rehearsal", "engine/forks", *SHARED},
    "engine/nodes": {"errors", *SHARED},
    "engine/agent": {"errors", "engine/forks", "engine/local", *SHARED},
    "engine/cell": {"results", "errors", "engine/diagnose", "engine/mailbox", "engine/parts", *SHARED},
    "engine/verdict": {"results", "errors", "engine/cell"},
    "engine/world": {"results", "errors", *SHARED}
    | {
        f"engine/{m}"
        for m in ("cell", "devices", "forks", "host", "local", "mailbox", "nodes", "parts", "verdict")
    },
    "engine/meter": {"results"},
    "engine/spans": set(),
    "engine/streams": set(),
    "engine/operation": {"results", *SHARED},
    "engine/trace": {"results", "layouts", "engine/operation"},
    "engine/follow": {"results", "engine/trace"},
    "engine/record": {"results"}
    | {f"engine/{m}" for m in ("operation", "spans", "streams", "meter", "trace", "follow")}
    | SHARED,
    "engine/execute": {"source"},
    "engine/report": {"results", "errors"},
    "engine/stdio": set(),
    "engine/shell": set(),
    "engine/groups": {"errors", "engine/operation", "engine/record", *SHARED},
    "engine/control": {f"engine/{m}" for m in ("operation", "record", "worker")}
    | SHARED,  # the last for its type
    "engine/worker": {"results", "errors", "rehearsal", "source", *SHARED}
    | {
        f"engine/{m}"
        for m in ("control", "execute", "groups", "meter", "operation", "record", "report", "shell", "stdio")
    },
    "engine/together": {"errors", "rehearsal", *SHARED}
    | {f"engine/{m}" for m in ("control", "groups", "operation", "record", "shell", "stdio", "worker")},
    "engine/preload": {"engine/worker", "engine/together", "versions", *SHARED},
}


def name_of(parts):
    """What ALLOWED calls a module: by its file in the engine, by its folder elsewhere."""
    return "/".join(parts[:2]) if parts[0] == "engine" and len(parts) > 1 else parts[0]


def ours(path):
    """Modules of the package that the file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parent
            for _ in range(node.level - 1):
                base = base.parent
            inside = base.joinpath(*(node.module or "").split(".")).relative_to(LIB).parts
            found |= {name_of((*inside, a.name)) for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rankcell"):
            inside = tuple(node.module.split(".")[1:])
            found |= {name_of((*inside, a.name)) for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {name_of(a.name.split(".")[1:]) for a in node.names if a.name.startswith("rankcell.")}
    return {f for f in found if (LIB / f"{f}.py").exists() or (LIB / f).is_dir()}


@pytest.mark.parametrize("path", sorted(LIB.rglob("*.py")), ids=lambda p: str(p.relative_to(LIB)))
def test_imports_point_one_way(path):
    part = name_of(path.relative_to(LIB).with_suffix("").parts)
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    assert ours(path) - {part} <= ALLOWED[part]


def test_importing_the_package_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, rankcell; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_strategies_need_no_notebook():
    import subprocess
    import sys

    code = "import sys, rankcell.parallel.ddp; sys.exit(bool({'IPython', 'cloudpickle'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(LIB.rglob("*.py")), ids=lambda p: str(p.relative_to(LIB)))
def test_no_module_imports_a_private_name_of_another(path):
    """What another module needs is public where it lives."""
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    ours = [n for n in imports if n.level or (n.module or "").startswith("rankcell")]
    assert [a.name for n in ours for a in n.names if a.name.startswith("_")] == []
