"""`%%ranks --against MODEL`: the cell's forward and backward beside those of one process."""

import pytest
import torch

from rankcell import errors, twin
from rankcell.models import GPT


@pytest.fixture
def dense(shell):
    """A dense model and a batch in the notebook, and the batch on the ranks."""
    shell.user_ns["dense"] = GPT(49)
    shell.user_ns["x"] = torch.randint(0, 49, (8, 16), generator=torch.Generator().manual_seed(0))
    return shell


def ranks(shell, source, options="--push x --against dense"):
    """The value of a rank cell of two ranks."""
    return shell.run_cell_magic("ranks", f"2 {options}", source)


HEAD = """
from torch.nn.functional import cross_entropy
from rankcell.models import GPT
from rankcell.parallel.ddp import DDP
from rankcell.parallel.transformer import tensor_parallel
def train(model, x):
    cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
"""
MINE = "x[4 * rank : 4 * rank + 4]"


@pytest.mark.parametrize(
    "source",
    [
        f"model = DDP(GPT(49))\ntrain(model, {MINE})\nmodel.finish_gradient_synchronization()",
        "train(tensor_parallel(GPT(49)), x)",
        f"with torch.no_grad():\n    GPT(49)({MINE})",
    ],
    ids=["ddp", "tensor parallel", "forward only"],
)
def test_a_right_cell_is_right(dense, source):
    run = ranks(dense, HEAD + source)
    assert run.against.ok, run.against
    assert "✓ the ranks' tensors make up" in dense.display_formatter.format(run)[0]["text/plain"]
    assert {e.kind for r in run.ranks for e in r.trace} <= {"output", "grad_output", "grad", "parameter"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (f"train(GPT(49), {MINE})", "its gradients are never averaged"),
        ("train(GPT(49, seed=rank), x)", "rank 1: other weights than one process has"),
    ],
)
def test_a_wrong_cell_is_wrong(dense, source, says):
    run = ranks(dense, HEAD + source)
    assert not run.against.ok
    assert says in run.against.text
    assert "✗" in dense.display_formatter.format(run)[0]["text/html"]


def test_the_notebook_s_model_stays_as_it_is(dense):
    ranks(dense, HEAD + "train(tensor_parallel(GPT(49)), x)")
    assert all(p.grad is None for p in dense.user_ns["dense"].parameters())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("torch.ones(3)", "called no module with parameters"),
        ("m = GPT(49)\ntrain(m, x)\ntrain(m, x)", r"called their model \[2, 2\] times"),
        (
            "train(GPT(49), x[:, rank:])",
            r"shapes \[\(8, 16\), \(8, 15\)\], which are no samples of one batch",
        ),
    ],
)
def test_what_one_process_cannot_do_again(dense, source, says):
    with pytest.raises(twin.NoTwin, match=says):
        ranks(dense, HEAD + source)


@pytest.mark.parametrize("name", ["nobody", "x"])
def test_against_what_is_no_model(dense, name):
    with pytest.raises(errors.OptionError, match=f"--against needs a model of the notebook, and {name} is"):
        ranks(dense, "1", f"--against {name}")
