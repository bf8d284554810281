"""What the site does to a notebook before MyST reads it. The notebook on disk, and the download, stay as they are."""

import ast
import json
import re
from typing import Any

import course
import pages

LONG = 8  # lines of a cell, from which on code that only draws is folded away
WIDGET = "application/vnd.jupyter.widget-view+json"
# The explorer that takes the place of a live kernel's panel, by the id of the cell that makes it
EXPLORERS = {"three-formulas-panel": "rings"}
# The planner's panel, which _static/planner.js fills from the numbers of panel.py
PLANNER = """<div class="planner"></div>
<noscript>This panel needs scripts. In a notebook it runs with a kernel.</noscript>
"""


def prepared(stem: str, text: str, wanted: set[str]) -> str:
    """The notebook as MyST is to read it.

    Solutions and long code that only draws or checks are folded, new terms lead to the glossary, cells that other pages
    link to get an id, and panels become explorers.
    """
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    for cell in notebook["cells"]:
        source = cell["source"]
        if cell["cell_type"] == "markdown":
            source = pages.link_new_terms(source)[0]
            anchor = course.anchor_of(stem, cell["id"])
            cell["source"] = with_target(source, anchor) if anchor in wanted else source
        elif cell["cell_type"] == "code":
            _fold(cell, source)
            _explore(cell)
    notebook["metadata"].pop("widgets", None)  # no page needs their scripts
    return json.dumps(notebook)


def with_target(source: str, anchor: str) -> str:
    """A Markdown cell with a target at its start, or behind the fold with which it begins: HTML takes no target."""
    head, fold, rest = source.partition("</details>\n\n") if source.startswith("<") else ("", "", source)
    return f"{head}{fold}({anchor})=\n{rest}"


def _fold(cell: dict[str, Any], source: str) -> None:
    tags = cell["metadata"].get("tags", [])
    folded = cell["metadata"].get("jupyter", {}).get("source_hidden")  # in JupyterLab, by `make execute`
    if "solution" in tags:
        prompts = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}
        cell["metadata"] = {"tags": [*tags, "hide-cell"], "mystnb": prompts}
    elif folded:
        prompts = {"code_prompt_show": "Show the code of the check", "code_prompt_hide": "Hide the code"}
        cell["metadata"] = {"tags": [*tags, "hide-input"], "mystnb": prompts}
    elif only_draws(cell, source):
        prompts = {"code_prompt_show": "Show the code of the picture", "code_prompt_hide": "Hide the code"}
        cell["metadata"] = {"tags": [*tags, "hide-input"], "mystnb": prompts}


def only_draws(cell: dict[str, Any], source: str) -> bool:
    """Whether a cell is long, defines nothing, runs on no rank, checks nothing, and ends in a picture."""
    figure = any('<figure class="rankcell"' in text for text in course.texts_of(cell, "text/html"))
    if not figure or source.startswith("%") or source.count("\n") + 1 < LONG:
        return False
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a line that begins with ! or %
        return False
    defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)
    return not defines and not re.search(r"\bcheck\.|\btorch\.|models\.", source)


def _explore(cell: dict[str, Any]) -> None:
    """A panel of widgets is dead without a kernel: an explorer, which is a script of the site, takes its place."""
    if "planner-panel" in cell["metadata"].get("tags", []):
        cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": {"text/html": PLANNER}}]
    for output in cell["outputs"]:
        if WIDGET in output.get("data", {}):
            output["data"] = {"text/html": explorer(EXPLORERS[cell["id"]])}


def explorer(name: str) -> str:
    """The place of an explorer, which _static/explorers.js fills."""
    return (
        f'<div class="explorer" data-explorer="{name}"><p>This explorer needs scripts, which are off here. '
        "The pictures of the lesson show some of its cases.</p></div>"
    )
