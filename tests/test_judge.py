"""tests/judge.py, on three small notebooks, judged in one go: it must notice what is wrong, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import judge
import notebooks

pytestmark = pytest.mark.slow

BARS = "from rankcell.draw import bars\nbars.bars({'a': 1.0, 'b': 2.0}, unit='s', alt='A is fast.')"
CHANGED = {  # name of a cell: its tag, its source, what changes in it after it was stored, and what has to be told
    "raises-nothing": (
        "raises-exception",
        "1 / 0",
        "1 / 1",
        "'ZeroDivisionError: division by zero' was stored",
    ),
    "raises-other": ("raises-exception", "1 / 0", "[][0]", "IndexError"),
    "raises-same": ("raises-exception", "1 / 0", "1 / 0", ""),
    "within-2-percent": ("", BARS, BARS.replace("1.0", "1.01"), ""),
    "number": ("", BARS, BARS.replace("1.0", "1.1"), "differ"),
    "word-of-a-drawing": ("", BARS, BARS.replace("'b'", "'c'"), "differ"),
    "time": ("time", BARS, BARS.replace("1.0", "10.0"), ""),
    "words-beside-times": ("time", BARS, BARS.replace("fast", "slow"), "differ"),
    "machine": ("machine", BARS, BARS.replace("fast", "slow"), ""),
}


def half(name, check="assert {0}(6) == 3, f'half of 6 is {{{0}(6)}}'", by="2"):
    """The cells of an exercise `name` that halves a number, and of its check."""
    body = f"def {name}(x):\n    # BEGIN SOLUTION\n    return x / {by}\n    # END SOLUTION"
    solution = f"# Exercise {len(name)}: {name}\n{body}"
    return [(name, solution, "solution"), (f"{name}-check", check.format(name))]


def answers(name, says="half of 6 is 5", shift=1, wrong=2):
    """Two wrong answers to the exercise `name`, or one, and a right one."""
    subtracts = f"# wrong: {name}: subtracts | {says}\ndef {name}(x):\n    return x - 1\n"
    return (
        f"# wrong: {name}: multiplies | half of 6 is 12\ndef {name}(x):\n    return x * 2\n"
        + subtracts * (wrong - 1)
        + f"# right: {name}: shifts\ndef {name}(x):\n    return x >> {shift}\n"
    )


CELLS = [
    ("kept", "kept = 2"),
    *half("robbed", by="kept"),
    *half("sound"),
    *half("loose", check="assert {0}(6) in (3, 12), f'not {{{0}(6)}}'"),
    *half("few"),
    *half("lax", check="assert callable({0})"),
    *half("no_slurm", check="print('Skipped: no Slurm')"),
    ("proved", "x = 1"),
    ("later", "x += 1"),
    *((name, source, *filter(None, [tag])) for name, (tag, source, *_) in CHANGED.items()),
    ("load", "%load_ext rankcell"),
    ("ranks", "%%ranks 2\nx = 1"),
    ("end", "1"),
]
ROBS = (
    "if True:\n    del kept\n    print('names defined there are gone')\n    assert False, 'half of 6 is 12'\n"
)
PROOF = "".join([
    answers("robbed").replace("def robbed(x):\n    return x * 2\n", ROBS),
    answers("sound"),
    "# after: sound\nfor x in range(9):\n    assert sound(x) + sound(x) == x\n",
    answers("loose", says="no such words", shift=2),
    answers("few", wrong=1),
    answers("lax"),
    answers("no_slurm"),
    "# after: proved\ny = 2\nassert x == y, 'x is y'\n# after: later\nassert 'y' not in globals()\n",
    "# after: ranks\n# %%ranks 2 -o _run\ny = x + rank\ny\n# after: ranks\nassert _run.values == [1, 2]\n",
    "# after: end\nassert '_run' not in globals()\n",
])  # fmt: skip


def write(folder, name, cells, proof="", changed=None):
    """A notebook of cells `(id, source, *tags)` with what they show, its proof beside it; then `changed` sources."""
    path = folder / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    built = [new_code_cell(s, id=i, metadata={"tags": tags} if tags else {}) for i, s, *tags in cells]
    nbformat.write(new_notebook(cells=[new_markdown_cell(f"# {name}"), *built]), path)
    if changed is not None:
        notebooks.execute(path)
        stored = notebooks.read(path)
        for cell in stored.cells:
            cell.source = changed.get(cell.id, cell.source)
        notebooks.write(stored, path)
    (folder / "tests" / "lessons").mkdir(parents=True, exist_ok=True)
    (folder / "tests" / "lessons" / f"{name}.py").write_text(proof)
    return path


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the judge says of each item, by notebook and name: "passed", "skipped", or what is wrong."""
    folder = tmp_path_factory.mktemp("course")
    paths = [
        write(folder, "01_tiny", CELLS, PROOF, {name: after for name, (_, _, after, _) in CHANGED.items()}),
        write(folder, "02_broken", [("one", "x = 1"), ("two", "x")], changed={"one": "x = 1 / 0"}),
        write(folder, "03_lost", [("one", "x = 1")], "# after: two\nassert x"),
    ]
    options = ["-p", "judge", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    options += ["--continue-on-collection-errors", "--junitxml", str(folder / "told.xml")]
    beside = str(Path(judge.__file__).parent)
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, paths)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": beside},
        capture_output=True,
    )
    found = {}
    for case in ElementTree.parse(folder / "told.xml").iter("testcase"):
        said = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        found[case.get("name")] = "" if said is None else said.tag if said.tag == "skipped" else said.text
    return found


def test_a_sound_exercise_and_its_proof_pass(told):
    assert not told["Exercise 5: sound"] and not told["sound"] and not told["after sound"]


def test_wrong_judgements_are_told(told):
    for words in (
        "is wrong, and passes its checks",
        "fails, but nothing says 'no such words':",
        "is right, and is refused: AssertionError: not 1",
    ):
        assert words in told["Exercise 5: loose"]
    assert "the stub is wrong, and passes its checks" in told["Exercise 3: lax"]


def test_an_exercise_has_two_or_three_wrong_answers(told):
    assert "1 wrong answers; two to four are wanted" in told["Exercise 3: few"]


def test_names_that_an_answer_took_come_back(told):
    assert not told["Exercise 6: robbed"]


def test_answers_without_a_slurm_are_skipped(told):
    assert told["Exercise 8: no_slurm"] == "skipped"


def test_proof_fails_and_leaves_no_name(told):
    assert "01_tiny.py, block of line 57: AssertionError: x is y (line 59)" in told["after proved"]
    assert not told["after later"]


def test_proof_runs_on_ranks(told):
    assert not told["after ranks"] and not told["after end"]


def test_a_block_without_its_cell_is_an_error(told):
    assert "no such cell, or no solution:\nline 1: after: two" in told["notebooks.03_lost.ipynb"]


def test_a_failed_cell_stops_its_lesson(told):
    assert "ZeroDivisionError" in told["one"] and told["two"] == "skipped"


@pytest.mark.parametrize("cell", CHANGED)
def test_what_a_cell_shows_is_compared(told, cell):
    wanted = CHANGED[cell][-1]
    assert wanted in told[cell] if wanted else not told[cell]
