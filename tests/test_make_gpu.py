"""`make gpu` where there is no GPU: it says so, writes nothing, and what it does with a lesson can be tried."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

import gpu

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends_with_1(capsys):
    before = list((ROOT / "notebooks").rglob("*.json"))
    assert gpu.main([]) == 1
    out = capsys.readouterr().out
    assert "make gpu needs a GPU" in out and "no record was written" in out
    assert list((ROOT / "notebooks").rglob("*.json")) == before


def test_what_is_missing_is_named(tmp_path):
    """On a Python that finds no packages."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.path[:] = [p for p in sys.path if 'site-pack' not in p]"
    )
    said = gpu.missing({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (
        "make gpu needs torch, IPython, cloudpickle, ipywidgets, numpy, pytest" in said and "wheels" in said
    )
    assert gpu.missing(dict(os.environ)) == ""


@pytest.mark.parametrize(
    ("cell", "runs"),
    [
        ("%%ranks 4 -o run\nx = 1", "%%ranks 4 -o run --device cuda\nx = 1"),
        ("%%ranks 2", "%%ranks 2 --device cuda"),
        ("%%ranks 2 --device cpu\nx", "%%ranks 2 --device cpu\nx"),
        ("%%ranks 4 --nodes 2\nx", "%%ranks 4 --nodes 2\nx"),
        ("%%ranks 1 of 1024 --on 128xh100x8\nx", "%%ranks 1 of 1024 --on 128xh100x8\nx"),
        ("%%ranks 16 of 64\nx", "%%ranks 16 of 64\nx"),
        ("x = '%%ranks 4'\n%ranks stop", "x = '%%ranks 4'\n%ranks stop"),
    ],
)
def test_rank_cells_go_to_the_gpu(cell, runs):
    assert gpu.on_cuda(cell) == runs


def lesson(tmp_path, *cells):
    """A lesson of these cells, run as `make gpu` runs one; exit code and result."""
    notebook = nbformat.v4.new_notebook()
    for source, *tags in cells:
        notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    path, result = tmp_path / "lesson.ipynb", tmp_path / "result.json"
    nbformat.write(notebook, path)
    command = [sys.executable, str(ROOT / "tools" / "gpu.py"), "--part", "lesson", str(path), str(result)]
    code = subprocess.run(command, capture_output=True, check=False, timeout=120).returncode
    return code, json.loads(result.read_text())


def test_a_lesson_runs_whole(tmp_path):
    cells = [("x = 1",), ("1 / 0", "raises-exception"), ("assert x == 1",)]
    assert lesson(tmp_path, *cells) == (0, {"cells": 3, "of": 3, "stopped": ""})


def test_a_lesson_that_stops_says_where(tmp_path):
    code, result = lesson(tmp_path, ("x = 1",), ("1 / 0",), ("x",))
    assert code == 1 and result["cells"] == 2
    assert result["stopped"] == "cell 2 of 3 (1 / 0): ZeroDivisionError: division by zero"


def test_a_cell_that_must_fail_and_does_not_stops_it(tmp_path):
    code, result = lesson(tmp_path, ("x = 1", "raises-exception"))
    assert code == 1 and "no error came" in result["stopped"]


def test_the_tests_for_a_gpu_need_nothing_but_what_is_asked_for(tmp_path):
    """The command itself, where the packages of the other tests are missing."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('nbformat', 'nbclient', 'nbconvert', 'jupyter_client', 'playwright', 'ipykernel'):\n"
        "    sys.modules[name] = None"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "lib")])
    command = [*gpu.tests(tmp_path / "report.xml"), "--collect-only"]
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of nbval
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    names = {line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line}
    assert names == {"tests/test_failures.py", "tests/test_gpu.py", "tests/test_world.py"}


def test_the_tests_are_counted(tmp_path):
    (tmp_path / "r.xml").write_text(
        "<testsuites><testsuite><testcase classname='a' name='b'/><testcase classname='a' "
        "name='c'><failure/></testcase><testcase classname='a' name='d'><skipped/></testcase></testsuite></testsuites>"
    )
    assert gpu.counts(tmp_path / "r.xml") == {"passed": 1, "failed": ["a::c"], "skipped": ["a::d"]}


def test_a_part_that_takes_too_long_is_ended():
    code, seconds = gpu.timed([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), 0.5)
    assert code == 124 and seconds < 30
