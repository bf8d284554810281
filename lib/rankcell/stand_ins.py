"""Stand-ins for what a laptop lacks: layers that take time without computing, where the cores also send, and a rule
for the CPU's kernel in torch's `context_parallel`.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SlowLinear(nn.Linear):
    """A linear layer whose backward takes `seconds` longer: a stand-in for a large layer, on cores that also send."""

    def __init__(self, n_in: int, n_out: int, *, seconds: float, **where) -> None:
        super().__init__(n_in, n_out, **where)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(super().forward(x), self.seconds)


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, stage: "TimedStage", j: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stage, ctx.j = stage, j
        with stage.span(f"{stage.rank}F{j}"):
            time.sleep(stage.seconds)
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        with ctx.stage.span(f"{ctx.stage.rank}B{ctx.j}"):
            time.sleep(2 * ctx.stage.seconds)
        return grad * weight, grad * x, None, None


class TimedStage(nn.Module):
    """A stand-in for one stage of a pipeline: x times its weight, in `seconds`, and twice as long in the backward.

    `span` marks each action under its name, "1F0" for stage 1, forward, micro-batch 0; micro-batches are numbered as
    they come. `held` says how many outputs were alive at most when another forward was over.
    """

    def __init__(
        self, rank: int, weight: Tensor, seconds: float, span: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self.rank, self.weight, self.seconds, self.span = rank, nn.Parameter(weight), seconds, span
        self.outputs: list[weakref.ref[Tensor]] = []
        self.held = 0

    def forward(self, x: Tensor) -> Tensor:
        out = _Marked.apply(x, self.weight, self, len(self.outputs))
        self.outputs.append(weakref.ref(out))
        self.held = max(self.held, sum(ref() is not None for ref in self.outputs))
        return out


def lend_cpu_rule() -> None:
    """Let torch's `context_parallel` run on the CPU: torch 2.13 has rules for the attention kernels of GPUs only."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as private

    def on_the_cpu(op, args, kwargs):
        mesh, (query, key, value) = args[0].device_mesh, [x.to_local() for x in args[:3]]
        results = private._templated_ring_attention(mesh.get_group(), 2, op, query, key, value, is_causal=args[4])
        return [DTensor.from_local(x, mesh, args[0].placements) for x in results[:2]]

    private.custom_ops[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default] = on_the_cpu
