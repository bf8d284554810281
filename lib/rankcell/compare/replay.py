"""One process does what the ranks of a cell did: for `%%ranks --against`.

The ranks' cell brought the inputs of its model and the gradients that reached its outputs. Ranks that were given the
same are one; the others' inputs are one batch, whose loss is the mean of theirs.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import UserFacingError
from ..results import RankResult, Run
from . import judge
from .traced import Traced

_INSTEAD = "Compare by hand: `with rankcell.trace(dense) as one: ...`, and `check.against(run, one)`."


class CannotReplay(UserFacingError, ValueError):
    """What the ranks did cannot be done again by one process on its own."""


def against(run: Run, dense: Any) -> Run:
    """The run of a cell with `--against`, and with it what one process says of it."""
    verdict = judge.compare(run, trace(dense, run))
    return replace(
        run, ranks=tuple(replace(r, trace=without_inputs(r.trace)) for r in run.ranks), against=verdict
    )


def trace(dense: Any, run: Run) -> Any:
    """The trace of `dense`, forward and backward, with what the models of the ranks were given together.

    Raises:
        CannotReplay: the cell called no model, or called it more than once, or was given what makes up no batch.
    """
    import torch

    from .trace import Trace

    ran = list(run.ran)
    calls = {r.rank: max((e.call for e in r.trace if e.kind == "input"), default=-1) + 1 for r in ran}
    if not any(calls.values()):
        raise CannotReplay("The cell called no module with parameters, so there is nothing to compare.")
    if any(count != 1 for count in calls.values()):
        raise CannotReplay(
            f"--against compares one forward and backward, and the ranks called their model "
            f"{sorted(calls.values())} times. {_INSTEAD}"
        )
    kinds: list[RankResult] = []
    for result in ran:
        if not any(_same(result, other) for other in kinds):
            kinds.append(result)
    given = [
        _joined([_parts(r, "input")[part] for r in kinds]) for part in range(len(_parts(kinds[0], "input")))
    ]
    twin = copy.deepcopy(dense)
    twin.zero_grad()
    with Trace(twin) as one:
        output = twin(*(torch.from_numpy(array) for array in given))
        outputs = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        gradients = [_gradient(part, outputs[part], kinds, ran) for part in range(len(outputs))]
        reached = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None]
        if reached:
            torch.autograd.backward([t for t, _ in reached], [g for _, g in reached])
    return one


def _parts(result: RankResult, kind: str) -> dict[int, np.ndarray]:
    return {e.part: e.whole for e in result.trace if e.kind == kind}


def _same(a: RankResult, b: RankResult) -> bool:
    """Whether two ranks were given the same."""
    ours, theirs = _parts(a, "input"), _parts(b, "input")
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """The samples of several ranks, one after the other."""
    if len(arrays) == 1:
        return arrays[0]
    if any(a.ndim == 0 or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        raise CannotReplay(
            f"The ranks gave their models tensors of shapes {[tuple(a.shape) for a in arrays]}, which are no samples "
            f"of one batch. {_INSTEAD}"
        )
    if any(np.array_equal(a, arrays[0]) for a in arrays[1:]) and all(
        np.array_equal(a, arrays[0]) for a in arrays
    ):
        return arrays[0]  # an argument that all share, beside one that they do not
    return np.concatenate(arrays)


def _gradient(part: int, output: Any, kinds: list[RankResult], ran: list[RankResult]) -> Any:
    """The gradient of the mean loss with respect to an output of one process; None if none came."""
    import torch

    shares = [_parts(r, "cotangent").get(part) for r in kinds]
    if any(share is None for share in shares):
        return None
    arrays = [share for share in shares if share is not None]
    if output.dim() == 0:
        whole = np.mean(arrays, axis=0)
    elif len(kinds) > 1:
        whole = np.concatenate(arrays) / len(kinds)
    else:
        whole = arrays[0]
        if whole.shape != tuple(
            output.shape
        ):  # an output that is cut over the ranks, such as logits by vocabulary
            each = [_parts(r, "cotangent").get(part) for r in ran]
            dims = [d for d, (a, b) in enumerate(zip(whole.shape, output.shape, strict=False)) if a != b]
            if len(dims) == 1 and all(array is not None for array in each):
                whole = np.concatenate([array for array in each if array is not None], axis=dims[0])
    if whole.shape != tuple(output.shape):
        raise CannotReplay(
            f"The gradients that reached the ranks' outputs make up shape {whole.shape}, and one process has an "
            f"output of shape {tuple(output.shape)}. {_INSTEAD}"
        )
    return torch.from_numpy(np.asarray(whole)).to(output.dtype)


def without_inputs(entries: tuple[Traced, ...]) -> tuple[Traced, ...]:
    """A rank's trace without what was only sent for this."""
    return tuple(e for e in entries if e.kind not in ("input", "cotangent"))
