"""The ways to install the course lead to the same environment: pip, conda, make."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import yaml

from rankcell import versions

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
EXTRAS = ["lab", "test", "site"]
INSTALL = f"-e .[{','.join(EXTRAS)}]"
CONDA_PACKAGES = [entry for entry in CONDA["dependencies"] if isinstance(entry, str)]
PIP_LINES = next(entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))


def test_conda_installs_what_pyproject_lists():
    assert [INSTALL] == [line for line in PIP_LINES if not line.startswith("torch==")]
    extras = dict(PROJECT["optional-dependencies"])
    assert sorted(EXTRAS) == sorted(extras)


def test_no_package_is_listed_twice_and_python_alike():
    """Else conda and pip would each bring their own torch."""
    requirements = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    ours = {re.match(r"[\w-]+", line)[0].lower() for line in requirements}
    assert not ours & {re.match(r"[\w-]+", line)[0].lower() for line in CONDA_PACKAGES}
    (python,) = (line for line in CONDA_PACKAGES if line.startswith("python"))
    assert CONDA["name"] == PROJECT["name"]
    assert PROJECT["requires-python"] == ">=" + python.removeprefix("python=")
    quoted = INSTALL.replace(".[", "'.[")
    assert f"install --quiet --no-compile {quoted}' 'torch==$(TORCH)'" in MAKEFILE
    major, minor = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert f"sys.version_info < ({major}, {minor})" in MAKEFILE


def test_every_way_installs_a_torch_that_was_tried():
    pinned = re.search(r"^TORCH := ([\d.]+)$", MAKEFILE, re.MULTILINE)[1]
    (span,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    newest = (versions.NEWEST[0], versions.NEWEST[1] + 1)
    assert span == f"torch>={versions.OLDEST[0]}.{versions.OLDEST[1]},<{newest[0]}.{newest[1]}"
    assert f"torch=={pinned}" in PIP_LINES
    assert versions.OLDEST <= versions.number(pinned) <= versions.NEWEST
    assert versions.untried(version("torch")) == ""


def test_another_torch_is_named():
    assert versions.untried("2.11.0+cu130") == versions.untried("2.15.9") == ""
    for other in ("2.16.0.dev20270101", "3.0.0", "2.10.1"):
        said = f"torch {other} is none of those on which the course was tried, 2.11 to 2.15."
        assert versions.untried(other).startswith(said)


def test_make_help_explains_every_target():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(["make"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    explained = re.findall(r"^make (\w+) +\S", result.stdout, re.MULTILINE)
    assert sorted(explained) == sorted(phony.split())
