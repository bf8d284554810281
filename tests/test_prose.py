"""What the lessons say in words and numbers is what their cells show.

A figure in a lesson's text has to occur, as it stands or before rounding, in the code or in the visible output of its
section (from one `##` to the next; an exercise is a section of its own from its task to the next one), in the notebook
of a lesson that its text names ("lesson 05"), or in the same paragraph as a link to its source. A calculation written
out, "16 bytes × 7e9 = 112 GB", is done again instead. Title and summary may take theirs from the whole notebook. So
nothing has to be marked in the text, and a figure that parts from its cell is found. Years, versions, figures inside
code and single digits without a unit are not looked at.
"""

import html
import json
import re
from pathlib import Path

import pytest

import notebooks

ROOT = Path(__file__).parent.parent
PATHS = sorted(
    set((ROOT / "notebooks").glob("*.ipynb")) - {ROOT / "notebooks" / "00_start.ipynb"}
)  # no lesson
MINUTES = {"warm-up": 4, "build": 10, "find the bug": 6}  # for one exercise of each kind
SLOT = 60  # minutes

WORDS = "bytes|seconds|minutes|hours|FLOP|times|GPUs|ranks|steps|calls|messages"  # that make a digit a figure
UNIT = rf"(?:\s|\\,)?(?:%|[kMGT]i?B|[mu]?s\b|W\b|x\b|{WORDS})"
FIGURE = re.compile(
    r"(?<![\w.,/^#{_-])(?!10\^)(?:(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d{2,})(?![\w]*\.\w)|(\d)(?="
    + UNIT
    + "))"
)
# What turns a number of a cell, in bytes, seconds, a fraction or one, into the figure before this word.
SCALES = {
    "%": (100,),
    **dict.fromkeys(("kB", "thousand"), (1e-3,)),
    **dict.fromkeys(("MB", "million"), (1e-6,)),
    **dict.fromkeys(("GB", "billion"), (1e-9,)),
    **dict.fromkeys(("TB", "trillion", "TFLOP", "TFLOPs"), (1e-12,)),
    **{unit: (2.0**-power,) for unit, power in (("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40))},
    "ms": (1e3,),
    "us": (1e6,),
    "ns": (1e9,),
    "minutes": (1 / 60,),
    "hours": (1 / 3600,),
    "days": (1 / 86400,),
}
# How long a lesson or a part of it takes, and numbers of lessons: the tests of the slot and of links look at those.
NAMED = re.compile(r"(?m)^\*\*\d+ minutes\*\*:.*$|\b[Aa]bout \d+ minutes\b|^# \d+ |\[\d\d (?=[A-Z])")
RATIOS = [base**power for base in (1000.0, 1024.0) for power in range(-4, 5)] + [0.01]
YEAR = re.compile(r"(?:19|20)\d\d")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@each_notebook
def test_figures_in_the_text_are_those_of_the_cells(path):
    problems = unsupported(notebooks.read(path))
    assert not problems, f"{path.stem}: {len(problems)} figures without a source\n" + "\n".join(problems)


@each_notebook
def test_a_lesson_fits_its_slot(path):
    """The line below the title says how long reading, running and the exercises take, and the sum fits a slot."""
    notebook = notebooks.read(path)
    stated = re.search(
        r"^\*\*(\d+) minutes\*\*: (\d+) to read, (\d+) to run, (\d+) for the exercises",
        notebook.cells[0].source,
        re.M,
    )
    assert stated, (
        "the first cell lacks: **52 minutes**: 16 to read, 2 to run, 34 for the exercises; 4 ranks, ..."
    )
    total, reading, running, exercises = map(int, stated.groups())
    main = main_part(notebook)
    words = sum(len(visible(cell.source).split()) for cell in main if cell.cell_type == "markdown")
    kinds = [
        kind for cell in main if cell.cell_type == "markdown" for kind in kinds_of_exercises(cell.source)
    ]
    seconds = notebook.metadata["rankcell"]["seconds"]
    assert abs(reading - words / 180) <= 1, f"{words} words are {words / 180:.1f} minutes"
    assert abs(running - seconds / 60) <= 1, f"its run took {seconds} s"
    assert exercises == sum(MINUTES[kind] for kind in kinds), f"exercises {kinds} at {MINUTES} minutes"
    assert total == reading + running + exercises
    assert total <= SLOT, "move cells below `## Going further`"


@each_notebook
def test_every_lesson_has_exercises_of_every_kind(path):
    kinds = [kind for cell in notebooks.read(path).cells for kind in kinds_of_exercises(cell.source)]
    assert len(kinds) >= 4, f"{len(kinds)} exercises"
    assert set(kinds) >= {"build", "find the bug"}, f"only {sorted(set(kinds))}"


def test_the_course_has_75_exercises():
    assert sum(len(kinds_of_exercises(c.source)) for path in PATHS for c in notebooks.read(path).cells) >= 75


@pytest.mark.parametrize(
    ("text", "cells", "missing"),
    [
        ("It takes 54.4 ms.", ["54.4 ms"], []),
        ("It takes 54 ms.", ["54.38 ms"], []),
        ("It takes 55 ms.", ["54.38 ms"], ["55"]),
        ("It takes 9 GB.", ["7 GB"], ["9"]),
        ("There are 16,384 of them.", ["2**14 = 16384"], []),
        ("It takes 16 bytes × 7e9 = 112 GB.", [], []),
        ("It takes $2 \\cdot \\frac78 \\cdot 14 = 26.5$ GB.", [], ["2 * (7/8) * 14 = 26.5"]),
        ("In 2009 it took `x[17]`.", ["nothing"], []),
        ("It takes 55 ms ([source](https://example.org)).", ["54 ms"], []),
    ],
)
def test_a_figure_is_looked_for(text, cells, missing):
    assert [figure for figure, _ in absent(text, numbers_in(cells))] == missing


def main_part(notebook):
    """The cells above `## Going further`, and the summary."""
    kept, within = [], True
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and re.match(r"## ", cell.source):
            within = not cell.source.startswith("## Going further")
        if within:
            kept.append(cell)
    return kept


def kinds_of_exercises(source):
    """The kinds of the exercises that a Markdown cell states: `**Exercise 3 (build): ...`."""
    return re.findall(r"\*\*Exercise \d+ \((warm-up|build|find the bug)\)", source)


def visible(markdown):
    """What a reader sees of Markdown: no code, no targets of links, no tags."""
    text = re.sub(r"(?ms)^```.*?^```", " ", markdown)
    text = re.sub(r"\]\([^)\s]*\)", "] ", text)
    text = re.sub(r"<[^>]*>", " ", text)
    return re.sub(r"`[^`\n]*`", " code ", text)


def shown(cell):
    """The code of a cell and what a reader sees of its outputs: of a picture, its words and its description."""
    yield cell.source
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield output.evalue
        else:
            for kind, value in output.data.items():
                if kind in ("text/html", "image/svg+xml"):
                    value = "".join(value) if isinstance(value, list) else value
                    value = re.sub(r"(?s)<style.*?</style>|<script.*?</script>", " ", value)
                    yield from re.findall(r'(?:aria-label|alt|title)="([^"]*)"', value)
                    yield html.unescape(re.sub(r"<[^>]*>", " ", value))
                elif kind == "text/plain":
                    yield value if isinstance(value, str) else json.dumps(value)


def numbers_in(texts):
    """All numbers of some texts."""
    found = set()
    for text in texts:
        for match in NUMBER.findall(text.replace("_", "") if "_" in text else text):
            try:
                found.add(float(match.replace(",", "")))
            except ValueError:
                found.update(float(part) for part in match.split(",") if part)
        found.update(float(part) for match in re.findall(r"\d+(?:,\d+)+", text) for part in match.split(","))
        found.update(
            float(base) ** int(power) for base, power in re.findall(r"(\d+)\s?\*\*\s?(\d{1,2})\b", text)
        )
    return found


def absent(text, known):
    """Each figure of a text that rounds from none of the known numbers, with the words around it."""
    seen = visible(text)
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"\]\(https?:", paragraph):
            seen = seen.replace(visible(paragraph), " ")
    calculated = set()
    for calculation, terms, right in calculations(seen):
        calculated |= terms
        if not right:
            yield calculation, "does not give that"
    for match in FIGURE.finditer(seen):
        figure = match[1] or match[2]
        if figure in calculated:
            continue
        if YEAR.fullmatch(figure) and not re.match(UNIT, seen[match.end() :]):
            continue
        value, digits = float(figure.replace(",", "")), len(figure.partition(".")[2])
        unit = re.match(r"[\s\\,]*([%\w]+)", seen[match.end() :])
        scales = (1, *SCALES.get(unit[1] if unit else "", ()))
        if not any(round(number * scale, digits) == value for number in known for scale in scales):
            yield figure, " ".join(seen[max(0, match.start() - 40) : match.end() + 25].split())


def calculations(text):
    """Each `terms = result` of numbers in a text, its figures, and whether it comes out, but for thousands and Ki."""
    plain = text
    for pattern, replacement in (
        (r"\\frac\s*(\d)\s*(\d)", r"(\1/\2)"),
        (r"\\t?frac\s*{([^{}]+)}\s*{([^{}]+)}", r"((\1)/(\2))"),
        (r"\\text\s*{\s*e?\s*}", "e"),
        (r"\\text\s*{[^{}]*}|\\[,;]|\$", " "),
        (r"\\cdot|\\times|[·×]", "*"),
        (r"\^\s*{(-?\d+)}|\^(\d)", r"**\1\2"),
        (r"[¹²³⁰⁴-⁹]+", lambda m: "**" + m[0].translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))),
        (r"−", "-"),
        (r"(?<=\d),(?=\d{3}\b)", ""),
        (
            r"(?<=[\d)]) ?(?:%|[kMGT]i?B(?:/s)?|bytes|[mu]?s|positions|tokens|layers|numbers|GPUs)(?=\s*[-+*/=)])",
            "",
        ),
    ):
        plain = re.sub(pattern, replacement, plain)
    for match in re.finditer(
        r"(?<![\w.)])([(\d][\d.e()\s*/+-]*[*/+-][\d.e()\s*/+-]*?)\s*(=|≈|\\approx)\s*(-?\d[\d.]*\d|\d)(?:e(\d+)|\*10\*\*(\d+))?",
        plain,
    ):
        left, _, right, power, power10 = match.groups()
        try:
            value = eval(left, {"__builtins__": {}})
        except (SyntaxError, TypeError, ZeroDivisionError, NameError):
            continue
        result = float(right) * 10 ** int(power or power10 or 0)
        off = 0.51 * 10 ** (-len(right.partition(".")[2]) + int(power or power10 or 0))
        comes_out = any(abs(value / scale - result) <= max(off, 0.005 * abs(result)) for scale in RATIOS)
        yield (
            match[0].strip(),
            set(re.findall(r"\d+(?:\.\d+)?", match[0])) | set(re.findall(r"\d{1,3}(?:,\d{3})+", text)),
            comes_out,
        )


def sections(notebook):
    """The cells from one `##` heading to the next, and from the task of one exercise to that of the next."""
    current = []
    for cell in notebook.cells:
        starts = cell.cell_type == "markdown" and re.match(r"## |\*\*Exercise \d", cell.source)
        if starts and current:
            yield current
            current = []
        current.append(cell)
    yield current


def unsupported(notebook):
    """One line for each figure of a notebook's text that nothing shows."""
    everything = numbers_in(
        text for cell in notebook.cells if cell.cell_type == "code" for text in shown(cell)
    )
    problems = []
    for section in sections(notebook):
        summary = section[0] is notebook.cells[0] or section[0].source.startswith(
            ("## What you", "## In short")
        )
        here = numbers_in(text for cell in section if cell.cell_type == "code" for text in shown(cell))
        for cell in section:
            if cell.cell_type != "markdown":
                continue
            known = (everything if summary else here) | named_lessons(cell.source)
            for figure, around in absent(NAMED.sub(" ", cell.source), known):
                problems.append(f"  cell {notebook.cells.index(cell)}: {figure} in: {around}")
    return problems


def named_lessons(text):
    """The numbers of the lessons that a text names."""
    found = set()
    for number in set(re.findall(r"[Ll]essons? (\d\d)\b", text)):
        for path in ROOT.glob(f"notebooks/{number}_*.ipynb"):
            for cell in notebooks.read(path).cells:
                found |= numbers_in([cell.source, *(shown(cell) if cell.cell_type == "code" else ())])
    return found
