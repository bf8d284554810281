"""The landing page: a cover, how to run the course, a card with a picture per lesson; the sidebar."""

import base64
import re
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter

import course
import highlighting

COVER = "04_collectives"  # the landing page shows this notebook's all-reduce
_CELL = """<div class="cell docutils container">
<div class="cell_input docutils container">{code}</div>
<div class="cell_output docutils container">{outputs}</div>
</div>
"""


def cards() -> str:
    """A card for each lesson, in order, with a picture if it can be read (MyST source)."""
    texts = []
    for lesson in course.LESSONS:
        stem, title = lesson["notebook"], f"{course.number(lesson)} · {lesson['title']}"
        if not course.exists(lesson):
            texts.append(
                f":::{{grid-item-card}} {title}\n\n{lesson['question']}\n\n[in preparation]{{.planned}}\n:::\n"
            )
            continue
        took = course.minutes(stem)
        image = f":img-top: pictures/{stem}.svg\n:img-alt:\n" if picture(lesson) else ""
        texts.append(
            f":::{{grid-item-card}} {title}\n"
            f":link: notebooks/{stem}\n:link-type: doc\n"
            f"{image}\n"
            f"{lesson['question']}\n\n"
            f"[{took.all} minutes: {took.read} to read, {took.do} for {course.exercises(stem)} exercises]"
            "{.minutes}\n:::\n"
        )
    return "::::{grid} 1 2 2 3\n:gutter: 3\n:class-container: lesson-cards\n\n" + "\n".join(texts) + "::::\n"


def pictures() -> dict[str, bytes]:
    """The pictures of the cards by the name of their file: a figure that the lesson itself has drawn."""
    found = {f"pictures/{lesson['notebook']}.svg": picture(lesson) for lesson in course.written()}
    return {name: data for name, data in found.items() if data}


def picture(lesson: dict[str, str]) -> bytes | None:
    """The figure that the lesson's line in lessons.toml names, by the id of its cell; else the first one, if any."""
    stem = lesson["notebook"]
    wanted = [course.cell(stem, lesson["picture"])] if "picture" in lesson else course.cells(stem)
    for cell in wanted:
        for text in course.texts_of(cell, "text/html"):
            match = re.search(r'<figure class="rankcell".*?src="data:image/svg\+xml;base64,([^"]+)"', text)
            if match:
                return base64.b64decode(match[1])
    if "picture" in lesson:
        raise ValueError(f"lessons.toml: cell {lesson['picture']} of {stem} has no figure")
    return None


def cell_as_html(cell: dict) -> str:
    """One stored code cell with its HTML outputs, in the elements that MyST-NB would use."""
    code = highlight(cell["source"], highlighting.RankCellLexer(), HtmlFormatter())
    shown = list(course.texts_of(cell, "text/html"))
    outputs = "\n".join(f'<div class="output text_html">{text}</div>' for text in shown if text)
    return _CELL.format(code=code, outputs=outputs)


def cover() -> str:
    """An all-reduce on four ranks and its picture, as the lesson on collectives stored them (MyST source)."""
    cells = course.cells(COVER) if (course.NOTEBOOKS / f"{COVER}.ipynb").exists() else []
    for index, cell in enumerate(cells):
        if cell["source"].startswith("%%ranks") and "dist.all_reduce(" in cell["source"]:
            after = [cell for cell in cells[index + 1 : index + 2] if cell["cell_type"] == "code"]
            return course.raw("".join(map(cell_as_html, [cell, *after])))
    return ""


def sidebar(further: list[str]) -> str:
    """A hidden toctree for each part that has lessons, and one for the pages `further` (MyST source)."""
    trees = []
    for part in course.PARTS:
        names = [f"notebooks/{lesson['notebook']}" for lesson in part["lesson"] if course.exists(lesson)]
        if names:
            trees.append(_tree(part["title"], names))
    return "\n\n".join([*trees, _tree("To look up", further)])


def _tree(caption: str, names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"])


def first_lesson() -> str:
    """The document to start with."""
    lessons = course.written()
    return f"notebooks/{lessons[0]['notebook']}.ipynb" if lessons else "index.md"


def page(further: list[str], repository: str) -> str:
    """index.md with the lessons that exist, so that nobody keeps a second list by hand."""
    text = (Path(__file__).parent / "index.md").read_text("utf-8")
    text = text.replace("<!-- cards -->", cards())
    text = text.replace("<!-- rank cell -->", cover())
    text = text.replace("CLONE", f"git clone {repository} course && cd course\n" if repository else "")
    return text.replace("FIRST-LESSON", first_lesson()) + "\n" + sidebar(further) + "\n"


RUN_IT = """<details class="run-it"><summary>Run this lesson</summary>
<p>The cells run on your own machine, on Linux, macOS or WSL2; a laptop will do. Once: 1.7 GB on disk and a few minutes,
with Python 3.11 or newer, git and make. Then 4 ranks take about 240 MiB beside the notebook, and no network.</p>
<pre tabindex="0">{clone}make lab        # JupyterLab on all lessons
make student    # copies without solutions</pre>{elsewhere}</details>
"""
ELSEWHERE = """
<p>Or on a machine of somebody else. <b>None of these has been tried.</b> {links}.</p>
<p>Colab and Kaggle open the notebook alone. Run this in a new first cell there, then restart the kernel:</p>
<pre tabindex="0">%pip install -q git+{repository}</pre>"""
PLACES = {
    "Binder": "https://mybinder.org/v2/gh/{name}/main?labpath={path}",  # takes binder/requirements.txt
    "Colab": "https://colab.research.google.com/github/{name}/blob/main/{path}",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{name}/blob/main/{path}",
    "Codespaces": "https://codespaces.new/{name}",  # takes .devcontainer
}


def run_it(repository: str, stem: str) -> str:
    """How to run a lesson, in a fold (HTML); links that start it elsewhere if the repository is on GitHub."""
    clone = f"git clone {course.escaped(repository)} course && cd course\n" if repository else ""
    return RUN_IT.format(clone=clone, elsewhere=_elsewhere(repository, stem))


def _elsewhere(repository: str, stem: str) -> str:
    name = repository.removeprefix("https://github.com/").removesuffix(".git").strip("/")
    if not repository.startswith("https://github.com/") or name.count("/") != 1:
        return ""
    path = f"notebooks/{stem}.ipynb"
    links = [f'<a href="{url.format(name=name, path=path)}">{place}</a>' for place, url in PLACES.items()]
    return ELSEWHERE.format(links=", ".join(links), repository=f"https://github.com/{name}")
