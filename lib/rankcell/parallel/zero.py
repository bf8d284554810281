"""ZeRO's first two stages: sharded optimizer states, then sharded gradients too.

Each rank holds 1/W of the states (`ShardedOptimizer`), or of states and gradients (`ZeRO2`); stage 3, in
`parallel.fsdp`, shards everything. Parameters lie one after the other in flat buffers that are cut into W equal
shards, so neither the number of layers nor their sizes matter.

What it does not do: optimizers that look at a whole matrix (Adafactor, Muon, L-BFGS), saved states, offloading.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import group
from .fsdp import FSDP
from .shards import FlatLayout


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO stage 1: an optimizer of which each rank holds the states of, and updates, 1/W of the parameters.

    Every rank calls `step` with the same, already averaged gradients; each updates its shard, then an
    all-gather gives everybody all of them. The parameters move into flat buffers when they are added.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self.process_group = process_group
        self.rank, self.world_size = group.place(process_group, "ShardedOptimizer")
        self.local: Any = None
        self._make: Callable[..., Any] = lambda parameters: optimizer_cls(parameters, **kwargs)
        self._flats: list[tuple[Tensor, FlatLayout]] = []
        # by parameter: its place in a flat buffer, which of its numbers are this rank's, and these
        self._parts: dict[nn.Parameter, tuple[Tensor, slice, nn.Parameter]] = {}
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group of parameters; its hyper-parameters are those of `optimizer_cls`."""
        shell = {**_hyper_parameters(param_group), "params": []}
        if self.local is None:  # only the optimizer itself knows all its defaults
            self.local = self._make([shell])
            self.defaults, self.state = self.local.defaults, self.local.state
        else:
            self.local.add_param_group(shell)
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        for kind in dict.fromkeys((p.dtype, p.device) for p in parameters):
            self._shard([p for p in parameters if (p.dtype, p.device) == kind])
        mine = [self._parts[p][2] for p in parameters]
        self.local.param_groups[-1]["params"] += [part for part in mine if part.numel()]

    @torch.no_grad()
    def _shard(self, parameters: list[nn.Parameter]) -> None:
        """Move parameters of one dtype into a flat buffer, and find this rank's part of each."""
        layout = FlatLayout([p.shape for p in parameters], self.world_size)
        flat = parameters[0].detach().new_zeros(layout.length)
        shard, views, places = layout.shard(flat, self.rank), layout.views(flat), layout.parts(self.rank)
        for parameter, view, (where, in_shard) in zip(parameters, views, places, strict=True):
            view.copy_(parameter)
            parameter.data = view
            self._parts[parameter] = view, where, nn.Parameter(shard[in_shard])
        self._flats.append((flat, layout))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard, then gather all parameters. Returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, ours in zip(self.local.param_groups, self.param_groups, strict=True):
            mine.update(_hyper_parameters(ours))  # a scheduler sets them on this optimizer
        for parameter, (view, where, part) in self._parts.items():
            if parameter.untyped_storage()._cdata != view.untyped_storage()._cdata:
                raise RuntimeError("Move or cast the model first, then make the ShardedOptimizer.")
            part.grad = None if parameter.grad is None else parameter.grad.reshape(-1)[where]
        self.local.step()
        for _, _, part in self._parts.values():
            part.grad = None  # a view would keep the whole gradient alive
        with torch.no_grad():
            for flat, layout in self._flats:
                if layout.length:
                    dist.all_gather_single(flat, layout.shard(flat, self.rank), group=self.process_group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Raises: no rank has all states, and this optimizer does not collect them."""
        raise RuntimeError("ShardedOptimizer saves no states: each rank has a part. ZeroRedundancyOptimizer does.")


def _hyper_parameters(param_group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in param_group.items() if k not in ("params", "param_names")}


class ZeRO2(FSDP):
    """ZeRO stage 2: each rank keeps all parameters, but only 1/W of the gradients and optimizer states.

    It is used like `FSDP`. Parameters are gathered once in each forward, and never freed; the shards that the
    optimizer updates are a part of them.
    """

    keeps_parameters = True
