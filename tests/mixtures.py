"""A layer of experts, `Mixture`, and the same layer with its experts spread over ranks, `ExpertParallel`: tokens travel
to their experts in one all-to-all and come back in another. Outputs, gradients and dropped tokens are those of
`Mixture` on all ranks' tokens, in the order of the ranks. It broadcasts nothing: routers must start equal.
`split_to_group` gives each rank its part.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rankcell.parallel import group, tensor
from rankcell.parallel.experts import Routing, route


class Mixture(nn.Module):
    """The layer on one process: `(..., d_in)` -> `(..., d_out)`, each token through k of the experts.

    `router` gives one number per expert; each expert is called with its own tokens, `(tokens, d_in)`, perhaps none. A
    token whose choices were all dropped gets zeros. After a forward `routing` says what happened; add
    `routing.balance_loss` to the loss.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: Sequence[nn.Module],
        *,
        k: int = 1,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        self.router, self.experts = router, nn.ModuleList(experts)
        self.k, self.capacity_factor = k, capacity_factor
        self.routing: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (T, d_in)
        routing = self.routing = route(
            self.router(tokens), self.k, capacity_factor=self.capacity_factor, alone=True
        )
        parts, places = [], []
        for number, expert in enumerate(self.experts):
            token, choice = ((routing.experts == number) & routing.kept).nonzero(as_tuple=True)
            parts.append(routing.weights[token, choice, None] * expert(tokens[token]))
            places.append(token)
        rows = torch.cat(parts)
        output = rows.new_zeros(len(tokens), rows.shape[-1]).index_add(0, torch.cat(places), rows)
        return output.unflatten(0, x.shape[:-1])


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, as many to each rank as `sent` says; its backward is the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], ranks: dist.ProcessGroup
    ) -> Tensor:
        ctx.how = sent, received, ranks
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=ranks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, ranks = ctx.how
        return _Exchange.apply(grad, received, sent, ranks), None, None, None


class ExpertParallel(nn.Module):
    """A `Mixture` whose experts are spread over the ranks of a group, E / W on each, in order.

        layer = ExpertParallel(Mixture(router, experts))
        y = layer(x)                                   # x: this rank's tokens, any number of them
        loss = share_of_mean(losses) + 0.01 * layer.routing.balance_loss
        loss.backward()
        sum_gradients(shared_parameters(layer))        # the router's; an expert's are already whole

    The losses of the ranks must *add up* to the loss of all (`share_of_mean`, in `context`). Then the gradient of an
    expert is complete on its rank, because the tokens of all ranks came to it: it must not be reduced again. Parameters
    keep their names (`experts.3.up.weight` is expert 3). All ranks of the group must call it, forward and backward.
    """

    def __init__(self, mixture: Mixture, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group or dist.group.WORLD
        self.rank, self.world_size = group.place(process_group, "these experts", use="call them")
        self.n_experts = len(mixture.experts)
        if self.n_experts % self.world_size:
            raise ValueError(f"{self.n_experts} experts cannot be shared equally by {self.world_size} ranks.")
        each = self.n_experts // self.world_size
        self.mine = slice(self.rank * each, (self.rank + 1) * each)
        self.router = mixture.router
        numbers = range(self.n_experts)[self.mine]
        self.experts = nn.ModuleDict({str(number): mixture.experts[number] for number in numbers})
        self.k, self.capacity_factor = mixture.k, mixture.capacity_factor
        self.routing: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (T, d_in)
        how: dict[str, Any] = {"capacity_factor": self.capacity_factor, "process_group": self.process_group}
        routing = self.routing = route(self.router(tokens), self.k, **how)
        # Row t * k + j is choice j of token t. In the order of their experts they are in that of their ranks.
        rows = routing.kept.flatten().nonzero()[:, 0]
        rows = rows[routing.experts.flatten()[rows].argsort(stable=True)]
        sent = routing.counts[self.rank].view(self.world_size, -1).sum(1).tolist()
        here = routing.counts[:, self.mine]  # (W, E / W) rows that come, from each rank for each expert
        received = here.sum(1).tolist()
        arrived = _Exchange.apply(tokens[rows // self.k], sent, received, self.process_group)

        expert = torch.arange(here.shape[1], device=x.device).repeat(self.world_size)
        by_expert = expert.repeat_interleave(here.flatten()).argsort(stable=True)
        parts = arrived[by_expert].split(here.sum(0).tolist())
        done = torch.cat([f(part) for f, part in zip(self.experts.values(), parts, strict=True)])

        returned = _Exchange.apply(done[by_expert.argsort()], received, sent, self.process_group)
        choices = returned.new_zeros(len(tokens) * self.k, returned.shape[-1]).index_copy(0, rows, returned)
        weights = routing.weights.flatten()[:, None]
        output = (weights * choices).view(len(tokens), self.k, choices.shape[1]).sum(1)
        return output.unflatten(0, x.shape[:-1])


def shared_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model that every rank holds: all but those of experts that were spread."""
    layers = [layer for layer in module.modules() if isinstance(layer, ExpertParallel)]
    spread = {p for layer in layers for p in layer.experts.parameters()}
    return (p for p in module.parameters() if p not in spread)


def split_to_group(x: Tensor, dim: int, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part along `dim` of `x`, which every rank holds whole. Backward an all-gather."""
    group = tensor.Group(process_group)
    group.check_divides(x.shape[dim], f"dim {dim} of a tensor of shape {tuple(x.shape)}")
    return tensor._Pair.apply(x, lambda x: group.own(x, dim), lambda grad: group.all_gather(grad, dim))
