"""Data parallelism: the same model on every rank, other data, and one average of the gradients.

`DDP` wraps any module, in any process group, in a notebook or in a script. During the backward it averages
the gradients in buckets, while the backward of earlier layers still runs.

What it does not do: it does not split the data (a sampler does). It does not make BatchNorm normalise over
all ranks: each normalises its own batch, and the running statistics are those of the first rank
(`nn.SyncBatchNorm` computes them over all, on GPUs only). It does not learn the real order of use either:
its buckets follow the order in which the module lists its parameters, backwards.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import group

MIB = 1 << 20


class _Bucket:
    """Gradients that travel in one all-reduce: side by side in one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [_real(p).numel() for p in self.parameters]
        self.flat = _real(self.parameters[0].detach()).new_zeros(sum(sizes))
        pieces = self.flat.split(sizes)
        self.places = [piece.view(_real(p).shape) for p, piece in zip(self.parameters, pieces, strict=True)]
        self.missing = set(range(len(sizes)))  # gradients that the running backward has not completed
        self.work: dist.Work | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients."""
        return self.flat.numel() * self.flat.element_size()

    @torch.no_grad()
    def fill(self) -> None:
        """Copy each gradient to its place; -0.0 stands for "none on this rank".

        A sum is -0.0 only if every rank gave -0.0, so afterwards every rank knows which parameters nobody
        used, and no extra byte is sent to say so. Adding 0.0 turns a real -0.0 into 0.0.
        """
        for p in self.parameters:
            self._check(p.grad)
        have = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if have:
            grads = [_real(self.parameters[i].grad) for i in have]
            torch._foreach_copy_([self.places[i] for i in have], grads)
        self.flat.add_(0.0)
        if len(have) < len(self.places):
            for i in set(range(len(self.places))).difference(have):
                self.places[i].fill_(-0.0)

    @torch.no_grad()
    def empty(self, world_size: int) -> None:
        """Give each parameter its average; one that no rank used keeps no gradient."""
        self.flat.div_(world_size)
        used = []
        for p, place in zip(self.parameters, self.places, strict=True):
            if p.grad is None:
                if group.has_numbers(place) and bool(((place == 0) & place.signbit()).all()):
                    continue
                p.grad = torch.empty_like(p)
            used.append((_real(p.grad), place))
        if used:
            torch._foreach_copy_([grad for grad, _ in used], [place for _, place in used])

    def reset(self) -> None:
        """Make ready for the next backward."""
        self.missing, self.work = set(range(len(self.parameters))), None

    def _check(self, grad: Tensor | None) -> None:
        if grad is None:
            return
        if grad.is_sparse:
            raise RuntimeError("A gradient is sparse, and DDP averages dense ones. Use sparse=False.")
        if grad.dtype.to_real() != self.flat.dtype or grad.device != self.flat.device:
            raise RuntimeError(
                f"A gradient is {grad.dtype} on {grad.device}; when DDP wrapped the module it was "
                f"{self.flat.dtype} on {self.flat.device}. Move or cast the module first, then wrap it."
            )


class DDP(nn.Module):
    """`module` on every rank of a group, kept equal by averaging gradients during each backward.

    Parameters and buffers start as those of the group's first rank. After `loss.backward()` every gradient is
    the mean over the ranks: of a loss that is a mean, and equal batches, that is the gradient of the global
    batch. Keep the wrapper while the module trains: once it is gone (`DDP(module)(x)`), nobody averages. A
    copy averages for itself; one that was saved whole and loaded does so over all ranks.

    Args:
        module: any module, on its device and in its dtype already.
        bucket_size_mb: gradients travel together, in buckets that are full as soon as they hold this many MiB
            (2^20 bytes). 0 means each gradient by itself, None all of one dtype together.
        process_group: the ranks that share the model, by default all.
        broadcast_buffers: with the gradients of each backward, give all ranks the first rank's buffers.

    >>> model = DDP(MLP(6, 32, 3))
    >>> loss = F.mse_loss(model(x), y)  # x, y: this rank's part of the batch
    >>> loss.backward()
    >>> model.finish_gradient_synchronization()  # the backward did it already, unless nothing used the model
    >>> optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module, self.bucket_size_mb, self.broadcast_buffers = module, bucket_size_mb, broadcast_buffers
        self.process_group = process_group
        group.place(process_group, "DDP", use="wrap the module")
        self._synchronizes = True
        self._changed = False  # a gradient may have changed since the last average
        self._will_finish = False  # the running backward will call `finish_gradient_synchronization`
        self._broadcast()
        self._watch()

    def _watch(self) -> None:
        """Sort the parameters into buckets, and have their gradients announced."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]  # a tied weight comes once
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        limit = float("inf") if self.bucket_size_mb is None else self.bucket_size_mb * MIB
        self.buckets = [_Bucket(parameters) for parameters in _in_buckets(trainable[::-1], limit)]
        # buckets on their way: always the first ones, so that all ranks agree on the order
        self._launched = 0
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), bucket, index))
            for bucket in self.buckets
            for index, p in enumerate(bucket.parameters)
        ]

    @property
    def world_size(self) -> int:
        """How many ranks share the model."""
        return dist.get_world_size(self.process_group)

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process: the group, the buckets and the hooks."""
        own = ("process_group", "buckets", "_hooks", "_frozen")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = None
        self._watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DDP":
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(deepcopy(self.__getstate__(), memo))
        twin.process_group = self.process_group
        return twin

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `module` computes."""
        if torch.is_grad_enabled():
            if any(p.requires_grad for p in self._frozen):
                raise RuntimeError(
                    "A parameter was frozen when DDP wrapped the module and is trainable now: its gradient "
                    "would differ from rank to rank. Wrap the module again."
                )
            self._forget_failed_backward()
            self._changed |= self._synchronizes
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Send what was not sent, wait for the all-reduces, and put the averages into `.grad`.

        Every backward ends with it by itself. Call it before the optimizer's step where a rank's loss may use
        no parameter at all, or after a `no_sync` that has no synchronized backward behind it.

        It does nothing if the gradients are averaged already, or if this rank ran no forward since then: it
        cannot know that others wait. So a rank without a batch runs the model too.
        """
        if not self._changed:
            return
        for bucket in self.buckets:
            bucket.missing.clear()  # what is missing now was not used in this backward
        self._launch()
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.empty(self.world_size)
        self._send_buffers()
        self._reset()
        self._changed = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's gradients and send nothing; the next one outside averages the
        sum.
        """
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def _send_buffers(self) -> None:
        """Give all ranks the buffers of the first one."""
        if self.broadcast_buffers:
            # `.data`: another backward may still need what autograd saved of them
            buffers = [buffer.data for buffer in self.module.buffers()]
            group.broadcast_together(buffers, 0, self.process_group)

    def _broadcast(self) -> None:
        """Make every rank's parameters and buffers those of the group's first rank."""
        first = dist.get_global_rank(self.process_group, 0) if self.process_group else 0
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if not tensor.numel():
                continue
            dense = _real(tensor.detach()).contiguous()
            dist.broadcast(dense, src=first, group=self.process_group)
            if not group.same_memory(dense, tensor):
                _real(tensor.detach()).copy_(dense)

    def _gradient_is_ready(self, bucket: _Bucket, index: int) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        if not self._changed:  # an assignment to an attribute of a module is slow
            self._changed = True
        if not self._synchronizes:
            return
        if not self._will_finish:
            self._will_finish = True
            # torch has no public name for "when this backward ends"; its own DDP and FSDP use the same
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_gradient_synchronization)
        if bucket.work is not None:
            raise RuntimeError(
                "The gradient of a parameter was complete twice in one backward, and its first part is on "
                "its way already. Checkpointing with use_reentrant=True does that. Use use_reentrant=False."
            )
        bucket.missing.discard(index)
        if not bucket.missing:
            self._launch()

    def _launch(self) -> None:
        """Start the all-reduce of each full bucket that has no unsent one before it."""
        while self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
            bucket = self.buckets[self._launched]
            bucket.fill()
            bucket.work = self._all_reduce(bucket)
            self._launched += 1

    def _all_reduce(self, bucket: _Bucket) -> dist.Work:
        return dist.all_reduce(bucket.flat, op=dist.ReduceOp.SUM, group=self.process_group, async_op=True)

    def _forget_failed_backward(self) -> None:
        """A backward that raised left buckets half full: let go of them."""
        if self._will_finish:
            for bucket in self.buckets[: self._launched]:
                group.settle(bucket.work)
            self._reset()

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._launched, self._will_finish = 0, False


def _hook(ddp: "weakref.ref[DDP]", bucket: _Bucket, index: int) -> Any:
    """A hook that ends with its DDP: a module that is wrapped again is not averaged twice."""

    def hook(_: Tensor) -> None:
        if (owner := ddp()) is not None:
            owner._gradient_is_ready(bucket, index)

    return hook


def _in_buckets(parameters: Sequence[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """`parameters` in lists of one dtype and device, each full as soon as it holds `limit` bytes; the list
    that is complete first comes first.
    """
    full: list[list[nn.Parameter]] = []
    filling: dict[Any, list[nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    for p in parameters:
        key = (p.dtype, p.device)
        filling.setdefault(key, []).append(p)
        sizes[key] = sizes.get(key, 0) + p.numel() * p.element_size()
        if sizes[key] >= limit:
            full.append(filling.pop(key))
            sizes[key] = 0
    order = {id(p): index for index, p in enumerate(parameters)}
    return sorted([*full, *filling.values()], key=lambda bucket: order[id(bucket[-1])])


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor seen as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
