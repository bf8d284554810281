"""Data parallelism: the same model on every rank, other data, and one average of the gradients. `DDP` wraps any module,
in any process group. During the backward it averages the gradients in buckets, while the backward of earlier layers
still runs. It does not split the data (a sampler does), normalise over all ranks in BatchNorm (`nn.SyncBatchNorm` does,
on GPUs), or learn the real order of use: its buckets follow the module's list of parameters, backwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import group

MIB = 1 << 20


class Bucket:
    """Gradients that travel in one all-reduce: side by side in one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [p.numel() for p in self.parameters]
        self.flat = self.parameters[0].detach().new_zeros(sum(sizes))
        pieces = self.flat.split(sizes)
        self.places = [piece.view(p.shape) for p, piece in zip(self.parameters, pieces, strict=True)]
        self.work: dist.Work | None = None
        self.reset()

    @torch.no_grad()
    def start(self, process_group: dist.ProcessGroup | None) -> None:
        """Copy each gradient to its place, and start to sum them over the ranks.

        -0.0 stands for "no gradient on this rank". A sum is -0.0 only if every rank gave -0.0, so afterwards every rank
        knows which parameters nobody used, and no extra byte is sent to say so.
        """
        for p, place in zip(self.parameters, self.places, strict=True):
            if p.grad is None:
                place.fill_(-0.0)
                continue
            torch.add(p.grad, 0.0, out=place)  # a real -0.0 becomes 0.0
        self.work = dist.all_reduce(self.flat, group=process_group, async_op=True)

    @torch.no_grad()
    def finish(self, world_size: int) -> None:
        """Wait for the sum, and give each parameter its average; one that no rank used keeps no gradient."""
        assert self.work is not None
        self.work.wait()
        self.flat.div_(world_size)
        for p, place in zip(self.parameters, self.places, strict=True):
            if p.grad is None:
                if bool(((place == 0) & place.signbit()).all()):
                    continue
                p.grad = torch.empty_like(p)
            p.grad.copy_(place)

    def reset(self) -> None:
        """Make ready for the next backward."""
        self.missing = set(range(len(self.parameters)))  # gradients that it has not completed
        self.work = None


class DDP(nn.Module):
    """`module` on every rank of a group, kept equal by averaging gradients during each backward.

    Parameters and buffers start as those of the group's first rank, which sends its buffers after each backward, too.
    After `loss.backward()` every gradient is the mean over the ranks: of a loss that is a mean, and equal batches, that
    is the gradient of the global batch. Wrap a module once.

    A bucket is full as soon as it holds `bucket_size_mb` MiB (2^20 bytes); with 0 each gradient travels by itself, with
    None all together, as far as one dtype reaches.

    >>> model = DDP(MLP(6, 32, 3))
    >>> loss = F.mse_loss(model(x), y)  # x, y: this rank's part of the batch
    >>> loss.backward()
    >>> model.finish_gradient_synchronization()  # the backward did it already, unless nothing used the model
    >>> optimizer.step()
    """

    def __init__(
        self, module: nn.Module, bucket_size_mb: float | None = 25.0, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.module, self.process_group = module, process_group
        _, self.world_size = group.place(process_group, "DDP", use="wrap the module")
        self._synchronizes = True
        self._changed = False  # a gradient may have changed since the last average
        self._will_finish = False  # the running backward will call `finish_gradient_synchronization`
        group.broadcast_together((*module.parameters(), *module.buffers()), process_group)
        trainable = [p for p in module.parameters() if p.requires_grad]  # a tied weight comes once
        limit = float("inf") if bucket_size_mb is None else bucket_size_mb * MIB
        self.buckets = [Bucket(parameters) for parameters in _in_buckets(trainable[::-1], limit)]
        # buckets on their way: always the first ones, so that all ranks agree on the order
        self._launched = 0
        for bucket in self.buckets:
            for index, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(partial(self._gradient_is_ready, bucket, index))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            if self._will_finish:  # a backward raised, and left buckets half full
                self._reset()
            self._changed |= self._synchronizes
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Send what was not sent, wait for the all-reduces, and put the averages into `.grad`.

        Every backward ends with it by itself; then it does nothing more. Call it before the optimizer's step where a
        rank's loss may use no parameter at all, or after a `no_sync` that has no synchronized backward behind it.
        """
        if not self._changed:
            return
        for bucket in self.buckets:
            bucket.missing.clear()  # what is missing now was not used in this backward
        self._launch()
        for bucket in self.buckets:
            bucket.finish(self.world_size)
        # `.data`: another backward may still need what autograd saved of them
        group.broadcast_together([b.data for b in self.module.buffers()], self.process_group)
        self._reset()
        self._changed = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's gradients and send nothing; the next one outside averages the sum."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def _gradient_is_ready(self, bucket: Bucket, index: int, _: Tensor) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        self._changed = True
        if not self._synchronizes:
            return
        if not self._will_finish:
            self._will_finish = True
            # torch has no public name for "when this backward ends"; its own DDP and FSDP use the same
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_gradient_synchronization)
        if bucket.work is not None:
            raise RuntimeError("A gradient was complete twice in one backward. Checkpoint with use_reentrant=False.")
        bucket.missing.discard(index)
        if not bucket.missing:
            self._launch()

    def _launch(self) -> None:
        """Start the all-reduce of each full bucket that has no unsent one before it."""
        while self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
            self.buckets[self._launched].start(self.process_group)
            self._launched += 1

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._launched, self._will_finish = 0, False


def _in_buckets(parameters: Sequence[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """`parameters` in order, in lists of one dtype, each full as soon as it holds `limit` bytes."""
    buckets: list[list[nn.Parameter]] = []
    for p in parameters:
        if not buckets or buckets[-1][0].dtype != p.dtype or sum(q.nbytes for q in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(p)
    return buckets
