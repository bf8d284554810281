"""The lessons and what lists them: in order, executed, clean; every link, term, topic, paper and command is there.

What a lesson says is for its author: nothing here counts words, cells or minutes.
"""

import ast
import base64
import html
import re
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest

import notebooks
from rankcell.draw.parts import WIDTH, text_width
from rankcell.teaching import exercises

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LOADED = {path.stem: notebooks.read(path) for path in PATHS}


def table(name):
    """A table of the site, site/NAME.toml."""
    return tomllib.loads((ROOT / "site" / f"{name}.toml").read_text("utf-8"))


LESSONS = [lesson for part in table("lessons")["part"] for lesson in part["lesson"]]
README = (ROOT / "README.md").read_text("utf-8")
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "lib" / "README.md"]
TARGET = re.compile(r"\]\(([^)\s#]+)")
# What the course calls by another name, what an author leaves for later, and what only talks down to a reader.
FORBIDDEN = re.compile(
    r"\b(?i:worker ids?|n_procs|mesh dims?|trivially|obviously)\b|\b(?:TODO|FIXME|XXX|TBD)\b"
)

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def markdown(stem):
    """The text of every markdown cell, code fences left out."""
    cells = [cell for cell in LOADED[stem].cells if cell.cell_type == "markdown"]
    return [re.sub(r"(?ms)^```.*?^```", "", cell.source) for cell in cells]


# Each notebook


def test_lessons_are_the_notebooks_in_order():
    assert [lesson["notebook"] for lesson in LESSONS] == sorted({*LOADED} - {"00_start"})
    assert [lesson["notebook"][:3] for lesson in LESSONS] == [f"{n:02d}_" for n in range(1, len(LESSONS) + 1)]


@each_notebook
def test_title_is_number_and_name(path):
    names = {lesson["notebook"]: f"# {int(lesson['notebook'][:2])} {lesson['title']}" for lesson in LESSONS}
    titles = re.findall(r"^# .*$", "\n".join(markdown(path.stem)), re.MULTILINE)
    assert titles == [names.get(path.stem, "# Start here")]
    assert LOADED[path.stem].cells[0].source.startswith(titles[0])


@each_notebook
def test_outputs_are_those_of_the_code_and_of_no_machine(path):
    assert notebooks.why_stale(LOADED[path.stem]) == ""
    assert notebooks.machine_paths(LOADED[path.stem], notebooks.paths_of_this_machine()) == []


@each_notebook
def test_metadata_is_clean(path):
    again = notebooks.read(path)
    notebooks.clean(again)
    assert nbformat.writes(again) == nbformat.writes(LOADED[path.stem]), (
        f"run `make execute NB={path.relative_to(ROOT)}`"
    )


@each_notebook
def test_prose_has_its_backslashes_links_and_words(path):
    """`\\frac` and `\\text` written by a program without the second backslash begin with a form feed and a tab."""
    cells = LOADED[path.stem].cells
    assert [c.id for c in cells if any(ord(ch) < 32 and ch != "\n" for ch in c.source)] == []
    assert FORBIDDEN.findall(re.sub(r"`[^`\n]*`", "", "\n".join(markdown(path.stem)))) == []
    targets = [html.unescape(target) for text in markdown(path.stem) for target in TARGET.findall(text)]
    assert [t for t in targets if not re.match(r"[a-z]+:", t) and not (path.parent / t).exists()] == []


@each_notebook
def test_no_title_of_a_picture_is_cut_off(path):
    shown = "".join(text for _, text in notebooks.output_texts(LOADED[path.stem]))
    pictures = [base64.b64decode(code).decode() for code in re.findall(r"svg\+xml;base64,([^\"]+)", shown)]
    titles = re.findall(r'<text x="12.00"[^>]+"600">([^<]+)<', "".join(pictures))
    assert [title for title in map(html.unescape, titles) if 12 + text_width(title) > WIDTH] == []


@each_notebook
def test_a_rank_cell_uses_no_name_of_ranks_on_another_device(path):
    """Where there are GPUs, `--device cpu` and cells without it are two worlds, which share no names."""
    known = {}  # number of ranks, device -> names
    for cell in LOADED[path.stem].cells:
        first, _, body = cell.source.partition("\n")
        size = re.match(r"%%ranks (\d+)(?! of|\d)", first)
        if cell.cell_type != "code" or not size or re.search(r"--(nodes|fresh)\b", first):
            continue
        tree = list(ast.walk(ast.parse(body)))
        own = {n.id for n in tree if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.name for n in tree if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        own |= {n.arg for n in tree if isinstance(n, ast.arg)}
        own |= {(n.asname or n.name).partition(".")[0] for n in tree if isinstance(n, ast.alias)}
        own.update(*(names.split(",") for names in re.findall(r"--push (\S+)", first)))
        on_cpu = "--device cpu" in first
        mine = known.setdefault((size[1], on_cpu), set())
        others = known.get((size[1], not on_cpu), set()) - own - mine
        assert {n.id for n in tree if isinstance(n, ast.Name)} & others == set(), first
        mine |= own


# Exercises


@each_notebook
def test_exercises_have_a_number_a_task_and_a_check(path):
    cells = LOADED[path.stem].cells
    names = []
    for index, cell in enumerate(cells):
        if "solution" in exercises.tags(cell):
            text = exercises.exercise_text(cell)
            assert text, f"this solution lacks its comment `# Exercise N: ...`: `{cell.source[:60]}`"
            names.append(text.split(":")[0])
            above = "\n".join(c.source for c in cells[:index] if c.cell_type == "markdown")
            assert re.search(rf"\b{names[-1]}\b", above), f"no markdown cell above states {names[-1]}"
            assert exercises.checks_of(cells, index), f"no cell below checks {names[-1]}"
    assert {*names} == {f"Exercise {k + 1}" for k in range(len({*names}))}


@each_notebook
def test_student_copy_has_tasks_and_no_solution(path):
    ours = LOADED[path.stem]
    copy = notebooks.student_copy(ours, path.name)
    assert "rankcell" not in copy.metadata
    assert sum(cell.source.count("%load_ext rankcell.teaching\n") for cell in copy.cells) == 1
    for cell, theirs in zip(ours.cells, copy.cells, strict=True):
        assert not theirs.get("outputs") and not theirs.get("execution_count")
        assert '"../' not in theirs.source or cell.cell_type != "code", "a copy stands elsewhere"
        if "solution" not in exercises.tags(cell):
            assert theirs.source.replace("%load_ext rankcell.teaching\n", "") == cell.source
            continue
        assert "raise NotImplementedError(" in theirs.source and "SOLUTION" not in theirs.source
        assert {"exercise", "raises-exception"} <= {*theirs.metadata["tags"]}
        assert "solution" not in theirs.metadata["tags"]
        if "SOLUTION" not in cell.source:
            assert len(theirs.source.splitlines()) <= 2


# What the site's tables say of the lessons


def test_topics_stand_once_and_where_the_table_says():
    topics = table("syllabus")["topic"]
    assert [topic["number"] for topic in topics] == list(range(1, len(topics) + 1))
    assert len({topic["topic"] for topic in topics}) == len(topics)
    for topic in topics:
        assert topic["taught"], topic
        for stem, place in topic["taught"]:
            heads = re.findall(r"(?m)^#{1,3} .+?(?=\s*$)", "\n".join(markdown(stem)))
            ids = [c.id for c in LOADED[stem].cells if c.cell_type == "markdown" and c.source[:1] != "<"]
            assert [*heads, *ids].count(place) == 1, f"topic {topic['number']}: no single {place!r} in {stem}"


def test_new_terms_and_the_glossary_agree():
    pages = pytest.importorskip("pages", reason="the site's packages are not installed here")
    for stem in LOADED:
        for text in markdown(stem):
            _, found, left = pages.link_new_terms(text)
            assert left == "", f"{stem}: no entry for {left!r}"
            assert found or not pages.NEW_TERMS.search(text), f"{stem}: an empty list of new terms"
    taught = pages.lessons_of_terms()
    for entry in pages.terms():
        assert entry["term"] in taught or "see" in entry, f"nothing teaches {entry['term']}"
        assert entry["means"].endswith(".")
        for stem in taught.get(entry["term"], []):  # a link leads to what explains it, not to the title
            assert pages.explained(stem, entry) != LOADED[stem].cells[0].id
    anchors = [pages.anchor_of_term(entry["term"]) for entry in pages.terms()]
    assert len({*anchors}) == len(anchors)
    assert pages.link_new_terms("New terms: rank, flux and world size.")[1:] == (
        ["rank", "world size"],
        "flux",
    )


PAPER = re.compile(
    r"https?://(?:[\w.]*arxiv\.org/\w+/|(?:dx\.)?doi\.org/|dl\.acm\.org/doi/(?:\w+/)?)([^)\s>\"#?]+?)(?:v\d)?(?:\.pdf)?(?=[)\s>\"#?]|$)"
)


def test_papers_stand_in_the_list_of_sources_once():
    sources = table("sources")["source"]
    numbers = [source.get("arxiv") or source["doi"] for source in sources]
    assert len({*numbers}) == len(numbers)
    for source, number in zip(sources, numbers, strict=True):
        assert re.fullmatch(r"\d\d(0[1-9]|1[0-2])\.\d{4,5}|10\.\d{4,9}/\S+", number), number
        assert source["title"] and source["authors"]
    cited = {stem: {*PAPER.findall("\n".join(c.source for c in nb.cells))} for stem, nb in LOADED.items()}
    unknown = {stem: found - {*numbers} for stem, found in cited.items() if found - {*numbers}}
    assert not unknown, f"not in site/sources.toml; look up their titles first: {unknown}"
    assert {*numbers} == set().union(*cited.values())


# README


def test_readme_lists_the_lessons_in_order():
    rows = [
        f"| {int(one['notebook'][:2])} | [{one['title']}](notebooks/{one['notebook']}.ipynb) | {one['question']} |"
        for one in LESSONS
    ]
    assert re.findall(r"^\| [1-9]\d* \|.*$", README, re.MULTILINE) == rows


def test_readme_s_tree_is_what_git_tracks():
    """Top level: every tracked file or folder but those whose names begin with a dot."""
    tree = re.search(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)[1]
    listed = [line.split()[0].rstrip("/") for line in tree.splitlines()]
    assert [name for name in listed if not (ROOT / name).exists()] == []
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert re.search(r"^Makefile +(.*)$", tree, re.MULTILINE)[1] == phony
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a git checkout")
    top = {path.split("/")[0] for path in result.stdout.splitlines()}
    there = {name for name in top if name[0] != "." and name != "LICENSE" and (ROOT / name).exists()}
    assert there - {name.split("/")[0] for name in listed} == set()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_texts_name_what_is_there(path):
    text = path.read_text("utf-8")
    targets = [t for t in TARGET.findall(text) if not re.match(r"[a-z]+:", t)]
    assert [t for t in targets if not (path.parent / t).exists()] == []
    known = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= known
    assert FORBIDDEN.findall(text) == []
