"""What is done to finished pages: small repairs, figures with numbers, the words for search, the map of the site."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes

import course
import landing
import panel

IMAGE = "rank-cell.png"  # the picture of a link that somebody shares
_FIGURE = re.compile(
    r'(?s)<figure class="rankcell"(?P<style>[^>]*)>(?P<img><img alt="(?P<alt>[^"]*)"[^>]*>)(?P<rest>.*?)</figure>'
)


def connect(app: Any, *, address: str, repository: str) -> None:
    """Let Sphinx call what stands below."""
    app.connect("builder-inited", _without_own_search)
    app.connect("doctree-read", _keep_sections)
    app.connect("env-purge-doc", lambda app, env, docname: _sections(env).pop(docname, None))
    app.connect("build-finished", lambda app, error: _finish(app, error, address))
    app.connect(
        "html-page-context",
        lambda app, name, template, context, tree: context.update(
            course_address=address, course_repository=repository, course_image=IMAGE
        ),
    )
    app.connect("html-page-context", _mend, priority=900)


def _without_own_search(app: Any) -> None:
    """Sphinx's index knows pages, not sections, and takes longer to build than the one below."""
    app.builder.search = False


# Each page


def _mend(app: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Small repairs of what the packages emit; axe found each of them (tests/test_site.py)."""
    body = context.get("body", "")
    body = body.replace(' aria-label="Toggle hidden content"', "")
    body = body.replace("<th></th>", "<td></td>")
    body = body.replace("<pre>", '<pre tabindex="0">')  # a box that scrolls must take the keyboard's focus
    body = body.replace('<pre class="failure">', '<pre class="failure" tabindex="0">')
    body = re.sub(
        r"""<div class=["']table-wrapper""",
        lambda found: f'<div tabindex="0" role="group" aria-label="table" {found[0][5:]}',
        body,
    )
    body = body.replace(
        '<div class="output text_html">',
        '<div class="output text_html" tabindex="0" role="group" aria-label="output">',
    )
    stem = name.removeprefix("notebooks/")
    if stem != name:
        body = name_the_cells(number_the_figures(body, int(stem[:2])), stem)
        body = body.replace(
            '<div id="cell-', f'{landing.run_it(context["course_repository"], stem)}<div id="cell-', 1
        )
        took = course.minutes(stem)
        context["course_minutes"] = f"{took.all} min"
    context["course_about"] = _about(name)
    # docutils says it once more, after the theme
    context["metatags"] = re.sub(r'<meta [^>]*name="viewport"[^>]*>', "", context.get("metatags", ""))
    context["body"] = _level(body)
    if '<div class="planner">' in body:  # the scripts of the panel, on its page only
        app.add_js_file(None, body=panel.script())
        app.add_js_file("planner.js", loading_method="defer")
    if 'class="explorer"' in body:
        app.add_js_file("explorers.js", defer="defer")
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = _level(context["furo_navigation_tree"])


def _level(fragment: str) -> str:
    """Furo's captions say role="heading" without a level, which screen readers need."""
    return fragment.replace('role="heading"', 'role="heading" aria-level="2"')


def _about(name: str) -> str:
    """A sentence about a page, for search engines and previews: a lesson's question."""
    for lesson in course.written():
        if name == f"notebooks/{lesson['notebook']}":
            return lesson["question"]
    return (
        "A course in notebooks on distributed training: cells that run on several real processes, and show "
        "what each of them sent and waited for."
    )


def number_the_figures(body: str, lesson: int) -> str:
    """Each figure gets its number, an id and a caption: the finding that its alt text states.

    Of a slider it is what the texts of all its pictures begin with.
    """
    count = 0

    def captioned(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        name = f"Figure {lesson}.{count}"
        frames = re.search(r'(?s)<script type="application/json">(.*?)</script>', match["rest"])
        if frames:
            titles = {alt.partition(". ")[0] for alt in json.loads(frames[1])["alts"]}
            finding = f" {escape(titles.pop())}." if len(titles) == 1 else ""
        else:
            finding = f" {course.first_sentence(match['alt'])}"
        return (
            f'<figure class="rankcell" id="figure-{count}"{match["style"]}>{match["img"]}{match["rest"]}'
            f'<figcaption class="number"><b>{name}.</b><span aria-hidden="true">{finding}</span></figcaption></figure>'
        )

    return _FIGURE.sub(captioned, body)


def name_the_cells(body: str, stem: str) -> str:
    """Every code cell gets an id of its own, so that other pages can link to it: MyST-NB gives them none."""
    ids = iter(c["id"] for c in course.cells(stem) if c["cell_type"] == "code" and c["source"].strip())

    def named(match: re.Match[str]) -> str:
        name = next(ids, None)
        return f'<div id="{course.anchor_of(stem, name)}" class="cell{match[1]}' if name else match[0]

    body, found = re.subn(r'<div class="cell( [^"]*docutils container)', named, body)
    expected = sum(c["cell_type"] == "code" and bool(c["source"].strip()) for c in course.cells(stem))
    if found != expected:
        raise ValueError(f"{stem} has {expected} code cells, and its page {found}")
    return body


# Search


def _sections(env: Any) -> dict[str, list[list[str]]]:
    """By page: id, heading and text of each section. It is kept with Sphinx's environment."""
    if not hasattr(env, "course_sections"):
        env.course_sections = {}
    return env.course_sections


def _keep_sections(app: Any, tree: nodes.document) -> None:
    _sections(app.env)[app.env.docname] = [
        [section["ids"][0], _title(section), _words(section)] for section in tree.findall(nodes.section)
    ]


def _title(section: nodes.section) -> str:
    title = section.next_node(nodes.title)
    return title.astext() if title is not None else ""


def _words(section: nodes.section) -> str:
    """The prose and the code of a section, without its subsections, formulas and outputs."""
    texts: list[str] = []

    def walk(node: nodes.Node) -> None:
        if isinstance(node, nodes.section | nodes.title | nodes.math | nodes.math_block | nodes.comment):
            return
        if isinstance(node, nodes.raw):
            texts.append(re.sub(r"<[^>]+>", " ", node.astext()))
        elif isinstance(node, nodes.container) and "cell_output" in node.get("classes", []):
            return
        elif isinstance(node, nodes.TextElement) and not any(
            isinstance(child, nodes.math) for child in node.children
        ):
            texts.append(node.astext())
        elif isinstance(node, nodes.Text):
            texts.append(node.astext())
        else:
            for child in node.children:
                walk(child)

    for child in section.children:
        walk(child)
    return " ".join(" ".join(texts).split())


def topics_of_sections() -> dict[tuple[str, str], list[str]]:
    """The topics that a section teaches, by page and heading: words by which it should be found."""
    found: dict[tuple[str, str], list[str]] = {}
    for topic in course.table("syllabus")["topic"]:
        for stem, place in topic["taught"]:
            heading = place if place.startswith("#") else course.section_of(stem, place)
            found.setdefault((f"notebooks/{stem}", heading.lstrip("# ")), []).append(topic["topic"])
    return found


def search_index(env: Any) -> list[list[Any]]:
    """A row per section, lessons first, in order: page, id, title of the page, heading, topics, text."""
    lessons = [f"notebooks/{lesson['notebook']}" for lesson in course.written()]
    others = sorted(set(_sections(env)) - {*lessons, "index", "syllabus"})
    topics, rows = topics_of_sections(), []
    for page in [*lessons, *others]:
        sections = _sections(env).get(page, [])
        for anchor, heading, text in sections:
            about = topics.get((page, heading.replace("`", "")), [])
            rows.append([page, anchor, sections[0][1], heading, about, text])
    return rows


# The whole site


def _finish(app: Any, error: Exception | None, address: str) -> None:
    """Name the sidebars; write the words for search as a script, because from file:// fetch() is refused."""
    if error or app.builder.name != "html":
        return
    out = Path(app.outdir)
    for docname in (*sorted(app.env.found_docs), *app.config.html_additional_pages):
        path = out / f"{docname}.html"
        page = path.read_text("utf-8")
        named = page.replace(
            '<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Course">'
        ).replace('<aside class="toc-drawer', '<aside aria-label="On this page" class="toc-drawer')
        if named != page:
            path.write_text(named, "utf-8")
    script = f"window.COURSE_SECTIONS={json.dumps(search_index(app.env), ensure_ascii=False)}"
    (out / "_static" / "search-index.js").write_text(script, "utf-8")
    if address:
        (out / "sitemap.xml").write_text(sitemap(address, sorted(app.env.found_docs)), "utf-8")


def sitemap(address: str, docnames: list[str]) -> str:
    """The addresses of all pages, for search engines."""
    base = address.rstrip("/")
    urls = "".join(f"<url><loc>{escape(f'{base}/{name}.html')}</loc></url>\n" for name in docnames)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n'
    )
