"""The ways to install the course lead to the same environment: pip, conda, make."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rankcell import versions

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
EXTRAS = ["lab", "test", "site"]
INSTALL = f"-e .[{','.join(EXTRAS)}]"

CONDA_PACKAGES = [entry for entry in CONDA["dependencies"] if isinstance(entry, str)]
PIP_LINES = next(entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))


def test_conda_installs_what_pyproject_lists():
    assert [INSTALL] == [line for line in PIP_LINES if not line.startswith("torch==")]
    extras = dict(PROJECT["optional-dependencies"])
    assert set(extras.pop("attach")) <= set(extras["test"])  # for those who install the package alone
    assert sorted(EXTRAS) == sorted(extras)


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
    assert (
        f"install --quiet --no-compile {INSTALL.replace('.[', chr(39) + '.[')}' 'torch==$(TORCH)'" in makefile
    )
    major, minor = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert f"sys.version_info < ({major}, {minor})" in makefile


def pinned():
    """The torch that make installs."""
    return re.search(r"^TORCH := ([\d.]+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[1]


def test_make_and_conda_install_the_same_torch_and_the_package_takes_those_that_were_tried():
    (span,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    newest = (versions.NEWEST[0], versions.NEWEST[1] + 1)
    assert span == f"torch>={versions.OLDEST[0]}.{versions.OLDEST[1]},<{newest[0]}.{newest[1]}"
    assert f"torch=={pinned()}" in PIP_LINES
    assert versions.OLDEST <= versions.number(pinned()) <= versions.NEWEST


def test_this_torch_is_one_of_them():
    assert versions.beyond(version("torch")) == ""


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("2.11.0+cu130", ""),
        ("2.15.9", ""),
        (
            "2.16.0.dev20270101",
            "torch 2.16.0.dev20270101 is newer than those on which the course was tried, 2.11 to 2.15.",
        ),
        ("3.0.0", "is newer than"),
        ("2.10.1", "is older than"),
    ],
)
def test_another_torch_is_named(torch, said):
    assert versions.beyond(torch).startswith(said) or said in versions.beyond(torch)
    assert bool(versions.beyond(torch)) == bool(said)


def test_an_older_torch_gets_the_new_names_and_a_newer_one_keeps_its_own():
    old = SimpleNamespace(all_gather_into_tensor="gather", reduce_scatter_tensor="scatter")
    versions.complete(old)
    assert (old.all_gather_single, old.reduce_scatter_single) == ("gather", "scatter")
    new = SimpleNamespace(all_gather_single="its own", reduce_scatter_single="its own")
    versions.complete(new)
    assert new.all_gather_single == new.reduce_scatter_single == "its own"


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
    assert len(explained) <= 13
