"""The site as a reader opens it: built once, then opened from file:// in one session of Debian's Chromium.

The build and the links are tested everywhere; what needs a browser is skipped where there is none.
"""

import gzip
import html
import itertools
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import handout
import notebooks
from rankcell import costs

ROOT = Path(__file__).parent.parent
LESSONS = sorted({path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} - {"00_start"})  # no lesson
READING = ["index.html", *(f"notebooks/{name}.html" for name in LESSONS)]
# in the order of the sidebar
TO_LOOK_UP = [
    "cheatsheet",
    "glossary",
    "explorers",
    "failures",
    "corrections",
    "reference",
    "syllabus",
    "reading",
]
TO_LOOK_UP = [f"{name}.html" for name in (*TO_LOOK_UP, "instructor")]
PAGES = [*READING, *TO_LOOK_UP, "search.html", "404.html"]
EVERY_WIDTH = [
    "index.html",
    "notebooks/05_bandwidth.html",
    "cheatsheet.html",
]  # the other pages are made alike
CHROMIUM = next(filter(None, map(shutil.which, handout.CHROMIUM)), None)
# Chromium's own services would ask the network for updates; as root it needs --no-sandbox.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync"]
PHONE, DESKTOP = {"width": 380, "height": 800}, {"width": 1400, "height": 900}

pytestmark = pytest.mark.slow
each_page = pytest.mark.parametrize("name", PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. A warning of Sphinx fails the build."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "source").mkdir()
    command = [Path(sys.executable).parent / "sphinx-build", "-q", "-W", "--keep-going", "-c", ROOT / "site"]
    command += ["-d", folder / "doctrees", folder / "source", folder / "html"]
    result = subprocess.run(command, capture_output=True, text=True)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "LaTeX-incompatible" not in said, said  # KaTeX draws it, with a sign that its font lacks
    return folder / "html"


@pytest.fixture(scope="module")
def text(site):
    """The HTML of a page, by its name."""
    return cache(lambda name: (site / name).read_text("utf-8"))


@each_page
def test_links_resolve(site, text, name):
    """Every link and source inside the site leads to a file, and to a section of it."""
    for value in re.findall(r'(?:href|src)="([^"]+)"', text(name)):
        target = urlsplit(html.unescape(value))
        if not target.scheme and not target.netloc:
            path = ((site / name).parent / unquote(target.path)).resolve() if target.path else site / name
            assert path.is_file(), value
            if target.fragment and path.suffix == ".html":
                assert f'id="{unquote(target.fragment)}"' in path.read_text("utf-8"), value


@each_page
def test_a_page_is_whole_and_light(text, name):
    page = text(name)
    sidebar = re.search(r'(?s)<div class="sidebar-tree">.*?</aside>', page)[0]
    listed = re.findall(r'<a class="[^"]*reference internal"[^>]*>(\d+) ', sidebar)
    assert [int(number) for number in listed] == [int(stem[:2]) for stem in LESSONS]
    assert all(f'{other}"' in sidebar or other == name for other in TO_LOOK_UP)
    assert len(re.search(r'<meta name="description" content="([^"]+)"', page)[1]) > 30
    assert page.count('name="viewport"') == 1
    assert "katex-error" not in page and not (shutil.which("node") and "katex.min.js" in page)
    assert len(gzip.compress(page.encode())) < 150_000  # on the wire, without the pictures of other files
    assert "embed.js" not in page and "jupyter.widget-view" not in page  # scripts of another package


@pytest.mark.parametrize("stem", LESSONS)
def test_a_lesson_has_its_download_neighbours_and_folds(site, text, stem):
    page, path = text(f"notebooks/{stem}.html"), ROOT / "notebooks" / f"{stem}.ipynb"
    links = dict(re.findall(r'<a class="(nb-download|prev-page|next-page)[^"]*" href="([^"]+)"', page))
    links = {kind: (site / "notebooks" / link).resolve() for kind, link in links.items()}
    index = READING.index(f"notebooks/{stem}.html")
    assert links["nb-download"].read_bytes() == path.read_bytes()
    assert links["prev-page"] == site / READING[index - 1]
    assert links["next-page"] == site / [*READING, *TO_LOOK_UP][index + 1]
    tags = [tag for cell in notebooks.read(path).cells for tag in cell.metadata.get("tags", [])]
    folds = re.findall(r"<details([^>]*)>\s*<summary[^>]*>(?:\s*<[^>]*>)*\s*Show the (\w+)", page)
    assert [kind for _, kind in folds].count("solution") == tags.count("solution")
    assert not any(" open" in attributes for attributes, _ in folds)


# In a browser


@pytest.fixture(scope="module")
def tab():
    """A page of Chromium; `.requests` has what it asked for, `.errors` its complaints."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=PHONE)
        page.requests, page.errors = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        # what the next page cuts short is no fault of this one
        page.on("requestfailed", lambda r: r.failure != "net::ERR_ABORTED" and page.errors.append(r.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        yield page
        browser.close()


@pytest.fixture
def visit(tab, site):
    """Open a page of the site from file:// in that tab."""

    def visit(name, viewport=PHONE, colours="light"):
        tab.set_viewport_size(viewport)
        tab.emulate_media(color_scheme=colours)
        tab.requests.clear()
        tab.errors.clear()
        tab.goto((site / name).as_uri())
        return tab

    return visit


OPEN = "document.querySelectorAll('article details').forEach((fold) => (fold.open = true))"
SHUT = "document.querySelectorAll('article details').forEach((fold) => (fold.open = false))"
# What is wider than the box around it
WIDE = """[...document.querySelectorAll(".output.traceback pre")].filter(
    (e) => e.scrollWidth > e.closest(".output, pre").clientWidth).length"""
FIGURES = """[...document.querySelectorAll("article img")].map((image) => {
    const {left, right, width} = image.getBoundingClientRect();
    return [image.naturalWidth > 0, width > 40, left >= 0, right <= 380, image.alt.trim() !== ""];
})"""


@each_page
def test_a_page_works_on_every_screen_and_on_paper(visit, name):
    page = visit(name)
    page.evaluate(SHUT)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("article details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("article details[open]").count() == 0
    page.evaluate(OPEN)
    # pictures may load when they come into view
    page.evaluate("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    page.wait_for_load_state("networkidle")
    if name.startswith("notebooks/"):
        assert [figure for figure in page.evaluate(FIGURES) if not all(figure)] == []
    for width in (380, 800, 1280, 1700) if name in EVERY_WIDTH else (380,):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(WIDE) == 0
    for figure in page.locator("article figure.rankcell:has(script)").all():
        slider, picture = figure.locator("input[type=range]"), figure.locator("img")
        before = picture.get_attribute("src")
        slider.press("ArrowRight" if slider.input_value() != slider.get_attribute("max") else "ArrowLeft")
        assert picture.get_attribute("src") != before
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.errors == []


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "notebooks/05_bandwidth", "cheatsheet", "search"])
def test_axe_finds_nothing_serious(visit, name, colours):
    """Colours, labels, order, focus, in both colours, with both sidebars; one page of each kind."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit(f"{name}.html", DESKTOP, colours)
    page.evaluate(OPEN)
    # folds open with an animation, during which contrast is low; text that is scrolled out of its box is skipped
    page.evaluate("document.getAnimations().forEach((animation) => animation.finish())")
    page.add_style_tag(content=".highlight pre { white-space: pre-wrap !important }")
    # boxes of code are most of a page's elements, and alike
    page.evaluate("[...document.querySelectorAll('.highlight')].slice(9).forEach((box) => box.remove())")
    for violation in axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]:
        assert violation["impact"] not in ("serious", "critical"), violation["nodes"][0]["html"][:200]


def test_dark_mode_is_dark_and_figures_do_not_glare(visit):
    ground = r"getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3).map(Number)"
    shine = "getComputedStyle(document.querySelector('figure.rankcell img')).filter"
    dark = visit("index.html", colours="dark")
    assert max(dark.evaluate(ground)) < 60 and dark.evaluate(shine) == "brightness(0.86)"
    light = visit("index.html")
    assert min(light.evaluate(ground)) > 240 and light.evaluate(shine) == "none"


def test_search_ranks_title_heading_topics_text(visit, text):
    page = visit("search.html")
    rows = [  # each has the words in one place only
        ["notebooks/x", "a", "Other", "Other", [], "here stands a zebra, zebra, zebra"],
        ["notebooks/x", "b", "Other", "B", ["What a zebra is"], ""],
        ["notebooks/x", "c", "Other", "C", ["Zebra, and more"], ""],
        ["notebooks/x", "d", "Other", "On a zebra", [], ""],
        ["notebooks/y", "e", "The zebra", "The zebra", [], ""],
        ["notebooks/z", "f", "Other", "F", [], "no animal"],
    ]
    assert page.evaluate("(rows) => courseSearch.rank('zebras', rows).map((r) => r.id)", rows) == [*"edcba"]
    ranked = "(query) => courseSearch.rank(query, COURSE_SECTIONS).map((row) => row.page)"
    for stem in LESSONS:
        title = re.search(r"<h1>\d+ ([^<]+)<", text(f"notebooks/{stem}.html"))[1]
        assert page.evaluate(ranked, title)[0] == f"notebooks/{stem}", title
    for option in ("%%ranks", "--pull", "--timeout"):
        assert page.evaluate(ranked, option)[0] == "reference", option


def test_a_word_in_the_sidebar_leads_to_its_section(visit):
    """As a reader does it: typed, entered, with a snippet of the text and a link that leads there."""
    page = visit("index.html", DESKTOP)
    page.locator(".sidebar-search").fill("online softmax")
    page.locator(".sidebar-search").press("Enter")
    first = page.locator("#search-results li").first
    first.wait_for()
    assert first.locator("mark").first.inner_text().lower() in ("online softmax", "online", "softmax")
    first.locator("a").click()
    page.wait_for_url("**/notebooks/17_context_parallel.html*")
    assert page.errors == []


def test_an_earlier_address_leads_to_the_lesson_and_its_section(visit, site):
    page = visit("index.html")
    page.goto((site / "notebooks/12_sequence_parallel.html").as_uri() + "#what-you-learned")
    page.wait_for_url("**/notebooks/17_context_parallel.html#what-you-learned")


def test_explorers_compute_as_the_library_by_keyboard(visit):
    page = visit("explorers.html")
    link = costs.Link(30e-6, 1e-10)
    for n, size in itertools.product((2, 8, 1024), (256, 2**30)):
        for name, of in (("ring", costs.ring_all_reduce), ("tree", costs.tree_all_reduce)):
            shown = page.evaluate(f"courseExplorers.RINGS['{name}']({size}, {n}, 30e-6, 1e-10)")
            assert shown == pytest.approx(of(size, n, link))
    for stage, dp in itertools.product(range(4), (1, 64)):
        chosen = {"billions": 7.5, "stage": stage, "dp": dp, "tp": 1, "pp": 1, "layers": 32}
        chosen |= {"hidden": 4096, "sequence": 2048, "batch": 2, "again": False}
        held = page.evaluate("(chosen) => courseExplorers.memory(chosen)", chosen)
        states = held["parameters"] + held["gradients"] + held["optimizer"]
        # https://arxiv.org/abs/1910.02054, figure 1: gradients and weights of 2 bytes, an optimizer of 12
        shared = [n / (dp if stage >= at else 1) for at, n in ((3, 2), (2, 2), (1, 12))]
        assert states == pytest.approx(7.5e9 * sum(shared))
        assert held["activations"] == 34 * 2048 * 2 * 4096 * 32  # Korthikanti et al., table 2
    for panel in page.locator(".explorer").all():
        before = panel.inner_html()
        panel.locator("input").last.press("ArrowLeft")
        assert panel.inner_html() != before
        says = panel.locator("p[role=status]").inner_text()
        assert panel.locator("svg[role=img]").get_attribute("aria-label") == says


def test_panels_of_the_lessons_work_without_a_kernel(visit):
    """In the place of each panel of widgets: an explorer, or the planner's own."""
    for stem in LESSONS:
        cells = notebooks.code_cells(notebooks.read(ROOT / "notebooks" / f"{stem}.ipynb"))
        shown = [output.get("data", {}) for cell in cells for output in cell.outputs]
        if panels := sum(notebooks.WIDGET_VIEW in data for data in shown):
            page = visit(f"notebooks/{stem}.html")
            assert page.locator(".explorer svg, .planner .planner-verdict").count() == panels
    panel = visit("notebooks/20_planner.html", DESKTOP).locator("div.planner")
    assert "tokens/s/GPU" in panel.locator(".planner-verdict").inner_text()
    panel.get_by_label("number of GPUs").select_option("16")
    assert "Rejected: it needs" in panel.locator(".planner-verdict").inner_text()
