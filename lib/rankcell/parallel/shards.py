"""Flat buffers in shards: the geometry of ZeRO, and what a rank holds of a unit of a sharded module.

When units are gathered and freed is not its business: that is `parallel.fsdp`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Places = list[tuple[nn.Module, str]]  # modules and the names that a parameter has in them


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


class Unit:
    """A module whose parameters, of one dtype, are gathered, used and freed together, in one flat buffer.

    The module's own `Parameter` objects become views of this rank's shard, so that optimizers update it. The whole
    has Parameters of its own, that computing uses and that receive the gradients. With `keep` the whole is never
    freed, and the shard is a part of it. `places` say where each parameter stands.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        places: Sequence[Places],
        process_group: dist.ProcessGroup | None,
        *,
        keep: bool,
    ) -> None:
        self.module, self.parameters, self.places = module, list(parameters), list(places)
        # The group itself, not None: so nobody can pickle a unit, whose whole may have no memory to read
        self.process_group, self.keep = process_group or dist.group.WORLD, keep
        rank = dist.get_rank(process_group)
        self.layout = FlatLayout([p.shape for p in parameters], dist.get_world_size(process_group))
        self.parts = [in_shard for _, in_shard in self.layout.parts(rank)]
        if len({p.dtype for p in parameters}) > 1:
            raise ValueError("A unit has parameters of several dtypes, and FSDP gathers them as one. Cast the module.")
        first = parameters[0].detach() if parameters else torch.empty(0)
        self.whole = first.new_zeros(self.layout.length)
        for view, parameter in zip(self.layout.views(self.whole), parameters, strict=True):
            view.copy_(parameter.detach())
        self.shard = self.layout.shard(self.whole, rank)
        if not keep:
            self.shard = self.shard.clone()
        for parameter, in_shard in zip(parameters, self.parts, strict=True):
            part = self.shard[in_shard]
            # A part of a matrix is (1, 1, n): it has more than one dim still, for whoever chooses weight decay by
            # that, but it is no matrix, so that optimizers of matrices refuse it.
            parameter.data = part.view(1, 1, -1) if parameter.dim() > 1 else part
        views = self.layout.views(self.whole.data)  # `.data`: to refill the buffer is no change to autograd
        self.wholes = [nn.Parameter(v, p.requires_grad) for v, p in zip(views, parameters, strict=True)]
        for index, whole in enumerate(self.wholes):
            if whole.requires_grad:
                whole.register_post_accumulate_grad_hook(lambda _, i=index: self._take(i))
        self.is_gathered = self.shows_wholes = False
        self.in_backward = False  # a gradient has reached its outputs, but not its inputs yet
        self.gathering: dist.Work | None = None
        self.reducing: tuple[dist.Work, Tensor, Tensor] | None = None  # and what must live until it is done
        self.gradient: Tensor | None = None  # of the whole, this rank's, not yet reduced
        self.reduced: Tensor | None = None  # of the shard, summed over all ranks
        self.received: set[int] = set()  # which gradients have come
        if not keep:
            self.whole.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Start to fill the whole buffer from the shards, unless that was done."""
        if self.is_gathered or not self.parameters:
            return
        self.is_gathered = True
        storage = self.whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.layout.length * self.whole.element_size())
        whole, group = self.whole.data, self.process_group
        self.gathering = dist.all_gather_single(whole, self.shard, group=group, async_op=True)

    def _wait(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def ready(self) -> None:
        """Wait until it is whole, and let its modules see the wholes."""
        self.gather()
        self._wait()
        self.show(wholes=True)

    def free(self, *, outdated: bool = False) -> None:
        """Let its modules see the shards, and free the whole, unless it is kept and not outdated.

        Its tensors stay, without storage, for autograd to point at.
        """
        self.show(wholes=False)
        if self.is_gathered and (outdated or not self.keep):
            self.is_gathered = False
            self._wait()
            if not self.keep:
                self.whole.untyped_storage().resize_(0)

    def show(self, *, wholes: bool) -> None:
        """Let the modules see the wholes, or this rank's shards."""
        if wholes == self.shows_wholes:
            return
        self.shows_wholes = wholes
        for parameter, places in zip(self.wholes if wholes else self.parameters, self.places, strict=True):
            for module, name in places:
                setattr(module, name, parameter)

    @torch.no_grad()
    def _take(self, index: int) -> None:
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
        """Start to sum the gradients over the ranks; this rank gets those of its shard."""
        if not any(whole.requires_grad for whole in self.wholes):
            return
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            gradient = self.shard.new_zeros(self.layout.length)
        self.wait_reduced()
        mine = gradient.new_empty(self.layout.chunk)
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
    def assign(self) -> None:
        """Give each parameter that was used its part of the averaged gradient."""
        self.wait_reduced()
        if self.reduced is not None:
            self.reduced.div_(dist.get_world_size(self.process_group))
            for index in sorted(self.received):
                parameter = self.parameters[index]
                gradient = self.reduced[self.parts[index]].view_as(parameter)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients that the shards' `.grad` does not hold."""
        self.reducing = self.gradient = self.reduced = None
        self.received.clear()
