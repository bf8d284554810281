"""Every topic of the course is where site/syllabus.toml says; every paper is the one its link names."""

import datetime
import html
import re
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
TOPICS = tomllib.loads((ROOT / "site" / "syllabus.toml").read_text("utf-8"))["topic"]
LESSONS = [
    lesson["notebook"]
    for part in tomllib.loads((ROOT / "site" / "lessons.toml").read_text("utf-8"))["part"]
    for lesson in part["lesson"]
]
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in (ROOT / "notebooks").glob("*.ipynb")}
SOURCES = tomllib.loads((ROOT / "site" / "sources.toml").read_text("utf-8"))["source"]
HEADING = re.compile(r"(?m)^(#{1,3}) (.+?)\s*$")
CODE_BLOCK = re.compile(r"(?s)^```.*?^```", re.MULTILINE)


# The topics


def test_all_topics_are_there_once():
    assert [topic["number"] for topic in TOPICS] == list(range(1, 92))
    assert len({topic["topic"] for topic in TOPICS}) == len(TOPICS)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: f"C{topic['number']:02}")
def test_a_topic_is_taught_where_the_index_says(topic):
    assert topic["taught"], "no lesson has it"
    text = " ".join(section(*place) for place in topic["taught"])
    assert topic["says"], "nothing to look for"
    missing = [words for words in topic["says"] if one_line([words]) not in text]
    assert not missing, f"not in {topic['taught']}: {missing}"
    assert topic.get("planned", LESSONS[-1]) in LESSONS


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: f"C{topic['number']:02}")
def test_every_place_has_something_of_the_topic(topic):
    for place in topic["taught"]:
        text = section(*place)
        assert any(one_line([words]) in text for words in topic["says"]), (
            f"nothing of {topic['says']} is in {place}"
        )


def section(stem, place):
    """Code, text and output from a heading to the next as high, or from a Markdown cell to the next such cell."""
    cells = NOTEBOOKS[stem].cells
    if not place.startswith("#"):
        (first,) = [i for i, c in enumerate(cells) if c.id == place and c.cell_type == "markdown"]
        assert not cells[first].source.startswith("<"), (
            f"{stem}, {place}: a cell that begins with HTML gets no id"
        )
        code = next(
            (i for i, c in enumerate(cells[first + 1 :], first + 1) if c.cell_type == "markdown"), None
        )
        return one_line(map(shown, cells[first:code]))
    found = []
    for cell in cells:
        text = shown(cell)
        if cell.cell_type == "markdown":
            bare = CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), cell.source).split("\n")
            for number, line in enumerate(bare):
                if HEADING.match(line):
                    found.append((line.strip(), []))
                if found:
                    found[-1][1].append(cell.source.split("\n")[number])
        elif found:
            found[-1][1].append(text)
    heads = [head for head, _ in found]
    assert heads.count(place) == 1, f"{stem} has {place!r} {heads.count(place)} times"
    start, level = heads.index(place), len(place.split()[0])
    end = next((i for i in range(start + 1, len(heads)) if len(heads[i].split()[0]) <= level), len(heads))
    return one_line(line for _, lines in found[start:end] for line in lines)


def shown(cell):
    """The source of a cell, and what its outputs show as text."""
    texts = [cell.source]
    for output in cell.get("outputs", []):
        texts.append(output.get("text", ""))
        texts += [str(output.get("data", {}).get(kind, "")) for kind in ("text/plain", "text/html")]
    return html.unescape("\n".join(texts))


def one_line(lines):
    """Words do not change when a paragraph is wrapped anew."""
    return " ".join(" ".join(lines).split())


def test_a_place_that_is_not_there_is_noticed():
    stem = TOPICS[0]["taught"][0][0]
    with pytest.raises(AssertionError, match="0 times"):
        section(stem, "## No such section")
    with pytest.raises(ValueError, match="unpack"):
        section(stem, "no-such-cell")


def test_the_page_links_to_sections_of_the_lessons():
    """conf.py and this file mean the same places: the built page is in test_site.py."""
    for topic in TOPICS:
        for stem, _ in topic["taught"]:
            assert stem in LESSONS, f"topic {topic['number']} is taught in {stem}"


# The papers

PAPER = re.compile(
    r"https?://(?:[\w.]*arxiv\.org/\w+/|(?:dx\.)?doi\.org/|dl\.acm\.org/doi/(?:\w+/)?)(?P<id>[^)\s>\"]+)"
)
LINK = re.compile(r"\[((?:[^\]\[]|\[[^\]]*\])+)\]\((https?://[^)\s]+)\)")
ARXIV = re.compile(r"(\d\d)(0[1-9]|1[0-2])\.(\d{4,5})")
DOI = re.compile(r"10\.\d{4,9}/[\w.()/-]+")


def cited(notebook):
    """The links to papers in a notebook: cell, the words of the link, the number of the paper."""
    links = []
    for cell in notebook.cells:
        found = [(words, PAPER.fullmatch(target)) for words, target in LINK.findall(cell.source)]
        named = [(cell.id, " ".join(words.split()), paper["id"]) for words, paper in found if paper]
        assert len(named) == len(PAPER.findall(cell.source)), (
            f"{cell.id}: a paper without the words of a link"
        )
        links += named
    return links


def number_of(source):
    return source.get("arxiv") or source["doi"]


def words_of(text):
    """The words of a text, in small letters but where a name has its own: ZeRO is not zero. No figures."""
    found = re.findall(r"[^\W_](?:[\w-]*[^\W_])?", text.replace("'s", ""))
    small = lambda word: all(part[1:].islower() or not part[1:] for part in word.split("-"))
    return {word.lower() if small(word) else word for word in found if not word.isdigit()}


def names_of(source):
    """All words that name a paper."""
    return words_of(" ".join([source["title"], source.get("known_as", ""), *source["authors"]]))


def names(link, source):
    """Whether the words of a link begin the title of a paper, or share words with it as with no other paper."""
    title = source["title"].removeprefix("The ")
    if len(link) > 5 and title.lower().startswith(link.lower()):
        return True
    shared = words_of(link) & names_of(source)
    return bool(shared) and not any(shared <= names_of(other) for other in SOURCES if other is not source)


@pytest.mark.parametrize("source", SOURCES, ids=number_of)
def test_a_paper_has_a_number_of_the_right_form(source):
    assert ("arxiv" in source) != ("doi" in source)
    assert problem_of(number_of(source)) is None
    assert source["title"] and source["authors"]


def problem_of(number):
    """What is wrong with the form of the number of a paper, or None."""
    if number.startswith("10."):
        return None if DOI.fullmatch(number) else f"{number} is no DOI"
    match = ARXIV.fullmatch(number)
    if not match:
        return f"{number} is not YYMM.NNNNN"
    year, month, of_month = 2000 + int(match[1]), int(match[2]), match[3]
    if len(of_month) != (5 if (year, month) >= (2015, 1) else 4):
        return f"{number}: since 2015 five digits stand after the point, before that four"
    today = datetime.date.today()
    return None if (2007, 4) <= (year, month) <= (today.year, today.month) else f"{number} is of another time"


def test_every_paper_of_the_list_is_cited_and_stands_once():
    numbers = [number_of(source) for source in SOURCES]
    assert len(set(numbers)) == len(numbers)
    used = {number for notebook in NOTEBOOKS.values() for _, _, number in cited(notebook)}
    assert set(numbers) - used == set()


@pytest.mark.parametrize("stem", sorted(NOTEBOOKS))
def test_links_to_papers_lead_where_their_words_say(stem):
    assert complaints(cited(NOTEBOOKS[stem])) == []


def complaints(links):
    """What is wrong with the links of one notebook."""
    known, wrong = {number_of(source): source for source in SOURCES}, []
    for cell, words, number in links:
        if problem_of(number):
            wrong.append(f"{cell}: {problem_of(number)}")
        elif number not in known:
            wrong.append(f"{cell}: {number} ({words}) is not in site/sources.toml; look up its title first")
        elif not any(names(other, known[number]) for _, other, same in links if same == number):
            # "paper" or "[1]" may name nothing if another link of the lesson to the same paper does
            wrong.append(f"{cell}: {words!r} does not name {known[number]['title']!r}")
        elif any(names(words, other) for other in SOURCES) and not names(words, known[number]):
            wrong.append(f"{cell}: {words!r} names another paper than {known[number]['title']!r}")
    return wrong


@pytest.mark.parametrize("stem", sorted(NOTEBOOKS))
def test_a_wrong_number_is_noticed(stem):
    """Each link in turn is given another number: a slip of a digit, or a paper that the lesson does not cite."""
    links = cited(NOTEBOOKS[stem])
    numbers = {number for _, _, number in links}
    other = next(number_of(source) for source in SOURCES if number_of(source) not in numbers)
    for i, (cell, words, number) in enumerate(links):
        slip = number[:-1] + str((int(number[-1]) + 1) % 10)
        for mutant in (slip, other, "2313.01234", "9905.12345"):
            assert complaints([*links[:i], (cell, words, mutant), *links[i + 1 :]]), f"{cell}: {mutant}"


def test_numbers_of_two_papers_changed_over_are_noticed():
    """Where the words of a link name a paper, no other paper of the list will do."""
    for notebook in NOTEBOOKS.values():
        for cell, words, number in cited(notebook):
            for source in SOURCES:
                if any(names(words, s) for s in SOURCES) and number_of(source) != number:
                    assert not names(words, source), f"{cell}: {words!r} would also name {source['title']!r}"
