"""What the pages of the site are made from: words, failures, corrections, docstrings. No browser, no build."""

import importlib
import inspect
import re
import tomllib

import pytest
import torch.distributed as dist

from rankcell import costs, source
from rankcell.draw.svg import Frames, drawing

pytest.importorskip("myst_parser", reason="the site's packages are not installed here")
import cheatsheet
import course
import finishing
import landing
import pages
import reference

STEMS = [lesson["notebook"] for lesson in course.written()]


@pytest.mark.parametrize("row", cheatsheet.COLLECTIVES, ids=lambda row: row.name)
def test_a_collective_of_the_sheet_is_that_of_the_library(row):
    formula = row.sent.replace("−", "-").replace("²", "**2").replace("2(n", "2*(n")
    for n in (2, 4, 64):
        assert eval(formula, {"n": n}) == pytest.approx(costs.bytes_sent(row.op, 1.0, n))
    assert hasattr(dist, row.call.partition("(")[0]) and row.op in row.call
    assert {r.name: r for r in cheatsheet.COLLECTIVES}[row.backward].backward == row.name


def test_every_stored_failure_is_explained_and_shown():
    made, kinds = pages.failures(), course.table("failures")["failure"]
    for stem in STEMS:
        for cell in course.cells(stem):
            if error := course.error_of(cell):
                assert pages.kind_of(*error, kinds)["title"] in made
    shown = re.findall(r'<pre class="failure">(\w+): ', made)
    assert len(shown) >= len(kinds) and {"Deadlock", "RankMismatch", "RankError", "CheckFailed"} <= set(shown)
    with pytest.raises(ValueError, match="no entry for NewError: it broke"):
        pages.kind_of("NewError", "it broke\nagain", kinds)


def test_the_landing_page_has_every_lesson_once():
    made = landing.page(list(pages.PAGES), "")
    for lesson in course.LESSONS:
        assert made.count(f":::{{grid-item-card}} {course.number(lesson)} · {lesson['title']}\n") == 1
    assert "git clone" not in made
    assert "git clone https://git.example/x course" in landing.page([], "https://git.example/x")


@pytest.mark.parametrize("module", [m for group in reference.GROUPS.values() for m in group])
def test_the_reference_has_what_can_be_imported(module):
    made, short = reference.page(), module.rpartition(".")[2]
    imported = importlib.import_module(f"rankcell.{module}")
    assert reference.public(module)
    for node in reference.public(module):
        found = getattr(imported, node.name)
        assert inspect.getdoc(found), f"{module}.{node.name} has no docstring"
        head = f"class {short}.{node.name}" if inspect.isclass(found) else f"{short}.{node.name}("
        assert f"[`{head}" in made
    for name in getattr(imported, "__all__", ()):
        found = getattr(imported, name)
        assert not inspect.isfunction(found) or found.__module__ != imported.__name__ or f".{name}(" in made


def test_the_reference_has_every_picture():
    named = {m.removeprefix("draw.") for m in reference.GROUPS["Pictures"]}
    assert named == {p.stem for p in (course.ROOT / "lib" / "rankcell" / "draw").glob("[a-z]*.py")} - {
        "parts",
        "page",
    }


def test_the_options_of_the_reference_are_those_of_the_magic():
    assert [flags for flags, *_ in reference.options()] == [flags for flags, _ in source.OPTIONS]
    made = reference.page()
    for flags, how in source.OPTIONS:
        assert flags[0] in made and (how["help"] % ()).split(":")[0] in made
    assert "`--start START`" in made and "`--device DEVICE`" in made
    assert all(f"* `%ranks {word}`" in made for word in ("stop", "restart", "doctor"))


def test_links_start_a_lesson_of_a_repository_on_github():
    shown = landing.run_it("https://github.com/us/course.git", "05_bandwidth")
    links = re.findall(r'href="([^"]+)"', shown)
    assert len(links) == 4 and all("us/course" in link and ".git" not in link for link in links)
    assert sum(link.endswith("notebooks/05_bandwidth.ipynb") for link in links) == 3
    assert "None of these has been tried" in shown and "git clone https://github.com/us/course.git" in shown
    for elsewhere in ("", "https://example.org/us/course"):
        assert "href" not in landing.run_it(elsewhere, "05_bandwidth")


def test_binder_gets_a_python_that_the_course_takes():
    """Its own is 3.10, and in a folder `binder` it reads no pyproject.toml."""
    wanted = tomllib.loads((course.ROOT / "pyproject.toml").read_text("utf-8"))["project"]["requires-python"]
    given = (course.ROOT / "binder" / "runtime.txt").read_text("utf-8").strip()
    assert wanted == f">={given.removeprefix('python-')}"


def test_figures_get_captions_and_sliders_what_their_pictures_share():
    def slider(*alts):
        return Frames(tuple(drawing(10, 10, alt=alt) for alt in alts), ("1", "2"))

    still = drawing(10, 10, alt="It rises. Then it falls.")
    drawn = (still, slider("Ring. Step 1: a.", "Ring. Step 2: b."), slider("1 rank: fast.", "2 ranks: slow."))
    page = finishing.number_the_figures("".join(f._repr_html_() for f in drawn), 7)
    captions = re.findall(r'class="number"><b>(.*?)</b><span aria-hidden="true">(.*?)</span>', page)
    assert captions == [("Figure 7.1.", " It rises."), ("Figure 7.2.", " Ring."), ("Figure 7.3.", "")]
