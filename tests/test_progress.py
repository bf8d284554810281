"""Ticks: an exercise is solved when its checks have passed; errors below an open one are one line; never in the way."""

import json

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell.teaching import load_ipython_extension, progress

FIRST, SECOND = "Exercise 1: halve", "Exercise 2: add up"
CELLS = (
    *[("# 1 Tiny",), ("x = 1", "code")],
    (f"# {FIRST}\nhalf = 3", "code", "solution"),
    *[("assert half, 'half is missing'", "code"), ("assert half == 3, f'half is {half}'", "code")],
    *[("## More",), ("1 / 0", "code", "raises-exception"), ("half + 1", "code")],
    (f"# {SECOND}\ntotal = 1", "code", "solution"),
    ("assert total", "code"),
)


def lesson():
    """A lesson with two exercises, the first with two checks; cell ids by their place."""
    found = new_notebook()
    for source, *tags in CELLS:
        make = new_code_cell if tags else new_markdown_cell
        cell = make(source, metadata={"tags": tags[1:]} if tags[1:] else {})
        cell["id"] = f"c{len(found.cells)}"
        found.cells.append(cell)
    return found


class Kernel:
    """A kernel of a notebook in which one runs cells of a student's copy, and sees what they show."""

    def __init__(self, path):
        self.sources = {cell["id"]: cell.source for cell in nbformat.read(path, 4).cells}
        self.shell = InteractiveShell(colors="nocolor")
        load_ipython_extension(self.shell)
        self.shell._showtraceback = lambda kind, error, lines: self.shown.append("\n".join(lines))
        self.shown = []

    def run(self, cell, source=None):
        self.shown = []
        self.shell.run_cell(source or self.sources[cell], cell_id=cell)
        return "".join(self.shown)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A student's copy of that lesson."""
    path = tmp_path / "01_tiny.ipynb"
    nbformat.write(notebooks.student_copy(lesson(), "tiny"), path)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    return path


@pytest.fixture
def kernel(copy):
    return Kernel(copy)


def states():
    return progress.line().rows.get("01_tiny")


def test_solved_when_checks_passed_since_the_answer(kernel):
    kernel.run("c2", "half = 3")
    kernel.run("c3")
    assert states() == {FIRST: False, SECOND: False}  # one check is missing
    kernel.run("c2", "half = 3")
    kernel.run("c4")
    assert states()[FIRST] is False  # the first check has seen an older answer
    kernel.run("c3")
    assert states() == {FIRST: True, SECOND: False}
    assert repr(progress.line()).startswith("01_tiny  1 of 2  ✓ ·\n")
    kernel.run("c2", "half = 4")
    kernel.run("c4")
    assert states()[FIRST]  # a tick is for good


def test_an_open_exercise_is_told_in_one_line(kernel):
    assert kernel.run("c3") == "The cell of Exercise 1 has not run yet."
    for cell in ("c2", "c3", "c7"):  # the stub, its check, and what builds on it
        assert kernel.run(cell) == "Exercise 1 is not answered yet."
    assert kernel.run("c2", f"def half():\n    {kernel.sources['c2']}") == ""
    assert kernel.run("c4") == "Exercise 1 is not answered yet."
    kernel.run("another", "del half")
    assert kernel.run("c2", "half = unknown").count("\n") > 1  # their own code, as IPython shows it
    repair = "The cell of Exercise 1 ended with NameError: name 'unknown' is not defined. Repair that first."
    assert kernel.run("c3") == kernel.run("c7") == repair
    kernel.run("c2", "half = 4")
    assert kernel.run("c4") == "AssertionError: half is 4"  # no line of the check
    assert "ZeroDivisionError" in kernel.run("c6") and "1 / 0" in kernel.run("c6")
    assert kernel.run("c7") == ""
    assert "SyntaxError" in kernel.run("c2", "half =")


HALVE = "# Exercise 1: halve\nunit = 2\ndef half(x):\n    {}\n\nfour = half(8)"
STUB = 'raise NotImplementedError("Exercise 1: halve")'
LOOP = "import math\nfound = []\nthree = 3\nfor unit in (1, 2):\n    found.append(half(unit))"
WANTS = "Exercise 1 is not answered yet. This cell builds on it.\n"


def test_elsewhere_names_tell_which_exercise_a_cell_wants(monkeypatch, capsys):
    """Where Jupyter does not tell the kernel its notebook: below the traceback of what uses an open exercise."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    shell = InteractiveShell(colors="nocolor")
    load_ipython_extension(shell)

    def told(source, error):
        """What stands below the traceback of a cell that ends so."""
        result = shell.run_cell(source)
        assert type(result.error_in_exec or result.error_before_exec) is error
        return capsys.readouterr().err

    no_error = type(None)
    assert told("four = []", no_error) == told("four[0]", IndexError) == ""
    assert told(HALVE.format(STUB), NotImplementedError) == ""
    assert told("four[0]", IndexError) == WANTS
    assert told("def check():\n    return four - nothing\ncheck()", NameError) == WANTS
    assert told(LOOP, NotImplementedError) == told("found[0]", IndexError) == WANTS  # made of it
    assert told("math.sin(tree)", NameError) == told("three.four", AttributeError) == ""  # other names
    assert told("four +", SyntaxError) == told("four = 3\nfour + '1'", TypeError) == ""  # bound anew
    assert told(HALVE.format("return x / unlike"), NameError) == ""
    wants = "The cell of Exercise 1 ended with NameError: name 'unlike' is not defined. Repair that first."
    assert told("four[0]", TypeError).startswith(wants)
    assert told(HALVE.format("return x / 2"), no_error) == told("four[0]", TypeError) == ""
    assert told(LOOP, no_error) == told("found[2]", IndexError) == ""


def test_a_rank_cell_is_told_by_its_names_too(shell, monkeypatch, capsys):
    """What ranks hold and what the notebook holds are two things, whatever their names; ranks may start anew."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    load_ipython_extension(shell)

    def told(source):
        shell.run_cell(source)
        return capsys.readouterr().err

    exercise = (
        "%%ranks 2 -o run --pull kept\n# Exercise 1: add up\nx = torch.ones(1)\n{}\nkept = x.tolist()\nx"
    )
    told("x, y = [], []")
    told(exercise.format(STUB.replace("halve", "add up")))
    assert told("run.values[0] + 1") == told("sums = [v[0] for v in kept]\nsums[5]") == WANTS
    assert told("x[0]") == told("%%ranks 2 --push y\ny[0]") == ""
    told("%ranks restart")
    assert told("%%ranks 2 --pull z\nz = kept") == told("z[0]") == WANTS
    told(exercise.format("dist.all_reduce(x)"))
    assert told("run.values[2] + 1") == told("%%ranks 2\nkept[2]") == ""


def test_what_cannot_be_kept_costs_nothing(copy, kernel, monkeypatch, capsys):
    (copy.parent / progress.FILE).write_text('{"lessons": 3')  # half a file is begun anew
    kernel.run("c8", "total = 1")
    kernel.run("c9")
    assert json.loads((copy.parent / progress.FILE).read_text("utf-8"))["lessons"] == {
        "01_tiny": {SECOND: "solved"}
    }

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(progress.Path, "write_text", refuse)
    for cell, source in (("c2", "half = 3"), ("c3", None), ("c4", None)):
        kernel.run(cell, source)
    assert f"{progress.FILE} cannot be written in the notebook's folder" in capsys.readouterr().err


def test_the_course_s_own_notebooks_are_not_counted(copy, monkeypatch):
    nbformat.write(lesson(), copy)
    assert "copies for students" in repr(progress.line())
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert progress.line().rows == {}
