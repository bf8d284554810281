"""Layers that take time without computing: for lessons about overlap, where the cores of a laptop also send."""

import time

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
