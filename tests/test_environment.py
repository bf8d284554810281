"""The ways to install the course lead to the same environment: pip, conda, make."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
EXTRAS = ["lab", "test", "site"]
INSTALL = f"-e .[{','.join(EXTRAS)}]"

CONDA_PACKAGES = [entry for entry in CONDA["dependencies"] if isinstance(entry, str)]
PIP_LINES = next(entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))


def test_conda_installs_what_pyproject_lists():
    assert PIP_LINES == [INSTALL]
    assert sorted(EXTRAS) == sorted(PROJECT["optional-dependencies"])


def test_conda_lists_no_package_of_pyproject_a_second_time():
    """Else conda and pip would each bring their own torch."""
    requirements = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    ours = {re.match(r"[\w-]+", line)[0].lower() for line in requirements}
    assert not ours & {re.match(r"[\w-]+", line)[0].lower() for line in CONDA_PACKAGES}


def test_conda_has_the_oldest_python_that_pyproject_allows():
    (python,) = (line for line in CONDA_PACKAGES if line.startswith("python"))
    assert PROJECT["requires-python"] == ">=" + python.removeprefix("python=")


def test_conda_has_the_name_of_the_package():
    assert CONDA["name"] == PROJECT["name"]


def test_make_installs_the_same_and_asks_for_the_same_python():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert f"install --quiet {INSTALL.replace('.[', chr(39) + '.[')}'" in makefile
    major, minor = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert f"sys.version_info < ({major}, {minor})" in makefile


def test_torch_is_pinned_and_installed_as_pinned():
    (pin,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    assert re.fullmatch(r"torch==[\d.]+", pin)
    assert version("torch").split("+")[0] == pin.removeprefix("torch==")


def test_katex_style_sheet_is_of_the_version_that_draws_the_formulas():
    katex = pytest.importorskip("sphinxcontrib.katex")
    assert f"katex@{katex.katex_version} " in (ROOT / "site" / "vendor.sh").read_text("utf-8")
    style_sheet = ROOT / "site" / "_static" / "vendor" / "katex" / "katex.min.css"
    assert f'content:"{katex.katex_version}"' in style_sheet.read_text("utf-8")


def test_make_help_explains_every_target():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(["make"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    explained = re.findall(r"^make (\w+) +\S", result.stdout, re.MULTILINE)
    assert sorted(explained) == sorted(phony.split())
    assert len(explained) < 12
