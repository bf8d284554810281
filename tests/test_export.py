"""A notebook as a script: the same numbers under torchrun, without rankcell; what cannot go along is said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rankcell.cluster import export

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def notebook(path, *cells):
    """Write a notebook of code cells; a cell is its source, or (source, tag)."""
    made = []
    for k, cell in enumerate(cells, 1):
        source, *tags = (cell,) if isinstance(cell, str) else cell
        made.append(
            {
                "cell_type": "code",
                "source": source,
                "metadata": {"tags": tags},
                "execution_count": k,
                "outputs": [],
            }
        )
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def without_rankcell(folder):
    """An environment in which importing rankcell fails."""
    (folder / "rankcell.py").write_text("raise ImportError('the script needs rankcell')")
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(script, ranks, *words):
    """What the script printed under torchrun."""
    (script.parent / "block").mkdir(exist_ok=True)
    command = [*TORCHRUN, str(ranks), script.name, *words]
    done = subprocess.run(
        command,
        cwd=script.parent,
        env=without_rankcell(script.parent / "block"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_same(found, expected):
    """Bit for bit, whatever it is made of."""
    assert type(found) is type(expected) or isinstance(expected, torch.Tensor)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for f, e in zip(found, expected, strict=True):
            check_same(f, e)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            check_same(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.slow
def test_lesson_08_gives_the_same_numbers(shell, tmp_path):
    """All cells for 4 ranks but those that measure time: what the notebook shows and pulls, bit for bit."""
    cells = json.loads((NOTEBOOKS / "08_ddp.ipynb").read_text())["cells"]
    kept = [c for c in cells if c["cell_type"] == "code" and "time" not in c["metadata"].get("tags", [])]
    sources = [("".join(c["source"]), *c["metadata"].get("tags", [])) for c in kept]
    path = notebook(tmp_path / "08_ddp.ipynb", *sources)
    expected = {}
    for k, (source, *tags) in enumerate(sources, 1):
        first, _, rest = source.partition("\n")
        if not first.startswith("%%ranks"):
            shell.run_cell(
                source, silent=True
            )  # it may need what a cell that measures time would have pulled
        elif "raises-exception" not in tags:
            done = shell.run_cell(f"{first} -o kept\n{rest}", silent=True)
            assert done.success, done.error_in_exec
            expected[f"In [{k}]"] = shell.user_ns.get("kept")
    script, job, *_ = export.export(path, to=tmp_path / "job", nodes=2, gpus_per_node=2)
    run(script, 4, "--save", "values.pt")
    found = torch.load(script.parent / "values.pt")
    assert found.keys() <= expected.keys() and len(found) >= 8
    for cell, named in found.items():
        for name, values in named.items():
            check_same(
                values, expected[cell].values if name == "value" else list(expected[cell].pulled[name])
            )
    assert "--nodes=2\n" in job.read_text() and "--gpus-per-node=2\n" in job.read_text()


@pytest.mark.slow
def test_pushed_names_are_made_as_the_notebook_made_them(tmp_path):
    """The statements that define them and that change them, in order, and nothing that only shows."""
    path = notebook(
        tmp_path / "lesson.ipynb",
        "%load_ext rankcell\nimport torch\nfrom rankcell import check\nfrom rankcell.models import MLP",
        "torch.manual_seed(3)\nnoise = torch.randn(2)\nunused = check.that(False, 'never run')",
        "model = MLP(2, 3, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "for x in torch.eye(2):\n    model.zero_grad()\n    model(x).sum().backward()\n    optimizer.step()",
        "check.that(True, 'shown only')",
        "scale = 2; factor = 3\n\n\ndef scaled(x):\n    return x * scale * factor + later\n",
        "later = 1",
        "weights = [p.detach() for p in model.parameters()]\nweights[1] += 1",
        "%%ranks 2 --push weights,scaled,noise -o run\nscaled(weights[1][0].item()), noise.tolist()",
        "%%ranks 2 --pull mine\nmine = rank + 10",
        "total = sum(mine)",
        "%%ranks 2 --push total --only 1\n'''two\nlines''', total",
    )
    names: dict = {}
    for line in ("import torch", "from rankcell.models import MLP"):
        exec(line, names)
    exec("torch.manual_seed(3)\nnoise = torch.randn(2)\nmodel = MLP(2, 3, 2)", names)
    exec("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", names)
    exec("for x in torch.eye(2):\n    model.zero_grad(); model(x).sum().backward(); optimizer.step()", names)
    bias = [p.detach() for p in names["model"].parameters()][1][0].item() + 1
    exported = export.convert(path)
    assert not exported.left_out
    assert "never run" not in exported.text and "shown only" not in exported.text
    script, *_ = export.export(path, to=tmp_path / "job")
    said = run(script, 2, "--save", "values.pt")
    found = torch.load(script.parent / "values.pt")
    assert found["In [9]"]["value"][0][0] == pytest.approx(bias * 6 + 1, rel=1e-6)
    assert found["In [9]"]["value"] == [found["In [9]"]["value"][0]] * 2
    assert found["In [9]"]["value"][1][1] == names["noise"].tolist()
    assert found["In [10]"]["mine"] == [10, 11]
    assert found["In [12]"]["value"] == [("two\nlines", 21)]
    assert "In [10], mine\n  rank 0: 10\n  rank 1: 11\n" in said


@pytest.mark.slow
def test_what_cannot_go_along_is_left_out_with_a_reason(tmp_path):
    path = notebook(
        tmp_path / "lesson.ipynb",
        "from rankcell.draw.timeline import timeline",
        "%%ranks 2 -o run\nx = torch.ones(1)\nx.item()",
        "events = run.events",
        ("%%ranks 2\nbroken = 1\nraise ValueError", "raises-exception"),
        "%%ranks 4\nwide = 1",
        "%%ranks 2\nbroken + 1",
        "%%ranks 2 --push events\nlen(events)",
        "%%ranks 2\n!ls",
        "%%ranks 2\nimport rankcell\nrankcell.span",
        "%%ranks 2\nfrom rankcell import run as again",
        "%%ranks 2 --push nothing\nnothing",
        "%%ranks 2\nfrom rankcell import span\nwith span('x'):\n    y = x + 1\ny.item()",
        "%%ranks 2\nbroken = 5",
        "%%ranks 2\nbroken;",
    )
    exported = export.convert(path)
    assert exported.world_size == 2
    assert exported.kept == ("In [2]", "In [12]", "In [13]", "In [14]")
    assert dict(exported.left_out) == {
        "In [4]": "it fails on purpose",
        "In [5]": "it ran on 4 ranks",
        "In [6]": "it needs broken, which In [4] made, which is left out",
        "In [7]": "it needs run, the record of In [2], which only rankcell makes",
        "In [8]": "it uses a magic or a shell command of the notebook",
        "In [9]": "it imports rankcell as a whole (name what it needs: `from rankcell.models import MLP`)",
        "In [10]": "it needs rankcell.run, which works in a notebook only",
        "In [11]": "it needs nothing, which no ordinary cell before it makes",
    }
    assert "# In [5] is left out: it ran on 4 ranks.\n#     wide = 1\n" in exported.text
    script, *_ = export.export(path, to=tmp_path / "job")
    said = run(script, 2)
    assert "In [12]\n  all 2 ranks: 2.0\n" in said and "In [14]" not in said


def test_script_names_no_rankcell_and_copies_what_it_imports(tmp_path):
    written = export.export(NOTEBOOKS / "08_ddp.ipynb", to=tmp_path)
    names = {str(p.relative_to(tmp_path)) for p in written}
    assert {
        "08_ddp.py",
        "08_ddp.sbatch",
        "lesson_modules/models.py",
    } <= names
    assert "lesson_modules/data/fables.txt" in names
    for path in written:
        if path.suffix == ".py":
            assert not re.search(r"^\s*(from|import) rankcell", path.read_text(), re.MULTILINE), path
            compile(path.read_text(), path, "exec")


@pytest.mark.alike(3)
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_every_lesson_with_rank_cells_becomes_a_script(path):
    """Or says in one sentence why not. Nothing is left out for want of a name."""
    try:
        exported = export.convert(path)
    except export.ExportError as error:
        assert "no cell that begins with %%ranks" in str(error)
        return
    compile(exported.text, path.stem, "exec")
    assert exported.kept
    for name, reason in exported.left_out:
        assert "no ordinary cell before it makes" not in reason, f"{name}: {reason}"


@pytest.mark.slow
def test_wrong_number_of_ranks_says_how_to_start(tmp_path):
    path = notebook(tmp_path / "lesson.ipynb", "%%ranks 2\nrank")
    script, *_ = export.export(path, to=tmp_path / "job")
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "These cells ran on 2 ranks in the notebook; this is 1." in done.stderr
    assert "torchrun --standalone --nproc-per-node=2" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"nodes": 3},
            "2 ranks cannot be spread evenly over 3 nodes. Choose a number of nodes that divides 2.",
        ),
        (
            {"nodes": 2, "gpus_per_node": 4},
            "2 nodes with 4 GPUs each hold 8 ranks; the cells ran on 2. That takes 1 per node.",
        ),
        ({"world_size": 8}, "has no cells for 8 ranks. It has cells for 2, 4."),
    ],
)
def test_messages(tmp_path, options, says):
    path = notebook(tmp_path / "lesson.ipynb", "%%ranks 2\nrank", "%%ranks 4\nrank", "%%ranks 2\nrank")
    with pytest.raises(export.ExportError) as error:
        export.export(path, to=tmp_path / "job", **options)
    assert says in str(error.value)
    assert not (tmp_path / "job").exists()


def test_command_tells_what_it_wrote(tmp_path, capsys):
    path = notebook(tmp_path / "lesson.ipynb", "%%ranks 2\nrank", ("%%ranks 2\n1 / 0", "raises-exception"))
    assert export.main(["export", str(path), "--to", str(tmp_path / "job"), "--nodes", "2"]) == 0
    said = capsys.readouterr().out
    assert "lesson.py: 1 cell for 2 ranks" in said and "left out In [2]: it fails on purpose" in said
    assert export.main(["export", str(tmp_path / "absent.ipynb")]) == 1
    assert "absent.ipynb cannot be read: No such file or directory." in capsys.readouterr().err
    empty = notebook(tmp_path / "empty.ipynb", "1 + 1")
    assert export.main(["export", str(empty)]) == 1
    assert "has no cell that begins with %%ranks" in capsys.readouterr().err
