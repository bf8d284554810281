"""ZeRO's arithmetic and its first two stages: sharded optimizer states, then sharded gradients too.

Every rank of plain data parallelism holds the same 16 bytes per parameter. Here each holds 1/W of the
states (`ShardedOptimizer`), or of states and gradients (`ZeRO2`); stage 3, in `parallel.fsdp`, shards
everything. Parameters lie one after the other in flat buffers that are cut into W equal shards, so neither
the number of layers nor their sizes matter. It is the final form of lesson 09, for any process group.

Not covered: optimizers that look at a whole matrix (Adafactor, Muon, L-BFGS; `ShardedOptimizer` refuses them)
and offloading.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import group
from .flat import Layout, Part, by, is_elementwise, states_of_part, whole_states
from .fsdp import FSDP


def model_state_bytes(
    parameters: float,
    world_size: int,
    stage: int,
    *,
    parameter: float = 2,
    gradient: float = 2,
    optimizer: float = 12,
) -> float:
    """Bytes of parameters, gradients and optimizer states on each rank, at a stage from 0 to 3.

    The defaults are the bytes per parameter of Adam in mixed precision: 2 for the parameter and 2 for its
    gradient, in 16 bits, and 12 for a float32 copy and two float32 moments. All in float32 it is 4, 4, 8.

    model_state_bytes(7.5e9, 64, 3)  # 16 * 7.5e9 / 64 = 1.875e9
    """
    # https://arxiv.org/abs/1910.02054, section 5 and Table 1 (2020)
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"ZeRO has the stages 1, 2 and 3, and 0 shards nothing. There is no stage {stage!r}."
        )
    kinds = ((3, parameter), (2, gradient), (1, optimizer))
    return parameters * sum(nbytes / (world_size if stage >= first else 1) for first, nbytes in kinds)


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO stage 1: an optimizer of which each rank holds the states of, and updates, 1/W of the parameters.

    Every rank calls `step` with the same, already averaged gradients; each updates its shard, then an
    all-gather gives everybody all of them. The parameters move into flat buffers when they are added.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Args:
        params: parameters, or parameter groups, the same on every rank.
        optimizer_cls: a torch optimizer that treats every number on its own (SGD, Adam, AdamW, ...).
        process_group: the ranks to share with; all by default.
        kwargs: go to `optimizer_cls`.

    Raises:
        ValueError: `optimizer_cls` does not treat every number on its own, which is tried on a small matrix.
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
        self.local: torch.optim.Optimizer | None = None
        self._make = lambda parameters: optimizer_cls(parameters, **kwargs)
        self._flats: list[tuple[Tensor, Layout]] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []  # each parameter, and its place in a flat buffer
        self._parts: list[Part] = []  # what this rank has of each parameter, in the same order
        super().__init__(params, kwargs)
        if not is_elementwise(self._make, self._flats[0][0].device):
            raise ValueError(
                f"{optimizer_cls.__name__} does not treat every number of a parameter on its own, so that it "
                f"computes something else from a rank's part. Use one that does (SGD, Adam, AdamW, ...), or "
                f"give the whole {optimizer_cls.__name__} to every rank."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group of parameters; its hyper-parameters are those of `optimizer_cls`."""
        shell = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        if self.local is None:  # only the optimizer itself knows all its defaults
            self.local = self._make([{**shell, "params": []}])
            self.defaults, self.state = self.local.defaults, self.local.state
        else:
            self.local.add_param_group({**shell, "params": []})
        super().add_param_group(param_group)
        before = len(self._parts)
        self._shard(self.param_groups[-1]["params"])
        mine = self.local.param_groups[-1]["params"]
        mine += [part.tensor for part in self._parts[before:] if part.tensor.numel()]

    def _shard(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move the parameters into flat buffers, and find this rank's part of each."""
        numbers = {id(p): len(self._parts) + i for i, p in enumerate(parameters)}
        found = {}
        for alike in by(lambda p: (p.dtype, p.device), parameters):
            layout = Layout([p.shape for p in alike], self.world_size)
            flat = alike[0].new_zeros(layout.length, requires_grad=False)
            shard, views, places = layout.shard(flat, self.rank), layout.views(flat), layout.parts(self.rank)
            for parameter, view, (where, in_shard) in zip(alike, views, places, strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
                mine = shard[in_shard]
                if view.dim() == 0 and len(mine):
                    mine = mine.view(())  # so that the optimizer's states have its shape
                number = numbers[id(parameter)]
                found[number] = (parameter, view), Part(number, view.shape, where, nn.Parameter(mine))
            self._flats.append((flat, layout))
        for _, (pair, part) in sorted(found.items()):
            self._views.append(pair)
            self._parts.append(part)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard, then gather all parameters. Returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, ours in zip(self.local.param_groups, self._hyper_parameters(), strict=True):
            mine.update(ours)  # a scheduler sets them on this optimizer
        for (parameter, view), part in zip(self._views, self._parts, strict=True):
            self._take_back(parameter, view)
            grad = parameter.grad
            part.tensor.grad = None if grad is None else grad.reshape(-1)[part.where].view_as(part.tensor)
        self.local.step()
        for part in self._parts:
            part.tensor.grad = None  # a view would keep the whole gradient alive
        with torch.no_grad():
            for flat, layout in self._flats:
                if layout.length:
                    dist.all_gather_single(flat, layout.shard(flat, self.rank), group=self.process_group)
        return loss

    @torch.no_grad()
    def _take_back(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Have the parameter's values in the flat buffer again, if somebody gave it other memory."""
        if group.same_memory(parameter, view) and parameter.dtype == view.dtype:
            return
        now, then = parameter.detach(), view
        if (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
            raise RuntimeError(
                f"A parameter is {_described(now)}; when ShardedOptimizer took it, it was "
                f"{_described(then)}. Move or cast the model first, then make the optimizer."
            )
        view.copy_(now)  # `p.data = ...`, or another memory format: new values, or the same elsewhere
        parameter.data = view

    def state_dict(self) -> dict[str, Any]:
        """The states that this rank holds, for the same rank of the same world size. No communication."""
        mine = {"rank": self.rank, "world_size": self.world_size}
        return {"shard": mine, **self.local.state_dict(), "ours": self._hyper_parameters()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, or what `full_state_dict` returned anywhere."""
        shard = state_dict.get("shard")
        if shard is None:
            state_dict = self._cut(state_dict)
        elif shard != {"rank": self.rank, "world_size": self.world_size}:
            raise ValueError(
                f"This is the shard of rank {shard['rank']} of {shard['world_size']}, but this is rank "
                f"{self.rank} of {self.world_size}. Save `full_state_dict()` to load into another world size."
            )
        self.local.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.state = self.local.state
        for ours, saved in zip(self.param_groups, state_dict["ours"], strict=True):
            ours.update(saved)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that one process would have, on every rank, on the CPU. All ranks must call it."""
        parts = [part for part in self._parts if part.tensor.numel()]
        groups, number = [], 0
        for group_, hyper in zip(self.param_groups, self._hyper_parameters(), strict=True):
            count = len(group_["params"])
            groups.append({**hyper, "params": list(range(number, number + count))})
            number += count
        return {
            "state": whole_states(parts, self.local.state, self.process_group),
            "param_groups": groups,
        }

    def _cut(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a full state dict, in the form of `state_dict`."""
        by_tensor = {id(part.tensor): part for part in self._parts}
        own, state = self.local.state_dict()["param_groups"], {}
        for group_, indices in zip(self.local.param_groups, own, strict=True):
            for tensor, index in zip(group_["params"], indices["params"], strict=True):
                state[index] = states_of_part(by_tensor[id(tensor)], full["state"])
        hyper = [_without_parameters(group_) for group_ in full["param_groups"]]
        groups = [{**h, "params": g["params"]} for h, g in zip(hyper, own, strict=True)]
        return {"state": {i: s for i, s in state.items() if s}, "param_groups": groups, "ours": hyper}

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        return [_without_parameters(group_) for group_ in self.param_groups]


def _without_parameters(param_group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in param_group.items() if k not in ("params", "param_names")}


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


class ZeRO2(FSDP):
    """ZeRO stage 2: each rank keeps all parameters, but only 1/W of the gradients and optimizer states.

    It is used like `FSDP`. Parameters are gathered once in each forward, and never freed; the shards that the
    optimizer updates are a part of them. Gradients are reduce-scattered during backward, unit by unit, and
    freed.
    """

    keeps_parameters = True
