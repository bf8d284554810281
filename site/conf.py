"""The course site: Sphinx, MyST-NB and Furo over the notebooks' outputs. No page asks another host.

    sphinx-build -c site site/_build/source site/_build/html

fills the empty folder `source` itself. Nothing is executed here: `make html` runs what is stale first. The
order of the lessons is in lessons.toml.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from ipython_pygments_lexers import IPython3Lexer
from myst_parser.mdit_to_docutils.base import default_slugify
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import RegexLexer, bygroups, using
from pygments.lexers.python import PythonLexer
from pygments.token import Generic, Keyword, Operator, Text
from sphinxcontrib import katex

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "lib")]

import panel  # noqa: E402

NOTEBOOKS = HERE.parent / "notebooks"
HERO = "04_collectives"  # the landing page shows this notebook's all-reduce
PARTS = tomllib.loads((HERE / "lessons.toml").read_text("utf-8"))["part"]
TOPICS = tomllib.loads((HERE / "syllabus.toml").read_text("utf-8"))["topic"]

project = "Distributed training, one rank cell at a time"
author = "the authors of the course"
copyright = author
html_title = project
extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design", "sphinxcontrib.katex"]
include_patterns = ["index.md", "syllabus.md", "notebooks/*.ipynb"]
templates_path = ["_templates"]

# Markdown is kept to what JupyterLab and GitHub show too; only index.md uses directives.
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
nb_merge_streams = True
nb_render_error_lexer = "cell-error"
# A bundle that holds every standard widget, so that require.js and its CDN are not needed.
nb_ipywidgets_js = {"vendor/widgets/embed.js": {}}

# With node, formulas are drawn at build time and a page carries style sheets and fonts only. Without it, the
# same KaTeX runs in the reader's browser, from a file of the site.
katex_prerender = shutil.which("node") is not None
katex.STARTUP_TIMEOUT = katex.RENDER_TIMEOUT = 60.0  # seconds
katex_css_path = "vendor/katex/katex.min.css"

html_theme = "furo"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["course.css"]
html_js_files = ["course.js"]
# The sources are the downloads, under their own names.
html_copy_source, html_sourcelink_suffix = True, ""
html_use_index = html_domain_indices = False
html_last_updated_fmt = None
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
copybutton_selector = "div.highlight:not(.output div.highlight) > pre"

# the all-reduce of every picture, at 4.5:1 on white and on black
LIGHT_BLUE, DARK_BLUE = "#0b5d96", "#8cc8f2"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
MONO = "ui-monospace, 'Cascadia Code', 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": LIGHT_BLUE,
        "color-brand-content": LIGHT_BLUE,
        "color-brand-visited": LIGHT_BLUE,
        "font-stack": SANS,
        "font-stack--monospace": MONO,
    },
    "dark_css_variables": {
        "color-brand-primary": DARK_BLUE,
        "color-brand-content": DARK_BLUE,
        "color-brand-visited": DARK_BLUE,
    },
}


def start_node(rundir, timeout):
    """The process that draws formulas, and a Unix socket to it.

    The package's own start does not wait until node listens on the socket, so that on a busy machine the
    whole build failed with "Connection refused". Over loopback, its other way, each formula waits 80 ms for
    delayed acknowledgements: on two cores the course took 48 s to build instead of 7.
    """
    path = rundir / "katex.sock"
    command = katex.KaTeXServer.build_command(socket=path)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=rundir)
    end = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return process, connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        if time.monotonic() > end:
            raise katex.KaTeXServer.timeout_error(timeout)
        time.sleep(0.01)


katex.KaTeXServer.start_server_process = start_node


class RankCellLexer(IPython3Lexer):
    """IPython's lexer shows all that follows an unknown cell magic as plain text. Ours is Python below."""

    name, aliases, filenames, mimetypes = "IPython with rank cells", ["ipython3"], [], []
    tokens = IPython3Lexer.tokens | {
        "root": [
            (
                r"(?s)\A(%%)(ranks|time|timeit|capture)\b([^\n]*\n)(.*)",
                bygroups(Operator, Keyword, Text, using(PythonLexer)),
            ),
            (
                r"(?s)\A(%%)(slurm)\b([^\n]*\n)(.*)",  # lines that begin with ! go to a shell
                bygroups(Operator, Keyword, Text, using(IPython3Lexer)),
            ),
            *IPython3Lexer.tokens["root"],
        ]
    }


class CellErrorLexer(RegexLexer):
    """The name of the error and the line that raised it stand out; a rank's error is prose, not Python."""

    name, aliases = "Error of a cell", ["cell-error"]
    flags = re.MULTILINE
    tokens = {  # noqa: RUF012  (Pygments reads a class attribute)
        "root": [
            (r"^\w*(Error|Exception|Timeout|Lost|Deadlock|Interrupt)\b", Generic.Strong),
            (r"^-+> ?\d+.*\n", Generic.Strong),
            (r".*\n", Text),
        ]
    }


def lesson_exists(lesson):
    """Whether the notebook of this lesson is there; the others are marked as in preparation."""
    return (NOTEBOOKS / f"{lesson['notebook']}.ipynb").exists()


def lesson_cards():
    """A card for each lesson that can be read, in order (MyST source)."""
    cards = []
    for part in PARTS:
        for lesson in filter(lesson_exists, part["lesson"]):
            number = int(lesson["notebook"][:2])
            cards.append(
                f":::{{grid-item-card}} {number} · {lesson['title']}\n:link: notebooks/{lesson['notebook']}\n"
                f":link-type: doc\n{lesson['question']}\n:::\n"
            )
    return "::::{grid} 1 1 2 2\n:gutter: 3\n\n" + "\n".join(cards) + "::::\n"


HERO_CELL = """<div class="cell docutils container">
<div class="cell_input docutils container">{code}</div>
<div class="cell_output docutils container">{outputs}</div>
</div>
"""


def cell_as_html(cell):
    """One stored code cell with its HTML outputs, in the elements that MyST-NB would use."""
    code = highlight("".join(cell["source"]), RankCellLexer(), HtmlFormatter())
    shown = ["".join(output.get("data", {}).get("text/html", "")) for output in cell["outputs"]]
    outputs = "\n".join(f'<div class="output text_html">{text}</div>' for text in shown if text)
    return HERO_CELL.format(code=code, outputs=outputs)


def hero_cells():
    """An all-reduce on four ranks and its picture, as the lesson on collectives stored them (MyST source)."""
    path = NOTEBOOKS / f"{HERO}.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.exists() else []
    for index, cell in enumerate(cells):
        source = "".join(cell["source"])
        if source.startswith("%%ranks") and "dist.all_reduce(" in source:
            picture = [after for after in cells[index + 1 : index + 2] if after["cell_type"] == "code"]
            return "```{raw} html\n" + "".join(map(cell_as_html, [cell, *picture])) + "```\n"
    return ""


def course_map():
    """Every lesson by part, those in preparation without a link (MyST source)."""
    parts = []
    for part in PARTS:
        lines = [":::{grid-item}", f"**{part['title']}**", ""]
        for lesson in part["lesson"]:
            number, title = int(lesson["notebook"][:2]), lesson["title"]
            if lesson_exists(lesson):
                lines.append(f"{number}. [{title}](notebooks/{lesson['notebook']}.ipynb)")
            else:
                lines.append(f"{number}. {title} [in preparation]{{.planned}}")
        parts.append("\n".join([*lines, ":::"]))
    return (
        "::::{grid} 1 2 2 3\n:gutter: 3\n:class-container: course-map\n\n" + "\n\n".join(parts) + "\n::::\n"
    )


def sidebar():
    """A hidden toctree for each part that has lessons: the sidebar, previous and next (MyST source)."""
    trees = []
    for part in PARTS:
        names = [f"notebooks/{lesson['notebook']}" for lesson in part["lesson"] if lesson_exists(lesson)]
        if names:
            trees.append(
                "\n".join(["```{toctree}", ":hidden:", f":caption: {part['title']}", "", *names, "```"])
            )
    return "\n\n".join(trees)


def first_lesson():
    """The document to start with."""
    names = [lesson["notebook"] for part in PARTS for lesson in part["lesson"] if lesson_exists(lesson)]
    return f"notebooks/{names[0]}.ipynb" if names else "index.md"


def landing_page():
    """index.md with the lessons that exist, so that nobody keeps a second list by hand."""
    page = (HERE / "index.md").read_text("utf-8")
    page = page.replace("<!-- cards -->", lesson_cards()).replace("<!-- course map -->", course_map())
    page = page.replace("<!-- rank cell -->", hero_cells())
    return page.replace("FIRST-LESSON", first_lesson()) + "\n" + sidebar() + "\n"


SYLLABUS = """---
orphan: true
hide-toc: true
---
# Topics

What the course covers, topic by topic, and the sections in which a lesson explains it, runs it and checks it.

| number | topic | lesson and section |
|--:|---|---|
"""


def anchor_of(stem, cell):
    """The id that a Markdown cell gets on its page: cells have ids of their own, which may repeat in other lessons."""
    return f"cell-{stem[:2]}-{cell}"


def section_of(stem, cell):
    """The heading under which a Markdown cell begins."""
    heading = ""
    for other in json.loads((NOTEBOOKS / f"{stem}.ipynb").read_text("utf-8"))["cells"]:
        source = "".join(other["source"])
        if other["id"] == cell:
            return source.split("\n")[0] if source.startswith("#") else heading
        if other["cell_type"] == "markdown":
            heading = (re.findall(r"(?m)^#{1,3} .*$", source) or [heading])[-1]
    raise ValueError(f"syllabus.toml: {stem} has no cell {cell}")


def link_to(stem, place):
    """A link to a section or a Markdown cell of a lesson (MyST source)."""
    if place.startswith("#"):
        name = place.lstrip("# ")
        target = f"notebooks/{stem}.ipynb#{default_slugify(name.replace('`', ''))}"
    else:
        name, target = section_of(stem, place).lstrip("# "), f"#{anchor_of(stem, place)}"
    return f"[{stem[:2]} {name}]({target})"


def syllabus():
    """The topics of syllabus.toml and where they are taught, as a table (MyST source)."""
    titles = {lesson["notebook"]: lesson for part in PARTS for lesson in part["lesson"]}
    rows = []
    for topic in TOPICS:
        links = [link_to(*place) for place in topic["taught"]]
        planned = titles.get(topic.get("planned"))
        if planned:
            number, title = planned["notebook"][:2], planned["title"]
            linked = f"[{number} {title}](notebooks/{planned['notebook']}.ipynb)"
            links.append(
                linked if lesson_exists(planned) else f"{number} {title} [in preparation]{{.planned}}"
            )
        rows.append(f"| {topic['number']} | {topic['topic']} | {'<br>'.join(links)} |\n")
    return SYLLABUS + "".join(rows)


def gather_the_sources(folder):
    """Fill Sphinx's source folder: the landing page, the topics, and the notebooks where links expect them.

    Only what changed is written, so that Sphinx reads only that again.
    """
    sources = {folder / "index.md": landing_page(), folder / "syllabus.md": syllabus()}
    for path in sorted(
        set(NOTEBOOKS.glob("*.ipynb")) - {NOTEBOOKS / "00_start.ipynb"}
    ):  # it is for JupyterLab
        sources[folder / "notebooks" / path.name] = path.read_text("utf-8")
    for path in folder.glob("notebooks/*.ipynb"):
        if path not in sources:
            path.unlink()
    for path, text in sources.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def fold_solutions(app, docname, source):
    """The tag `solution` alone folds a cell: no notebook carries metadata that only the site understands."""
    if not docname.startswith("notebooks/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags", [])
        if "solution" in tags:
            prompts = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}
            cell["metadata"] = {"tags": [*tags, "hide-cell"], "mystnb": prompts}
    source[0] = json.dumps(notebook)


PANEL = """<div class="planner"></div>
<noscript>This panel needs scripts. In a notebook it runs with a kernel.</noscript>
"""


def plant_the_panel(app, docname, source):
    """A cell with the tag `planner-panel` shows the panel that works without a kernel in place of its widgets."""
    if not docname.startswith("notebooks/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if "planner-panel" in cell["metadata"].get("tags", []):
            shown = {"output_type": "display_data", "metadata": {}, "data": {"text/html": [PANEL]}}
            cell["outputs"] = [shown]
            notebook["metadata"].pop("widgets", None)
            source[0] = json.dumps(notebook)


def mark_cells(app, docname, source):
    """The Markdown cells that the table of topics links to get an id; it shows nothing."""
    stem = docname.removeprefix("notebooks/")
    wanted = {place for topic in TOPICS for of, place in topic["taught"] if of == stem}
    if docname == stem or not wanted:
        return
    app.env.note_dependency(str(HERE / "syllabus.toml"))  # read the page again when the topics change
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["id"] in wanted:
            cell["source"] = [f"({anchor_of(stem, cell['id'])})=\n", *cell["source"]]
    source[0] = json.dumps(notebook)


def number_the_headings(fragment):
    """Furo's captions say role="heading" without a level, which screen readers need."""
    return fragment.replace('role="heading"', 'role="heading" aria-level="2"')


def mend_the_page(app, pagename, templatename, context, doctree):
    """Small repairs of what the packages emit; axe found each of them (tests/test_site.py)."""
    body = context.get("body", "")
    if '<div class="planner">' in body:  # the scripts of the panel, on its page only
        app.add_js_file(None, body=panel.script())
        app.add_js_file("planner.js", loading_method="defer")
    body = body.replace(' aria-label="Toggle hidden content"', "")
    body = body.replace("<th></th>", "<td></td>")
    body = body.replace("<pre>", '<pre tabindex="0">')  # a box that scrolls must take the keyboard's focus
    body = body.replace(
        '<div class="table-wrapper', '<div tabindex="0" role="group" aria-label="table" class="table-wrapper'
    )
    body = body.replace(
        '<div class="output text_html">',
        '<div class="output text_html" tabindex="0" role="group" aria-label="output">',
    )
    context["body"] = number_the_headings(body)
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = number_the_headings(context["furo_navigation_tree"])


def searchable_text(page):
    """The words of one built page, with the sections that a search result links to."""
    article = page[page.index("<article") : page.index("</article>")]
    article = re.sub(r'(?s)<a class="headerlink".*?</a>', " ", article)
    article = re.sub(r"(?s)<(script|style|svg|math)\b.*?</\1>", " ", article)
    article = re.sub(r"<(?!/?(section|span id|h\d))[^>]+>", " ", article)
    return '<div role="main">' + re.sub(r"\s+", " ", article) + "</div>"


def finish_the_pages(app, error):
    """Name the sidebars, and write the text for search as a script: from file://, fetch() is refused."""
    if error or app.builder.name != "html":
        return
    texts = {}
    for docname in sorted(app.env.found_docs):
        path = Path(app.outdir) / f"{docname}.html"
        page = path.read_text("utf-8")
        page = page.replace(
            '<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Course">'
        )
        page = page.replace('<aside class="toc-drawer', '<aside aria-label="On this page" class="toc-drawer')
        path.write_text(page, "utf-8")
        texts[f"{docname}.html"] = searchable_text(page)
    script = "window.SEARCH_TEXT=" + json.dumps(texts)
    (Path(app.outdir) / "_static" / "search-text.js").write_text(script, "utf-8")


def setup(app):
    """Called by Sphinx."""
    gather_the_sources(Path(app.srcdir))
    app.add_lexer("ipython3", RankCellLexer)
    app.add_lexer("cell-error", CellErrorLexer)
    app.connect("source-read", fold_solutions)
    app.connect("source-read", plant_the_panel)
    app.connect("source-read", mark_cells)
    app.connect("html-page-context", mend_the_page, priority=900)
    app.connect("build-finished", finish_the_pages)
