"""`%%ranks --against MODEL`: one process does what the ranks of a cell did.

On the ranks the cell's models are traced, and the inputs of each and the gradients that reached its outputs are kept.
Ranks that were given the same are one; the others' inputs are one batch, whose loss is the mean of theirs.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import UserFacingError
from ..results import RankResult, Run
from . import judge
from .trace import Trace, local_part, to_numpy
from .traced import Traced

_INSTEAD = "Compare by hand: `with rankcell.trace(dense) as one: ...`, and `check.against(run, one)`."


class CannotReplay(UserFacingError, ValueError):
    """What the ranks did cannot be done again by one process on its own."""


class Follow:
    """On a rank: while the block runs, traces each module with parameters that is called from outside of any other."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder  # of the rank: what is traced goes with the cell's result
        self._kept: list[Traced] = []
        self._traces: list[Trace] = []
        self._calls: dict[int, int] = {}  # by module: its calls so far
        self._inside: set[int] = set()  # modules in those
        self._stack = ExitStack()

    def __enter__(self) -> "Follow":
        self._stack.callback(nn.modules.module.register_module_forward_pre_hook(self._called).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        self._recorder.trace += (*self._kept, *(entry for trace in self._traces for entry in trace.entries))

    def _called(self, module: nn.Module, given: tuple) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes it once more
        call = self._calls.get(id(module), -1) + 1
        if not call:
            if id(module) in self._inside or next(module.parameters(), None) is None:
                return
            self._inside |= {id(part) for part in module.modules()}
            self._traces.append(self._stack.enter_context(Trace(module, on_rank=True)))
            self._stack.callback(module.register_forward_hook(self._answered).remove)
        self._calls[id(module)] = call
        for part, tensor in enumerate(_tensors(given)):
            self._keep("input", call, part, tensor)

    def _answered(self, module: nn.Module, _: Any, output: Any) -> None:
        for part, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                keep = partial(self._keep, "cotangent", self._calls[id(module)], part)
                self._stack.callback(tensor.register_hook(keep).remove)

    def _keep(self, kind: str, call: int, part: int, tensor: Tensor) -> None:
        self._kept.append(Traced("", kind, 0, to_numpy(local_part(tensor)), call=call, part=part))


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def against(run: Run, dense: Any) -> Run:
    """The run of a cell with `--against`, and with it what one process says of it.

    Raises:
        CannotReplay: the cell called no model, or called it more than once, or was given what makes up no batch.
    """
    one, ranks = _trace(dense, run.ran), []
    for result in run.ranks:
        traced = tuple(e for e in result.trace if e.kind not in ("input", "cotangent"))
        ranks.append(replace(result, trace=traced))
    run = replace(run, ranks=tuple(ranks))
    return replace(run, against=judge.compare(run, one))


def _trace(dense: nn.Module, ran: Sequence[RankResult]) -> Trace:
    """The trace of `dense`, forward and backward, with what the models of the ranks were given together."""
    calls = sorted(max((e.call + 1 for e in r.trace if e.kind == "input"), default=0) for r in ran)
    if not any(calls):
        raise CannotReplay("The cell called no module with parameters, so there is nothing to compare.")
    if set(calls) != {1}:
        raise CannotReplay(
            f"--against compares one forward and backward, and the ranks called their model {calls} times. {_INSTEAD}"
        )
    kinds: list[RankResult] = []
    for result in ran:
        if not any(_were_given_the_same(result, other) for other in kinds):
            kinds.append(result)
    given = [_batch([_parts(r, "input")[part] for r in kinds]) for part in _parts(kinds[0], "input")]
    twin = copy.deepcopy(dense)
    twin.zero_grad()
    with Trace(twin) as one:
        outputs = list(_tensors(twin(*map(torch.from_numpy, given))))
        gradients = [_gradient(part, output, kinds) for part, output in enumerate(outputs)]
        reached = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None]
        if reached:
            torch.autograd.backward([t for t, _ in reached], [g for _, g in reached])
    return one


def _parts(result: RankResult, kind: str) -> dict[int, np.ndarray]:
    return {e.part: e.value for e in result.trace if e.kind == kind}


def _were_given_the_same(a: RankResult, b: RankResult) -> bool:
    ours, theirs = _parts(a, "input"), _parts(b, "input")
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)


def _batch(arrays: list[np.ndarray]) -> np.ndarray:
    """The samples of several ranks, one after the other; an argument that all share as it is."""
    if all(np.array_equal(a, arrays[0]) for a in arrays):
        return arrays[0]
    if any(a.ndim == 0 or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        raise CannotReplay(
            f"The ranks gave their models tensors of shapes {[tuple(a.shape) for a in arrays]}, which are no samples "
            f"of one batch. {_INSTEAD}"
        )
    return np.concatenate(arrays)


def _gradient(part: int, output: Tensor, kinds: list[RankResult]) -> Tensor | None:
    """The gradient of the mean loss with respect to an output of one process; None if none came."""
    shares = [parts[part] for r in kinds if part in (parts := _parts(r, "cotangent"))]
    if len(shares) < len(kinds):
        return None
    whole = np.mean(shares, axis=0) if output.dim() == 0 else np.concatenate(shares) / len(kinds)
    if whole.shape != tuple(output.shape):
        raise CannotReplay(
            f"The gradients that reached the ranks' outputs make up shape {whole.shape}, and one process has an "
            f"output of shape {tuple(output.shape)}. {_INSTEAD}"
        )
    return torch.from_numpy(np.asarray(whole)).to(output.dtype)
