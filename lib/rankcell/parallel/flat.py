"""Tensors one after the other in a flat buffer that is cut into equal shards: the geometry of ZeRO.

`Layout` says where each tensor lies and which part of it a rank holds. `Part` is such a part of a parameter
as an optimizer sees it; from the parts of all ranks `whole_states` makes the optimizer states that one
process would have, and `states_of_part` cuts them for any other number of ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


class Layout:
    """Where each of some tensors lies in a flat buffer, and which part of each a rank holds."""

    def __init__(self, shapes: Sequence[torch.Size], n_shards: int) -> None:
        self.shapes, self.ends = list(shapes), []
        end = 0
        for shape in shapes:
            end += shape.numel()
            self.ends.append(end)
        self.chunk = -(-end // n_shards)  # numbers per shard; the last one may end in padding
        self.length = self.chunk * n_shards

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's shard, as a view of the flat buffer."""
        return flat[rank * self.chunk : (rank + 1) * self.chunk]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor, as a view of the flat buffer `(length,)`."""
        pairs = zip(self.shapes, self.ends, strict=True)
        return [flat[end - shape.numel() : end].view(shape) for shape, end in pairs]

    def parts(self, rank: int) -> list[tuple[slice, slice]]:
        """The part of each tensor that a rank holds: where in the flattened tensor, where in the shard."""
        low, high, places = rank * self.chunk, (rank + 1) * self.chunk, []
        for shape, end in zip(self.shapes, self.ends, strict=True):
            start = end - shape.numel()
            a, b = max(low, start), max(min(high, end), max(low, start))
            places.append((slice(a - start, b - start), slice(a - low, b - low)))
        return places


def by(key: Callable[[Any], Any], items: Iterable[Any]) -> list[list[Any]]:
    """Items with an equal key together, in the order they came."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


@dataclass(frozen=True)
class Part:
    """The part of a parameter that this rank's optimizer updates."""

    number: int  # of the parameter, counted through the optimizer's groups
    shape: torch.Size  # of the whole parameter
    where: slice  # in the flattened parameter
    tensor: nn.Parameter


def whole_states(
    parts: Iterable[Part], state: Mapping[Tensor, Any], process_group: dist.ProcessGroup | None
) -> dict[int, dict[str, Any]]:
    """An optimizer's states by the numbers of its parameters, whole, on the CPU. All ranks must call it."""
    mine = [
        (part.number, part.shape, part.where, {k: _to_cpu(v) for k, v in state[part.tensor].items()})
        for part in parts
        if part.tensor in state
    ]
    everybody: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everybody, mine, group=process_group)
    states: dict[int, dict[str, Any]] = {}
    for number, shape, where, entries in (item for rank in everybody for item in rank):
        whole, length = states.setdefault(number, {}), where.stop - where.start
        for key, value in entries.items():
            if not _is_per_number(value, length):
                whole[key] = value
                continue
            if key not in whole:
                whole[key] = value.new_zeros(shape)
            whole[key].view(-1)[where] = value.reshape(-1)
    return {number: entries for number, entries in sorted(states.items()) if entries}


def states_of_part(part: Part, full: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of `whole_states` that belong to a part, in its shape. No communication."""
    return {
        key: value.reshape(-1)[part.where].view(part.tensor.shape).clone()
        if _is_per_number(value, part.shape.numel())
        else deepcopy(value)
        for key, value in full.get(part.number, {}).items()
    }


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _is_per_number(value: Any, numel: int) -> bool:
    """Whether an entry of an optimizer's state belongs to the numbers of a parameter, unlike a step count.

    Those of a parameter without dims look like a count; it is in one part, so it is copied like one, too.
    """
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel


def is_elementwise(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: torch.device) -> bool:
    """Whether an optimizer treats every number on its own, found out by trying.

    Two steps on a matrix `(4, 6)`, whole and as two parts of 9 and 15 numbers, must give the same numbers. They are
    computed also where everything else is a rehearsal.
    """
    with _disable_current_modes():
        return _is_elementwise(make, device)


def _is_elementwise(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: torch.device
) -> bool:
    start = torch.linspace(-1, 1, 24, device=device).view(4, 6)
    found = []
    for cut in (lambda x: [x], lambda x: [x.view(-1)[:9], x.view(-1)[9:]]):
        parameters = [nn.Parameter(part.clone()) for part in cut(start)]
        try:
            optimizer = make(parameters)
            for step in range(2):
                gradient = (7 * start + step).sin() * (1 + start.abs())
                for parameter, part in zip(parameters, cut(gradient), strict=True):
                    parameter.grad = part.clone()
                optimizer.step()
        except (RuntimeError, TypeError, ValueError):  # it refuses vectors, or wants a closure
            return False
        found.append(torch.cat([parameter.detach().view(-1) for parameter in parameters]))
    return torch.allclose(*found, rtol=1e-4, atol=1e-6)
