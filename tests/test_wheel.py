"""`pip install rankcell` from a wheel, into an environment where nobody has installed the course.

The environment is fresh but for torch and IPython, which it takes from this one. There the examples of lib/README.md,
the readme of the package, run cell by cell.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "lib" / "README.md").read_text("utf-8")
CELLS = re.findall(r"(?ms)^```python\n(.*?)^```", README)

pytestmark = pytest.mark.slow

# A notebook without a browser: the cells of the readme, one after the other, and where the package lies.
NOTEBOOK = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1])):
    shell.run_cell(cell, store_history=True).raise_error()
import rankcell, rankcell.planner, rankcell.models
print("PLACE", rankcell.__file__)
out = shell.user_ns["Out"]
idle = [world for world in shell._rankcell.worlds.values() if world.world_size == 4]
print("MIB", round(sum(idle[0].memory()) / 2**20))
print("SUM", [v.tolist() for v in out[2].values])
print("LAST", out[max(out)])
print("EQUAL", [bool(v.ok) for v in out.values() if hasattr(v, "ok")])
print("AGAINST", out[CELL_AGAINST].against.ok)
print("STEPPED", len(out[CELL_STEP].ranks[0].steps) > 2)
print("TEXT", len(rankcell.models.text()) > 1000)
"""


def without_course():
    """The variables of this process but those by which Python finds packages."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def run(*command, cwd):
    result = subprocess.run(
        command, cwd=cwd, env=without_course(), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built from a copy, so that nothing is left here."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "lib", folder / "lib", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    # without an environment for building, which would have to be fetched
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, ".", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel):
    """The interpreter of a fresh environment with the wheel, and this environment's other packages behind it."""
    folder = wheel.parent / "env"
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=wheel.parent)
    python = folder / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    run(*install, str(wheel), cwd=wheel.parent)
    ours = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (ours / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return python


def test_the_wheel_holds_the_package_its_data_and_its_readme(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(p.relative_to(ROOT / "lib")) for p in (ROOT / "lib" / "rankcell").rglob("*.py")}
    assert modules <= set(names)
    assert {"rankcell/planner/fitted.json", "rankcell/data/fables.txt"} <= set(names)
    assert all(name.startswith("rankcell") for name in names)
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "# rankcell" in text and "One example each" in text
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"rankcell-{version}-py3-none-any.whl" == wheel.name and wheel.name in README


@pytest.fixture(scope="module")
def said(python, tmp_path_factory):
    """What the cells of the readme, run one after the other in the fresh environment, leave behind."""
    tmp_path = tmp_path_factory.mktemp("notebook")
    numbers = {
        words: next(i for i, c in enumerate(CELLS, 1) if words in c) for words in ("--step", "--against")
    }
    (tmp_path / "cells.json").write_text(json.dumps(CELLS), "utf-8")
    program = NOTEBOOK.replace("CELL_AGAINST", str(numbers["--against"])).replace(
        "CELL_STEP", str(numbers["--step"])
    )
    (tmp_path / "notebook.py").write_text(program, "utf-8")
    return run(str(python), "notebook.py", "cells.json", cwd=tmp_path)


def test_the_examples_of_the_readme_run_in_a_fresh_environment(said, python):
    place = re.search(r"(?m)^PLACE (.*)$", said)[1]
    assert Path(place).is_relative_to(python.parent.parent), (
        "the package of this tree was used, not the wheel's"
    )
    assert "SUM [[6.0, 6.0, 6.0], [6.0, 6.0, 6.0], [6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]" in said
    assert re.search(r"(?m)^LAST \[0, 2\]$", said), said[-2000:]
    for held in ("AGAINST True", "STEPPED True", "TEXT True", "EQUAL [True]"):
        assert held in said, said[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what processes share")
def test_four_idle_ranks_take_as_much_memory_as_the_site_says(said):
    (claim,) = set(re.findall(r"(\d+) MiB", (ROOT / "site" / "index.md").read_text("utf-8")))
    measured = int(re.search(r"(?m)^MIB (\d+)$", said)[1])
    assert 0.5 * int(claim) < measured < 1.5 * int(claim)


def test_the_command_of_the_readme_plans(python, tmp_path):
    (line,) = re.findall(r"(?m)^rankcell plan .*$", README)
    said = run(str(python.with_name("rankcell")), *line.split()[1:], cwd=tmp_path)
    assert "torchrun" in said
