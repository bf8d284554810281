"""Imports point one way: what a module may import of ours is written down here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).parent.parent / "lib" / "rankcell"
# Of each part what it may import of ours; the first ones nothing. In the engine `./x` is another of its modules, SHARED
# what both sides share.
ALLOWED = """
results: models: costs: hardware: source: versions: layouts:
engine/__init__: engine/channel: engine/system: engine/spans: engine/streams: engine/stdio: engine/shell:
doctor: engine/devices engine/local engine/match engine/system hardware versions
figures: engine/world models   cluster: source   parallel: models schedules versions
schedules: errors results   planner: hardware results schedules
jobs: draw engine/channel engine/control engine/diagnose engine/groups engine/match engine/messages engine/nodes
    engine/operation engine/record engine/report engine/streams engine/system errors results
rehearsal: costs errors planner results   exercises: cluster source
progress: exercises   room: engine/system progress
grade: check engine/system exercises results schedules source
command: cluster doctor grade jobs planner room   simulate: results
errors: results   against: errors layouts results
twin: engine/trace errors results   check: against errors results
magics: check cluster doctor draw engine/devices engine/world errors progress results source twin versions
draw: hardware results schedules
__init__: check draw engine/meter engine/trace engine/world errors magics results
engine/messages: results   engine/devices: ./system errors   engine/match: errors results
engine/diagnose: results SHARED   engine/launch: ./preloaded ./worker errors SHARED
engine/local: ./launch errors SHARED   engine/nodes: ./devices errors SHARED
engine/agent: ./launch ./local errors SHARED   engine/host: ./devices ./local ./nodes errors rehearsal SHARED
engine/received: results SHARED   engine/workers: ./host ./received errors results SHARED
engine/cell: ./diagnose ./received ./workers errors results SHARED
engine/world: ./cell ./host ./launch ./workers errors results SHARED   engine/meter: results
engine/operation: results SHARED   engine/trace: ./operation layouts results   engine/follow: ./trace results
engine/record: ./follow ./meter ./operation ./spans ./streams ./trace results SHARED   engine/execute: source
engine/report: errors results   engine/groups: ./operation ./record errors SHARED
engine/control: ./operation ./record ./worker SHARED   engine/environment: ./report errors source SHARED
engine/worker: ./control ./environment ./execute ./groups ./meter ./operation ./record ./report ./shell ./stdio errors
    rehearsal results SHARED
engine/preloaded: ./worker versions SHARED
"""
SHARED = "./messages ./channel ./system ./match"


def allowed():
    found, part = {}, ""
    for word in ALLOWED.replace("SHARED", SHARED).replace("./", "engine/").split():
        if word.endswith(":"):
            part = word[:-1]
            found[part] = set()
        else:
            found[part].add(word)
    return found


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
    assert part in allowed(), f"say in ALLOWED what {part} may import"
    assert ours(path) - {part} <= allowed()[part]
    # what another module needs is public where it lives
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    inside = [n for n in imports if n.level or (n.module or "").startswith("rankcell")]
    assert [a.name for n in inside for a in n.names if a.name.startswith("_")] == []


@pytest.mark.parametrize(
    ("module", "without"),
    [("rankcell", "'torch'"), ("rankcell.parallel.ddp", "'IPython', 'cloudpickle'")],
)
def test_an_import_brings_no_more_than_it_needs(module, without):
    code = f"import sys, {module}; sys.exit(bool({{{without}}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
