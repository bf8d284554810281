"""tests/judge.py, on a notebook of a few cells: it must notice what is wrong, and nothing else."""

import textwrap

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import judge
import notebooks

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

HALF = """# Exercise 1: halve the number
def half(x):
    # BEGIN SOLUTION
    return x / 2
    # END SOLUTION"""
CHECK = "assert half(6) == 3, f'half of 6 is {half(6)}'"
PROOF = """
# after: half
for x in range(9):
    assert half(x) + half(x) == x

# wrong: half: multiplies | half of 6 is 12
def half(x):
    return x * 2

# wrong: half: subtracts | half of 6 is 5 | AssertionError
def half(x):
    return x - 1

# right: half: shifts
def half(x):
    return x >> 1
"""


@pytest.fixture
def lesson(pytester, monkeypatch):
    """Judge a notebook of cells `(id, source, *tags)`; `changed` replaces sources after the outputs were stored."""

    def judged(*cells, proof="", changed=()):
        path = pytester.path / "notebooks" / "01_tiny.ipynb"
        path.parent.mkdir(exist_ok=True)
        built = [new_markdown_cell("# 1 Tiny")]
        built += [new_code_cell(s, id=i, metadata={"tags": tags} if tags else {}) for i, s, *tags in cells]
        nbformat.write(new_notebook(cells=built), path)
        notebooks.execute(path)
        stored = notebooks.read(path)
        for cell in stored.cells:
            cell.source = dict(changed).get(cell.id, cell.source)
        notebooks.write(stored, path)
        folder = pytester.path / "tests" / "lessons"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "01_tiny.py").write_text(textwrap.dedent(proof))
        options = ["-p", "judge", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
        monkeypatch.setenv("PYTHONPATH", str(judge.__file__.rpartition("/")[0]))
        return pytester.runpytest_subprocess(*options, path)

    return judged


def test_a_sound_exercise_passes(lesson):
    result = lesson(
        ("fails", "1 / 0", "raises-exception"), ("half", HALF, "solution"), ("check", CHECK), proof=PROOF
    )
    result.assert_outcomes(passed=5)  # three cells, the exercise, and the proof


def test_wrong_judgements_are_told(lesson):
    proof = PROOF.replace("x >> 1", "x >> 2").replace("half of 6 is 5", "no such words")
    result = lesson(
        ("half", HALF, "solution"), ("check", "assert half(6) in (3, 12), f'not {half(6)}'"), proof=proof
    )
    result.assert_outcomes(passed=3, failed=1)
    for words in (
        "*line 6 is wrong, and passes its checks",
        "*line 10 fails, but nothing says 'no such words':",
        "*line 14 is right, and is refused: AssertionError: not 1",
    ):
        result.stdout.fnmatch_lines([words])


def test_an_exercise_has_two_or_three_wrong_answers(lesson):
    one = PROOF[: PROOF.index("# wrong: half: sub")]
    result = lesson(("half", HALF, "solution"), ("check", CHECK), proof=one)
    result.stdout.fnmatch_lines(["1 wrong answers; two or three are wanted"])


def test_a_stub_that_passes_is_told(lesson):
    result = lesson(("half", HALF, "solution"), ("check", "assert callable(half)"), proof=PROOF)
    result.stdout.fnmatch_lines(["the stub is wrong, and passes its checks"])


def test_a_block_without_its_cell_is_an_error(lesson):
    lesson(("one", "x = 1"), proof="# after: two\nassert x").assert_outcomes(errors=1)


def test_proof_fails_and_leaves_no_name(lesson):
    proof = "# after: one\ny = 2\nassert x == y, 'x is y'\n# after: two\nassert 'y' not in globals()"
    result = lesson(("one", "x = 1"), ("two", "x += 1"), proof=proof)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["01_tiny.py, block of line 1: AssertionError: x is y (line 3)"])


def test_proof_runs_on_ranks(lesson):
    proof = "# after: one\n# %%ranks 2 -o _run\ny = x + rank\ny\n# after: one\nassert _run.values == [1, 2]\n"
    proof += "# after: two\nassert '_run' not in globals()"
    lesson(
        ("one", "%load_ext rankcell"),
        ("ranks", "%%ranks 2\nx = 1"),
        ("two", "1"),
        proof=proof.replace("after: one", "after: ranks"),
    ).assert_outcomes(passed=5)


def test_a_failed_cell_stops_its_lesson(lesson):
    result = lesson(("one", "x = 1"), ("two", "x"), changed=[("one", "x = 1 / 0")])
    result.assert_outcomes(failed=1, skipped=1)


def test_a_deliberate_error_is_the_stored_one(lesson):
    cells = [(name, "1 / 0", "raises-exception") for name in ("none", "other", "same")]
    result = lesson(*cells, changed=[("none", "1 / 1"), ("other", "[][0]")])
    result.assert_outcomes(failed=2, passed=1)


BARS = "from rankcell.draw import bars\nbars.bars({'a': 1.0, 'b': 2.0}, unit='s', alt='A is fast.')"
CHANGES = {  # name of a cell: its tag, what changes in it, and whether that has to be noticed
    "within-2-percent": ("", "1.0", "1.01", False),
    "number": ("", "1.0", "1.1", True),
    "word-of-a-drawing": ("", "'b'", "'c'", True),
    "time": ("time", "1.0", "10.0", False),
    "words-beside-times": ("time", "fast", "slow", True),
    "machine": ("machine", "fast", "slow", False),
}


def test_what_a_cell_shows_is_compared(lesson):
    cells = [(name, BARS, *filter(None, [tag])) for name, (tag, *_) in CHANGES.items()]
    changed = [(name, BARS.replace(before, after)) for name, (_, before, after, _) in CHANGES.items()]
    result = lesson(*cells, changed=changed)
    noticed = [name for name, (*_, noticed) in CHANGES.items() if noticed]
    result.assert_outcomes(failed=len(noticed), passed=len(CHANGES) - len(noticed))
    result.stdout.fnmatch_lines([f"FAILED *::{name}*" for name in noticed])


def test_answers_without_a_slurm_are_skipped(lesson):
    lesson(("half", HALF, "solution"), ("check", "print('Skipped: no Slurm')"), proof=PROOF).assert_outcomes(
        passed=3, skipped=1
    )


def test_names_that_an_answer_took_come_back(lesson):
    kept = HALF.replace("/ 2", "/ kept")
    killer = "    del kept\n    print('names defined there are gone')\n    assert False, 'half of 6 is 12'"
    proof = PROOF.replace("def half(x):\n    return x * 2", "if True:\n" + killer).replace(
        "x >> 1", "x / kept"
    )
    lesson(("kept", "kept = 2"), ("half", kept, "solution"), ("check", CHECK), proof=proof).assert_outcomes(
        passed=5
    )
