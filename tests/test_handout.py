"""The decks and the PDFs: which cell begins a slide, what a deck loads, links on paper."""

import re
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import handout

LESSONS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))[1:]


def types(*cells):
    return handout.slide_types(handout.in_parts(new_notebook(cells=list(cells))))


def code(source="x = 1", *tags, output="1"):
    shown = [new_output("execute_result", {"text/plain": output})]
    return new_code_cell(source, metadata={"tags": list(tags)}, outputs=shown)


def test_headings_exercises_and_prose_after_code_begin_slides():
    cells = [
        new_markdown_cell("# 4 Collectives\n\nWhat?"),
        code("%load_ext rankcell"),
        new_markdown_cell("Words.\n\n## One to all\n\nMore words."),
        code(),
        new_markdown_cell("What it shows.\n\n### Deeper"),
        code(),
        new_markdown_cell("**Exercise 1 (build).** Do it.\n\n```\n# no heading\n```"),
        code("# Exercise 1: do it", "solution"),
        code("check.that(True, 'right')"),
        code("after = 1"),
        new_code_cell("check.that(True, 'folded')", metadata={"jupyter": {"source_hidden": True}}),
    ]
    assert types(*cells) == [
        *("slide", "skip", "subslide", "slide", "-"),
        *("subslide", "subslide", "-"),
        *("subslide", "skip", "skip", "-", "skip"),
    ]


def test_a_deck_loads_only_what_lies_beside_it(tmp_path):
    handout.slides(tmp_path, [path for path in LESSONS if path.stem[:2] == "03"])
    text = (tmp_path / "03_point_to_point.html").read_text("utf-8")
    loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)|<link[^>]* href="([^"]+)', text)
    files = [name for pair in loaded for name in pair if name and not name.startswith("data:")]
    assert len(files) >= 5 and all((tmp_path / name).is_file() for name in files), files
    assert not re.search(r"@import|cdnjs|unpkg", text)
    assert text.count("<section") > 10 and "Show the solution" not in text and "BEGIN SOLUTION" not in text
    assert 'href="04_collectives.html"' in text
    assert '<a href="03_point_to_point.html">' in (tmp_path / "index.html").read_text("utf-8")


@pytest.fixture
def site(tmp_path):
    """A site of three pages."""
    (tmp_path / "notebooks").mkdir()
    pages = {
        "index": '<a href="notebooks/a.html#x">a</a><img src="_images/p.svg"><a href="https://x.y/">out</a>',
        "notebooks/a": '<h2 id="x">A</h2><a href="#x">x</a><a href="../index.html">home</a><details>y</details>',
        "other": "not printed",
    }
    for name, body in pages.items():
        text = f'<head><title>{name}</title></head><body><article role="main">{body}</article></body>'
        (tmp_path / f"{name}.html").write_text(text, "utf-8")
    return tmp_path


def test_links_between_pages_hold_on_paper(site):
    made = handout.joined(site, ["index", "notebooks/a"])
    assert 'href="#notebooks-a--x"' in made and 'id="notebooks-a--x"' in made
    assert 'href="#index--"' in made and 'id="index--"' in made
    assert 'src="_images/p.svg"' in made and 'href="https://x.y/"' in made
    assert "<details open>" in made and "not printed" not in made
