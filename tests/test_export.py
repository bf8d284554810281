"""A notebook as a script: the same numbers under torchrun, without rankcell; what cannot go along is said."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from rankcell.cluster import export


def notebook(path, *cells):
    """Write a notebook of code cells; a cell is its source, or (source, tag)."""
    sources = [(cell,) if isinstance(cell, str) else cell for cell in cells]
    made = [
        {"cell_type": "code", "source": source, "metadata": {"tags": tags}, "execution_count": k, "outputs": []}
        for k, (source, *tags) in enumerate(sources, 1)
    ]  # fmt: skip
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


# What goes along: the statements that define a pushed name and that change it, in order, and nothing that only shows
LESSON = [
    "import torch\nfrom rankcell import check, models\nfrom rankcell.models import MLP\ntorch.manual_seed(3)",
    "noise = torch.randn(2)\nunused = check.that(True, 'never run')",
    "model = MLP(2, 3, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "for x in torch.eye(2):\n    model.zero_grad()\n    model(x).sum().backward()\n    optimizer.step()",
    "check.that(True, 'shown only')",
    "scale = 2; factor = 3\n\n\ndef scaled(x):\n    return x * scale * factor + later\n",
    "later = 1\nweights = [p.detach() for p in model.parameters()]\nweights[1] += 1\ntext = models.text()[:9]",
    "def text_of(rank):\n    return f'rank {rank}'",
    "%%ranks 2 --push weights,scaled,noise,text_of -o run\nscaled(weights[1]), noise, text_of(rank)",
    "%%ranks 2 --push text --pull mine\nimport copy\nfrom rankcell.parallel.ddp import DDP\nmine = rank + 10\ntext",
    "total = sum(mine)",
    "%%ranks 2 --push model,total --pull losses\nwrapped = DDP(copy.deepcopy(model))\nlosses = []\n"
    "torch.manual_seed(rank)\n"
    "step = torch.optim.SGD(wrapped.parameters(), lr=0.1)\nfor x in torch.rand(5, 4, 2):\n    step.zero_grad()\n"
    "    loss = wrapped(x + rank).square().mean()\n    loss.backward()\n    step.step()\n"
    "    losses.append(loss.item())\n(\n    [p.detach() for p in wrapped.parameters()]\n)",
    "%%ranks 2 --push total --only 1\n'''two\nlines''', total",
    "%%ranks 2 --fresh --device cpu\nworld_size",
]
# and what does not: a tag makes the cell fail on purpose
LEFT_OUT = {
    ("%%ranks 2\nbroken = 1\nraise ValueError", "raises-exception"): "it fails on purpose",
    "%%ranks 4\nwide = 1": "it ran on 4 ranks",
    "%%ranks 2\nbroken + 1": "it needs broken, which In [16] made, which is left out",
    "%%ranks 2 --push events\nlen(events)": "it needs run, the record of In [9], which only rankcell makes",
    "%%ranks 2\n!ls": "it uses a magic or a shell command of the notebook",
    "%%ranks 2\nimport rankcell\nrankcell.span": "it imports rankcell as a whole (name what it needs: "
    "`from rankcell.models import MLP`)",
    "%%ranks 2\nfrom rankcell import run as again": "it needs rankcell.run, which works in a notebook only",
    "%%ranks 2 --push nothing\nnothing": "it needs nothing, which no ordinary cell before it makes",
}
AFTER = ["%%ranks 2\nfrom rankcell import span\nwith span('x'):\n    y = rank + 1\ny",
         "%%ranks 2\nbroken = 5", "%%ranks 2\nbroken;"]  # fmt: skip


def same(found, expected):
    """Whether both are alike bit for bit, whatever they are made of."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


@pytest.mark.slow
def test_a_script_gives_the_numbers_of_its_notebook(shell, tmp_path):
    shell.reset()
    expected = {}
    for k, source in enumerate([*LESSON, *AFTER], 1):
        first, _, rest = source.partition("\n")
        if first.startswith("%%ranks"):
            first = f"{first.removesuffix(' -o run')} -o kept"
        done = shell.run_cell(f"{first}\n{rest}", silent=True)
        assert done.success, done.error_in_exec or done.error_before_exec
        name = k if k <= len(LESSON) else k + 1 + len(LEFT_OUT)
        expected[f"In [{name}]"] = shell.user_ns.get("kept")
    path = notebook(tmp_path / "lesson.ipynb", *LESSON, "events = run.events", *LEFT_OUT, *AFTER)
    exported = export.convert(path)
    numbers = range(len(LESSON) + 2, len(LESSON) + 2 + len(LEFT_OUT))
    assert dict(exported.left_out) == {
        f"In [{n}]": why for n, why in zip(numbers, LEFT_OUT.values(), strict=True)
    }
    assert (
        exported.world_size == 2
        and "# In [17] is left out: it ran on 4 ranks.\n#     wide = 1\n" in exported.text
    )
    assert "\ntorch.set_rng_state(_first_random)  # --fresh" in exported.text
    assert "never run" not in exported.text and "shown only" not in exported.text

    script, job, *modules = export.export(path, to=tmp_path / "job", nodes=2, gpus_per_node=1)
    assert "--nodes=2\n" in job.read_text() and "--gpus-per-node=1\n" in job.read_text()
    copied = {str(p.relative_to(script.parent / "lesson_modules")) for p in modules}
    assert {"__init__.py", "models.py", "parallel/ddp.py", "data/fables.txt"} <= copied
    for written in (script, *(p for p in modules if p.suffix == ".py")):
        assert not re.search(r"^\s*(from|import) rankcell", written.read_text(), re.MULTILINE), written
    (tmp_path / "rankcell.py").write_text("raise ImportError('the script needs rankcell')")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    environment |= {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = lambda *words: subprocess.run(
        [sys.executable, *words], cwd=script.parent, env=environment, capture_output=True, text=True
    )
    alone = run(script)
    assert alone.returncode == 1 and "These cells ran on 2 ranks in the notebook; this is 1." in alone.stderr
    assert "torchrun --standalone --nproc-per-node=2" in alone.stderr
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*torchrun, script, "--save", "values.pt")
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(script.parent / "values.pt")
    assert [*found] == ["In [9]", "In [10]", "In [12]", "In [13]", "In [14]", "In [24]"]
    for cell, named in found.items():
        for name, values in named.items():
            theirs = expected[cell].values if name == "value" else expected[cell].pulled[name]
            assert same(values, [v for v in theirs if v is not None]), (cell, name)
    assert (
        "In [10], mine\n  rank 0: 10\n  rank 1: 11\n" in done.stdout and "In [13]\n  rank 1: (" in done.stdout
    )
    assert "In [10]\n  all 2 ranks: 'The " in done.stdout and "In [26]" not in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [({"nodes": 3}, "2 ranks cannot be spread evenly over 3 nodes. Choose a number of nodes that divides 2."),
     ({"nodes": 2, "gpus_per_node": 4}, "2 nodes with 4 GPUs each hold 8 ranks; the cells ran on 2. That takes 1 per"),
     ({"world_size": 8}, "has no cells for 8 ranks. It has cells for 2, 4.")],
)  # fmt: skip
def test_what_cannot_be_exported_is_said(tmp_path, options, says):
    path = notebook(tmp_path / "lesson.ipynb", "%%ranks 2\nrank", "%%ranks 4\nrank", "%%ranks 2\nrank")
    with pytest.raises(export.ExportError) as error:
        export.export(path, to=tmp_path / "job", **options)
    assert says in str(error.value) and not (tmp_path / "job").exists()


def test_the_command_tells_what_it_wrote(tmp_path, capsys):
    path = notebook(tmp_path / "lesson.ipynb", "%%ranks 2\nrank", ("%%ranks 2\n1 / 0", "raises-exception"))
    empty = notebook(tmp_path / "empty.ipynb", "1 + 1")
    (tmp_path / "text.ipynb").write_text("{}")
    for words, code, says in (
        ([path, "--to", tmp_path / "job", "--nodes", "2"], 0, "lesson.py: 1 cell for 2 ranks"),
        ([path, "--to", tmp_path / "job", "--world-size", "2"], 0, "left out In [2]: it fails on purpose"),
        ([tmp_path / "absent.ipynb"], 1, "absent.ipynb cannot be read: No such file or directory."),
        ([tmp_path / "text.ipynb"], 1, "text.ipynb is no notebook of format 4."),
        ([empty], 1, "has no cell that begins with %%ranks"),
    ):
        assert export.main(["export", *map(str, words)]) == code
        said = capsys.readouterr()
        assert says in said.out + said.err and bool(said.err) == bool(code)
