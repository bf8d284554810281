"""`pip install rankcell` from a wheel, into an environment where nobody has installed the course.

It is fresh but for torch and IPython. There the examples of lib/README.md, the readme of the package, run cell by cell.
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
print("SUM", [v.tolist() for v in out[2].values])
print("LAST", out[max(out)])
print("EQUAL", [bool(v.ok) for v in out.values() if hasattr(v, "ok")])
print("AGAINST", [run.against.ok for run in out.values() if getattr(run, "against", None)])
print("TEXT", len(rankcell.models.text()) > 1000)
"""


def run(*command, cwd):
    """What the command prints, without the variables by which Python finds packages."""
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    result = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)
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
    into = [sys.executable, "-m", "pip", "--python", str(python)]
    run(*into, "install", "-q", "--no-deps", "--no-index", str(wheel), cwd=wheel.parent)
    ours = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (ours / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return python


def test_the_wheel_holds_the_package_and_its_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(p.relative_to(ROOT / "lib")) for p in (ROOT / "lib" / "rankcell").rglob("*.py")}
    assert modules <= set(names)
    assert {"rankcell/planner/fitted.json", "rankcell/data/fables.txt"} <= set(names)
    assert all(name.startswith("rankcell") for name in names)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"rankcell-{version}-py3-none-any.whl" == wheel.name and wheel.name in README


def test_the_examples_of_the_readme_run_in_a_fresh_environment(python, tmp_path):
    """What its cells, run one after the other, leave behind."""
    (tmp_path / "cells.json").write_text(json.dumps(CELLS), "utf-8")
    (tmp_path / "notebook.py").write_text(NOTEBOOK, "utf-8")
    said = run(str(python), "notebook.py", "cells.json", cwd=tmp_path)
    place = re.search(r"(?m)^PLACE (.*)$", said)[1]
    assert Path(place).is_relative_to(python.parent.parent)  # not the package of this tree
    held = (f"SUM {[[6.0] * 3] * 4}", "LAST [0, 2]\n", "AGAINST [True]", "TEXT True", "EQUAL [True]")
    assert [words for words in held if words not in said] == [], said[-2000:]
    (line,) = re.findall(r"(?m)^rankcell plan .*$", README)
    assert "torchrun" in run(str(python.with_name("rankcell")), *line.split()[1:], cwd=tmp_path)
