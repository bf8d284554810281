"""Tensors one after the other in a flat buffer that is cut into equal shards: the geometry of ZeRO."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class FlatLayout:
    """Where each of some tensors lies in a flat buffer, and which part of each a rank holds."""

    def __init__(self, shapes: Sequence[torch.Size], n_shards: int) -> None:
        self.shapes, self.ends = list(shapes), list[int]()
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
