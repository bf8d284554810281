"""What a rank holds of a unit of a sharded module: its shard of the parameters, and the wholes while they are needed.

When units are gathered and freed is not its business: that is `parallel.fsdp`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .flat import FlatLayout, by

Places = list[tuple[nn.Module, str]]  # modules and the names that a parameter has in them


class Flat:
    """Some parameters of a unit in one flat buffer: this rank's shard, and the whole while it is needed.

    The module's own `Parameter` objects become views of the shard, so that optimizers update it. The whole
    has Parameters of its own, that computing uses and that receive the gradients.

    Args:
        process_group: the ranks that share the buffer; with None every rank keeps a copy of all of it.
        keep: never free the whole; the shard is a part of it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        places: Sequence[Places],
        process_group: dist.ProcessGroup | None,
        *,
        keep: bool,
    ) -> None:
        self.process_group, self.is_sharded, self.keep = process_group, process_group is not None, keep
        self.parameters, self.places = list(parameters), list(places)
        rank, n_shards = 0, 1
        if process_group is not None:
            rank, n_shards = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.layout = FlatLayout([p.shape for p in parameters], n_shards)
        self.parts = self.layout.parts(rank)
        self.whole = parameters[0].detach().new_zeros(self.layout.length)
        for view, parameter in zip(self.layout.views(self.whole), parameters, strict=True):
            view.copy_(parameter.detach())
        self.shard = self.layout.shard(self.whole, rank)
        if not keep:
            self.shard = self.shard.clone()
        for parameter, (_, in_shard), shape in zip(parameters, self.parts, self.layout.shapes, strict=True):
            parameter.data = self._in_shape(self.shard[in_shard], shape)
        views = self.layout.views(self.whole.data)  # `.data`: to refill the buffer is no change to autograd
        self.wholes = [nn.Parameter(v, p.requires_grad) for v, p in zip(views, parameters, strict=True)]
        self.gathering: tuple[dist.Work, Tensor] | None = None  # and the tensor that must live until then
        self.reducing: tuple[dist.Work, Tensor, Tensor] | None = None
        self.gradient: Tensor | None = None  # of the whole, this rank's, not yet reduced
        self.reduced: Tensor | None = None  # of the shard, summed over all ranks
        self.received: set[int] = set()
        self.free()

    def _in_shape(self, part: Tensor, shape: torch.Size) -> Tensor:
        """A part `(n,)` of a tensor in the shape that the module shows between steps.

        A part of a matrix is `(1, 1, n)`: it still has more than one dim, for whoever chooses weight decay
        by that, but it is no matrix, so that optimizers of matrices refuse it.
        """
        if not self.is_sharded:
            return part.view(shape)
        return part.view(1, 1, len(part)) if len(shape) > 1 else part

    def gather(self) -> None:
        """Start to fill the whole buffer from the shards."""
        storage = self.whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.layout.length * self.whole.element_size())
        if not self.is_sharded:
            self.whole.data.copy_(self.shard)
        elif self.layout.length:
            whole, group = self.whole.data, self.process_group
            self.gathering = dist.all_gather_single(whole, self.shard, group=group, async_op=True), self.shard

    def wait(self) -> None:
        """Wait until the whole buffer is filled."""
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def free(self) -> None:
        """Give the memory of the whole back; its tensors stay, without storage, for autograd to point at."""
        self.wait()
        if not self.keep:
            self.whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def take(self, index: int) -> None:
        """Move a gradient into the flat buffer as soon as it is there, and free its own memory."""
        gradient, self.wholes[index].grad = self.wholes[index].grad, None
        if gradient is None:  # the hook runs, but no gradient came this way
            return
        if self.gradient is None and gradient.numel() == self.layout.length and gradient.is_contiguous():
            self.gradient = gradient.view(-1)  # it is the whole buffer: no copy
        else:
            if self.gradient is None:
                self.gradient = gradient.new_zeros(self.layout.length)
            self.layout.views(self.gradient)[index].add_(gradient)
        self.received.add(index)

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks; this rank gets those of its shard.

        What is not sharded is left to `FSDP`, which sums it with one all-reduce for all units.
        """
        if not any(whole.requires_grad for whole in self.wholes):
            return
        if self.gradient is None:
            self.gradient = self.shard.new_zeros(self.layout.length)
        if self.is_sharded:
            self.wait_reduced()
            mine, gradient, self.gradient = self.gradient.new_empty(self.layout.chunk), self.gradient, None
            work = dist.reduce_scatter_single(mine, gradient, group=self.process_group, async_op=True)
            self.reducing = work, mine, gradient

    def wait_reduced(self) -> None:
        """Wait for the sum; the gradients of the whole are freed then."""
        if self.reducing is not None:
            work, mine, _ = self.reducing
            work.wait()
            self.reducing = None
            self.reduced = mine if self.reduced is None else self.reduced.add_(mine)

    @torch.no_grad()
    def assign(self, world_size: int) -> None:
        """Give each parameter that was used its part of the averaged gradient."""
        total = self.reduced if self.is_sharded else self.gradient
        if total is None:
            return
        total.div_(world_size)
        for index in sorted(self.received):
            parameter, (_, in_shard) = self.parameters[index], self.parts[index]
            gradient = total[in_shard].view_as(parameter)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients that the shards' `.grad` does not hold."""
        self.reducing = self.gradient = self.reduced = None
        self.received.clear()


class Unit:
    """A module whose parameters are gathered, used and freed together.

    Args:
        parameters: those that it owns; `places` say where each stands.
        is_sharded: whether a parameter is cut over the ranks, or every rank keeps a copy.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        places: dict[nn.Parameter, Places],
        process_group: dist.ProcessGroup | None,
        *,
        shard_vectors: bool,
        keep: bool,
    ) -> None:
        self.name, self.module, self.keep = name, module, keep

        def is_sharded(parameter: nn.Parameter) -> bool:
            return parameter.dim() > 1 or (shard_vectors and parameter.dim() == 1)

        self.flats = [
            Flat(
                alike, [places[p] for p in alike], process_group if is_sharded(alike[0]) else None, keep=keep
            )
            for alike in by(lambda p: (p.dtype, p.requires_grad, is_sharded(p)), parameters)
        ]
        self.is_gathered = self.shows_wholes = False
        self.in_backward = False  # a gradient has reached its outputs, but not its inputs yet

    def gather(self) -> None:
        """Start to gather, unless that was done."""
        if not self.is_gathered:
            self.is_gathered = True
            for flat in self.flats:
                flat.gather()

    def ready(self) -> None:
        """Wait until it is whole, and let its modules see the wholes."""
        self.gather()
        for flat in self.flats:
            flat.wait()
        self.show(wholes=True)

    def free(self, *, outdated: bool = False) -> None:
        """Let its modules see the shards, and free the wholes. What is kept stays until it is outdated."""
        self.show(wholes=False)
        if self.is_gathered and (outdated or not self.keep):
            self.is_gathered = False
            for flat in self.flats:
                flat.free()

    def show(self, *, wholes: bool) -> None:
        """Let the modules see the wholes, or this rank's shards."""
        if wholes == self.shows_wholes:
            return
        self.shows_wholes = wholes
        for flat in self.flats:
            seen = flat.wholes if wholes else flat.parameters
            for parameter, places in zip(seen, flat.places, strict=True):
                for module, name in places:
                    setattr(module, name, parameter)
