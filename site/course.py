"""What the pages of the site are made from: the lessons in order, their notebooks, and links into them.

Everything here reads files and returns values; nothing is written, and nothing is executed.
"""

import ast
import html
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from myst_parser.mdit_to_docutils.base import default_slugify

HERE = Path(__file__).parent
ROOT = HERE.parent
NOTEBOOKS = ROOT / "notebooks"

# "**47 minutes**: 16 to read, 1 to run, 30 for the exercises", in the first cell of each lesson
_MINUTES = re.compile(
    r"\*\*(?P<all>\d+) minutes\*\*: (?P<read>\d+) to read, (?P<run>\d+) to run, (?P<do>\d+) for the exercises"
)


class Minutes(NamedTuple):
    """How long a lesson takes, in minutes, as its first cell says."""

    all: int
    read: int
    run: int
    do: int


def table(name: str) -> dict[str, Any]:
    """One of the tables beside this file, for example "lessons"."""
    return tomllib.loads((HERE / f"{name}.toml").read_text("utf-8"))


PARTS = table("lessons")["part"]
LESSONS = [lesson for part in PARTS for lesson in part["lesson"]]


def exists(lesson: dict[str, str]) -> bool:
    """Whether the notebook of this lesson is there; the others are in preparation."""
    return (NOTEBOOKS / f"{lesson['notebook']}.ipynb").exists()


def written() -> list[dict[str, str]]:
    """The lessons that can be read, in order."""
    return [lesson for lesson in LESSONS if exists(lesson)]


def number(lesson: dict[str, str]) -> int:
    """The number of a lesson: 4 for 04_collectives."""
    return int(lesson["notebook"][:2])


@cache
def cells(stem: str) -> list[dict[str, Any]]:
    """The cells of one notebook, each `source` joined to one text."""
    stored = json.loads((NOTEBOOKS / f"{stem}.ipynb").read_text("utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in stored]


def cell(stem: str, name: str) -> dict[str, Any]:
    """The cell with this id."""
    for found in cells(stem):
        if found["id"] == name:
            return found
    raise ValueError(f"{stem} has no cell {name}")


def tags(cell: dict[str, Any]) -> list[str]:
    """The tags of one cell."""
    return cell["metadata"].get("tags", [])


def minutes(stem: str) -> Minutes:
    """How long the lesson takes, from its first cell."""
    match = _MINUTES.search(" ".join(cells(stem)[0]["source"].split()))
    if not match:
        raise ValueError(f"The first cell of {stem} does not say how many minutes the lesson takes.")
    return Minutes(*(int(match[name]) for name in Minutes._fields))


def exercises(stem: str) -> int:
    """How many exercises a lesson has."""
    return sum("solution" in tags(c) for c in cells(stem))


def texts_of(cell: dict[str, Any], *kinds: str) -> Iterator[str]:
    """The outputs of a cell of these kinds, for example "text/html"."""
    for output in cell.get("outputs", []):
        for kind in kinds:
            if kind in output.get("data", {}):
                yield "".join(output["data"][kind])


def error_of(cell: dict[str, Any]) -> tuple[str, str] | None:
    """The name and the text of the error that a cell ended with."""
    for output in cell.get("outputs", []):
        if output["output_type"] == "error":
            return output["ename"], output["evalue"]
    return None


def first_sentence(text: str) -> str:
    """The first sentence of a text, without line breaks."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(text.split()), maxsplit=1)[0]


# Links


def anchor_of(stem: str, cell: str) -> str:
    """The id that a cell gets on its page: cells have ids of their own, which may repeat in other lessons."""
    return f"cell-{stem[:2]}-{cell}"


def section_of(stem: str, name: str) -> str:
    """The heading under which a cell stands: "## Buckets"."""
    heading = ""
    for found in cells(stem):
        source = found["source"]
        if found["cell_type"] == "markdown":
            here = re.findall(r"(?m)^#{1,3} .*$", re.sub(r"(?sm)^```.*?^```", "", source))
            if found["id"] == name:
                return here[0] if source.startswith("#") else heading
            heading = (here or [heading])[-1]
        elif found["id"] == name:
            return heading
    raise ValueError(f"{stem} has no cell {name}")


def link_to(stem: str, place: str, *, words: str = "") -> str:
    """A link to a section ("## Buckets") or a cell, by its id, of a lesson (MyST source)."""
    if place.startswith("#"):
        name = place.lstrip("# ")
        target = f"notebooks/{stem}.ipynb#{default_slugify(name.replace('`', ''))}"
    else:
        name, target = section_of(stem, place).lstrip("# "), f"#{anchor_of(stem, place)}"
    return f"[{words or f'{stem[:2]} {name}'}]({target})"


def link_to_lesson(lesson: dict[str, str]) -> str:
    """A link to a lesson, or its name and that it is in preparation (MyST source)."""
    name = f"{lesson['notebook'][:2]} {lesson['title']}"
    if exists(lesson):
        return f"[{name}](notebooks/{lesson['notebook']}.ipynb)"
    return f"{name} [in preparation]{{.planned}}"


def raw(text: str) -> str:
    """HTML as it is (MyST source)."""
    return f"```{{raw}} html\n{text}\n```\n"


def escaped(text: str) -> str:
    """Text that stands in HTML."""
    return html.escape(text, quote=True)


def in_a_table(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def literal(text: str) -> str:
    """Text that Markdown must not read: code, messages (MyST source, inside a line)."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


# The library, read and not imported: its docstrings


@cache
def module(name: str) -> ast.Module:
    """The source of a module of the library, "draw.timeline", as a tree."""
    path = ROOT / "lib" / "rankcell" / Path(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))
