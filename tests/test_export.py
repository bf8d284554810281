"""A notebook's rank cells as a script: the same numbers under torchrun; what stays behind is said."""

import json
import os
import subprocess
import sys

import pytest

from rankcell import command
from rankcell.cluster import export


def notebook(path, *cells):
    """Write a notebook of code cells; a cell is its source, or (source, tag)."""
    sources = [(cell,) if isinstance(cell, str) else cell for cell in cells]
    made = [
        {
            "cell_type": "code",
            "source": source,
            "metadata": {"tags": tags},
            "execution_count": k,
            "id": f"id{k}",
        }
        for k, (source, *tags) in enumerate(sources, 1)
    ]
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


LESSON = [
    "import math",
    "print('never run')",
    "%%ranks 2 --pull mine\nx = torch.full((2,), rank + 1.0)\ndist.all_reduce(x)\n(\n    x.tolist(), 'two\\nlines'\n)",
    "%%ranks 2\nfrom rankcell import span\nwith span('s'):\n    y = 3.1416 * rank\nround(y, 2)",
    "%%ranks 2 --device cpu\nw = 1; world_size + w  # both",
    "%%ranks 2\n'silent';",
    "%%ranks 2\ndist.barrier()",
    ("%%ranks 2\n1 / 0", "raises-exception"),
    "%%ranks 2 --push model\nmodel",
    "%%ranks 2 --only 1\nrank",
    "%%ranks 2\n!ls",
    "%%ranks 4\nrank",
    "%%ranks 1 of 64\nrank",
]


@pytest.fixture
def lesson(tmp_path):
    return notebook(tmp_path / "lesson.ipynb", *LESSON)


@pytest.mark.slow
def test_a_script_prints_the_values_of_its_cells(lesson, tmp_path):
    assert command.main(["export", str(lesson), "--to", str(tmp_path), "--nodes", "2"]) == 0
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = lambda *words: subprocess.run(
        [sys.executable, *words, tmp_path / "lesson.py"], env=environment, capture_output=True, text=True
    )
    assert "These cells ran on 2 ranks: torchrun --standalone --nproc-per-node=2 lesson.py" in run().stderr
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    both = "\n".join(f"  rank {r}: ([3.0, 3.0], 'two\\nlines')" for r in range(2))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"In [3]\n{both}\nIn [4]\n  rank 0: 0.0\n  rank 1: 3.14\nIn [5]\n  rank 0: 3\n  rank 1: 3\n"
    )


def test_cells_that_stay_behind_are_named_with_reasons(lesson):
    cells = export.read(lesson)
    assert {c.options.world_size for c in cells} == {2} and len(cells) == 9
    assert {c.number: found for c in cells if (found := export.obstacle(c))} == {
        "8": "fails on purpose",
        "9": "needs names of the notebook: define model in the script",
        "10": "ran on some of the ranks only: write it under `if rank in ...:`",
        "11": "has a magic or a shell command",
    }
    text = export.script(lesson, cells)
    assert "never run" not in text and "%%ranks" not in text and "gpu = True and" in text


def test_the_command_tells_what_it_wrote(tmp_path, capsys):
    path = notebook(tmp_path / "lesson.ipynb", "%%ranks 2\nrank", ("%%ranks 2\n1 / 0", "raises-exception"))
    empty, text = notebook(tmp_path / "empty.ipynb", "1 + 1"), tmp_path / "text.ipynb"
    text.write_text("{}")
    job = ["--to", tmp_path / "job", "--nodes", "2", "--gpus-per-node", "1"]
    for words, code, says in (
        ([path, *job], 0, "lesson.py: 1 cell for 2 ranks\n  left out In [2]: it fails on purpose\n"),
        ([tmp_path / "absent.ipynb"], 1, "absent.ipynb cannot be read: No such file or directory."),
        ([text], 1, "text.ipynb is no notebook of format 4."),
        ([empty], 1, "has no cell that begins with %%ranks"),
        (
            [path, "--nodes", "3"],
            1,
            "2 ranks cannot be spread evenly over 3 nodes. Choose a number of nodes that",
        ),
    ):
        assert command.main(["export", *map(str, words)]) == code
        said = capsys.readouterr()
        assert says in said.out + said.err and bool(said.err) == bool(code)
    written = (tmp_path / "job" / "lesson.sbatch").read_text()
    assert "--nodes=2\n" in written and "--gpus-per-node=1\n" in written
