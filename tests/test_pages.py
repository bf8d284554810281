"""What the pages of the site are made from: words, failures, corrections, minutes, docstrings. No browser, no build."""

import html
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch.distributed as dist

from rankcell import costs, source
from rankcell.draw.svg import Frames, drawing

pytest.importorskip("myst_parser", reason="the site's packages are not installed here")
import cheatsheet
import course
import finishing
import landing
import lessons
import pages
import reference

ROOT = Path(__file__).parent.parent
STEMS = [lesson["notebook"] for lesson in course.written()]


def markdown(stem):
    return [c for c in course.cells(stem) if c["cell_type"] == "markdown"]


# Glossary


@pytest.mark.parametrize("stem", STEMS)
def test_every_new_term_is_in_the_glossary(stem):
    lists = [
        pages.link_new_terms(c["source"])[1:] for c in markdown(stem) if pages.NEW_TERMS.search(c["source"])
    ]
    assert len(lists) == (0 if stem == "18_planner" else 1), (
        "a lesson has one list of new terms, the last one none"
    )
    assert all(found and left == "" for found, left in lists)


def test_a_term_without_an_entry_would_be_seen():
    _, found, left = pages.link_new_terms("New terms: rank, flux compensator and world size.")
    assert found == ["rank", "world size"] and left == "fluxcompensator"


def test_every_entry_is_taught_somewhere_and_stands_once():
    taught = pages.lessons_of_terms()
    names = [entry["term"] for entry in pages.terms()]
    assert len(set(names)) == len(names)
    for entry in pages.terms():
        assert entry["term"] in taught or "see" in entry, entry["term"]
        assert entry["means"].endswith(".") and len(entry["means"]) > 15
    anchors = [pages.anchor_of_term(name) for name in names]
    assert len(set(anchors)) == len(anchors)


def test_lessons_and_glossary_link_both_ways():
    made = pages.glossary()
    for stem in STEMS:
        linked = re.findall(
            r"glossary\.md#(term-[\w-]+)",
            "".join(pages.link_new_terms(c["source"])[0] for c in markdown(stem)),
        )
        assert linked or stem == "18_planner"
        for anchor in linked:
            entry = re.search(rf"{{#{anchor}}}.*\n(.*)", made)
            assert f"[{stem[:2]} " in entry[1], f"{anchor} does not lead to {stem}"


def test_a_term_leads_to_the_cell_that_explains_it():
    """Not to the list of new terms, nor to the first cell."""
    for entry in pages.terms():
        for stem in pages.lessons_of_terms().get(entry["term"], []):
            cell = course.cell(stem, pages.explained(stem, entry))
            assert cell is not course.cells(stem)[0]
    assert (
        pages.explained("03_point_to_point", {"term": "deadlock"}) != markdown("03_point_to_point")[-1]["id"]
    )


# Cheat sheet


@pytest.mark.parametrize("row", cheatsheet.COLLECTIVES, ids=lambda row: row.name)
def test_a_collective_of_the_sheet_is_that_of_the_library(row):
    formula = row.sent.replace("−", "-").replace("²", "**2").replace("2(n", "2*(n")
    for n in (2, 4, 64):
        assert eval(formula, {"n": n}) == pytest.approx(costs.bytes_sent(row.op, 1.0, n))
    assert hasattr(dist, row.call.partition("(")[0])
    assert re.escape(row.op) in row.call or row.op in row.call
    pair = {r.name: r for r in cheatsheet.COLLECTIVES}[row.backward]
    assert pair.backward == row.name


def test_the_pictures_of_the_sheet_are_what_the_collectives_do():
    """Played with sets: a part is where it came from."""
    n, rows = cheatsheet.N, {row.op: row for row in cheatsheet.COLLECTIVES}

    def column(cells):
        return "".join(cells)

    own = [[str(r)] * n for r in range(n)]
    expected = {
        "all_reduce": [["S"] * n for _ in range(n)],
        "reduce_scatter": [["S" if part == r else "." for part in range(n)] for r in range(n)],
        "all_gather": [[own[part][part] for part in range(n)] for _ in range(n)],
        "broadcast": [own[0] for _ in range(n)],
        "reduce": [["S" if r == 0 else "."] * n for r in range(n)],
        "scatter": [[own[0][part] if part == r else "." for part in range(n)] for r in range(n)],
        "gather": [[own[part][part] if r == 0 else "." for part in range(n)] for r in range(n)],
        "all_to_all": [[own[part][r] for part in range(n)] for r in range(n)],
    }
    assert {op: row.after for op, row in rows.items()} == {
        op: tuple(map(column, e)) for op, e in expected.items()
    }


def test_the_strategies_name_lessons():
    assert {s.lesson for s in cheatsheet.STRATEGIES} <= set(STEMS)


# Failures and corrections


def test_every_stored_failure_is_explained_and_shown():
    made, kinds = pages.failures(), course.table("failures")["failure"]
    for stem in STEMS:
        for cell in course.cells(stem):
            error = course.error_of(cell)
            if error:
                assert pages.kind_of(*error, kinds)["title"] in made
    shown = re.findall(r'<pre class="failure">(\w+): ', made)
    assert len(shown) >= len(kinds) and {"Deadlock", "RankMismatch", "RankError", "CheckFailed"} <= set(shown)


def test_a_failure_that_nobody_has_explained_is_noticed():
    with pytest.raises(ValueError, match="no entry for NewError: it broke"):
        pages.kind_of("NewError", "it broke\nagain", course.table("failures")["failure"])


def test_every_correction_leads_to_its_cell():
    for entry in course.table("corrections")["correction"]:
        assert course.cell(*entry["shown"])["source"]
        assert entry["right"].endswith(".") and entry["said"]
    with pytest.raises(ValueError, match="no cell nowhere"):
        course.cell("08_ddp", "nowhere")


# Lessons


def test_the_site_finds_the_minutes_and_the_exercises_of_every_lesson():
    made = pages.instructor()
    for stem in STEMS:
        took, n = course.minutes(stem), course.exercises(stem)
        assert took.all == took.read + took.run + took.do and n >= 4
        assert f"| {took.read} | {took.run} | {took.do} | {n} | {took.all} |" in made
        slips = pages.slips(stem)
        assert len(slips) >= n / 2 and all(answer in html.unescape(made) for *_, answer in slips)


def test_a_cell_gets_its_target_where_html_does_not_swallow_it():
    assert lessons.with_target("Words.", "cell-1") == "(cell-1)=\nWords."
    fold = "<details><summary>A</summary>\n\ntext\n\n</details>\n\n"
    assert lessons.with_target(f"{fold}Words.", "cell-1") == f"{fold}(cell-1)=\nWords."


def test_only_code_that_draws_is_folded():
    figure = {
        "outputs": [{"output_type": "execute_result", "data": {"text/html": '<figure class="rankcell">'}}]
    }
    long = "charts.lines(\n    a,\n    b,\n    c,\n    d,\n    e,\n    f,\n)"
    assert lessons.only_draws(figure, long)
    assert not lessons.only_draws({"outputs": []}, long)
    for other in (
        "%%ranks 4\n" + long,
        "def f():\n    pass\n\n" + long,
        long + "\ncheck.that(a, 'b')",
        "charts.lines(a)",
    ):
        assert not lessons.only_draws(figure, other)


def test_a_panel_without_an_explorer_is_noticed():
    cell = {"metadata": {}, "outputs": [{"output_type": "display_data", "data": {lessons.WIDGET: {}}}]}
    with pytest.raises(ValueError, match="unpack"):
        lessons._explore(cell, "panel(something_new, choices)")


def test_cells_that_are_not_on_the_page_are_noticed():
    with pytest.raises(ValueError, match="code cells, and its page 1"):
        finishing.name_the_cells('<div class="cell docutils container">', STEMS[0])


def test_the_landing_page_has_every_lesson_once():
    made = landing.page(list(pages.PAGES), "")
    for lesson in course.LESSONS:
        assert made.count(f":::{{grid-item-card}} {course.number(lesson)} · {lesson['title']}\n") == 1
    assert "git clone" not in made
    assert "git clone https://git.example/x course" in landing.page(
        list(pages.PAGES), "https://git.example/x"
    )


# Reference


@pytest.mark.parametrize("module", [m for group in reference.GROUPS.values() for m in group])
def test_the_reference_has_what_can_be_imported(module):
    made = reference.page()
    imported = importlib.import_module(f"rankcell.{module}")
    assert reference.public(module)
    for node in reference.public(module):
        found = getattr(imported, node.name)
        assert inspect.getdoc(found), f"{module}.{node.name} has no docstring"
        words = (
            f"class {module.rpartition('.')[2]}.{node.name}"
            if inspect.isclass(found)
            else f"{module.rpartition('.')[2]}.{node.name}("
        )
        assert f"[`{words}" in made
    for name in getattr(imported, "__all__", ()):
        if (
            inspect.isfunction(getattr(imported, name))
            and getattr(imported, name).__module__ == imported.__name__
        ):
            assert f".{name}(" in made


def test_the_options_of_the_reference_are_those_of_the_magic():
    assert [flags for flags, *_ in reference.options()] == [flags for flags, _ in source.OPTIONS]
    made = reference.page()
    for flags, how in source.OPTIONS:
        assert flags[0] in made
        assert (how["help"] % ()).split(":")[0] in made
    for word in ("stop", "restart", "export"):
        assert f"* `%ranks {word}`" in made


def test_docstrings_become_markdown():
    text = "One line with a_name and `code_here`.\n\n    f(x)  # example\n\n"
    text += "Args:\n    x: what it is,\n        in two lines.\n    y: another."
    text += "Args:\n    x: what it is,\n        in two lines.\n    y: another."
    made = "\n".join(reference.text_of(text))
    assert r"a\_name and `code_here`" in made
    assert "```python\nf(x)  # example\n```" in made
    assert "* `x`: what it is, in two lines.\n* `y`: another." in made


# Search and the map of the site


def test_sections_know_their_topics():
    topics = finishing.topics_of_sections()
    assert any("All-reduce" in topic for topic in topics["notebooks/04_collectives", "All to all"])


def test_the_map_of_the_site():
    made = finishing.sitemap("https://a.example/b/", ["index", "notebooks/x&y"])
    assert "<loc>https://a.example/b/index.html</loc>" in made and "x&amp;y.html" in made


def test_the_citation_is_of_this_package():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"version: {project['version']}" in citation and citation.startswith("cff-version: 1.2.0")


def test_figures_get_captions_and_sliders_what_all_their_pictures_are():
    still = drawing(10, 10, alt="It rises. Then it falls.")
    alike = Frames(
        (drawing(10, 10, alt="Ring. Step 1: a."), drawing(10, 10, alt="Ring. Step 2: b.")), ("1", "2")
    )
    other = Frames((drawing(10, 10, alt="1 rank: fast."), drawing(10, 10, alt="2 ranks: slow.")), ("1", "2"))
    page = finishing.number_the_figures("".join(f._repr_html_() for f in (still, alike, other)), 7)
    captions = re.findall(r'class="number"><b>(.*?)</b><span aria-hidden="true">(.*?)</span>', page)
    assert captions == [("Figure 7.1.", " It rises."), ("Figure 7.2.", " Ring."), ("Figure 7.3.", "")]
