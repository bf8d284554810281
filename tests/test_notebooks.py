"""tools/notebooks.py on notebooks of two or three cells: execute, stale, clean, and copies for students."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell.teaching import exercises


def tiny(path, *cells):
    """A notebook at `path`: a string is a code cell, a tuple a code cell and its tags."""
    built = [new_markdown_cell("# 1 Tiny")]
    for cell in cells:
        source, *tags = (cell,) if isinstance(cell, str) else cell
        built.append(new_code_cell(source, metadata={"tags": tags} if tags else {}))
    nbformat.write(new_notebook(cells=built, metadata={"language_info": {"name": "python"}}), path)
    return path


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A tiny notebook that was executed once, to be copied and changed."""
    path = tmp_path_factory.mktemp("tiny") / "01_tiny.ipynb"
    tiny(path, "x = 1", "print('a')\nprint(x)\nx + 1", ("1 / 0", "raises-exception"))
    assert notebooks.main(["execute", str(path)]) == 0
    return path


def test_execute_stores_outputs_counts_and_fingerprint(executed):
    notebook = notebooks.read(executed)
    first, second, third = notebooks.code_cells(notebook)
    assert [first.execution_count, second.execution_count, third.execution_count] == [1, 2, 3]
    assert [output.output_type for output in second.outputs] == ["stream", "execute_result"]
    assert second.outputs[0].text == "a\n1\n"
    assert third.outputs[0].ename == "ZeroDivisionError"
    assert set(notebook.metadata) == {"kernelspec", "language_info", "rankcell"}
    assert notebooks.why_stale(notebook) == ""


def test_execute_twice_changes_nothing(executed, capsys):
    before = executed.read_text("utf-8")
    notebooks.execute(executed)
    duration = re.compile(r'"seconds": \d+')
    assert duration.sub("", executed.read_text("utf-8")) == duration.sub("", before)
    assert notebooks.main(["execute", "--stale", str(executed)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("cell", "change", "reason"),
    [
        (0, {"source": "# 2 Prose"}, ""),
        (1, {"source": "x = 2"}, "its code changed since it was executed"),
        (2, {"execution_count": 4}, "not executed from top to bottom (execution counts [1, 4, 3])"),
        (3, {"outputs": []}, "cell [3] has the tag `raises-exception` but holds no error"),
        (2, {"outputs": []}, "its outputs are not those that its run stored"),
        (3, {"metadata": {}}, "cell [3] holds an error but has no tag `raises-exception`"),
    ],
)
def test_stale_says_why(executed, tmp_path, capsys, cell, change, reason):
    notebook = notebooks.read(executed)
    notebook.cells[cell].update(nbformat.from_dict(change))
    path = tmp_path / "01_tiny.ipynb"
    nbformat.write(notebook, path)
    assert notebooks.main(["stale", str(path)]) == 0
    assert capsys.readouterr().out == (f"{path}: {reason}\n" if reason else "")


@pytest.mark.parametrize(
    ("cells", "timeout", "said"),
    [
        (("1", "1 / 0", "2"), 600, "code cell 2 of 3 (`1 / 0`) raised ZeroDivisionError: division by zero"),
        (("import time", "time.sleep(999)"), 1, "2 of 2 (`time.sleep(999)`) did not end within 1 s."),
        ((("x = 1", "raises-exception"),), 600, "has the tag `raises-exception` but holds no error"),
        (("print('/home/me/x')",), 600, "cell [1] shows the path '/home/me/' of this machine: /home/me/x"),
        (("import warnings; warnings.warn('old')",), 600, "cell [1] shows the path '/tmp/ipykernel_"),
    ],
)
def test_a_run_that_goes_wrong_stores_nothing(tmp_path, cells, timeout, said):
    path = tiny(tmp_path / "01_tiny.ipynb", *cells)
    before = path.read_bytes()
    with pytest.raises(notebooks.NotebookError) as caught:
        notebooks.execute(path, timeout=timeout)
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_clean_keeps_tags_and_drops_the_rest():
    cell = new_code_cell("1", metadata={"tags": ["time"], "collapsed": True})
    twin, solution = new_code_cell("2"), new_code_cell("# Exercise 1: x", metadata={"tags": ["solution"]})
    twin["id"] = cell["id"]
    notebook = new_notebook(metadata={"widgets": {}, "vscode": {}})
    notebook.cells = [cell, twin, solution]
    notebooks.clean(notebook)
    assert cell.metadata == {"tags": ["time"]} and cell["id"] != twin["id"]
    folded = {"outputs_hidden": True, "source_hidden": True}  # in JupyterLab
    assert solution.metadata == {"tags": ["solution"], "jupyter": folded}
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"


# Copies for students

HOLES = """%%ranks 4 -o run
# Exercise 3: "add" up
def total(x):
    \"\"\"The sum over the ranks.\"\"\"
    # BEGIN SOLUTION
    dist.all_reduce(x)

    return x
    # END SOLUTION


# BEGIN SOLUTION
x = total(x)
# END SOLUTION
x"""


def test_student_copies_are_written_once(tmp_path, capsys):
    path = tiny(
        tmp_path / "01_tiny.ipynb",
        ("# Exercise 1: say \"hello\"\nprint('hello')", "solution"),
        ("%%ranks 4 -o run\n# Exercise 2: send the last shard first\ndist.send(x, 1)", "solution", "time"),
        "assert True",
    )
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "gpu.json").write_text("{}")
    command = ["student", "--to", str(tmp_path / "student"), str(path)]
    assert notebooks.main(command) == 0
    assert (tmp_path / "student" / "recorded" / "gpu.json").read_text() == "{}"  # lessons show it
    assert "do not solve" in (tmp_path / "student" / "AGENTS.md").read_text("utf-8")
    copy = notebooks.read(tmp_path / "student" / "01_tiny.ipynb")
    assert [cell.source for cell in copy.cells[1:]] == [
        'raise NotImplementedError("Exercise 1: say \\"hello\\"")',
        '%%ranks 4 -o run\nraise NotImplementedError("Exercise 2: send the last shard first")',
        "assert True",
    ]
    kinds = [["exercise"], ["exercise", "time"], ["check"]]
    assert [exercises.tags(cell)[:-1] for cell in copy.cells[1:]] == kinds
    assert "hello" in path.read_text("utf-8")
    (tmp_path / "student" / "01_tiny.ipynb").write_text("my answers")
    assert notebooks.main(command) == 0
    assert (tmp_path / "student" / "01_tiny.ipynb").read_text() == "my answers"
    assert "01_tiny.ipynb: kept, your answers may be in it" in capsys.readouterr().out


def test_cells_that_build_on_an_answer_do_not_hold_up_run_all():
    """On the ranks, too, and where what they made of it is used; what is made anew does not count."""
    answer = "# Exercise 1: double\ndef double(x):\n    return 2 * x"
    cells = [new_code_cell(answer, metadata={"tags": ["solution"]})]
    cells += [new_markdown_cell("## Later"), new_code_cell("a = double(1)"), new_code_cell("b = 3")]
    cells += [new_code_cell("%%ranks 2 --push double -o run\nc = double(rank)")]
    cells += [
        new_code_cell(source)
        for source in ("%%ranks 2\nd = c + 1", "run.values", "%%slurm\na", "a = b", "a + b")
    ]
    cells += [new_code_cell("e = []\ndouble(e)"), new_code_cell("e[0]")]  # a function may fill what it gets
    copy = notebooks.student_copy(new_notebook(cells=cells), "01_tiny")
    held_up = [c.source for c in copy.cells[2:] if "raises-exception" not in c.metadata.get("tags", [])]
    assert held_up == ["b = 3", "a = b", "a + b"]
    assert copy.cells[2].metadata["rankcell"] == {"builds_on": ["Exercise 1: double"]}


def test_student_stub_keeps_what_is_no_solution():
    hole = '# your code\n{0}raise NotImplementedError("Exercise 3: \\"add\\" up")\n'
    head = HOLES.partition("    # BEGIN")[0]
    assert exercises.stub(new_code_cell(HOLES)) == f"{head}    {hole.format('    ')}\n\n{hole.format('')}x"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (HOLES.replace("    # END SOLUTION\n", ""), "come in pairs"),
        (HOLES.replace("    # BEGIN SOLUTION\n", ""), "come in pairs"),
        (HOLES.replace("x = total(x)\n# END SOLUTION\n", ""), "come in pairs"),
        (HOLES.replace("    # END", "# END"), "come in pairs that begin in the same column."),
        ("print(1)", "cell 2 is tagged `solution` but does not begin with a comment like `# Exercise 2: "),
    ],
)
def test_half_marked_solutions_are_refused(tmp_path, capsys, source, said):
    path = tiny(tmp_path / "01_tiny.ipynb", (source, "solution"))
    assert notebooks.main(["student", "--to", str(tmp_path / "student"), str(path)]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "student").exists()
