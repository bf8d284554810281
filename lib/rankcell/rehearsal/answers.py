"""What each collective gives when all ranks of a group have come to it: plain tensors in, plain tensors filled.

The ranks of `%%ranks 64 --local` live in one process, so that whoever comes last can do this for all. Sums are taken
in rank order, in the dtype of the tensors. It knows nothing of who waits for whom.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Given:
    """What one rank gave to a collective. `splits` of an all_to_all of one tensor: rows from each rank, and to each."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    splits: tuple[Sequence[int], Sequence[int]] | None = None


_COMBINE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "PRODUCT": Tensor.mul_,
    "MIN": lambda total, x: torch.minimum(total, x, out=total),
    "MAX": lambda total, x: torch.maximum(total, x, out=total),
    "BAND": Tensor.bitwise_and_,
    "BOR": Tensor.bitwise_or_,
    "BXOR": Tensor.bitwise_xor_,
}


def check(op: str, given: Given, n: int) -> None:
    """Raise RuntimeError if one tensor for all `n` ranks of a group has not `n` times as many numbers as a part."""
    if op not in ("all_gather", "reduce_scatter") or len(given.inputs) != len(given.outputs):
        return
    for x, y in zip(given.inputs, given.outputs, strict=True):
        part, whole = (x, y) if op == "all_gather" else (y, x)
        if whole.numel() != n * part.numel():
            raise RuntimeError(
                f"{op} on {n} ranks: {whole.numel()} numbers in all are not {n} times the {part.numel()} of one rank."
            )


def fill(op: str, given: Sequence[Given], *, reduce_op: str = "SUM", root: int = 0) -> None:
    """Write what each rank gets into its outputs.

    Args:
        op: its name in the course, such as "all_gather"; one without tensors, such as "barrier", fills nothing.
        given: by place in the group.
        reduce_op: "SUM", "AVG", ...
        root: the place in the group of the one that sends or receives all.

    Raises:
        NotImplementedError: there is no such reduce operation. RuntimeError: tensors do not fit each other.
    """
    # neither a mode of the rank that happens to come last nor autograd has anything to do with it
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        _FILL.get(op, _nothing)([_bare(g) for g in given], reduce_op or "SUM", root)


def copy(source: Tensor, target: Tensor) -> None:
    """What a receive does: the numbers of `source` into `target`, which may have another shape."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        _put(target.data, source.data)


def _bare(given: Given) -> Given:
    # `.data` has a version of its own: as with a backend, autograd does not hear that the numbers change
    return Given([t.data for t in given.inputs], [t.data for t in given.outputs], given.splits)


def _put(target: Tensor, source: Tensor) -> None:
    target.copy_(source if target.shape == source.shape else source.reshape(target.shape))


def _combined(tensors: Sequence[Tensor], reduce_op: str) -> Tensor:
    combine = _COMBINE.get(reduce_op)
    if combine is None:
        raise NotImplementedError(
            f"the reduce operation {reduce_op} is not done here: {', '.join(_COMBINE)} are."
        )
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for x in tensors[1:]:
        combine(total, x if x.shape == total.shape else x.reshape(total.shape))
    return total.div_(len(tensors)) if reduce_op == "AVG" else total


def _nothing(given: Sequence[Given], reduce_op: str, root: int) -> None:
    pass


def _all_reduce(given: Sequence[Given], reduce_op: str, root: int) -> None:
    for i in range(len(given[0].inputs)):
        total = _combined([g.inputs[i] for g in given], reduce_op)
        for g in given:
            _put(g.outputs[i], total)


def _reduce(given: Sequence[Given], reduce_op: str, root: int) -> None:
    for i in range(len(given[0].inputs)):
        _put(given[root].outputs[i], _combined([g.inputs[i] for g in given], reduce_op))


def _broadcast(given: Sequence[Given], reduce_op: str, root: int) -> None:
    for place, g in enumerate(given):
        if place != root:
            for source, target in zip(given[root].inputs, g.outputs, strict=True):
                _put(target, source)


def _all_gather(given: Sequence[Given], reduce_op: str, root: int) -> None:
    for g in given:
        if len(g.outputs) == len(g.inputs):  # one tensor for all parts
            for i, output in enumerate(g.outputs):
                parts = output.view(-1).split([other.inputs[i].numel() for other in given])
                for part, other in zip(parts, given, strict=True):
                    _put(part, other.inputs[i])
        else:
            parts = [x for other in given for x in other.inputs]
            for target, source in zip(g.outputs, parts, strict=True):
                _put(target, source)


def _reduce_scatter(given: Sequence[Given], reduce_op: str, root: int) -> None:
    for place, g in enumerate(given):
        for i, output in enumerate(g.outputs):
            if len(g.inputs) == len(g.outputs):  # one tensor for all parts
                n = output.numel()
                parts = [other.inputs[i].reshape(-1)[place * n : (place + 1) * n] for other in given]
            else:
                parts = [other.inputs[place] for other in given]
            _put(output, _combined(parts, reduce_op))


def _gather(given: Sequence[Given], reduce_op: str, root: int) -> None:
    for target, g in zip(given[root].outputs, given, strict=True):
        _put(target, g.inputs[0])


def _scatter(given: Sequence[Given], reduce_op: str, root: int) -> None:
    for g, source in zip(given, given[root].inputs, strict=True):
        _put(g.outputs[0], source)


def _all_to_all(given: Sequence[Given], reduce_op: str, root: int) -> None:
    sent = [_pieces(g.inputs, None if g.splits is None else g.splits[1], len(given)) for g in given]
    for place, g in enumerate(given):
        targets = _pieces(g.outputs, None if g.splits is None else g.splits[0], len(given))
        for target, pieces in zip(targets, sent, strict=True):
            _put(target, pieces[place])


def _pieces(tensors: Sequence[Tensor], splits: Sequence[int] | None, n: int) -> Sequence[Tensor]:
    """What goes to each rank, or comes from each: the tensors themselves, or rows of the only one."""
    if splits is None:
        return tensors
    (tensor,) = tensors
    return tensor.split(list(splits) or [tensor.shape[0] // n] * n)


_FILL = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
