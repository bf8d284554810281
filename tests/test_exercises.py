"""Every notebook runs from top to bottom, and each of its exercises can be failed as well as solved.

    python -m pytest -s tests/test_exercises.py -k 05    # one notebook, with what the learner sees for each answer

(With `--sampled`, as in `make test`, of each exercise's wrong answers the first one only.)

At an exercise the kernel first gets the student's stub, then each wrong answer of `tests/answers/<notebook>.md`, each
followed by the cells that check it; each must fail, with feedback that says why. Then it gets the solution, which must
pass, as must all other cells: one that is tagged `raises-exception` has to raise what it raised when it was stored,
one with the line `# NBVAL_CHECK_OUTPUT` has to show what it showed to the letter, and all others
have to show what they showed, each mark of a picture, too, with numbers within 2 % (other machines round otherwise). Of
the pictures, tables and verdicts of a cell tagged `time` the words have to be the same, and the size of the numbers, so
that a wrong unit is noticed; a cell tagged `machine` may show anything. A check of the clock (in a cell that is tagged
`time`) may measure three times: other work may have had the cores. (Where there is no Slurm the cells that need
one are skipped, and the answers that they would judge are not judged.) A file of answers looks like this:

    ## Exercise 2
    ### adds up its own part only
    > the ranks hold different sums
    ```python
    %%ranks 4 -o run
    x.sum()
    ```

What follows `>` occurs in the error of the answer or of its check. Where an exercise has several solution cells, its
heading goes on like their comments: `## Exercise 2: mend the order`.
"""

import base64
import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbval.plugin import coalesce_streams, get_sanitize_patterns

import notebooks
from rankcell import exercises

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SANITIZE = get_sanitize_patterns((Path(__file__).parent / "sanitize.cfg").read_text("utf-8"))
TERMINAL = re.compile(r"\x1b\[[0-9;]*m")  # colours
NAMES_GONE = re.compile(r"names (defined there )?are gone|made with new_group were closed")
DRAWING = re.compile(r'src="data:image/svg\+xml;base64,([^"]+)')
# What differs from machine to machine, from run to run, or after other answers: the rounding in a verdict, and how many
# are alike but for it; a library's own log; the number of a cell; that ranks were started
ROUNDING = r" \(largest difference [^)]*\)| \(\d+ times\)|\b(off|differ) by [\d.e+-]+"
VARYING = re.compile(rf"{ROUNDING}|\bUSDT:.*|<cell \d+>|\d+ ranks talk over .*")
MESSAGES = re.compile("B: .* [mu]?s(, |$)")  # each with its size and time
STRIP = re.compile(r"\|[^|\n]*\||(?<= )[#.]+(?= )")  # of characters, in the text of a picture of times
UNITS = {"ns": ("t", 1e-9), "us": ("t", 1e-6), "ms": ("t", 1e-3), "s": ("t", 1)}
UNITS |= {f"{prefix}B": ("B", 2 ** (10 * i)) for i, prefix in enumerate(["", "Ki", "Mi", "Gi", "Ti"])}
UNITS |= {f"{prefix}B": ("B", 10 ** (3 * i)) for i, prefix in enumerate(["k", "M", "G", "T"], 1)}
QUANTITY = re.compile(rf"(\d+(?:,\d{{3}})*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ({'|'.join(UNITS)})\b)?")
DRAWINGS = {"image/png", "image/jpeg", notebooks.WIDGET_VIEW}


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_exercises_can_be_failed_and_solved(path, pytestconfig):
    answers = path.parent.parent / "tests" / "answers" / f"{path.stem}.md"
    wrong = read_answers(answers.read_text("utf-8")) if answers.exists() else None
    problems = judge(path, wrong, most=1 if pytestconfig.getoption("--sampled") else None)
    assert not problems, "\n\n".join([f"{path.stem}: {len(problems)} problems", *problems])
    if not answers.exists():
        pytest.xfail(f"tests/answers/{path.stem}.md is not written yet: only stubs and solutions were tried")


@dataclass(frozen=True)
class Answer:
    """A wrong answer: what is wrong with it, its code, and what the learner has to read then."""

    name: str
    source: str
    feedback: tuple[str, ...]


def read_answers(text):
    """The wrong answers of a file, by the heading of their exercise: `{"Exercise 2": [Answer, ...]}`."""
    found = {}
    for exercise, section in re.findall(r"(?ms)^## (Exercise \d+\b[^\n]*)\n(.*?)(?=^## |\Z)", text):
        answers = found.setdefault(exercise.strip(), [])
        for name, body in re.findall(r"(?ms)^### ([^\n]+)\n(.*?)(?=^### |\Z)", section):
            code = re.search(r"(?ms)^```python\n(.*?)^```", body)
            feedback = tuple(re.findall(r"(?m)^> *(\S.*?) *$", body.split("```")[0]))
            assert code and feedback, f"{exercise}, {name!r}: a `> feedback` and a ```python block are needed"
            answers.append(Answer(name.strip(), code[1].rstrip("\n"), feedback))
    return found


def judge(path, answers=None, *, timeout=600, most=None):
    """What is wrong with the notebook at `path` and its exercises: one text each, none where all is well.

    `answers` comes from `read_answers`; None tries the stubs and the solutions only. `timeout` is the limit of one
    cell in seconds. Of each exercise at most `most` wrong answers are tried.
    """
    notebook = notebooks.read(path)
    run = Judgement(path, notebook, timeout, most)
    try:
        run.all_cells(answers)
    except (CellTimeoutError, DeadKernelError) as error:
        run.problems.append(f"{run.what}: {type(error).__name__}: {notebooks.first_line(str(error))}")
    finally:
        run.stop()
    return run.problems


@dataclass
class Judgement:
    """One run of a notebook in one kernel, with the answers that are tried on the way."""

    path: Path
    notebook: nbformat.NotebookNode
    timeout: float
    most: int | None = None  # wrong answers of each exercise that are tried
    problems: list = field(default_factory=list)
    done: list = field(default_factory=list)  # the cells that are in the kernel
    what: str = "the first cell"  # what runs now, for messages

    def __post_init__(self):
        self.start()

    def start(self):
        """Begin a fresh kernel."""
        self.client = notebooks.kernel(
            self.notebook, self.path.parent, timeout=self.timeout, allow_errors=True
        )
        self.context = self.client.setup_kernel(cleanup_kc=True)
        self.context.__enter__()

    def stop(self):
        """End the kernel."""
        self.context.__exit__(None, None, None)

    def again(self):
        """A fresh kernel in which all cells so far have run."""
        self.stop()
        self.start()
        for cell in self.done:
            self.outputs(cell.source)

    def outputs(self, source):
        """What the kernel answers to one cell."""
        return self.client.execute_cell(new_code_cell(source), 0).outputs

    def all_cells(self, answers):
        """Run cell by cell; stop at the first that does not do what it did when it was stored."""
        taken = set()
        cells = self.notebook.cells
        for index, cell in enumerate(cells):
            if cell.cell_type != "code" or not cell.source.strip():
                continue
            if "solution" in exercises.tags(cell):
                text = exercises.exercise_text(cell)
                headings = [h for h in answers or () if text.startswith(h if ":" in h else f"{h}:")]
                wrong = [answer for h in headings for answer in answers[h]]
                self.exercise(cell, [cells[i] for i in exercises.checks_of(cells, index)], wrong[: self.most])
                if answers is not None and len(wrong) < 2:
                    self.problems.append(f"{text}: {len(wrong)} wrong answers, at least 2 are needed")
                for heading in headings:
                    if heading in taken:
                        self.problems.append(f"`## {heading}` fits several cells: go on like their comments")
                taken.update(headings)
            self.what = f"the cell `{title(cell.source)}`"
            if not self.as_stored(cell):
                return
            self.done.append(cell)
        for heading in answers or ():
            if heading not in taken:
                self.problems.append(f"`## {heading}`: there is no such exercise")

    def as_stored(self, cell):
        """Run one cell of the notebook: True if it does what it did when it was stored."""
        outputs = self.outputs(cell.source)
        error, expected = error_of(outputs), error_of(cell.outputs)
        for _ in range(2):
            if error is None or error.ename != "CheckFailed" or "time" not in exercises.tags(cell):
                break
            print(f"\n{self.what}, measured again: {spelled(error)}")
            outputs = self.measured_again(cell)
            error = error_of(outputs)
        if "raises-exception" in exercises.tags(cell):
            wanted = expected.ename if expected else "an error"
            if error is None or (expected and error.ename != expected.ename):
                raised = f"raises {error.ename}" if error else "raises nothing"
                self.problems.append(f"{self.what} {raised}, and should raise {wanted}")
                return True
        elif error is not None:
            self.problems.append(f"{self.what} raises {spelled(error)}")
            return False
        if re.search(r"(?m)^\s*# *NBVAL_CHECK_OUTPUT\s*$", cell.source):
            before, after = shown(cell.outputs), shown(outputs)
            if before != after:
                self.problems.append(f"{self.what} shows other things than were stored:\n{before}\n{after}")
        elif not skipped(outputs) and "machine" not in exercises.tags(cell):
            clock = "time" in exercises.tags(cell) or cell.source.startswith("%%slurm")
            parted = difference(told(cell.outputs, clock), told(outputs, clock), 100 if clock else 1.02)
            if parted:
                self.problems.append(f"{self.what} shows {parted[1]!r}, and {parted[0]!r} was stored")
        return True

    def measured_again(self, cell):
        """What a cell tagged `time` answers after those before it that are tagged so, too, have run once more.

        What the clock showed while other work had the cores is no mistake of the lesson.
        """
        timed = list(itertools.takewhile(lambda c: "time" in exercises.tags(c), reversed(self.done)))
        for earlier in reversed(timed):
            self.outputs(earlier.source)
        return self.outputs(cell.source)

    def exercise(self, cell, checks, wrong):
        """Try the stub and the wrong answers of one exercise; each has to fail."""
        text = exercises.exercise_text(cell)
        print(f"\n{self.path.stem}, {text}")
        number = text.split(":")[0]
        stub = Answer("the stub", exercises.stub(cell), (number,))
        for answer in [stub, *wrong]:
            self.what = f"{number}, {answer.name!r}"
            seen, outputs = self.feedback(answer.source, checks)
            if seen is None and skipped(outputs):
                print(f"  {answer.name}: not judged, a `%%slurm` cell was skipped")
                continue
            print(f"  {answer.name}\n" + indented(seen if seen is not None else "PASSES"))
            if seen is None:
                self.problems.append(f"{self.what}: passes its check, and should fail")
            for part in answer.feedback if seen is not None else ():
                if " ".join(part.split()) not in " ".join(seen.split()):
                    self.problems.append(f"{self.what}: fails, but nothing says {part!r}:\n{indented(seen)}")
            if NAMES_GONE.search(str(outputs)):
                self.again()

    def feedback(self, source, checks):
        """The error that the learner sees for an answer (None: it passes), and all outputs on the way."""
        outputs = []
        for code in [source, *(check.source for check in checks)]:
            outputs += self.outputs(code)
            if error := error_of(outputs):
                return spelled(error), outputs
        return None, outputs


def error_of(outputs):
    """The error among the outputs of a cell, or None."""
    return next((output for output in outputs if output.output_type == "error"), None)


def spelled(error):
    """An error as the learner reads it, without the lines of code around it."""
    return TERMINAL.sub("", f"{error.ename}: {error.evalue}")


def shown(outputs):
    """What a cell shows, without drawings and times."""
    parts = []
    for output in coalesce_streams([nbformat.from_dict(dict(output)) for output in outputs]):
        if output.output_type == "stream":
            parts.append((output.name, output.text))
        elif output.output_type == "error":
            parts.append(("error", spelled(output)))
        else:
            parts += sorted((kind, str(value)) for kind, value in output.data.items() if kind not in DRAWINGS)
    for pattern, replacement in SANITIZE:
        parts = [(kind, re.sub(pattern, replacement, text)) for kind, text in parts]
    return parts


def skipped(outputs):
    """Whether a cell that needs a Slurm said that there is none."""
    return any(o.get("text", "").startswith("Skipped: ") for o in outputs)


def told(outputs, clock):
    """All that the outputs of a cell say, in pieces: lines of text, alt texts, and, of drawings, their marks and words.

    Of a cell of the `clock` only pictures, tables and verdicts, without what comes and goes with times: timelines,
    lists of messages, the order of rows, and the marks of drawings.
    """
    pieces = []
    for output in coalesce_streams([nbformat.from_dict(dict(output)) for output in outputs]):
        page = str(output.get("data", {}).get("text/html", ""))
        if clock and not page:
            continue
        if output.output_type == "stream":
            pieces += output.text.splitlines()
        elif output.output_type == "error":
            pieces += spelled(output).splitlines()
        else:
            lines = str(output.data.get("text/plain")).splitlines()
            drawings = [base64.b64decode(code).decode() for code in DRAWING.findall(page)]
            alts = re.findall(r'<img[^>]* alt="([^"]*)"', page)
            if not clock:
                pieces += [*lines, *alts, *(mark for svg in drawings for mark in svg.split("<"))]
            elif not any("Timeline of rank" in alt for alt in alts):
                lines = [" ".join(STRIP.sub("", line).split()) for line in lines if not MESSAGES.search(line)]
                pieces += sorted(lines, key=lambda line: QUANTITY.sub("", line)) + alts
    pieces = [" ".join(VARYING.sub("", piece).split()) for piece in pieces]
    alike = [piece[:1] == "✓" and piece == before for before, piece in itertools.pairwise(["", *pieces])]
    return [piece for piece, again in zip(pieces, alike, strict=True) if piece.strip(" -") and not again]


def difference(before, after, factor):
    """The first two pieces that are not the same words with numbers that are apart by `factor` at most, or None."""
    for pair in itertools.zip_longest(before, after, fillvalue="nothing"):
        first, second = (
            QUANTITY.sub(lambda match: "# " + UNITS.get(match[2], ("", 1))[0], text) for text in pair
        )
        numbers = [
            [float(n.replace(",", "")) * UNITS.get(unit, ("", 1))[1] for n, unit in QUANTITY.findall(text)]
            for text in pair
        ]
        if first != second or not all(close(a, b, factor) for a, b in zip(*numbers, strict=True)):
            return pair
    return None


def close(a, b, factor):
    """Whether two numbers are apart by `factor` at most; of what the clock measures nothing may be left."""
    return math.isclose(a, b, rel_tol=1 - 1 / factor, abs_tol=1e-9) or (factor > 2 and not a * b)


def title(source):
    """The line of a cell that tells most: its second if the first is a magic."""
    lines = source.strip().splitlines()
    return notebooks.first_line(" ".join(lines[:2]) if lines[0].startswith("%%") else lines[0])


def indented(text):
    """`text` as a block under its heading, long ones cut."""
    lines = text.strip().splitlines()
    return "\n".join("      | " + line[:160] for line in lines[:12] + ["..."] * (len(lines) > 12))


# The judge, on notebooks of a few cells

HALF = """# Exercise 1: halve the number
def half(x):
    # BEGIN SOLUTION
    return x / 2
    # END SOLUTION"""
CHECK = "assert half(6) == 3, f'half of 6 is {half(6)}'"
ANSWERS = """## Exercise 1
### multiplies
> half of 6 is 12
```python
def half(x):
    return x * 2
```

### subtracts
> half of
> 6 is 5
```python
def half(x):
    return x - 1
```
"""


def tiny(folder, *cells):
    """A notebook of code cells (or cells and their tags) that was executed, so that its outputs are known."""
    built = [new_markdown_cell("# 1 Tiny")]
    for cell in cells:
        source, *tags = (cell,) if isinstance(cell, str) else cell
        built.append(new_code_cell(source, metadata={"tags": tags} if tags else {}))
    nbformat.write(new_notebook(cells=built), folder / "01_tiny.ipynb")
    notebooks.execute(folder / "01_tiny.ipynb")
    return folder / "01_tiny.ipynb"


def changed(path, index, source):
    """The notebook at `path` with another source in one cell, and its old outputs."""
    notebook = notebooks.read(path)
    notebook.cells[index].source = source
    notebooks.write(notebook, path)
    return path


def test_answers_are_read_by_exercise():
    found = read_answers(ANSWERS + "\n## Exercise 2: part b\n### x\n> y\n```python\n1\n\n2\n```\n")
    assert list(found) == ["Exercise 1", "Exercise 2: part b"]
    assert [answer.name for answer in found["Exercise 1"]] == ["multiplies", "subtracts"]
    assert found["Exercise 1"][1].feedback == ("half of", "6 is 5")
    assert found["Exercise 2: part b"] == [Answer("x", "1\n\n2", ("y",))]
    with pytest.raises(AssertionError, match="Exercise 1, 'multiplies': a `> feedback` and a"):
        read_answers(ANSWERS.replace("> half of 6 is 12", ""))


def test_a_sound_exercise_has_no_problems(tmp_path, capsys):
    path = tiny(tmp_path, ("1 / 0", "raises-exception"), (HALF, "solution"), CHECK, "half(4)  # 2.0")
    assert judge(path, read_answers(ANSWERS)) == []
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if line] == [
        "01_tiny, Exercise 1: halve the number",
        "the stub",
        "| NotImplementedError: Exercise 1: halve the number",
        "multiplies",
        "| AssertionError: half of 6 is 12",
        "subtracts",
        "| AssertionError: half of 6 is 5",
    ]


def test_all_that_was_judged_wrongly_is_told(tmp_path):
    path = tiny(tmp_path, (HALF, "solution"), "assert half(6) in (3, 12)")
    answers = ANSWERS.split("### sub")[0] + "## Exercise 7\n" + ANSWERS.split("\n", 1)[1]
    assert judge(path, read_answers(answers)) == [
        "Exercise 1, 'multiplies': passes its check, and should fail",
        "Exercise 1: halve the number: 1 wrong answers, at least 2 are needed",
        "`## Exercise 7`: there is no such exercise",
    ]
    _, problem, _ = judge(path, read_answers(ANSWERS))
    assert problem.startswith("Exercise 1, 'subtracts': fails, but nothing says 'half of':")
    assert "| AssertionError" in problem


def test_a_stub_that_passes_is_told(tmp_path):
    path = tiny(tmp_path, (HALF, "solution"), "assert callable(half)")
    assert judge(path) == ["Exercise 1, 'the stub': passes its check, and should fail"]


def test_two_solutions_of_one_exercise_are_told_apart(tmp_path):
    other = HALF.replace("halve the number", "halve the float")
    path = tiny(tmp_path, (HALF, "solution"), CHECK, (other, "solution"), CHECK)
    assert judge(path, read_answers(ANSWERS)) == [
        "`## Exercise 1` fits several cells: go on like their comments"
    ]
    apart = [ANSWERS.replace("Exercise 1", f"Exercise 1: halve the {what}") for what in ("number", "float")]
    assert judge(path, read_answers("".join(apart))) == []


def test_a_cell_that_fails_is_told(tmp_path):
    path = changed(tiny(tmp_path, "x = 1", "y = 2"), 1, "x = 1 / 0")
    assert judge(path) == ["the cell `x = 1 / 0` raises ZeroDivisionError: division by zero"]


def test_a_check_of_the_clock_may_measure_three_times(tmp_path):
    cells = ("from rankcell import check\nslow = [3, 2, 1, 1]", ("seconds = slow.pop(0)", "time"))
    path = tiny(tmp_path, *cells, ("x = 1", "time"), ("check.that(seconds < 4, 'fast')", "time"))
    assert judge(changed(path, 4, "check.that(seconds < 2, 'fast')")) == []
    (problem,) = judge(changed(path, 4, "check.that(seconds < 1, 'fast')"))
    assert problem.endswith("raises CheckFailed: This does not hold: fast.")
    path = tiny(tmp_path, *cells, "check.that(seconds < 4, 'fast')")  # not tagged: measured once
    assert len(judge(changed(path, 3, "check.that(seconds < 2, 'fast')"))) == 1


def test_a_deliberate_error_has_to_be_the_one_that_was_stored(tmp_path):
    path = tiny(tmp_path, ("1 / 0", "raises-exception"))
    assert judge(changed(path, 1, "1 / 1")) == [
        "the cell `1 / 1` raises nothing, and should raise ZeroDivisionError"
    ]
    assert judge(changed(path, 1, "[][0]")) == [
        "the cell `[][0]` raises IndexError, and should raise ZeroDivisionError"
    ]


def test_outputs_that_must_not_change_are_compared_without_times(tmp_path):
    marked = "# NBVAL_CHECK_OUTPUT\nprint('took 3 ms')\n[1, 2]"
    path = tiny(tmp_path, marked)
    assert judge(changed(path, 1, marked.replace("3 ms", "4.5 s"))) == []
    (problem,) = judge(changed(path, 1, marked.replace("[1, 2]", "[1, 3]")))
    assert problem.startswith("the cell `# NBVAL_CHECK_OUTPUT` shows other things than were stored")


def test_what_a_cell_shows_must_not_change(tmp_path):
    source = "from rankcell.draw import bars\nbars.bars({{'a': {}, 'b': 2.0}}, unit='GB')"
    path = tiny(tmp_path, source.format(1.0))
    assert judge(changed(path, 1, source.format(1.01))) == []
    (problem,) = judge(changed(path, 1, source.format(1.1)))
    assert problem.startswith(
        "the cell `from rankcell.draw import bars` shows 'a: 1.1', and 'a: 1' was stored"
    )
    assert len(judge(changed(path, 1, source.format(1.0).replace("'b'", "'c'")))) == 1
    path = tiny(tmp_path, (source.format(1.0), "machine"))
    assert judge(changed(path, 1, source.format(1.1))) == []
    path = tiny(tmp_path, "print('a line')\n7")
    assert judge(changed(path, 1, "print('a  line')\n7.1")) == []
    assert len(judge(changed(path, 1, "print('a line')\n8"))) == 1
    assert len(judge(changed(path, 1, "print('any line')\n7"))) == 1


def test_words_that_only_a_drawing_has_must_not_change(tmp_path):
    source = "from rankcell.draw import collectives\ncollectives.matrices({{'m': [[0, 1]]}}, 'One is zero.', row='{}')"
    path = tiny(tmp_path, source.format("a query"))
    assert judge(path) == []
    (problem,) = judge(changed(path, 1, source.format("a key")))
    assert "a key" in problem and "a query" in problem


def test_rounding_in_a_verdict_may_change(tmp_path):
    """On another machine a difference may be zero: its verdict is then without it, and one with the verdict before."""
    source = "from rankcell import check\nv = check.close_to(7.0, {}, name='seven')\ncheck.every(v, v)"
    path = tiny(tmp_path, source.format("7.0"))
    apart = source.format("7.0000001").replace(
        "every(v, v)", "every(v, check.close_to(7.0, 7.0, name='seven'))"
    )
    assert judge(changed(path, 1, apart)) == []
    assert len(judge(changed(path, 1, source.format("7.0").replace("seven", "eight")))) == 1


def test_of_a_cell_of_the_clock_words_and_units_must_not_change(tmp_path):
    source = "from rankcell.draw import bars\nbars.bars({'copy': 0.002, 'send': 0.04}, unit='s', alt='A copy is fast.')"
    path = tiny(tmp_path, (source, "time"))
    for change in ("0.04", "0.4"), ("copy': 0.002, 'send': 0.04", "copy': 0.02, 'send': 0.04"):
        assert judge(changed(path, 1, source.replace(*change))) == []
    for change in ("0.04", "40"), ("'send'", "'copies'"), ("fast", "slow"):
        assert len(judge(changed(path, 1, source.replace(*change)))) == 1, change


def test_a_cell_that_takes_too_long_is_named(tmp_path):
    path = changed(tiny(tmp_path, "import time"), 1, "import time; time.sleep(60)")
    (problem,) = judge(path, timeout=2)
    assert problem.startswith("the cell `import time; time.sleep(60)`: CellTimeoutError")


def test_names_that_an_answer_took_along_come_back(tmp_path):
    path = tiny(tmp_path, "kept = 2", (HALF.replace("/ 2", "/ kept"), "solution"), CHECK)
    killer = "del kept\nprint('names defined there are gone')\nassert False, 'half of 6 is 12'"
    answers = ANSWERS.replace("def half(x):\n    return x * 2", killer)
    assert judge(path, read_answers(answers)) == []


def test_an_answer_is_not_judged_where_its_check_is_skipped(tmp_path, capsys):
    path = tiny(tmp_path, (HALF, "solution"), "print('Skipped: no Slurm')")
    assert judge(path, read_answers(ANSWERS)) == []
    assert "multiplies: not judged, a `%%slurm` cell was skipped" in capsys.readouterr().out
