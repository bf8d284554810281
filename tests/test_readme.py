"""README.md says what is there: the lessons, the targets, the tree."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
LESSONS = [
    lesson
    for part in tomllib.loads((ROOT / "site" / "lessons.toml").read_text("utf-8"))["part"]
    for lesson in part["lesson"]
]
TREE = re.search(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)[1]


def test_table_lists_the_lessons_in_order():
    rows = []
    for lesson in LESSONS:
        number, name, title = int(lesson["notebook"][:2]), lesson["notebook"], lesson["title"]
        exists = (ROOT / "notebooks" / f"{name}.ipynb").exists()
        cell = f"[{title}](notebooks/{name}.ipynb)" if exists else f"{title} *(in preparation)*"
        rows.append(f"| {number} | {cell} | {lesson['question']} |")
    table = re.findall(r"^\| \d+ \|.*$", README, re.MULTILINE)
    assert table == rows


def test_tree_lists_what_git_tracks():
    """Top level: every tracked file or folder but the ones whose names begin with a dot, and .ci/run."""
    listed = [line.split()[0].rstrip("/") for line in TREE.splitlines()]
    for name in listed:
        assert (ROOT / name).exists(), f"the tree lists {name}"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a git checkout")
    top = {path.split("/")[0] for path in result.stdout.splitlines()}
    missing = (
        {name for name in top if not name.startswith(".")}
        - {name.split("/")[0] for name in listed}
        - {"LICENSE"}
    )
    assert not missing, f"the tree does not list {sorted(missing)}"


def test_tree_names_the_targets():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert re.search(r"^Makefile +(.*)$", TREE, re.MULTILINE)[1] == phony


def test_links_resolve():
    for target in re.findall(r"\]\(([^)\s#]+)", README):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / target).exists(), f"README.md links to {target}"


def test_commands_are_targets():
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) <= targets
