"""The decks and the PDFs: which cell begins a slide, what a deck loads, links on paper."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import handout

ROOT = Path(__file__).parent.parent
STEMS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb") if path.stem != "00_start")


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
        new_markdown_cell("**Exercise 1 (build).** Do it."),
        code("# Exercise 1: do it", "solution"),
        code("check.that(True, 'right')"),
        code("after = 1"),
    ]
    assert types(*cells) == [
        *("slide", "skip", "subslide", "slide", "-"),
        *("subslide", "subslide", "-"),
        *("subslide", "skip", "skip", "-"),
    ]


def test_what_does_not_fit_goes_on_below():
    head, long = new_markdown_cell("## Head"), "\n".join(["x = 1"] * 20)
    assert types(head, code(), code(long), code(), code(long)) == ["slide", "skip", "-", "-", "subslide"]


def test_a_heading_inside_code_begins_nothing():
    fenced = new_markdown_cell("## Head\n\n```\n# a comment\n## another\n```")
    assert types(fenced) == ["slide"]


def test_widgets_are_left_out():
    cell = new_code_cell(
        "explore()", outputs=[new_output("display_data", {handout.WIDGET_VIEW: {"model_id": "x"}})]
    )
    assert handout.in_parts(new_notebook(cells=[cell]))[0].outputs == []


@pytest.mark.parametrize("stem", STEMS)
def test_slides_of_a_lesson_are_many_and_small(stem):
    """One slide was what nbconvert made of a lesson; a slide that scrolls is an exception."""
    cells = handout.in_parts(nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4))
    heights = []
    for cell, kind in zip(cells, handout.slide_types(cells), strict=True):
        if kind != "skip":
            heights += [0.0] if kind != "-" else []
            heights[-1] += handout.lines_of(cell)
    assert len(heights) >= 25
    assert sum(height > 1.5 * handout.ROOM for height in heights) <= len(heights) / 5


def test_a_deck_loads_only_what_lies_beside_it(tmp_path):
    path = ROOT / "notebooks" / "03_point_to_point.ipynb"
    handout.slides(tmp_path, [path])
    text = (tmp_path / "03_point_to_point.html").read_text("utf-8")
    loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)|<link[^>]* href="([^"]+)', text)
    files = [name for pair in loaded for name in pair if name and not name.startswith("data:")]
    assert len(files) >= 5
    assert all((tmp_path / name).is_file() for name in files), files
    styles = re.findall(r"url\(([^)]+)\)", (tmp_path / "assets" / "katex.min.css").read_text("utf-8"))
    assert all((tmp_path / "assets" / style).is_file() for style in styles if style.endswith("woff2"))
    assert not re.search(r"@import|cdnjs|unpkg", text)
    assert text.count("<section") > 30 and "Show the solution" not in text and "BEGIN SOLUTION" not in text
    assert 'href="04_collectives.html"' in text and '<a href="03_point_to_point.html">' in (
        tmp_path / "index.html"
    ).read_text("utf-8")


# Paper


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


def test_no_site_and_no_chromium_are_said(tmp_path, monkeypatch, capsys):
    assert handout.main(["pdf", str(tmp_path), str(tmp_path)]) == 1
    assert "run `make html` first" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(handout.HandoutError, match="apt-get install chromium"):
        handout.print_page(tmp_path / "x.html", tmp_path / "x.pdf")


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, handout.CHROMIUM)), reason="there is no Chromium here")
def test_a_page_is_printed(site):
    page = site / "index.html"
    handout.print_page(page, site / "x.pdf")
    assert (site / "x.pdf").read_bytes().startswith(b"%PDF")
