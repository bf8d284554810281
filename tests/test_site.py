"""The site as a reader opens it: built once, opened from file:// in Debian's Chromium.

The build and the links are tested everywhere; what needs a browser is skipped where there is none.
"""

import gzip
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

import handout
from rankcell import costs, schedules
from rankcell.draw import svg
from rankcell.planner.memory import zero_states

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted({path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} - {"00_start"})  # no lesson
PAGES = ["index.html", *(f"notebooks/{name}.html" for name in NOTEBOOKS)]
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
TO_LOOK_UP = [f"{name}.html" for name in (*TO_LOOK_UP, "instructor")]  # in the order of the sidebar
ALL_PAGES = [*PAGES, *TO_LOOK_UP]
UNLISTED = ["search.html", "404.html"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Chromium's own services would ask the network for updates; as root it needs --no-sandbox.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Enough where all lessons are alike
EXAMPLES = ("index.html", "03_point_to_point.html", "16_jobs.html")
PHONE = {"width": 380, "height": 800}
DESKTOP = {"width": 1400, "height": 900}

pytestmark = pytest.mark.slow
each_page = pytest.mark.parametrize("page_name", [*ALL_PAGES, *UNLISTED])
each_notebook_page = pytest.mark.parametrize("page_name", PAGES[1:])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    return build(tmp_path_factory.mktemp("site"))


def build(folder, *options, name="html", **environment):
    """Build the site in `folder`/`name` and return that. A warning of Sphinx fails the build.

    What an earlier build in the same folder has read is not read again.
    """
    (folder / "source").mkdir(exist_ok=True)
    command = [Path(sys.executable).parent / "sphinx-build", "-q", "-W", "--keep-going", "-c", ROOT / "site"]
    command += ["-d", folder / "doctrees", *options, folder / "source", folder / name]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "LaTeX-incompatible" not in said, said  # KaTeX draws it, with a sign that its font lacks
    return folder / name


# Without a browser


@pytest.fixture(scope="module")
def text(site):
    """The HTML of a page, by its name."""
    return cache(lambda name: (site / name).read_text("utf-8"))


@each_page
def test_links_resolve(site, text, page_name):
    """Every link and source inside the site leads to a file, and to a section of it."""
    for value in re.findall(r'(?:href|src)="([^"]+)"', text(page_name)):
        target = urlsplit(html.unescape(value))
        if target.scheme or target.netloc:
            continue
        path = (
            ((site / page_name).parent / unquote(target.path)).resolve() if target.path else site / page_name
        )
        assert path.is_file(), f"{page_name} links to {value}"
        if target.fragment and path.suffix == ".html":
            assert f'id="{unquote(target.fragment)}"' in path.read_text("utf-8"), (
                f"{page_name} links to {value}"
            )


@each_page
def test_sidebar_lists_the_lessons_in_order(text, page_name):
    sidebar = re.search(r'(?s)<div class="sidebar-tree">.*?</aside>', text(page_name))[0]
    numbers = [
        int(number) for number in re.findall(r'<a class="[^"]*reference internal"[^>]*>(\d+) ', sidebar)
    ]
    assert numbers == [int(stem[:2]) for stem in NOTEBOOKS]
    ends = [re.search(rf'href="[^"]*{name}"|<a class="current[^>]*href="#"', sidebar) for name in TO_LOOK_UP]
    assert all(ends)


@each_page
def test_a_page_is_light(site, text, page_name):
    """150 kB at most on the wire, without the pictures of other files; and no script of another package's widgets."""
    assert len(gzip.compress(text(page_name).encode())) < 150_000
    assert "embed.js" not in text(page_name) and "jupyter.widget-view" not in text(page_name)


@each_page
def test_a_page_says_what_it_is(text, page_name):
    """For search engines and previews."""
    page = text(page_name)
    assert len(re.search(r'<meta name="description" content="([^"]+)"', page)[1]) > 40
    assert re.search(r'<meta property="og:title" content="[^"]+"', page)
    assert page.count('name="viewport"') == 1


def test_every_topic_has_its_row(text):
    """The table of topics is whole, with a link in each row, and the landing page leads to it."""
    rows = re.findall(r"(?s)<tr class=\"row-\w+\"><td[^>]*><p>(\d+)</p>(.*?)</tr>", text("syllabus.html"))
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) > 90
    for number, row in rows:
        links = re.findall(r'(?s)<a [^>]*href="([^"]+)"[^>]*>(.*?)</a>', row)
        assert links and all(target.startswith("notebooks/") for target, _ in links), f"topic {number}"
        names = [words for _, words in links]
        assert len(set(names)) == len(names), f"topic {number} has two links of one name"
    assert 'href="syllabus.html"' in text("index.html")


@each_notebook_page
def test_page_offers_its_notebook_and_its_neighbours(site, text, page_name):
    download = re.search(r'<a class="nb-download[^"]*" href="([^"]+)" download>', text(page_name))[1]
    stored = ((site / page_name).parent / download).read_bytes()
    assert stored == (ROOT / "notebooks" / f"{Path(page_name).stem}.ipynb").read_bytes()
    index = PAGES.index(page_name)
    previous = re.search(r'<a class="prev-page" href="([^"]+)"', text(page_name))[1]
    assert ((site / page_name).parent / previous).resolve() == site / PAGES[index - 1]
    following = re.search(r'<a class="next-page" href="([^"]+)"', text(page_name))
    if index + 1 < len(PAGES):
        assert ((site / page_name).parent / following[1]).resolve() == site / PAGES[index + 1]
    else:
        assert ((site / page_name).parent / following[1]).resolve() == site / TO_LOOK_UP[0]


@each_page
def test_formulas_are_drawn(text, page_name):
    assert "katex-error" not in text(page_name)
    if shutil.which("node"):
        assert "katex.min.js" not in text(page_name)


@each_page
def test_boxes_that_scroll_take_the_focus_of_the_keyboard(text, page_name):
    """axe looks at few of the boxes of code, which are all alike."""
    article = re.search(r"(?s)<article.*</article>", text(page_name))[0]
    own = re.sub(r'(?s)<div class="rankcell-run">.*?</div>', "", article)  # these wrap their lines
    boxes = re.findall(r"<pre\b[^>]*>", own)
    assert [box for box in boxes if 'tabindex="0"' not in box and "white-space:pre-wrap" not in box] == []


@pytest.fixture(scope="module")
def other(site):
    """The site built without node, with an address and a repository."""
    given = {"COURSE_ADDRESS": "https://course.example/x/", "COURSE_REPOSITORY": "https://git.example/course"}
    return build(site.parent, "-D", "katex_prerender=0", name="without-node", **given)


def test_an_address_and_a_repository_appear_where_they_are_given(site, other):
    first, same = ((folder / "index.html").read_text("utf-8") for folder in (site, other))
    assert "git.example" not in first and "og:image" not in first and not (site / "sitemap.xml").exists()
    assert (
        "git clone https://git.example/course course" in same and 'href="https://git.example/course"' in same
    )
    assert '<meta property="og:image" content="https://course.example/x/_static/rank-cell.png">' in same
    addresses = re.findall(
        "<loc>https://course.example/x/([^<]+)</loc>", (other / "sitemap.xml").read_text("utf-8")
    )
    assert sorted(addresses) == sorted(ALL_PAGES)
    assert '<base href="https://course.example/x/">' in (other / "404.html").read_text("utf-8")
    lesson = (other / "notebooks" / f"{NOTEBOOKS[0]}.html").read_text("utf-8")
    assert "git clone https://git.example/course" in lesson


def test_site_builds_without_node(other):
    """The reader's browser then draws the formulas, with a script that the site holds itself."""
    folder = other
    scripts = re.findall(r'<script[^>]* src="([^"?]+)', (folder / "index.html").read_text("utf-8"))
    assert "_static/katex.min.js" in scripts
    assert all((folder / script).is_file() for script in scripts)


# In a browser


@pytest.fixture(scope="module")
def browser():
    """Chromium, driven from this process."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(browser, site):
    """Open a page of the site from file://; `.requests` has what it asked for, `.errors` its complaints."""

    def failed(request):
        if request.failure != "net::ERR_ABORTED":  # what the next page cuts short is no fault of this one
            request.frame.page.errors.append(f"failed: {request.url}, {request.failure}")

    def open_page(name, viewport=PHONE, colours="light", scripts=True):
        context = browser.new_context(viewport=viewport, color_scheme=colours, java_script_enabled=scripts)
        page = context.new_page()
        page.requests, page.errors = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("requestfailed", failed)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        page.goto((site / name).as_uri())
        return page

    return open_page


@pytest.fixture(scope="module", params=ALL_PAGES)
def name(request):
    """Each page in turn: all tests of one page run before those of the next, so that it is opened once."""
    return request.param


@pytest.fixture(scope="module")
def notebook_page(name):
    if name not in PAGES[1:]:
        pytest.skip("no notebook")
    return name


@pytest.fixture(scope="module")
def opened(open_page, name):
    """The page as it is opened in one way, the same for all its tests: `opened(scripts=False)`."""
    pages = {}

    def opened(**ways):
        key = tuple(sorted((way, str(value)) for way, value in ways.items()))
        if key not in pages:
            pages[key] = open_page(name, **ways)
        return pages[key]

    yield opened
    for page in pages.values():
        page.context.close()


def set_folds(page, *, opened):
    page.evaluate(
        f"document.querySelectorAll('article details').forEach((f) => (f.open = {str(opened).lower()}))"
    )


@pytest.mark.alike(2)
def test_page_asks_no_other_host_and_reports_no_error(opened):
    assert_on_its_own(opened())


def assert_on_its_own(page):
    # pictures may load when they come into view
    page.evaluate("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    page.wait_for_load_state("networkidle")
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.errors == []


def test_a_foreign_request_would_be_seen(open_page):
    """The test above can fail."""
    page = open_page("index.html")
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://localhost:9/x.png'}))")
    with pytest.raises(AssertionError, match="localhost:9"):
        assert_on_its_own(page)
    page.context.close()


# Boxes of code are most of a page's elements and have a few colours: one box is enough for those it shows. Where
# colours are asked for, that holds for paragraphs, too.
COLOURS = ["color-contrast", "link-in-text-block"]
CODE = ".highlight, code, .signature"
TEXT = f"{CODE}, p, li, td, th, pre, summary, figcaption"
MARK_BOXES_WITHOUT_A_NEW_COLOUR = """(boxes) => {
    document.querySelectorAll("[data-nothing-new]").forEach((box) => delete box.dataset.nothingNew);
    const once = (f, known = new Map()) => (element) => {
        if (!known.has(element)) known.set(element, f(element));
        return known.get(element);
    };
    const ground = once((element) => {
        const colour = getComputedStyle(element).backgroundColor;
        return /, 0\\)$/.test(colour) && element.parentElement ? ground(element.parentElement) : colour;
    });
    const look = once((element) => {
        const style = getComputedStyle(element);
        return [style.color, style.opacity, style.fontSize, style.fontWeight, ground(element)].join();
    });
    const [seen, first] = [new Set(), new Set()];  // looks, and the first texts that have them
    const says = (element) => [...element.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
    const all = [...document.querySelectorAll(boxes)];
    for (const element of new Set(all.flatMap((box) => [box, ...box.querySelectorAll("*")]))) {
        if (!says(element) || seen.has(look(element))) continue;
        seen.add(look(element));
        first.add(element);
    }
    const nothingNew = all.filter((box) => ![box, ...box.querySelectorAll("*")].some((e) => first.has(e)));
    nothingNew.forEach((box) => (box.dataset.nothingNew = ""));  // at the end: it would make styles be computed anew
}"""


def serious(page, *, colours, without=(), sidebars=False):
    """What axe holds against a page's colours, or against all else, with all folds open: without some parts, or only in
    the sidebars.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    set_folds(page, opened=True)
    # folds open with an animation, during which contrast is low
    page.evaluate("document.getAnimations().forEach((animation) => animation.finish())")
    page.evaluate(MARK_BOXES_WITHOUT_A_NEW_COLOUR, TEXT if colours else CODE)
    # axe skips text that is scrolled out of its box; what is excluded need not be laid out where only colours count
    hidden = "[data-nothing-new] { display: none !important }" if colours else ""
    wrapped = page.add_style_tag(content=f".highlight pre {{ white-space: pre-wrap !important }} {hidden}")
    exclude = [["[data-nothing-new]"], *([part] for part in without)]
    options = {"resultTypes": ["violations"]}
    options |= {"runOnly": COLOURS} if colours else {"rules": {rule: {"enabled": False} for rule in COLOURS}}
    context = {"exclude": exclude} | ({"include": [["aside"]]} if sidebars else {})
    violations = axe.run(page, context=context, options=options).response["violations"]
    wrapped.evaluate("(style) => style.remove()")
    return [
        f"{violation['id']}: {node['html'][:200]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_a_pale_colour_of_code_would_be_seen(open_page):
    """The boxes that axe does not look at have nothing to show that the others have not."""
    page = open_page(PAGES[1])
    words = page.locator(".cell_input .highlight span").filter(has_text=re.compile(r"\w"))
    words.last.evaluate("(word) => (word.style.color = '#ccc')")
    (found,) = serious(page, colours=True)
    assert found.startswith("color-contrast: ")
    page.context.close()


@pytest.mark.alike(7)
def test_axe_finds_nothing_serious(opened, name):
    """In both colours, on a phone and on a desktop. What is the same for axe in two of the four is looked at once:
    only rules about colours depend on them, and a desktop shows the same article beside two sidebars. The modules of
    the reference are made alike: the first two of each group stand for the others.
    """
    page = opened()
    try:
        alike = ["section > section:nth-of-type(n+3)"] if name == "reference.html" else []
        found = serious(page, colours=False, without=alike)
        found += serious(page, colours=True, without=alike)
        page.emulate_media(color_scheme="dark")
        found += serious(page, colours=True, without=alike)
        page.set_viewport_size(DESKTOP)
        found += serious(page, colours=True, sidebars=True)
        page.emulate_media(color_scheme="light")
        found += serious(page, colours=True, sidebars=True)
        found += serious(page, colours=False, sidebars=True)
    finally:
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(PHONE)
    assert found == []


def test_a_pale_colour_in_the_dark_and_in_a_sidebar_would_be_seen(open_page):
    """The partial looks above see what they are for."""
    page = open_page("404.html", colours="dark", viewport=DESKTOP)
    page.locator(".sidebar-tree a").first.evaluate("(link) => (link.style.color = '#444')")
    page.locator("article p").first.evaluate("(p) => (p.style.color = '#444')")
    sidebar = serious(page, colours=True, sidebars=True)
    assert len(sidebar) == 1 and "reference internal" in sidebar[0]
    assert len(serious(page, colours=True)) == 2
    page.context.close()


# What is wider than the box around it, and by how many px, among the elements that match.
OVERFLOW = """(selector) => [...document.querySelectorAll(selector)]
    .map((e) => Math.round(e.scrollWidth - e.closest(".output, pre").clientWidth)).filter((px) => px > 0)"""


@pytest.mark.alike(3)
def test_page_fits_every_width(opened):
    page = opened()
    set_folds(page, opened=True)
    for width in (380, 600, 800, 1024, 1280, 1400, 1700):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOW, ".output.traceback pre") == []
        if width >= 800:  # on a phone a table of many numbers scrolls in its box
            assert page.evaluate(OVERFLOW, "table.dataframe") == []
    page.set_viewport_size(PHONE)


def test_code_reads_alike_in_and_outside_of_folds(opened, notebook_page):
    page = opened()
    set_folds(page, opened=True)
    sizes = """[...document.querySelectorAll(".cell_input pre")].map((e) => getComputedStyle(e).fontSize)"""
    assert len(set(page.evaluate(sizes))) == 1


def test_the_longest_line_of_code_fits_a_large_screen(open_page):
    page = open_page(PAGES[1], viewport={"width": 1920, "height": 1000})
    box = page.locator(".cell_input pre").first
    box.evaluate("(box) => (box.textContent = 'x'.repeat(110))")  # as many characters as ruff allows
    assert box.evaluate("(box) => box.scrollWidth <= box.clientWidth")
    page.context.close()


def test_figures_are_visible_on_a_phone(opened, notebook_page):
    page = opened()
    set_folds(page, opened=True)
    figures = page.evaluate(
        """() => [...document.querySelectorAll("article img")].map((image) => {
            const box = image.getBoundingClientRect();
            const {left, right, width} = box;
            return {alt: image.alt, pixels: image.naturalWidth, left, right, width};
        })"""
    )
    for figure in figures:
        assert figure["pixels"] > 0, figure
        assert figure["width"] > 40, figure
        assert figure["left"] >= 0 and figure["right"] <= PHONE["width"], figure
        assert figure["alt"].strip(), figure


@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_figures_are_visible_without_scripts(open_page, example):
    """The still pictures: on paper, on GitHub, and where scripts are off."""
    page = open_page(f"notebooks/{example}", scripts=False)
    folded = "details:not([open]) figure"  # the reader's click opens them, without a script too
    images = page.locator(f"article figure.rankcell:not({folded}) > img")
    widths = images.evaluate_all("(images) => images.map((image) => image.getBoundingClientRect().width)")
    assert len(widths) == page.locator(f"article figure.rankcell:not({folded})").count() > 0
    assert min(widths) > 40
    page.context.close()


def test_every_slider_changes_its_picture(opened, notebook_page):
    page = opened()
    set_folds(page, opened=True)
    for figure in page.locator("article figure.rankcell:has(script)").all():
        slider, picture = figure.locator("input[type=range]"), figure.locator("img")
        before = picture.get_attribute("src")
        slider.press("ArrowRight" if slider.input_value() != slider.get_attribute("max") else "ArrowLeft")
        assert picture.get_attribute("src") != before


@each_notebook_page
def test_solutions_are_folded(text, page_name):
    notebook = nbformat.read(ROOT / "notebooks" / f"{Path(page_name).stem}.ipynb", as_version=4)
    solutions = sum("solution" in cell.metadata.get("tags", []) for cell in notebook.cells)
    folds = re.findall(
        r"<details([^>]*)>\s*<summary[^>]*>(?:\s*<[^>]*>)*\s*Show the solution", text(page_name)
    )
    assert len(folds) == solutions
    assert not any(" open" in attributes for attributes in folds)


def test_printing_opens_the_folds(opened, notebook_page):
    page = opened()
    set_folds(page, opened=False)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("article details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("article details[open]").count() == 0


# Search


@pytest.fixture(scope="module")
def search(open_page):
    page = open_page("search.html")
    yield page
    page.context.close()


def ranked(page, query):
    """The sections found, best first: page and heading."""
    found = page.evaluate("(query) => courseSearch.rank(query, COURSE_SECTIONS)", query)
    return [(result["page"].removeprefix("notebooks/"), result["heading"]) for result in found]


def test_the_title_of_a_lesson_finds_it_first(search, text):
    for stem in NOTEBOOKS:
        title = re.search(r"<h1>\d+ ([^<]+)<", text(f"notebooks/{stem}.html"))[1]
        assert ranked(search, title)[0][0] == stem, title


def test_title_then_heading_then_topics_then_text(search):
    for query in ("all-reduce", "All reduce", "all_reduce"):
        assert ranked(search, query)[0] == ("04_collectives", "All to all")
    found = ranked(search, "buckets")
    assert found[0] == ("08_ddp", "Buckets")  # a heading, before lessons that only use the word
    assert ("05_bandwidth", "In buckets") in found[:3] and len(found) > 5
    assert ranked(search, "roofline")[0][0] == "02_hardware"
    assert ranked(search, "xylophone zebra") == []


def test_the_order_of_search_is_that_of_its_rules(search):
    """On rows made for it: each row has the words in one place only."""
    rows = [
        ["notebooks/x", "a", "Other", "Other", [], "here stands a zebra, zebra, zebra"],
        ["notebooks/x", "b", "Other", "B", ["What a zebra is"], ""],
        ["notebooks/x", "c", "Other", "C", ["Zebra, and more"], ""],
        ["notebooks/x", "d", "Other", "On a zebra", [], ""],
        ["notebooks/y", "e", "The zebra", "The zebra", [], ""],
        ["notebooks/z", "f", "Other", "F", [], "no animal"],
    ]
    found = search.evaluate("(rows) => courseSearch.rank('zebras', rows).map((r) => r.id)", rows)
    assert found == ["e", "d", "c", "b", "a"]


def test_a_word_in_the_sidebar_finds_sections_from_a_file(search, site):
    """As a reader does it: typed, entered, with a snippet of the text and a link that leads there."""
    search.goto((site / "index.html").as_uri())
    search.set_viewport_size(DESKTOP)
    search.locator(".sidebar-search").fill("all-reduce")
    search.locator(".sidebar-search").press("Enter")
    first = search.locator("#search-results li").first
    first.wait_for()
    assert first.locator("a").get_attribute("href") == "notebooks/04_collectives.html#all-to-all"
    assert first.locator("mark").inner_text().lower() == "all-reduce"
    search.locator(".search-again input").fill("online softmax")
    search.get_by_role("link", name="12 Sequence parallel").first.wait_for()
    search.locator("#search-results li a").first.click()
    search.wait_for_url("**/12_sequence_parallel.html*")
    assert search.errors == []
    search.goto((site / "search.html").as_uri())


# Explorers


@pytest.fixture(scope="module")
def explorers(open_page):
    page = open_page("explorers.html")
    yield page
    page.context.close()


def test_the_explorer_of_schedules_computes_as_the_library(explorers):
    cases = itertools.product(schedules.SCHEDULES, (1, 2, 4, 7), (1, 3, 8, 12), (1, 2, 3), (1.0, 2.5))
    asked, expected = [], []
    for name, ranks, microbatches, chunks, backward in cases:
        v = chunks if name == "interleaved" else 1
        plan = schedules.SCHEDULES[name](ranks, microbatches, *([v] if name == "interleaved" else []))
        events = schedules.predict(plan, forward=1 / v, backward=backward / v)
        asked.append([name, ranks, microbatches, chunks, backward])
        expected.append(
            [schedules.length(events), schedules.idle_share(events), max(schedules.peak_in_flight(plan)) / v]
        )
    shown = explorers.evaluate(
        """(cases) => cases.map(([name, ranks, microbatches, chunks, backward]) => {
            const s = courseExplorers.schedule({name, ranks, microbatches, chunks, backward});
            return [s.end, s.idle, s.peak];
        })""",
        asked,
    )
    for case, one, other in zip(asked, shown, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9), case


def test_the_explorers_of_all_reduces_and_memory_compute_as_the_library(explorers):
    link = costs.Link(30e-6, 1e-10)
    for n, size in itertools.product((2, 8, 1024), (256, 2**20, 2**30)):
        ours = {"ring": costs.ring_all_reduce(size, n, link), "tree": costs.tree_all_reduce(size, n, link)}
        for name, seconds in ours.items():
            shown = explorers.evaluate(f"courseExplorers.RINGS['{name}']({size}, {n}, 30e-6, 1e-10)")
            assert shown == pytest.approx(seconds)
    for stage, dp in itertools.product(range(4), (1, 64)):
        chosen = {"billions": 7.5, "stage": stage, "dp": dp, "tp": 1, "pp": 1, "layers": 32}
        chosen |= {"hidden": 4096, "sequence": 2048, "batch": 2, "again": False}
        held = explorers.evaluate("(chosen) => courseExplorers.memory(chosen)", chosen)
        states = held["parameters"] + held["gradients"] + held["optimizer"]
        assert states == pytest.approx(zero_states(7.5e9, dp, stage))
        assert held["activations"] == 34 * 2048 * 2 * 4096 * 32  # Korthikanti et al., table 2


def test_every_control_of_an_explorer_changes_it_by_keyboard(explorers):
    schedule = explorers.locator("[data-explorer=schedule] select")
    schedule.select_option("interleaved")  # where chunks count, too
    for panel in explorers.locator(".explorer").all():
        for control in panel.locator("input").all():
            name = control.get_attribute("id")
            assert panel.locator(f"label[for={name}]").count() == 1
            before = panel.inner_html()
            control.press("ArrowLeft")
            if panel.inner_html() == before:  # it was the first choice
                control.press("ArrowRight")
            assert panel.inner_html() != before
        says = panel.locator("p[role=status]").inner_text()
        assert panel.locator("svg[role=img]").get_attribute("aria-label") == says


def test_the_panels_of_the_lessons_are_explorers(open_page):
    """In the place of each panel of widgets, which is dead without a kernel: an explorer, or the planner's own."""
    for name in NOTEBOOKS:
        notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
        panels = sum(
            "application/vnd.jupyter.widget-view+json" in output.get("data", {})
            for cell in notebook["cells"]
            for output in cell.get("outputs", [])
        )
        if panels:
            page = open_page(f"notebooks/{name}.html")
            assert page.locator(".explorer svg, .planner .planner-verdict").count() == panels
            page.context.close()


# Slides


def test_a_deck_shows_its_slides(browser, tmp_path):
    """From file://, one after the other by keyboard, with formulas and sliders that work."""
    handout.slides(tmp_path, [ROOT / "notebooks" / "04_collectives.ipynb"])
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "04_collectives.html").as_uri())
    page.wait_for_function("Reveal.isReady()")
    title = page.locator("section.present h1").bounding_box()
    assert 0 < title["y"] < 300 and title["width"] > 100
    page.keyboard.press("ArrowRight")
    heading = page.locator("section.present h2").first
    heading.wait_for()
    assert 0 < heading.bounding_box()["y"] < 300
    assert page.locator(".katex").count() > 10
    seen = page.evaluate(
        """() => Reveal.getSlides().map((slide) => {
            const {h, v} = Reveal.getIndices(slide);
            Reveal.slide(h, v);
            const {width, height} = slide.getBoundingClientRect();
            return width > 600 && height > 300 && slide.innerText.trim().length > 0;
        })"""
    )
    assert len(seen) > 30 and all(seen)
    assert errors == [] and [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    page.close()


# Small things


def test_a_figure_has_its_number_and_grows_on_a_click(open_page):
    page = open_page("notebooks/04_collectives.html", viewport=DESKTOP)
    numbers = page.locator("article figcaption.number b").all_inner_texts()
    assert numbers == [f"Figure 4.{k}." for k in range(1, len(numbers) + 1)] and len(numbers) > 5
    assert page.locator("article figure.rankcell").count() == len(numbers)
    button = page.get_by_role("button", name="Enlarge Figure 4.2.")
    button.press("Enter")
    dialog = page.get_by_role("dialog")
    assert dialog.locator("img").get_attribute("alt") == page.locator("#figure-2 img").get_attribute("alt")
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.context.close()


def test_a_lesson_that_was_opened_keeps_a_mark(open_page, site):
    page = open_page(PAGES[1])
    page.goto((site / "index.html").as_uri())
    marked = page.locator(".lesson-cards .visited")
    assert marked.count() == 1 and "opened before" in marked.text_content()
    assert "✓" in page.locator(f".sidebar-tree a[href*='{NOTEBOOKS[0]}']").text_content()
    page.context.close()


def test_code_that_only_draws_is_folded(text):
    """And code that checks or defines something is not."""
    page = text("notebooks/05_bandwidth.html")
    folds = re.findall(
        r"(?s)<details[^>]*>\s*<summary[^>]*>(?:\s*<[^>]*>)*\s*Show the code of the picture.*?</details>",
        page,
    )
    assert folds
    assert not any("check." in html.unescape(re.sub("<[^>]+>", "", fold)) for fold in folds)


def test_long_checks_are_folded_and_their_verdicts_are_not(text):
    page = text("notebooks/05_bandwidth.html")
    folds = re.findall(r"(?s)<details[^>]*>(?:(?!</details>).)*Show the code of the check.*?</details>", page)
    assert len(folds) > 5
    assert all("check." in html.unescape(re.sub("<[^>]+>", "", fold)) for fold in folds)
    assert not any("✓" in fold for fold in folds)


def test_dark_mode_is_dark_and_its_figures_do_not_glare(open_page):
    background = r"getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3).map(Number)"
    shine = "getComputedStyle(document.querySelector('figure.rankcell img')).filter"
    dark, light = open_page("index.html", colours="dark"), open_page("index.html", colours="light")
    assert max(dark.evaluate(background)) < 60 and dark.evaluate(shine) == "brightness(0.86)"
    assert min(light.evaluate(background)) > 240 and light.evaluate(shine) == "none"


# A slider as the library draws it today; those of the pages are as old as the notebooks' outputs.


@pytest.fixture
def slider(browser, tmp_path):
    """A page with one slider over three pictures, their labels of different length; the second is still."""
    figures = tuple(svg.drawing(300, 60, svg.label(10, 40, n), alt=f"picture {n}") for n in "123")
    frames = svg.Frames(figures, ("before", "who sends what to whom", "after"), still=1)
    (tmp_path / "slider.html").write_text(f"<!doctype html><body>{frames._repr_html_()}</body>", "utf-8")
    page = browser.new_page(viewport=PHONE)
    page.goto((tmp_path / "slider.html").as_uri())
    yield page
    page.close()


def test_a_slider_opens_on_the_first_picture_and_steps_on(slider):
    shown, control = slider.locator("img"), slider.get_by_role("slider")
    assert shown.get_attribute("alt") == "picture 1"
    control.press("ArrowRight")
    assert shown.get_attribute("alt") == "picture 2"
    assert control.get_attribute("aria-valuetext") == "who sends what to whom"
    slider.get_by_role("button", name="next step").click()
    slider.get_by_role("button", name="next step").click()  # past the end
    assert shown.get_attribute("alt") == "picture 3"
    slider.get_by_role("button", name="previous step").click()
    assert slider.locator("output").inner_text() == "who sends what to whom"


def test_a_slider_on_paper_shows_the_still_picture(slider):
    shown = slider.locator("img")
    slider.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.get_attribute("alt") == "picture 2"
    slider.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shown.get_attribute("alt") == "picture 1"


def test_nothing_of_a_slider_moves_under_the_pointer(slider):
    controls = slider.locator("input, button")
    boxes = []
    for _ in range(3):
        boxes.append([control.bounding_box() for control in controls.all()])
        slider.get_by_role("slider").press("ArrowRight")
    assert boxes[0] == boxes[1] == boxes[2]


# The planner's panel: what it computes is compared with Python in test_panel.py.


def test_the_planner_works_without_a_kernel(open_page, text):
    name = "notebooks/18_planner.html"
    assert "embed.js" not in text(name) and len(gzip.compress(text(name).encode())) < 150_000
    page = open_page(name, viewport=DESKTOP)
    panel = page.locator("div.planner")
    verdict = panel.locator(".planner-verdict")
    assert "tokens/s/GPU" in verdict.inner_text() and panel.locator("tbody tr").count() == 5
    panel.get_by_label("number of GPUs").select_option("16")
    assert "Rejected: it needs" in verdict.inner_text()
    panel.get_by_label("number of GPUs").select_option("256")
    panel.get_by_role("button").first.click()  # the best layout is taken
    best = panel.locator("tbody tr td").first.inner_text()
    assert verdict.inner_text().startswith(best + ".")
    assert panel.locator(".planner-strip b").count() >= 1  # the limit of the memory
    assert page.errors == []
    page.context.close()


def test_jupyterlab_leaves_a_slider_its_keys(slider):
    """Else the arrows move the notebook's selection: Lumino looks for this on what has the focus."""
    for control in slider.locator("input, button").all():
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
