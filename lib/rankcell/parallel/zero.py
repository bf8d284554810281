"""ZeRO in its three stages: sharded optimizer states, then gradients too, then parameters too.

Every rank of plain data parallelism holds the same 16 bytes per parameter. Here each holds 1/W of the
states (`ShardedOptimizer`), of states and gradients (`ZeRO2`), or of everything (`FSDP`). Parameters lie one
after the other in flat buffers that are cut into W equal shards, so neither the number of layers nor their
sizes matter. It is the final form of notebook 09, and runs in any process group.

Not covered: optimizers that look at a whole matrix (Muon, Adafactor, L-BFGS), offloading, `copy.deepcopy` of
a wrapped module, and units that some ranks run and others do not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


class _Layout:
    """Where each of some tensors lies in a flat buffer, and which part of each a rank holds."""

    def __init__(self, shapes: Sequence[torch.Size], n_shards: int) -> None:
        self.shapes, self.ends = list(shapes), []
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
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.local: torch.optim.Optimizer | None = None
        self._make = lambda group: optimizer_cls([group], **kwargs)
        self._flats: list[tuple[Tensor, _Layout]] = []
        self._parts: list[
            tuple[nn.Parameter, slice, nn.Parameter]
        ] = []  # whole, where, what this rank updates
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group of parameters; its hyper-parameters are those of `optimizer_cls`."""
        shell = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        if self.local is None:  # only the optimizer itself knows all its defaults
            self.local = self._make({**shell, "params": []})
            self.defaults, self.state = self.local.defaults, self.local.state
        else:
            self.local.add_param_group({**shell, "params": []})
        super().add_param_group(param_group)
        mine = self.local.param_groups[-1]["params"]
        mine += [part for part in self._shard(self.param_groups[-1]["params"]) if part.numel()]

    def _shard(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Move the parameters into flat buffers; returns this rank's part of each."""
        found = []
        for alike in _by(lambda p: (p.dtype, p.device), parameters):
            layout = _Layout([p.shape for p in alike], self.world_size)
            flat = alike[0].new_zeros(layout.length, requires_grad=False)
            shard, views, places = layout.shard(flat, self.rank), layout.views(flat), layout.parts(self.rank)
            for parameter, view, (where, in_shard) in zip(alike, views, places, strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
                part = nn.Parameter(shard[in_shard])
                self._parts.append((parameter, where, part))
                found.append(part)
            self._flats.append((flat, layout))
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard, then gather all parameters. Returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, ours in zip(self.local.param_groups, self._hyper_parameters(), strict=True):
            mine.update(ours)  # a scheduler sets them on this optimizer
        for parameter, where, part in self._parts:
            part.grad = None if parameter.grad is None else parameter.grad.reshape(-1)[where]
        self.local.step()
        for *_, part in self._parts:
            part.grad = None  # a view would keep the whole gradient alive
        with torch.no_grad():
            for flat, layout in self._flats:
                if layout.length:
                    dist.all_gather_single(flat, layout.shard(flat, self.rank), group=self.process_group)
        return loss

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
        numbers = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        mine = [
            (
                numbers[id(parameter)],
                where,
                {k: _to_cpu(v) for k, v in self.local.state.get(part, {}).items()},
            )
            for parameter, where, part in self._parts
            if part.numel() and part in self.local.state
        ]
        everybody: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybody, mine, group=self.process_group)
        parameters, state = [p for g in self.param_groups for p in g["params"]], {}
        for number, where, entries in (item for rank in everybody for item in rank):
            whole, length = state.setdefault(number, {}), where.stop - where.start
            for key, value in entries.items():
                if not _is_per_number(value, length):
                    whole[key] = value
                    continue
                if key not in whole:
                    whole[key] = value.new_zeros(parameters[number].shape)
                whole[key].view(-1)[where] = value.reshape(-1)
        groups, number = [], 0
        for group, hyper in zip(self.param_groups, self._hyper_parameters(), strict=True):
            count = len(group["params"])
            groups.append({**hyper, "params": list(range(number, number + count))})
            number += count
        return {
            "state": {n: entries for n, entries in sorted(state.items()) if entries},
            "param_groups": groups,
        }

    def _cut(self, full: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a full state dict, in the form of `state_dict`."""
        numbers = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        places = {
            id(part): (numbers[id(parameter)], where, parameter) for parameter, where, part in self._parts
        }
        own, state = self.local.state_dict()["param_groups"], {}
        hyper = [
            {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in full["param_groups"]
        ]
        for group, indices in zip(self.local.param_groups, own, strict=True):
            for part, index in zip(group["params"], indices["params"], strict=True):
                number, where, parameter = places[id(part)]
                state[index] = {
                    k: v.reshape(-1)[where].clone() if _is_per_number(v, parameter.numel()) else deepcopy(v)
                    for k, v in full["state"].get(number, {}).items()
                }
        groups = [{**h, "params": g["params"]} for h, g in zip(hyper, own, strict=True)]
        return {"state": {i: s for i, s in state.items() if s}, "param_groups": groups, "ours": hyper}

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in self.param_groups
        ]


def _by(key: Callable[[Any], Any], items: Iterable[Any]) -> list[list[Any]]:
    """Items with an equal key together, in the order they came."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _is_per_number(value: Any, numel: int) -> bool:
    """Whether an entry of an optimizer's state belongs to the numbers of a parameter, unlike a step count."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel


class _Flat:
    """Some parameters of a unit in one flat buffer: this rank's shard, and the whole while it is needed.

    The module's own `Parameter` objects become views of the shard, so that optimizers update it. The whole
    has Parameters of its own, that computing uses and that receive the gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], places: Mapping, owner: "FSDP") -> None:
        first = parameters[0]
        self.group, self.rank, self.world_size = owner.process_group, owner.rank, owner.world_size
        self.is_sharded = first.dim() > 1 or owner.shard_vectors
        self.parameters, self.places = list(parameters), [places[id(p)] for p in parameters]
        self.layout = _Layout([p.shape for p in parameters], self.world_size if self.is_sharded else 1)
        self.parts = self.layout.parts(self.rank if self.is_sharded else 0)
        dtype = owner.compute_dtype if owner.compute_dtype and first.is_floating_point() else first.dtype
        self.whole = torch.zeros(self.layout.length, dtype=dtype, device=first.device)
        master = self.whole if dtype == first.dtype else self.whole.to(first.dtype)
        for view, parameter in zip(self.layout.views(master), parameters, strict=True):
            view.copy_(parameter.detach())
        self.is_persistent = owner.keeps_parameters
        self.shard = self.layout.shard(master, self.rank if self.is_sharded else 0)
        if not (self.is_persistent and master is self.whole):
            self.shard = self.shard.clone()  # else it stays a part of the whole
        for parameter, (_, in_shard) in zip(parameters, self.parts, strict=True):
            part = self.shard[in_shard]
            parameter.data, parameter.grad = part if self.is_sharded else part.view(parameter.shape), None
        views = self.layout.views(self.whole.data)  # `.data`: to refill the buffer is no change to autograd
        self.wholes = [nn.Parameter(view) for view in views]
        self.reduce_dtype = owner.reduce_dtype or first.dtype
        self.gathering: tuple[dist.Work, Tensor] | None = None  # and the tensor that must live until then
        self.reducing: tuple[dist.Work, Tensor, Tensor] | None = None
        self.gradient: Tensor | None = None  # of the whole, this rank's, not yet reduced
        self.reduced: Tensor | None = None  # of the shard, summed over all ranks
        self.received: set[int] = set()
        for index, parameter in enumerate(self.wholes):
            parameter.register_post_accumulate_grad_hook(self._taker(index, owner))
            parameter.requires_grad_(parameters[index].requires_grad)
        self.free()

    @property
    def is_trained(self) -> bool:
        return any(p.requires_grad for p in self.parameters)

    def gather(self) -> None:
        """Start to fill the whole buffer from the shards."""
        storage = self.whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.layout.length * self.whole.element_size())
        for whole, parameter in zip(self.wholes, self.parameters, strict=True):
            whole.requires_grad_(parameter.requires_grad)
        with torch.no_grad():
            if not self.is_sharded:
                self.whole.data.copy_(self.shard)
            elif self.layout.length:
                mine = self.shard.to(self.whole.dtype)
                work = dist.all_gather_single(self.whole.data, mine, group=self.group, async_op=True)
                self.gathering = work, mine

    def wait(self) -> None:
        """Wait until the whole buffer is filled."""
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def free(self) -> None:
        """Give the memory of the whole back; its tensors stay, without storage, for autograd to point at."""
        self.wait()
        if not self.is_persistent:
            self.whole.untyped_storage().resize_(0)

    def put(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the modules see these parameters: `wholes` to compute, `parameters` (the shards) else."""
        for parameter, places in zip(parameters, self.places, strict=True):
            for module, name in places:
                setattr(module, name, parameter)

    def _taker(self, index: int, owner: "FSDP") -> Callable[[nn.Parameter], None]:
        @torch.no_grad()
        def take(whole: nn.Parameter) -> None:
            """Move a gradient into the flat buffer as soon as it is there, and free its own memory."""
            owner.is_dirty = True
            gradient, whole.grad = whole.grad, None
            fits = gradient.numel() == self.layout.length and gradient.dtype == self.reduce_dtype
            if self.gradient is None and fits and gradient.is_contiguous():
                self.gradient = gradient.view(-1)  # it is the whole buffer: no copy
            else:
                if self.gradient is None:
                    self.gradient = gradient.new_zeros(self.layout.length, dtype=self.reduce_dtype)
                self.layout.views(self.gradient)[index].add_(gradient)
            self.received.add(index)

        return take

    def reduce(self) -> None:
        """Start to sum the gradients; this rank gets those of its shard."""
        if self.gradient is None:  # nothing on this rank, but perhaps on others
            self.gradient = torch.zeros(self.layout.length, dtype=self.reduce_dtype, device=self.shard.device)
        if self.is_sharded:
            self.wait_reduced()
            mine, gradient, self.gradient = self.gradient.new_empty(self.layout.chunk), self.gradient, None
            work = dist.reduce_scatter_single(mine, gradient, group=self.group, async_op=True)
            self.reducing = work, mine, gradient

    def wait_reduced(self) -> None:
        """Wait for the sum; the gradients of the whole are freed then."""
        if self.reducing is not None:
            work, mine, _ = self.reducing
            work.wait()
            self.reducing = None
            self.reduced = mine if self.reduced is None else self.reduced.add_(mine)

    @torch.no_grad()
    def assign(self, is_used: Sequence[bool]) -> None:
        """Give each parameter that any rank used its part of the averaged gradient."""
        self.reduced.div_(self.world_size)
        for parameter, (_, in_shard), used in zip(self.parameters, self.parts, is_used, strict=True):
            if used and parameter.requires_grad:
                gradient = self.reduced[in_shard].view_as(parameter).to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.reduced = None
        self.received.clear()


class _Unit:
    """A module whose parameters are gathered, used and freed together."""

    def __init__(self, module: nn.Module, flats: list[_Flat], ancestors: set[int]) -> None:
        self.module, self.flats, self.ancestors = module, flats, ancestors
        self.is_gathered = False
        self.open_calls = 0  # forward calls whose backward has not begun
        self.was_called = False

    def is_around(self, other: "_Unit") -> bool:
        """Whether the other unit is a part of this one, or this one itself."""
        return other is self or id(self.module) in other.ancestors

    def gather(self) -> None:
        if not self.is_gathered:
            self.is_gathered = True
            for flat in self.flats:
                flat.gather()

    def wait(self) -> None:
        for flat in self.flats:
            flat.wait()

    def free(self) -> None:
        if self.is_gathered:
            self.is_gathered = False
            for flat in self.flats:
                flat.free()

    def show(self, whole: bool) -> None:
        for flat in self.flats:
            flat.put(flat.wholes if whole else flat.parameters)


class FSDP(nn.Module):
    """ZeRO stage 3: `module`, of which each rank keeps 1/W, and a whole unit only while it computes with it.

    Forward: all-gather a unit's parameters, compute, free them. Backward: all-gather them again, compute,
    free them, reduce-scatter the gradients. The next unit is gathered while one computes.

        model = FSDP(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after wrapping: it sees the shards
        loss(model(x)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    The parameters of `module` keep their names and hold this rank's part, flattened: one that lies wholly
    on other ranks is empty here. Rank 0's weights and buffers are sent to all at the start. Vectors (biases,
    norm weights) are few; they stay whole on each rank and are all-reduced, unless `shard_vectors` is set.

    Args:
        module: any module; it is changed in place.
        compute_dtype: dtype to gather and compute in; shards, gradients and optimizer stay in their own.
        process_group: the ranks to share with; all by default.
        units: submodules to gather one after the other. Default: the entries of its ModuleLists and
            Sequentials, or its children where there are none. What is in no unit forms one of its own,
            that is whole from the beginning of forward to the end of backward; so do weights tied across
            units.
        reshard_after_forward: False keeps units whole until their backward: an all-gather less, more memory.
        shard_vectors: shard parameters with one dim, too.
        reduce_dtype: dtype in which gradients are summed; that of the shards by default.
    """

    keeps_parameters = False

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        units: Iterable[nn.Module] | None = None,
        reshard_after_forward: bool = True,
        shard_vectors: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self.compute_dtype, self.reduce_dtype = module, compute_dtype, reduce_dtype
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.reshard_after_forward = reshard_after_forward and not self.keeps_parameters
        self.shard_vectors = shard_vectors
        self.is_dirty = False  # gradients came that were not synchronised yet
        self._in_backward = False
        self._send_from_rank_0()
        self._root, self._units = self._make_units(list(_default_units(module) if units is None else units))
        self._order: list[_Unit] = []  # as the last forward ran them
        self._running: list[_Unit] = []
        self._reducing: list[_Flat] = []
        for unit in self._units:
            unit.module.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after(unit), always_call=True)

    @torch.no_grad()
    def _send_from_rank_0(self) -> None:
        source = dist.get_global_rank(self.process_group, 0) if self.process_group else 0
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.is_meta:
                raise ValueError("FSDP needs real weights: move the module off the meta device first.")
            tensor.data = tensor.data.contiguous()
            if tensor.numel():  # as bytes, which every backend can send
                dist.broadcast(tensor.data.view(-1).view(torch.uint8), source, self.process_group)

    def _make_units(self, modules: list[nn.Module]) -> tuple[_Unit, list[_Unit]]:
        """The root's unit, and the others in the order they were given."""
        owners: dict[int, set[int]] = {}  # parameter: indices of the units it is in, -1 for none
        inside = [{id(m) for m in unit.modules()} for unit in modules]
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for part in self.module.modules():
            around = [i for i, members in enumerate(inside) if id(part) in members]
            owner = min(around, key=lambda i: len(inside[i])) if around else -1  # the innermost
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
                    places.setdefault(id(parameter), []).append((part, name))
                    owners.setdefault(id(parameter), set()).add(owner)
        members: dict[int, list[nn.Parameter]] = {}
        for key, found in owners.items():
            members.setdefault(found.pop() if len(found) == 1 else -1, []).append(parameters[key])
        units = []
        for i, module in enumerate((*modules, self.module)):
            own = members.get(i if i < len(modules) else -1, [])
            alike = _by(
                lambda p: (p.dtype, p.device, p.requires_grad, p.dim() > 1 or self.shard_vectors), own
            )
            ancestors = {id(self.module)}
            ancestors |= {id(m) for m, inner in zip(modules, inside, strict=True) if id(module) in inner}
            units.append(_Unit(module, [_Flat(group, places, self) for group in alike], ancestors))
        return units[-1], units[:-1]

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if self.is_dirty:
            self.finish_gradient_synchronization()
        for unit in (*self._units, self._root):
            unit.free()  # the optimizer may have changed the shards
            unit.open_calls = 0
        self._order, self._running = self._running or self._order, []
        self._root.gather()
        self._root.wait()
        self._root.show(whole=True)
        if self._order:
            self._order[0].gather()
        try:
            args, kwargs = self._cast((args, kwargs))
            output = self.module(*args, **kwargs)
        finally:
            self._root.show(whole=False)
            for unit in self._units:
                if self.reshard_after_forward or not unit.open_calls:
                    unit.free()  # also one that was gathered ahead and not used
        if not self._await_backward(self._root, output):
            self._root.free()
        return output

    def _before(self, unit: _Unit) -> Callable:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
            unit.gather()
            unit.wait()
            unit.show(whole=True)
            if not self._in_backward:
                self._running.append(unit)
                self._gather_ahead(self._order, len(self._running))
            return self._cast((args, kwargs))

        return before

    def _after(self, unit: _Unit) -> Callable:
        def after(module: nn.Module, args: tuple, output: Any) -> None:
            unit.show(whole=False)
            awaited = self._await_backward(unit, output, passed_through=args)
            # in backward a checkpointed unit runs again: its gradients are still to come
            if not self._in_backward and (self.reshard_after_forward or not awaited):
                unit.free()

        return after

    def _gather_ahead(self, order: Sequence[_Unit], place: int) -> None:
        """Start to gather the unit that comes next, where that is known."""
        if 0 <= place < len(order):
            order[place].gather()

    def _cast(self, value: Any) -> Any:
        """`value` with every floating-point tensor in the dtype to compute in."""
        if self.compute_dtype is None:
            return value
        if isinstance(value, Tensor):
            return value.to(self.compute_dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping) and type(value) is dict:
            return {key: self._cast(v) for key, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self._cast, value))
        return value

    # backward

    def _await_backward(self, unit: _Unit, output: Any, passed_through: Any = ()) -> bool:
        """Have `_begin_backward` called when a gradient reaches an output; False if none ever will."""
        inputs = {id(t) for t in _tensors(passed_through)}
        tensors = [t for t in _tensors(output) if t.requires_grad and id(t) not in inputs]
        if not (tensors and torch.is_grad_enabled()):
            return False
        if self._in_backward:  # recomputed: its forward was counted
            return True
        unit.open_calls += 1
        unit.was_called = True
        runs = self._running
        place = len(runs) - 1 - runs[::-1].index(unit) if unit in runs else len(runs)
        missing = {id(t) for t in tensors}
        for tensor in tensors:

            def begin(gradient: Tensor, key: int = id(tensor)) -> None:
                self._begin_backward(unit, runs, place)
                if key in missing:
                    missing.remove(key)
                    unit.open_calls -= not missing

            tensor.register_hook(begin)
        return True

    def _begin_backward(self, unit: _Unit, runs: Sequence[_Unit], place: int) -> None:
        """Have the unit whole, reduce what is behind, gather what comes next."""
        self._in_backward = self.is_dirty = unit.was_called = True
        unit.gather()
        unit.wait()
        for other in self._units:
            if (
                other.was_called
                and other.open_calls <= 0
                and not (other.is_around(unit) or unit.is_around(other))
            ):
                self._end_backward(other)
        self._gather_ahead(runs, place - 1)

    def _end_backward(self, unit: _Unit) -> None:
        """Free the unit and start to reduce its gradients."""
        unit.free()
        unit.was_called = False
        for flat in unit.flats:
            if flat.is_trained:
                for earlier in self._reducing:  # one at a time, so that memory holds one at a time
                    earlier.wait_reduced()
                flat.reduce()
                self._reducing.append(flat)

    def finish_gradient_synchronization(self) -> None:
        """After backward: wait until every parameter's `grad` is this rank's part of the average over ranks.

        All ranks must call it. A parameter that no rank used keeps the gradient it had.
        """
        if not self.is_dirty:
            return
        for unit in (*reversed(self._units), self._root):
            if unit.was_called:
                self._end_backward(unit)
            unit.open_calls = 0
            unit.free()
        flats = list(dict.fromkeys(self._reducing))
        for flat in flats:
            flat.wait_reduced()
        used = self._all_reduce_rest(flats)
        for flat in flats:
            flat.assign([used.pop(0) for _ in flat.parameters])
        self._reducing = []
        self.is_dirty = self._in_backward = False

    def _all_reduce_rest(self, flats: Sequence[_Flat]) -> list[bool]:
        """Sum the gradients of vectors, in one all-reduce; returns which parameters any rank used."""
        flags = [i in flat.received for flat in flats for i in range(len(flat.parameters))]
        device = self._root_device()
        used = torch.tensor(flags, dtype=torch.float32, device=device)
        rest = [flat for flat in flats if not flat.is_sharded]
        tensors = [used, *(flat.gradient for flat in rest)]
        for alike in _by(lambda t: (t.dtype, t.device), tensors):
            together = torch.cat(alike)
            dist.all_reduce(together, group=self.process_group)
            for tensor, summed in zip(alike, together.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(summed)
        for flat in rest:
            flat.reduced, flat.gradient = flat.gradient, None
        return (used > 0).tolist()

    def _root_device(self) -> torch.device:
        return next(flat.shard.device for unit in (*self._units, self._root) for flat in unit.flats)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The norm of all gradients of the whole model, which are scaled down if it is above `max_norm`.

        All ranks must call it. `torch.nn.utils.clip_grad_norm_` would see one rank's part only.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._root_device())
        flats = [flat for unit in (*self._units, self._root) for flat in unit.flats]
        for flat in flats:
            if flat.is_sharded or self.rank == 0:  # vectors are the same on every rank: count them once
                for parameter in flat.parameters:
                    if parameter.grad is not None:
                        total += parameter.grad.double().square().sum()
        dist.all_reduce(total, group=self.process_group)
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
        for flat in flats:
            for parameter in flat.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad))
        return norm

    def held_by_kind(self) -> dict[str, list[Tensor]]:
        """What this rank holds now besides its parameters and their `.grad`, for whoever counts memory."""
        flats = [flat for unit in (*self._units, self._root) for flat in unit.flats]
        gradients = [flat.gradient for flat in flats] + [flat.reduced for flat in flats]
        gradients += [t for flat in flats if flat.reducing for t in flat.reducing[1:]]
        gradients += [whole.grad for flat in flats for whole in flat.wholes]
        wholes = [tensor for flat in flats for tensor in (flat.whole, flat.shard)]
        return {"parameters": wholes, "gradients": [t for t in gradients if t is not None]}

    # whole parameters

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict of the module as one process has it, on every rank. All ranks must call it."""
        wholes: dict[int, Tensor] = {}
        for unit in (*self._units, self._root):
            for flat in unit.flats:
                master = flat.shard.clone()
                if flat.is_sharded:
                    master = flat.shard.new_empty(flat.layout.length)
                    dist.all_gather_single(master, flat.shard.clone(), group=self.process_group)
                for parameter, view in zip(flat.parameters, flat.layout.views(master), strict=True):
                    wholes[id(parameter)] = view.clone()
        names = {id(p): p for p in self.module.parameters()}
        state = self.module.state_dict(keep_vars=True)
        return {name: wholes[id(t)] if id(t) in names else t.detach().clone() for name, t in state.items()}

    gather_full_params = full_state_dict

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a state dict of the module as one process has it. No communication."""
        wheres = {
            id(parameter): where
            for unit in (*self._units, self._root)
            for flat in unit.flats
            for parameter, (where, _) in zip(flat.parameters, flat.parts, strict=True)
        }
        own = self.module.state_dict(keep_vars=True)
        if own.keys() != state_dict.keys():
            differ = ", ".join(sorted(own.keys() ^ state_dict.keys()))
            raise ValueError(f"The state dict and the module differ in: {differ}.")
        for name, tensor in own.items():
            if id(tensor) in wheres:
                tensor.data.copy_(state_dict[name].reshape(-1)[wheres[id(tensor)]].view_as(tensor))
            else:
                tensor.copy_(state_dict[name])


class ZeRO2(FSDP):
    """ZeRO stage 2: each rank keeps all parameters, but only 1/W of the gradients and optimizer states.

    It is used like `FSDP`. Parameters are gathered once in each forward, and never freed; the shards that the
    optimizer updates are a part of them. Gradients are reduce-scattered during backward, unit by unit, and
    freed.
    """

    keeps_parameters = True


def _default_units(module: nn.Module) -> list[nn.Module]:
    """Entries of the outermost ModuleLists and Sequentials, else the children, that have parameters."""
    containers = (nn.ModuleList, nn.Sequential)

    def entries(part: nn.Module) -> list[nn.Module]:
        found = []
        for child in part.children():
            if isinstance(part, containers) and type(child).forward is not nn.Module.forward:
                found.append(child)
            else:
                found += entries(child)
        return found

    found = entries(module) or [m for m in module.children() if type(m).forward is not nn.Module.forward]
    return [m for m in dict.fromkeys(found) if next(m.parameters(), None) is not None]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors inside tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        value = vars(value).values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]
