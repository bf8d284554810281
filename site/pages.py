"""The pages that are made from something: topics, glossary, failures, corrections, reading, instructor (MyST source).

Each function returns a page. `PAGES` names them in the order of the sidebar; those with a text of their own keep it in
a .md file here, with a comment where the generated part goes.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cheatsheet
import course
import reference
from course import escaped, in_a_table, link_to, link_to_lesson, literal, raw
from rankcell.teaching import exercises

NEW_TERMS = re.compile(r"(?s)(\*{0,2}New\s+terms:?\*{0,2}:?)(.*?)(?=\n\n|$)")
PROOF = course.ROOT / "tests" / "lessons"


def _text(name: str, parts: Mapping[str, str]) -> str:
    """The file of this name with each `<!-- part -->` filled in."""
    text = (course.HERE / name).read_text("utf-8")
    for part, made in parts.items():
        if f"<!-- {part} -->" not in text:
            raise ValueError(f"{name} has no place for {part!r}")
        text = text.replace(f"<!-- {part} -->", made)
    return text


# Topics

_TOPICS = """---
hide-toc: true
---
# Topics

What the course covers, topic by topic, and the sections in which a lesson explains it, runs it and checks it.

| number | topic | lesson and section |
|--:|---|---|
"""


def topics() -> str:
    """The topics of syllabus.toml and where they are taught."""
    titles = {lesson["notebook"]: lesson for lesson in course.LESSONS}
    rows = []
    for topic in course.table("syllabus")["topic"]:
        links = [link_to(*place) for place in topic["taught"]]
        planned = titles.get(topic.get("planned"))
        if planned:
            links.append(link_to_lesson(planned))
        rows.append(f"| {topic['number']} | {topic['topic']} | {'<br>'.join(links)} |\n")
    return _TOPICS + "".join(rows)


# Glossary


def anchor_of_term(term: str) -> str:
    """The id of an entry of the glossary."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def terms() -> list[dict[str, Any]]:
    """The entries of glossary.toml by alphabet."""
    return sorted(course.table("glossary")["term"], key=lambda entry: entry["term"].lower())


@cache
def _pattern() -> tuple[re.Pattern[str], dict[str, str]]:
    """What finds each way to write each term, longest first; and which term that is."""
    written = {words: e["term"] for e in terms() for words in (e["term"], *e.get("written", []))}
    longest = sorted(written, key=len, reverse=True)
    words = "|".join(re.escape(w).replace(r"\ ", r"\s+") for w in longest)
    return re.compile(rf"(?<![\w`-])({words})(?!\w)"), written


def link_new_terms(source: str, glossary: str = "../glossary.md") -> tuple[str, list[str], str]:
    """The Markdown of a cell with its list of new terms linked, the terms, and what of the list is no term."""
    found: list[str] = []
    match = NEW_TERMS.search(source)
    if not match:
        return source, found, ""
    pattern, written = _pattern()

    def link(words: re.Match[str]) -> str:
        term = written[" ".join(words[0].split())]
        found.append(term)
        return f"[{words[0]}]({glossary}#{anchor_of_term(term)})"

    linked = pattern.sub(link, match[2])
    left = re.sub(r"\band\b|\bfurther\b|[\s,;:.*]", "", pattern.sub("", match[2]))
    return source[: match.start(2)] + linked + source[match.end(2) :], found, left


def lessons_of_terms() -> dict[str, list[str]]:
    """The lessons whose lists of new terms have it, by term."""
    found: dict[str, list[str]] = {}
    for lesson in course.written():
        for cell in course.cells(lesson["notebook"]):
            if cell["cell_type"] == "markdown":
                for term in link_new_terms(cell["source"])[1]:
                    found.setdefault(term, []).append(lesson["notebook"])
    return found


def explained(stem: str, entry: Mapping[str, Any]) -> str:
    """The id of the cell of a lesson that first has the words in bold, else first has them at all."""
    ways = "|".join(re.escape(w).replace(r"\ ", r"\s+") for w in (entry["term"], *entry.get("written", [])))
    word = rf"(?:{ways})"
    cells = [
        c for c in course.cells(stem) if c["cell_type"] == "markdown" and not c["source"].startswith("<")
    ]
    for wanted in (rf"(?i)\*\*[^*\n]*\b{word}", rf"(?i)(?<!\w){word}"):
        for cell in cells[1:]:
            if re.search(wanted, cell["source"]):
                return cell["id"]
    return cells[-1]["id"]


def glossary() -> str:
    """The words of the course, and the lessons that explain them."""
    lessons = lessons_of_terms()
    lines = ["# Glossary\n", "The words of the course, each with the places that explain it.\n"]
    letter = ""
    for entry in terms():
        if entry["term"][0].upper() != letter and entry["term"][0].isalpha():
            letter = entry["term"][0].upper()
            lines.append(f"## {letter}\n")
        places = [(stem, explained(stem, entry)) for stem in dict.fromkeys(lessons.get(entry["term"], []))]
        if "see" in entry and not places:
            places.append(tuple(entry["see"]))
        where = " · ".join(link_to(*place) for place in places)
        lines.append(
            f"[**{entry['term']}**]{{#{anchor_of_term(entry['term'])}}} {entry['means']}  \n"
            f"[{where}]{{.where}}\n"
        )
    return "\n".join(lines)


# Failures


def failures() -> str:
    """Each kind of failure with its meaning, and the messages of the lessons' own cells, where one stores it."""
    kinds = course.table("failures")["failure"]
    seen: dict[str, list[tuple[str, dict[str, Any], str, str]]] = {kind["title"]: [] for kind in kinds}
    for lesson in course.written():
        for cell in course.cells(lesson["notebook"]):
            error = course.error_of(cell)
            if error:
                seen[kind_of(*error, kinds)["title"]].append((lesson["notebook"], cell, *error))
    sections = []
    for kind in kinds:
        sections.append(f"## {kind['title']}\n\n{kind['means']} **What to do:** {kind['do']}\n")
        for stem, cell, name, text in _different(seen[kind["title"]]):
            code = re.sub(r"^%%ranks[^\n]*\n", "", cell["source"]).strip()
            link = code_link(
                stem, cell["id"], f"{stem[:2]} {course.section_of(stem, cell['id']).lstrip('# ')}"
            )
            sections.append(
                f"In {link}"
                + (f":\n\n```python\n{code}\n```\n" if len(code.splitlines()) <= 12 else ", a longer cell:\n")
                + raw(f'<pre class="failure">{escaped(name)}: {escaped(text)}</pre>')
            )
    return _text("failures.md", {"failures": "\n".join(sections)})


def _different(found: list[tuple]) -> list[tuple]:
    """Failures whose first lines differ."""
    by_line = {}
    for entry in found:
        by_line.setdefault(re.sub(r"\d+", "0", entry[3].split("\n")[0]), entry)
    return list(by_line.values())


def kind_of(name: str, text: str, kinds: list[dict[str, str]]) -> dict[str, str]:
    """The first kind that fits an error."""
    for kind in kinds:
        if kind["name"] == name and kind.get("starts", "") in text:
            return kind
    raise ValueError(f"failures.toml has no entry for {name}: {text.splitlines()[0]}")


def code_link(stem: str, cell: str, words: str) -> str:
    """A link to a code cell, which MyST does not know: conf.py gives it its id when the page is written."""
    anchor = course.anchor_of(stem, cell)
    return f'<a class="reference internal" href="notebooks/{stem}.html#{anchor}">{escaped(words)}</a>'


# Corrections


def corrections() -> str:
    """What well-known material says, what is right, and the cell that shows it."""
    made, topic = [], ""
    for entry in course.table("corrections")["correction"]:
        if entry["topic"] != topic:
            topic = entry["topic"]
            made.append(f"\n## {topic}\n\n| one reads | right is | shown in |\n|---|---|---|\n")
        stem, name = entry["shown"]
        if course.cell(stem, name)["cell_type"] == "markdown":
            link = link_to(stem, name)
        else:
            link = code_link(stem, name, f"{stem[:2]} {course.section_of(stem, name).lstrip('# ')}")
        made.append(f"| {in_a_table(entry['said'])} | {in_a_table(entry['right'])} | {link} |\n")
    return _text("corrections.md", {"corrections": "".join(made)})


# Further reading


def reading() -> str:
    """The papers of sources.toml by year, and the lessons that cite them."""
    citing: dict[str, list[dict[str, str]]] = {}
    for lesson in course.written():
        text = "".join(c["source"] for c in course.cells(lesson["notebook"]) if c["cell_type"] == "markdown")
        for source in course.table("sources")["source"]:
            if (source.get("arxiv") or source["doi"]) in text:
                citing.setdefault(source["title"], []).append(lesson)
    rows = []
    for source in sorted(course.table("sources")["source"], key=lambda s: s["title"].lower()):
        number = source.get("arxiv")
        address = f"https://arxiv.org/abs/{number}" if number else f"https://doi.org/{source['doi']}"
        lessons = ", ".join(link_to_lesson(lesson) for lesson in citing.get(source["title"], []))
        by = " and ".join(source["authors"])
        rows.append(f"| [{in_a_table(source['title'])}]({address}) | {by} | {lessons} |\n")
    return _text("reading.md", {"papers": "| paper | by | lessons |\n|---|---|---|\n" + "".join(rows)})


# For instructors


def instructor() -> str:
    """Minutes of the lessons, and the usual slips with the message that catches them."""
    return _text("instructor.md", {"minutes": _minutes(), "slips": _slips()})


def _minutes() -> str:
    rows, total = [], [0, 0, 0, 0]
    for lesson in course.written():
        took = course.minutes(lesson["notebook"])
        total = [a + b for a, b in zip(total, took, strict=True)]
        n = course.exercises(lesson["notebook"])
        rows.append(
            f"| {link_to_lesson(lesson)} | {took.read} | {took.run} | {took.do} | {n} | {took.all} |\n"
        )
    every = sum(course.exercises(lesson["notebook"]) for lesson in course.written())
    all_of, read, run, do = total
    rows.append(
        f"| all, in hours | {read / 60:.1f} | {run / 60:.1f} | {do / 60:.1f} | {every} | {all_of / 60:.1f} |\n"
    )
    head = "| lesson | reading | running | exercises | how many | together |\n|---|--:|--:|--:|--:|--:|\n"
    return head + "".join(rows)


_SLIP = re.compile(r"(?m)^# wrong: (?P<cell>[\w-]+): (?P<slip>[^|\n]+) \| (?P<answer>[^|\n]+)")


def slips(stem: str) -> list[tuple[str, str, str]]:
    """Exercise, slip, and words of the message that answers it: the wrong answers that the tests try."""
    path = PROOF / f"{stem}.py"
    if not path.exists():
        return []
    lesson = exercises.Lesson(course.ROOT / "notebooks" / f"{stem}.ipynb")
    number = {
        lesson.cells[e.index]["id"]: exercises.short_name(e.text).removeprefix("Exercise ")
        for e in lesson.exercises
    }
    found = [
        (number.get(m["cell"], ""), m["slip"], m["answer"]) for m in _SLIP.finditer(path.read_text("utf-8"))
    ]
    return sorted(found, key=lambda slip: slip[0])


def _slips() -> str:
    folds = []
    for lesson in course.written():
        rows = "".join(
            f"<tr><td>{exercise}</td><td>{escaped(slip)}</td><td>{escaped(answer)}</td></tr>"
            for exercise, slip, answer in slips(lesson["notebook"])
        )
        if rows:
            name = f"{lesson['notebook'][:2]} {lesson['title']}"
            folds.append(
                f"<details><summary>{escaped(name)}</summary><div class='table-wrapper'><table class='docutils'><thead>"
                f"<tr><th>exercise</th><th>the student</th><th>the check says</th></tr></thead><tbody>{rows}</tbody>"
                "</table></div></details>"
            )
    return raw("\n".join(folds))


def explorers() -> str:
    """The panels that work without a kernel."""
    return (course.HERE / "explorers.md").read_text("utf-8")


# The pages by their name, in the order of the sidebar
PAGES: dict[str, Callable[[], str]] = {
    "cheatsheet": cheatsheet.page,
    "glossary": glossary,
    "explorers": explorers,
    "failures": failures,
    "corrections": corrections,
    "reference": reference.page,
    "syllabus": topics,
    "reading": reading,
    "instructor": instructor,
}


def wanted_anchors(texts: Mapping[Path, Any]) -> set[str]:
    """The ids of cells that these pages link to."""
    joined = "\n".join(text for text in texts.values() if isinstance(text, str))
    return set(re.findall(r"#(cell-\d\d-[\w-]+)", joined))


__all__ = ["PAGES", "anchor_of_term", "link_new_terms", "literal", "slips", "terms", "wanted_anchors"]
