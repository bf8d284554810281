"""The notebooks are in order, executed, clean and well proportioned; so are their student copies."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import notebooks
from rankcell import exercises

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESSONS = [
    lesson
    for part in tomllib.loads((ROOT / "site" / "lessons.toml").read_text("utf-8"))["part"]
    for lesson in part["lesson"]
]

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def loaded():
    """Each notebook, read once."""
    return {path: notebooks.read(path) for path in PATHS}


# The course


def test_lessons_are_numbered_in_reading_order():
    assert [lesson["notebook"][:3] for lesson in LESSONS] == [f"{n:02d}_" for n in range(1, len(LESSONS) + 1)]


def test_every_notebook_is_a_lesson():
    assert {path.stem for path in PATHS} - {"00_start"} <= {lesson["notebook"] for lesson in LESSONS}


@each_notebook
def test_title_is_the_lesson_s_number_and_name(path, loaded):
    titles = re.findall(r"^# .*$", "\n".join(markdown(loaded[path])), re.MULTILINE)
    if path.stem == "00_start":
        assert titles == ["# Start here"]
        return
    lesson = next(lesson for lesson in LESSONS if lesson["notebook"] == path.stem)
    assert titles == [f"# {int(path.stem[:2])} {lesson['title']}"]
    assert loaded[path].cells[0].source.startswith(titles[0])


@each_notebook
def test_a_rank_cell_uses_no_name_of_the_ranks_on_another_device(path, loaded):
    """Where there are GPUs, `--device cpu` and cells without it are two worlds, which share no names."""
    problems = names_of_another_world(loaded[path].cells)
    assert not problems, "\n".join(problems)


def test_a_name_of_another_world_is_found():
    given = new_code_cell("%%ranks 4 -o run\nfrom rankcell import models\ndef step(): ...")
    used = new_code_cell("%%ranks 4 --device cpu\nx = models.text()\nstep()")
    assert names_of_another_world([given, used]) == [
        "`%%ranks 4 --device cpu` has no models, step: they are names of `%%ranks 4 -o run`"
    ]
    pushed = new_code_cell("%%ranks 4 --push step --device cpu\nfrom rankcell import models\nstep(models)")
    assert names_of_another_world([given, pushed, used]) == []


def names_of_another_world(cells):
    """Names that a rank cell uses, and that only ranks on another device have: one line for each cell."""
    known, problems = {}, []  # by number of ranks and device: {name: first line of its cell}
    for cell in cells:
        first, _, body = cell.source.partition("\n")
        size = re.match(r"%%ranks (\d+)(?! of|\d)", first)
        if cell.cell_type != "code" or not size or re.search(r"--(nodes|local|fresh)\b", first):
            continue
        tree = list(ast.walk(ast.parse(body)))
        own = {n.id for n in tree if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.name for n in tree if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        own |= {n.arg for n in tree if isinstance(n, ast.arg)}
        own |= {(n.asname or n.name).partition(".")[0] for n in tree if isinstance(n, ast.alias)}
        pushed = re.search(r"--push (\S+)", first)
        own |= set(pushed[1].split(",")) if pushed else set()
        used = {n.id for n in tree if isinstance(n, ast.Name)}
        on_cpu = "--device cpu" in first
        mine = known.setdefault((size[1], on_cpu), {})
        others = known.get((size[1], not on_cpu), {})
        foreign = sorted(n for n in used - own - set(mine) if n in others)
        if foreign:
            problems.append(
                f"`{first}` has no {', '.join(foreign)}: they are names of `{others[foreign[0]]}`"
            )
        mine.update(dict.fromkeys(own, first))
    return problems


@each_notebook
def test_links_to_files_resolve(path, loaded):
    for source in markdown(loaded[path]):
        for target in re.findall(r"\]\(([^)\s#]+)", source):
            if not re.match(r"[a-z]+:", target):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


@each_notebook
def test_outputs_are_those_of_the_code(path, loaded):
    assert notebooks.why_stale(loaded[path]) == ""


@each_notebook
def test_formulas_have_their_backslashes(path, loaded):
    """`\\frac` written by a program without its second backslash is a form feed and "rac"."""
    assert [
        c.id for c in loaded[path].cells if any(ord(ch) < 32 and ch not in "\n\t" for ch in c.source)
    ] == []


@each_notebook
def test_outputs_name_no_machine(path, loaded):
    assert notebooks.machine_paths(loaded[path], notebooks.paths_of_this_machine()) == []


@each_notebook
def test_metadata_is_clean(path, loaded):
    before = nbformat.writes(loaded[path])
    again = notebooks.read(path)
    notebooks.clean(again)
    assert nbformat.writes(again) == before, f"run `make execute NB={path.relative_to(ROOT)}`"


@each_notebook
def test_code_cells_are_short(path, loaded):
    for cell in notebooks.code_cells(loaded[path]):
        lines = len(cell.source.splitlines())
        assert lines <= 40, f"the cell that begins `{cell.source[:50]}` has {lines} lines"


@each_notebook
def test_prose_comes_between_code(path, loaded):
    for kind, cells in groupby(loaded[path].cells, key=lambda cell: cell.cell_type):
        cells = list(cells)
        assert kind != "code" or len(cells) <= 3, (
            f"{len(cells)} code cells in a row: `{cells[0].source[:50]}`"
        )


@each_notebook
def test_exercises_have_a_task_a_solution_and_a_check(path, loaded):
    cells = loaded[path].cells
    numbers = []
    for index, cell in enumerate(cells):
        if "solution" not in exercises.tags(cell):
            continue
        text = exercises.exercise_text(cell)
        assert text, f"this solution lacks its comment `# Exercise N: ...`: `{cell.source[:60]}`"
        name = text.split(":")[0]
        number = int(name.removeprefix("Exercise "))
        numbers.append(number)
        task = "\n".join(c.source for c in cells[:index] if c.cell_type == "markdown")
        assert re.search(rf"\b{name}\b", task), f"no markdown cell above states {name}"
        following = cells[index + 1 :]
        until_next = following[
            : next((i for i, c in enumerate(following) if "solution" in exercises.tags(c)), 99)
        ]
        assert any(
            c.cell_type == "code" and re.search(r"\bcheck\.|^\s*assert\b", c.source, re.MULTILINE)
            for c in until_next
        ), f"no cell below checks {name}"
    assert sorted(set(numbers)) == list(range(1, len(set(numbers)) + 1)), f"exercises are numbered {numbers}"


@each_notebook
def test_rank_cells_are_linted(path, loaded, tmp_path):
    """ruff does not read cells that begin with a magic of ours, so it is given their bodies here."""
    for cell in notebooks.code_cells(loaded[path]):
        if cell.source.startswith("%%ranks") and "raises-exception" not in exercises.tags(cell):
            body = cell.source.split("\n", 1)[1] if "\n" in cell.source else ""
            (tmp_path / f"cell_{cell.execution_count:02d}.py").write_text(body + "\n", "utf-8")
    ignored = "F821,F401,E402,B018,E731,E741"  # names and imports live on from cell to cell
    command = [
        "ruff",
        "check",
        "--isolated",
        "--line-length=110",
        "--select=E,F,B",
        f"--ignore={ignored}",
        ".",
    ]
    result = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@each_notebook
def test_student_copy_has_the_tasks_and_none_of_the_solutions(path, loaded):
    copy = notebooks.student_copy(loaded[path], path.name)
    assert len(copy.cells) == len(loaded[path].cells)
    for ours, theirs in zip(loaded[path].cells, copy.cells, strict=True):
        assert not theirs.get("outputs")
        if "solution" in exercises.tags(ours):
            assert "raise NotImplementedError(" in theirs.source
            assert "solution" not in exercises.tags(theirs)
            assert "SOLUTION" not in theirs.source
            if "SOLUTION" not in ours.source:
                assert len(theirs.source.splitlines()) <= 2
        else:
            assert theirs.source == ours.source


def markdown(notebook):
    """The text of every markdown cell, code fences left out."""
    return [
        re.sub(r"(?ms)^```.*?^```", "", cell.source)
        for cell in notebook.cells
        if cell.cell_type == "markdown"
    ]


# The tool, on notebooks of two or three cells


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
    path = tiny(
        tmp_path_factory.mktemp("tiny") / "01_tiny.ipynb",
        "x = 1",
        "print('a')\nprint(x)\nx + 1",
        ("1 / 0", "raises-exception"),
    )
    assert notebooks.main(["execute", str(path)]) == 0
    return path


def test_execute_stores_outputs_counts_and_the_fingerprint(executed):
    notebook = notebooks.read(executed)
    first, second, third = notebooks.code_cells(notebook)
    assert [first.execution_count, second.execution_count, third.execution_count] == [1, 2, 3]
    assert [output.output_type for output in second.outputs] == ["stream", "execute_result"]
    assert second.outputs[0].text == "a\n1\n"
    assert third.outputs[0].ename == "ZeroDivisionError"
    assert set(notebook.metadata) == {"kernelspec", "language_info", "rankcell"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebooks.why_stale(notebook) == ""


def test_execute_twice_changes_nothing(executed):
    before = executed.read_text("utf-8")
    notebooks.execute(executed)
    duration = re.compile(r'"seconds": \d+')
    assert duration.sub("", executed.read_text("utf-8")) == duration.sub("", before)


def change_the_code(cells):
    cells[1].source = "x = 2"


def drop_a_count(cells):
    cells[2].execution_count = None


def swap_the_counts(cells):
    cells[1].execution_count, cells[2].execution_count = 2, 1


def drop_the_error(cells):
    cells[3].outputs = []


def edit_an_output(cells):
    cells[2].outputs[0].text = "a\n2\n"


def drop_the_tag(cells):
    cells[3].metadata = {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_the_code, "its code changed since it was executed"),
        (drop_a_count, "not executed from top to bottom (execution counts [1, None, 3])"),
        (swap_the_counts, "not executed from top to bottom (execution counts [2, 1, 3])"),
        (drop_the_error, "cell [3] has the tag `raises-exception` but holds no error"),
        (edit_an_output, "its outputs are not those that its run stored"),
        (drop_the_tag, "cell [3] holds an error but has no tag `raises-exception`"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_stale_says_why(executed, tmp_path, capsys, change, reason):
    notebook = notebooks.read(executed)
    change(notebook.cells)
    path = tmp_path / "01_tiny.ipynb"
    nbformat.write(notebook, path)
    assert notebooks.main(["stale", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: {reason}\n"


def test_prose_does_not_make_a_notebook_stale(executed):
    notebook = notebooks.read(executed)
    notebook.cells[0].source += "\n\nA sentence."
    assert notebooks.why_stale(notebook) == ""


def test_execute_stale_leaves_the_others_alone(executed, capsys):
    assert notebooks.main(["execute", "--stale", str(executed)]) == 0
    assert capsys.readouterr().out == ""


def test_a_failing_cell_is_named_and_nothing_is_stored(tmp_path, capsys):
    path = tiny(tmp_path / "01_tiny.ipynb", "x = 1", "y = x / 0", "z = 1")
    before = path.read_bytes()
    assert notebooks.main(["execute", str(path)]) == 1
    message = capsys.readouterr().err
    assert f"{path}: code cell 2 of 3 (`y = x / 0`) raised ZeroDivisionError: division by zero" in message
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_cell_that_takes_too_long_is_named(tmp_path):
    path = tiny(tmp_path / "01_tiny.ipynb", "import time", "time.sleep(60)")
    with pytest.raises(notebooks.NotebookError, match=r"code cell 2 of 2 .* did not end within 1 s\."):
        notebooks.execute(path, timeout=1)


def test_a_cell_that_should_have_failed_is_named(tmp_path):
    path = tiny(tmp_path / "01_tiny.ipynb", ("x = 1", "raises-exception"))
    with pytest.raises(notebooks.NotebookError, match="has the tag `raises-exception` but holds no error"):
        notebooks.execute(path)


def test_an_output_with_a_path_of_this_machine_is_refused(tmp_path):
    path = tiny(tmp_path / "01_tiny.ipynb", "import warnings; warnings.warn('old')", "print('/home/me/data')")
    with pytest.raises(notebooks.NotebookError) as caught:
        notebooks.execute(path)
    assert "cell [1] shows the path '/tmp/ipykernel_" in str(caught.value) or sys.platform != "linux"
    assert "cell [2] shows the path '/home/me/' of this machine: /home/me/data" in str(caught.value)
    assert "executed" not in path.read_text("utf-8")


def test_solutions_are_folded_in_jupyterlab():
    notebook = new_notebook(cells=[new_code_cell("1", metadata={"tags": ["solution"]}), new_code_cell("2")])
    notebooks.clean(notebook)
    folded = {"outputs_hidden": True, "source_hidden": True}
    assert [cell.metadata for cell in notebook.cells] == [{"tags": ["solution"], "jupyter": folded}, {}]


def test_long_checks_are_folded_in_jupyterlab():
    """A verdict stays in sight; so do short checks, code that a reader is to read, and ranks at work."""
    check = "check.every(\n" + "    check.that(True, 'yes'),\n" * 6 + ")"
    code = "a = 1\n" * 17
    cells = [
        check,
        check.replace("    check.that(True, 'yes'),\n", "", 1),  # short
        code + check,  # more than two thirds of it are no check
        check + "\na",  # shows something
        "def f():\n    pass\n\n" + check,
        "def g():\n    pass\n\n" + check,  # the last cell needs it
        "%%ranks 4\n" + check,
        "!ls\n" + check,
        code + "check.that(a, 'one')",
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    notebook.cells[6:6] = [new_code_cell("# Exercise 1: three", metadata={"tags": ["solution"]})]
    notebook.cells.insert(6, new_markdown_cell("## Your turn"))
    notebook.cells += [new_code_cell("%%slurm net\n" + check), new_code_cell("g()")]
    notebooks.clean(notebook)
    folded = [i for i, c in enumerate(notebook.cells) if c.metadata.get("jupyter") == {"source_hidden": True}]
    assert folded == [0, 4, 10, 11]  # the last but one judges an exercise


def test_clean_keeps_tags_and_drops_the_rest():
    cell = new_code_cell("1", metadata={"tags": ["time"], "collapsed": True})
    twin = new_code_cell("2")
    twin["id"] = cell["id"]
    notebook = new_notebook(
        metadata={"widgets": {}, "vscode": {}, "kernelspec": {"name": "me", "display_name": "Me"}}
    )
    notebook.cells = [cell, twin]
    notebooks.clean(notebook)
    assert cell.metadata == {"tags": ["time"]}
    assert cell["id"] != twin["id"]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_not_a_notebook(tmp_path):
    with pytest.raises(notebooks.NotebookError, match="there is no such notebook"):
        notebooks.read(tmp_path / "none.ipynb")
    (tmp_path / "text.ipynb").write_text("hello")
    with pytest.raises(notebooks.NotebookError, match="not a notebook"):
        notebooks.read(tmp_path / "text.ipynb")


def test_student_stub_keeps_the_magic_and_states_the_task(tmp_path, executed):
    path = tiny(
        tmp_path / "01_tiny.ipynb",
        ("# Exercise 1: say \"hello\"\nprint('hello')", "solution"),
        ("%%ranks 4 -o run\n# Exercise 2: send the last shard first\ndist.send(x, 1)", "solution", "time"),
        "assert True",
    )
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "gpu.json").write_text("{}")
    assert notebooks.main(["student", "--to", str(tmp_path / "student"), str(path)]) == 0
    assert (tmp_path / "student" / "recorded" / "gpu.json").read_text() == "{}"  # lessons show it
    copy = notebooks.read(tmp_path / "student" / "01_tiny.ipynb")
    assert [cell.source for cell in copy.cells[1:]] == [
        'raise NotImplementedError("Exercise 1: say \\"hello\\"")',
        '%%ranks 4 -o run\nraise NotImplementedError("Exercise 2: send the last shard first")',
        "assert True",
    ]
    assert [exercises.tags(cell) for cell in copy.cells[1:]] == [
        ["exercise", "raises-exception"],
        ["exercise", "time", "raises-exception"],
        ["check", "raises-exception"],
    ]
    assert "hello" in path.read_text("utf-8")


def test_a_student_copy_that_is_there_stays(tmp_path, capsys):
    path = tiny(
        tmp_path / "01_tiny.ipynb", ("# Exercise 1: say hello\nprint('hello')", "solution"), "assert True"
    )
    command = ["student", "--to", str(tmp_path / "student"), str(path)]
    assert notebooks.main(command) == 0
    (tmp_path / "student" / "01_tiny.ipynb").write_text("my answers")
    assert notebooks.main(command) == 0
    assert (tmp_path / "student" / "01_tiny.ipynb").read_text() == "my answers"
    assert "01_tiny.ipynb: kept, your answers may be in it" in capsys.readouterr().out


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


def test_in_a_student_copy_cells_that_build_on_an_answer_do_not_hold_up_run_all(tmp_path):
    """On the ranks, too, and where what they made of it is used; what is made anew does not count."""
    cells = [
        new_code_cell(
            "# Exercise 1: double\ndef double(x):\n    return 2 * x", metadata={"tags": ["solution"]}
        ),
        new_markdown_cell("## Later"),
        new_code_cell("a = double(1)"),
        new_code_cell("b = 3"),
        new_code_cell("%%ranks 2 --push double -o run\nc = double(rank)"),
        new_code_cell("%%ranks 2\nd = c + 1"),
        new_code_cell("run.values"),
        new_code_cell("a = b"),
        new_code_cell("a + b"),
    ]
    copy = notebooks.student_copy(new_notebook(cells=cells), "01_tiny")
    held_up = [
        cell.source for cell in copy.cells[2:] if "raises-exception" not in cell.metadata.get("tags", [])
    ]
    assert held_up == ["b = 3", "a = b", "a + b"]


def test_student_stub_keeps_what_is_not_marked_as_solution():
    error = 'raise NotImplementedError("Exercise 3: \\"add\\" up")'
    assert exercises.stub(new_code_cell(HOLES)) == (
        '%%ranks 4 -o run\n# Exercise 3: "add" up\n'
        'def total(x):\n    """The sum over the ranks."""\n'
        f"    # your code\n    {error}\n\n\n# your code\n{error}\nx"
    )


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("    # END SOLUTION\n", "", "`# BEGIN SOLUTION` without its other half"),
        ("    # BEGIN SOLUTION\n", "", "`# END SOLUTION` without its other half"),
        ("x = total(x)\n# END SOLUTION\n", "", "`# BEGIN SOLUTION` without its other half"),
        (
            "    # END SOLUTION",
            "# END SOLUTION",
            "`# BEGIN SOLUTION` and `# END SOLUTION` do not begin in the same column",
        ),
    ],
)
def test_half_marked_solutions_are_refused(tmp_path, capsys, before, after, reason):
    path = tiny(tmp_path / "01_tiny.ipynb", (HOLES.replace(before, after, 1), "solution"))
    assert notebooks.main(["student", "--to", str(tmp_path / "student"), str(path)]) == 1
    assert f'cell 2 (`Exercise 3: "add" up`) has {reason}.' in capsys.readouterr().err


def test_student_copy_of_an_executed_notebook_holds_no_output(executed):
    text = json.dumps(notebooks.student_copy(notebooks.read(executed), "tiny"))
    assert "ZeroDivisionError" not in text and '"executed"' not in text


def test_a_solution_without_its_comment_is_refused(tmp_path, capsys):
    path = tiny(tmp_path / "01_tiny.ipynb", ("print('hello')", "solution"))
    assert notebooks.main(["student", "--to", str(tmp_path / "student"), str(path)]) == 1
    assert (
        "cell 2 is tagged `solution` but does not begin with a comment like `# Exercise 2: "
        in capsys.readouterr().err
    )
    assert not (tmp_path / "student").exists()
