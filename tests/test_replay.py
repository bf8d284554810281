"""`%%ranks --against MODEL`: the cell's forward and backward beside those of one process."""

import pytest
import torch

from rankcell import errors
from rankcell.compare import replay
from rankcell.models import GPT


@pytest.fixture
def dense(shell):
    """A dense model and a batch in the notebook, and the batch on the ranks."""
    shell.user_ns["dense"] = GPT(49)
    shell.user_ns["x"] = torch.randint(0, 49, (8, 16), generator=torch.Generator().manual_seed(0))
    return shell


def ranks(shell, source, options="--push x --against dense"):
    """The value of a rank cell of two ranks."""
    return shell.run_cell_magic("ranks", f"2 {options}", HEAD + source)


HEAD = """
from torch.nn.functional import cross_entropy
from rankcell.models import GPT
from rankcell.parallel.ddp import DDP
from rankcell.parallel.transformer import tensor_parallel
def train(model, x):
    cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
mine = x[4 * rank : 4 * rank + 4] if "x" in globals() else None
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("model = DDP(GPT(49))\ntrain(model, mine)", "✓ the ranks' tensors make up"),
        ("train(tensor_parallel(GPT(49)), x)", "✓ the ranks' tensors make up"),
        ("with torch.no_grad():\n    GPT(49)(mine)", "✓ the ranks' tensors make up"),
        ("train(GPT(49), mine)", "its gradients are never averaged"),
        ("train(GPT(49, seed=rank), x)", "rank 1: other weights than one process has"),
    ],
)
def test_a_cell_is_judged(dense, source, says):
    run = ranks(dense, source)
    shown = dense.display_formatter.format(run)[0]
    assert run.against.ok == (says[0] == "✓") and says in shown["text/plain"]
    assert ("✗" in shown["text/html"]) != run.against.ok
    assert {e.kind for r in run.ranks for e in r.trace} <= {"output", "grad_output", "grad", "parameter"}
    assert all(
        p.grad is None for p in dense.user_ns["dense"].parameters()
    )  # the notebook's model stays as it is


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("torch.ones(3)", "The cell called no module with parameters, so there is nothing to compare"),
        (
            "m = GPT(49)\ntrain(m, x)\ntrain(m, x)",
            r"one forward .*, and the ranks called their model \[2, 2\] times",
        ),
        (
            "train(GPT(49), x[:, rank:])",
            r"shapes \[\(8, 16\), \(8, 15\)\], which are no samples of one batch",
        ),
    ],
)
def test_what_one_process_cannot_do_again(dense, source, says):
    with pytest.raises(replay.CannotReplay, match=says):
        ranks(dense, source)


@pytest.mark.parametrize("name", ["nobody", "x"])
def test_against_what_is_no_model(dense, name):
    with pytest.raises(errors.OptionError, match=f"--against needs a model of the notebook, and {name} is"):
        ranks(dense, "1", f"--against {name}")
