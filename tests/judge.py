"""nbval runs each notebook once; in the same kernel this plugin proves the author right and judges the exercises.

    make notebooks NB=notebooks/05_bandwidth.ipynb

Each code cell is a test of nbval's: it must end as its tags say and show what is stored, numbers within 2 %; of a cell
tagged `time` the words of its pictures and tables; a cell tagged `machine` may show anything. What else has to hold
stands in `tests/lessons/05_bandwidth.py`, in blocks that name a cell by its id:

    # after: ring               plain asserts, run right after that cell; they may read the notebook's names, and the
                                names that they define do not stay. With `# %%ranks 4 -o _run` as its first line a
                                block runs on the ranks; a block below it may read `_run`
    # wrong: ring: slip | words     an answer in the place of that solution: what is wrong with it, and words that the
                                learner has to read then
    # right: ring               an answer of another form, which has to pass

A line `# %...` of a block is a magic; a block that is one string holds what is no Python. Before a solution, its stub
and its wrong answers (two to four) run, each followed by the cells that check it, and have to fail there: one test an
exercise. A block whose cell is gone is an error. Without a Slurm, cells that need one are skipped, and so is what names
them.
"""

import ast
import base64
import itertools
import math
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from queue import Empty

import nbformat
import pytest
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError, coalesce_streams

from rankcell.teaching import exercises

HEAD = re.compile(r"^# (after|wrong|right): ([\w-]+)(?:: ([^|]*[^| ]))?(?: \| (.*))?$")
LIMIT = 600  # seconds for one cell, so that nothing waits for ever
TERMINAL = re.compile(r"\x1b\[[0-9;]*m")  # colours
NAMES_GONE = re.compile(r"names (defined there )?are gone|made with new_group were closed")
LIVE = re.compile(r"(?m)^(starting \d+ ranks?|running for \d+ s): ")  # what a rank cell shows and then clears
DRAWING = re.compile(r'src="data:image/svg\+xml;base64,([^"]+)')
MESSAGES = re.compile("B: .* [mu]?s(, |$)")  # each with its size and time
STRIP = re.compile(r"\|[^|\n]*\||(?<= )[#.]+(?= )")  # of characters, in the text of a picture of times
UNITS = {"ns": ("t", 1e-9), "us": ("t", 1e-6), "ms": ("t", 1e-3), "s": ("t", 1)}
UNITS |= {f"{prefix}B": ("B", 2 ** (10 * i)) for i, prefix in enumerate(["", "Ki", "Mi", "Gi", "Ti"])}
UNITS |= {f"{prefix}B": ("B", 10 ** (3 * i)) for i, prefix in enumerate(["k", "M", "G", "T"], 1)}
QUANTITY = re.compile(rf"(\d+(?:,\d{{3}})*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ({'|'.join(UNITS)})\b)?")


class Disproved(Exception):
    """What a notebook, an exercise or the proof beside it gets wrong."""


@dataclass
class Block:
    """One block of a file in tests/lessons: what it is for, and the line of the file above its source."""

    kind: str
    cell: str
    says: tuple[str, ...]
    line: int
    source: str = ""

    def as_cell(self):
        """The source as one would type it."""
        code = re.sub(r"(?m)^# (?=[%!])", "", self.source).strip("\n") + "\n"
        try:
            body = ast.parse(code).body
        except SyntaxError:  # a magic
            return code
        text = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        return body[0].value.value if text and isinstance(body[0].value.value, str) else code

    def as_check(self, path):
        """A cell that runs the source and leaves no name of its own behind."""
        code = self.as_cell()
        if code.startswith("%%ranks"):
            first, _, body = code.partition("\n")
            *statements, last = ast.parse(body).body
            if isinstance(last, ast.Expr):
                last = ast.Return(last.value)
            inner = textwrap.indent("\n".join(map(ast.unparse, [*statements, last])), "    ")
            return f"{first}\ndef _check():\n{inner}\n\n_check()"
        if code.startswith("%"):
            return code
        numbered = "\n" * self.line + code
        return f"exec(compile({numbered!r}, {path.name!r}, 'exec'), {{**globals()}})"


def read_blocks(text):
    """The blocks of a file of tests/lessons by kind and cell: `{("after", "ring"): [Block, ...]}`."""
    found = defaultdict(list)
    block = None
    for number, line in enumerate(text.splitlines(), 1):
        if head := HEAD.match(line):
            kind, cell, _, says = head.groups()
            block = Block(
                kind, cell, tuple(part.strip() for part in (says or "").split(" | ") if part), number
            )
            found[kind, cell].append(block)
        elif block is not None:
            block.source += line + "\n"
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Each notebook that nbval would run becomes a lesson."""
    found = yield
    return [Lesson.from_parent(parent, path=c.path) if isinstance(c, IPyNbFile) else c for c in found]


class Lesson(IPyNbFile):
    """A notebook in one kernel: nbval's cells, and between them the exercises and the proof."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.broken = ""  # the cell that failed: what follows builds on it
        self.done = []  # the cells that are in the kernel
        self.skipped = set()  # ids of cells that need a Slurm which is not there

    def setup(self):
        """Start the kernel. Its ports were free when they were chosen; somebody may take one before it does: again."""
        for left in (2, 1, 0):
            try:
                return super().setup()
            except RuntimeError:  # "Kernel died before replying"
                if not left:
                    raise

    def collect(self):
        """nbval's cells in order, an exercise before its solution, the proof after the cell it names."""
        self.proof = self.path.parent.parent / "tests" / "lessons" / f"{self.path.stem}.py"
        self.blocks = read_blocks(self.proof.read_text("utf-8")) if self.proof.exists() else {}
        for item in super().collect():
            cell = item.cell
            if "solution" in exercises.tags(cell):
                name = exercises.exercise_text(cell) or cell.id
                yield Exercise.from_parent(self, name=name, cell=cell)
            item.options["check"] = True
            yield Cell.from_parent(
                self, name=cell.id, cell_num=item.cell_num, cell=cell, options=item.options
            )
            if ("after", cell.id) in self.blocks:
                yield Proof.from_parent(self, name=f"after {cell.id}", cell=cell)
        lost = sorted(
            f"line {block.line}: {kind}: {cell}"
            for (kind, cell), blocks in self.blocks.items()
            for block in blocks
            if not any(
                c.id == cell and (kind == "after" or "solution" in exercises.tags(c)) for c in self.nb.cells
            )
        )
        if lost:
            raise self.CollectError(f"{self.proof.name}: no such cell, or no solution:\n" + "\n".join(lost))

    def run(self, source):
        """What the kernel shows for one cell, without what it clears."""
        message = self.kernel.execute_cell_input(source, allow_stdin=False)
        try:
            self.kernel.await_reply(message, timeout=LIMIT)
        except Empty:
            self.kernel.interrupt()
            self.broken = "a check or an answer"
            raise Disproved(f"not done after {LIMIT} s: {source[:200]}") from None
        outputs = []
        while True:
            told = self.get_kernel_message(timeout=60)
            kind, content = told["msg_type"], told["content"]
            if told["parent_header"].get("msg_id") != message:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return [o for o in outputs if not is_live(o)]
            if kind in ("stream", "error", "display_data", "execute_result"):
                outputs.append(nbformat.from_dict({"output_type": kind, **content}))

    def again(self):
        """A fresh kernel in which all cells so far have run."""
        self.kernel.stop()
        self.setup()
        for cell in self.done:
            self.run(cell.source)

    def check_cells(self, solution):
        """The cells that judge the answer in the place of `solution`."""
        cells = self.nb.cells
        place = next(i for i, cell in enumerate(cells) if cell.id == solution.id)
        return [cells[i] for i in exercises.checks_of(cells, place)]


class Part:
    """What the tests of a lesson share: they stop where a cell failed, and tell a failure in words."""

    def runtest(self):
        if self.parent.broken:
            pytest.skip(f"the cell `{self.parent.broken}` failed")
        self.judge()

    def reportinfo(self):
        return self.path, 0, f"{self.path.stem}: {self.name}"


WIDGET = "application/vnd.jupyter.widget-view+json"


class Cell(Part, IPyNbCell):
    """A cell of the notebook, run and compared with what is stored."""

    def judge(self):
        self.output_timeout = 60  # seconds for the next message, when the cell is through
        try:
            IPyNbCell.runtest(self)
        except NbCellError as error:
            if str(error) != "Cell outputs differ":
                self.parent.broken = self.name
            raise
        if skipped(self.test_outputs):
            self.parent.skipped.add(self.cell.id)
        self.parent.done.append(self.cell)
        if "raises-exception" in exercises.tags(self.cell) and not error_of(self.test_outputs):
            self.raise_cell_error("The cell raises nothing, and is tagged raises-exception")

    def compare_outputs(self, test, ref, skip_compare=None):
        test = [output for output in test if not is_live(output)]
        tags = exercises.tags(self.cell)
        if skipped(test) or "machine" in tags:
            return True
        if all(any(WIDGET in output.get("data", {}) for output in outputs) for outputs in (test, ref)):
            return True  # what such a panel holds comes as outputs of their own where nothing shows it
        clock = "time" in tags or self.cell.source.startswith("%%slurm")
        parted = difference(
            told(ref, clock, self.sanitize), told(test, clock, self.sanitize), numbers=not clock
        )
        self.comparison_traceback = [f"shows {parted[1]!r}, and {parted[0]!r} was stored"] if parted else []
        return not parted


class Item(Part, pytest.Item):
    """A test of the judge's own."""

    def __init__(self, *, cell, **kwargs):
        super().__init__(**kwargs)
        self.cell = cell

    def repr_failure(self, excinfo):
        return str(excinfo.value) if isinstance(excinfo.value, Disproved) else super().repr_failure(excinfo)

    def blocks(self, kind):
        return self.parent.blocks.get((kind, self.cell.id), [])


class Proof(Item):
    """The author's checks after one cell."""

    def judge(self):
        if self.cell.id in self.parent.skipped:
            pytest.skip("needs a Slurm")
        names = set()
        for block in self.blocks("after"):
            source = block.as_check(self.parent.proof)
            error = error_of(self.parent.run(source))
            if error:
                raise Disproved(
                    f"{self.parent.proof.name}, block of line {block.line}: {spelled(error)}{lines_of(error)}"
                )
            names |= set(re.findall(r"\A%%ranks.* -o (\S+)", source))
        if names:
            self.parent.run(f"for _name in {sorted(names)}: globals().pop(_name, None)")


class Exercise(Item):
    """One exercise: its stub and wrong answers fail and say why, answers of another form pass."""

    def judge(self):
        stub = Block("wrong", self.cell.id, (self.name.split(":")[0],), 0, exercises.stub(self.cell))
        wrong = self.blocks("wrong")
        problems = [] if 2 <= len(wrong) <= 4 else [f"{len(wrong)} wrong answers; two to four are wanted"]
        for block in [stub, *wrong, *self.blocks("right")]:
            where = f"the answer of line {block.line}" if block.line else "the stub"
            seen, outputs = self.answer(block.as_cell() if block.line else block.source)
            if seen is None and skipped(outputs):
                pytest.skip("needs a Slurm")
            print(f"{where} ({block.kind}):\n{textwrap.indent(seen or 'passes', '    ')}")
            if block.kind == "right":
                problems += [f"{where} is right, and is refused: {seen}"] if seen else []
            elif seen is None:
                problems.append(f"{where} is wrong, and passes its checks")
            for words in block.says:
                if seen and " ".join(words.split()) not in " ".join(seen.split()):
                    problems.append(
                        f"{where} fails, but nothing says {words!r}:\n{textwrap.indent(seen, '    ')}"
                    )
            if NAMES_GONE.search(str(outputs)):
                self.parent.again()
        if problems:
            raise Disproved("\n\n".join([f"{self.path.stem}, {self.name}", *problems]))

    def answer(self, source):
        """The error that the learner sees for an answer (None: it passes), and all outputs on the way."""
        outputs = []
        for code in [source, *(cell.source for cell in self.parent.check_cells(self.cell))]:
            outputs += self.parent.run(code)
            if error := error_of(outputs):
                return spelled(error), outputs
        return None, outputs


def error_of(outputs):
    """The error among the outputs of a cell, or None."""
    return next((output for output in outputs if output.output_type == "error"), None)


def spelled(error):
    """An error as the learner reads it, without the lines of code around it."""
    return TERMINAL.sub("", f"{error.ename}: {error.evalue}")


def lines_of(error):
    """The last place in a file of tests/lessons that a traceback names, for the author."""
    found = re.findall(r"(?:line |:)(\d+)", TERMINAL.sub("", "\n".join(error.traceback)).split(".py")[-1])
    return f" (line {found[0]})" if found else ""


def is_live(output):
    """Whether a rank cell shows this while it runs and then clears it: nbval does not follow `clear_output`."""
    text = output.get("data", {}).get("text/plain", "")
    return output.output_type == "display_data" and bool(LIVE.search(text))


def skipped(outputs):
    """Whether a cell that needs a Slurm said that there is none."""
    return any(o.get("text", "").startswith("Skipped: ") for o in outputs)


def told(outputs, clock=False, sanitize=str):
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
    pieces = [" ".join(sanitize(piece).replace("~", "").split()) for piece in pieces]
    alike = [piece[:1] == "✓" and piece == before for before, piece in itertools.pairwise(["", *pieces])]
    return [piece for piece, again in zip(pieces, alike, strict=True) if piece.strip(" -") and not again]


def difference(before, after, *, numbers=True):
    """The first two pieces that are not the same words with (where they count) `numbers` within 2 %, or None."""
    for pair in itertools.zip_longest(before, after, fillvalue="nothing"):
        first, second = (
            QUANTITY.sub(lambda match: "# " + UNITS.get(match[2], ("", 1))[0], text) for text in pair
        )
        found = [
            [float(n.replace(",", "")) * UNITS.get(unit, ("", 1))[1] for n, unit in QUANTITY.findall(text)]
            for text in pair
        ]
        if first != second or (numbers and not all(map(close, *found))):
            return pair
    return None


def close(a, b):
    """Whether two numbers are within 2 % of each other: other machines round otherwise."""
    return math.isclose(a, b, rel_tol=0.02, abs_tol=1e-9)
