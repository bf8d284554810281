"""What the strategies share: a rank's place in a group, many tensors in one message, one gradient norm. It does not
make groups: `dist.new_group` or a device mesh does.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..results import grouped


def place(process_group: dist.ProcessGroup | None, owner: str, *, use: str = "use it") -> tuple[int, int]:
    """This rank's number in a process group, and the group's size; None is the group of all ranks.

    Raises ValueError where this rank is not in it: `owner` says whose group it is, `use` what members do.
    """
    world_size = dist.get_world_size(process_group)
    if world_size < 1:
        raise ValueError(f"Rank {dist.get_rank()} is not in the process group of {owner}. Only its members {use}.")
    return dist.get_rank(process_group), world_size


@torch.no_grad()
def all_reduce_together(tensors: Iterable[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Sum each tensor over the ranks of a group, in place, with one all-reduce per dtype."""
    _together(tensors, lambda flat: dist.all_reduce(flat, group=process_group))


@torch.no_grad()
def broadcast_together(tensors: Iterable[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
    """Give each tensor the values it has on the first rank of the group, with one broadcast per dtype."""
    _together(tensors, lambda flat: dist.broadcast(flat, group_src=0, group=process_group))


def _together(tensors: Iterable[Tensor], send: Callable[[Tensor], object]) -> None:
    """Put tensors of one dtype into a flat one, `send` it, and copy back what it then holds."""
    for together in grouped((tensor.dtype, tensor) for tensor in tensors).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in together])
        if flat.numel():
            send(flat)
        for tensor, part in zip(together, flat.split([t.numel() for t in together]), strict=True):
            tensor.copy_(part.view_as(tensor))
