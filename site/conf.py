"""The course site: Sphinx, MyST-NB and Furo over the notebooks' outputs. No page asks another host.

    sphinx-build -c site site/_build/source site/_build/html

fills the empty folder `source` itself. Nothing is executed here: `make html` runs what is stale first. The
order of the lessons is in lessons.toml. Beside this file:

    course        the lessons, their notebooks, links into them
    landing       the landing page
    pages         the other pages, each from its table (*.toml), its text (*.md), or what the lessons have stored
    cheatsheet    one of them: collectives and strategies on one sheet
    reference     one of them: the docstrings
    lessons       what is done to a notebook before it becomes a page
    panel         the numbers of the planner's panel
    finishing     what is done to a finished page; the search, the map of the site
    highlighting  colours of cells and errors
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from sphinxcontrib import katex

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "lib")]

import course  # noqa: E402
import finishing  # noqa: E402
import highlighting  # noqa: E402
import landing  # noqa: E402
import lessons  # noqa: E402
import pages  # noqa: E402

# Where the course can be cloned, and where this site will stand. Both may be empty: then no page names them, and there
# is no sitemap.
REPOSITORY = os.environ.get("COURSE_REPOSITORY", "")  # https://github.com/...
ADDRESS = os.environ.get("COURSE_ADDRESS", "")  # https://.../

project = "Distributed training, one rank cell at a time"
author = "the authors of the course"
copyright = author
html_title = project
html_baseurl = ADDRESS
extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design", "sphinx_reredirects", "sphinxcontrib.katex"]
# A lesson's earlier address leads to its page.
redirects = {f"notebooks/{a['was']}": f"{a['notebook']}.html" for a in course.LESSONS if "was" in a}
include_patterns = ["*.md", "notebooks/*.ipynb"]
templates_path = ["_templates"]

# Markdown is kept to what JupyterLab and GitHub show too; only the pages made here use directives.
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
nb_merge_streams = True
nb_render_error_lexer = "cell-error"

# With node, formulas are drawn at build time and a page carries style sheets and fonts only. Without it, the
# same KaTeX runs in the reader's browser, from a file of the site.
katex_prerender = shutil.which("node") is not None
katex.STARTUP_TIMEOUT = katex.RENDER_TIMEOUT = 60.0  # seconds
katex_css_path = "vendor/katex/katex.min.css"

html_theme = "furo"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["course.css"]
html_js_files = [("course.js", {"defer": "defer"})]
html_additional_pages = {"search": "search.html", "404": "404.html"}
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
if REPOSITORY:
    html_theme_options["footer_icons"] = [
        {"name": "The repository", "url": REPOSITORY, "html": "The repository", "class": "repository"}
    ]


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


def gather_the_sources(folder):
    """Fill Sphinx's source folder: the pages, the pictures of the cards, and the notebooks where links expect them.

    Only what changed is written, so that Sphinx reads only that again. Returns what was wanted there, by path.
    """
    texts = {folder / f"{name}.md": make() for name, make in pages.PAGES.items()}
    texts[folder / "index.md"] = landing.page(list(pages.PAGES), REPOSITORY)
    sources = {path: text.encode() for path, text in texts.items()}
    sources |= {folder / name: picture for name, picture in landing.pictures().items()}
    for path in sorted(set(course.NOTEBOOKS.glob("*.ipynb")) - {course.NOTEBOOKS / "00_start.ipynb"}):
        sources[folder / "notebooks" / path.name] = path.read_bytes()
    for path in (*folder.glob("notebooks/*.ipynb"), *folder.glob("*.md")):
        if path not in sources:
            path.unlink()
    for path, data in sources.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
    return texts


def prepare_lessons(app, docname, source):
    """A notebook becomes what MyST is to read; see lessons."""
    if docname.startswith("notebooks/"):
        for name in ("syllabus", "glossary", "corrections"):  # they say which cells get an id
            app.env.note_dependency(str(HERE / f"{name}.toml"))
        stem = docname.removeprefix("notebooks/")
        source[0] = lessons.prepared(stem, source[0], app.course_anchors)


def setup(app):
    """Called by Sphinx."""
    app.course_anchors = pages.wanted_anchors(gather_the_sources(Path(app.srcdir)))
    app.add_lexer("ipython3", highlighting.RankCellLexer)
    app.add_lexer("cell-error", highlighting.CellErrorLexer)
    app.connect("source-read", prepare_lessons)
    finishing.connect(app, address=ADDRESS, repository=REPOSITORY)
