"""What each rank holds of a module that is sharded over ranks: shards, and wholes while they are needed.

`Sharded` cuts a module into units and their parameters into flat buffers (`Flat`), makes it whole again to
save it, and cuts what is loaded, for any number of ranks. When units are gathered and freed is not its
business: that is `parallel.fsdp`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import group
from .flat import Layout, by


class _Absent(nn.Parameter):
    """Stands for a weight that is not whole now: has its shape, and raises when computed with."""

    @classmethod
    def of(cls, name: str, shape: torch.Size, memory: Tensor, is_trained: bool) -> nn.Parameter:
        """The stand-in of a parameter in a shape, on top of any memory."""
        outline = memory.as_strided(shape, [0] * len(shape))
        if not group.has_numbers(memory):  # a fake tensor has a class of its own already
            return nn.Parameter(outline, is_trained)
        made = torch.Tensor._make_subclass(cls, outline, is_trained)
        made.weight_name = name
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ASKS_ONLY:
            return super().__torch_function__(function, types, args, kwargs or {})
        found = [a.weight_name for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)]
        raise RuntimeError(
            f"{found[0] if found else 'A weight'} is used outside of the forward of its module, where this "
            f"rank holds only a part of it. Leave that module out of `units=`: then it stays whole meanwhile."
        )


_ATTRIBUTES = "shape dtype device layout ndim requires_grad grad grad_fn is_leaf is_meta is_sparse".split()
_METHODS = "size dim numel is_floating_point is_complex untyped_storage __hash__".split()
_ASKS_ONLY = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in _METHODS),
}


class Flat:
    """Some parameters of a unit in one flat buffer: this rank's shard, and the whole while it is needed.

    The module's own `Parameter` objects become views of the shard, so that optimizers update it. The whole
    has Parameters of its own, that computing uses and that receive the gradients.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], places: Mapping, names: Sequence[str], owner: "Sharded"
    ) -> None:
        first = parameters[0]
        self.owner_group, self.rank, self.world_size = owner.process_group, owner.rank, owner.world_size
        self.is_sharded = owner.shards(first)
        self.parameters, self.places = list(parameters), [places[id(p)] for p in parameters]
        self.layout = Layout([p.shape for p in parameters], self.world_size if self.is_sharded else 1)
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
        self.absent = [
            _Absent.of(name, p.shape, self.shard, p.requires_grad)
            for name, p in zip(names, parameters, strict=True)
        ]
        for parameter, (_, in_shard), shape in zip(parameters, self.parts, self.layout.shapes, strict=True):
            parameter.data = self._in_shape(self.shard[in_shard], shape)
            parameter.grad = None
        views = self.layout.views(self.whole.data)  # `.data`: to refill the buffer is no change to autograd
        self.wholes = [nn.Parameter(view) for view in views]
        self.reduce_dtype = owner.reduce_dtype or first.dtype
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

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters wants a gradient."""
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
                work = dist.all_gather_single(self.whole.data, mine, group=self.owner_group, async_op=True)
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
        """Let the modules see these: `wholes` to compute, `absent` or `parameters` (the shards) else."""
        for parameter, places in zip(parameters, self.places, strict=True):
            for module, name in places:
                setattr(module, name, parameter)

    @torch.no_grad()
    def take(self, index: int) -> None:
        """Move a gradient into the flat buffer as soon as it is there, and free its own memory."""
        gradient, self.wholes[index].grad = self.wholes[index].grad, None
        if gradient.requires_grad:
            raise RuntimeError(
                "A backward with create_graph=True reached the parameters of a sharded module, whose "
                "gradients are cut off from the graph. For a gradient penalty take "
                "torch.autograd.grad(output, inputs, create_graph=True). For gradients of the parameters' "
                "gradients do not shard the module."
            )
        fits = gradient.numel() == self.layout.length and gradient.dtype == self.reduce_dtype
        if self.gradient is None and fits and gradient.is_contiguous():
            self.gradient = gradient.view(-1)  # it is the whole buffer: no copy
        else:
            if self.gradient is None:
                self.gradient = gradient.new_zeros(self.layout.length, dtype=self.reduce_dtype)
            self.layout.views(self.gradient)[index].add_(gradient)
        self.received.add(index)

    def reduce(self) -> None:
        """Start to sum the gradients; this rank gets those of its shard."""
        if self.gradient is None:  # nothing on this rank, but perhaps on others
            self.gradient = torch.zeros(self.layout.length, dtype=self.reduce_dtype, device=self.shard.device)
        if self.is_sharded:
            self.wait_reduced()
            mine, gradient, self.gradient = self.gradient.new_empty(self.layout.chunk), self.gradient, None
            work = dist.reduce_scatter_single(mine, gradient, group=self.owner_group, async_op=True)
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

    def drop_gradients(self) -> None:
        """Forget all gradients that the shards' `.grad` does not hold yet."""
        if self.reducing is not None:
            group.settle(self.reducing[0])
        self.reducing = self.gradient = self.reduced = None
        self.received.clear()
        for whole in self.wholes:
            whole.grad = None


class Unit:
    """A module whose parameters are gathered, used and freed together."""

    def __init__(self, name: str, module: nn.Module, flats: list[Flat], ancestors: set[int]) -> None:
        self.name, self.module, self.flats, self.ancestors = name, module, flats, ancestors
        self.is_gathered, self.shown = False, "parameters"
        self.in_backward = False  # a gradient has reached an output; whole until its backward has ended
        self.open_calls = 0  # forward calls whose backward has not begun
        self.was_called = False  # since its gradients were last reduced

    def is_around(self, other: "Unit") -> bool:
        """Whether the other unit is a part of this one, or this one itself."""
        return other is self or id(self.module) in other.ancestors

    def gather(self) -> bool:
        """Start to gather, unless that was done; whether it was started now."""
        if self.is_gathered:
            return False
        self.is_gathered = True
        for flat in self.flats:
            flat.gather()
        return True

    def wait(self) -> None:
        """Wait until it is whole."""
        for flat in self.flats:
            flat.wait()

    def free(self, *, outdated: bool = False) -> None:
        """Give the memory of the wholes back. What is persistent stays whole until it is outdated."""
        self.wait()
        if self.is_gathered and (outdated or not any(flat.is_persistent for flat in self.flats)):
            self.is_gathered = False
            for flat in self.flats:
                flat.free()

    def show(self, what: str) -> None:
        """Let the modules see the unit's "wholes", its shards as "parameters", or "absent" in their place."""
        if what != self.shown:
            self.shown = what
            for flat in self.flats:
                flat.put(getattr(flat, what))

    def forget(self) -> None:
        """After a backward that raised: as if neither it nor its forward had been."""
        for flat in self.flats:
            if flat.gathering is not None:
                group.settle(flat.gathering[0])
                flat.gathering = None
            flat.drop_gradients()
        self.free(outdated=True)
        self.show("parameters")
        self.in_backward = self.was_called = False
        self.open_calls = 0


class Sharded(nn.Module):
    """`module` with its parameters cut over the ranks of a group, unit by unit; `parallel.fsdp` runs it."""

    keeps_parameters = False

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None,
        units: Sequence[nn.Module],
        shard_vectors: bool,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        initialise: Callable[[str, nn.Module], Any] | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.module, self.compute_dtype, self.reduce_dtype = module, compute_dtype, reduce_dtype
        self.process_group, self.shard_vectors = process_group, shard_vectors
        self.rank, self.world_size = group.place(process_group, type(self).__name__)
        self._made_on = device or torch.get_default_device()
        self._missing: list[str] = []  # weights of a model on the meta device that nobody has filled
        self._build(units, initialise)

    def shards(self, parameter: Tensor) -> bool:
        """Whether a whole parameter is cut over the ranks."""
        return parameter.dim() > 1 or (self.shard_vectors and parameter.dim() == 1)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be copied or pickled: its memory is shared with the optimizer and other ranks. "
            f"Save `full_state_dict()`; for a copy wrap a new module and call its `load_full_state_dict`."
        )

    # from the module to units

    def _build(
        self, modules: Sequence[nn.Module], initialise: Callable[[str, nn.Module], Any] | None
    ) -> None:
        """Make the units: the root's, and the others in the order they were given.

        What is on the meta device becomes real one unit after the other. Until all are done the module keeps
        meta parameters for those that are sharded already, so `initialise` cannot reach them.
        """
        names = {id(module): name for name, module in self.module.named_modules()}
        inside = [{id(m) for m in unit.modules()} for unit in modules]
        owned, places = self._owned(inside)
        was_meta = any(t.is_meta for t in (*self.module.parameters(), *self.module.buffers()))
        self._make_buffers_real(must_fill=initialise is not None)
        built: dict[int, Unit] = {}
        shards: list[tuple[nn.Module, str, nn.Parameter]] = []
        for i in (-1, *sorted(range(len(modules)), key=lambda i: -len(inside[i]))):  # the outer ones first
            module = modules[i] if i >= 0 else self.module
            parameters = [self._made_real(p, places) for p in owned.get(i, [])]
            first_places = [places[id(p)][0] for p in parameters]
            full_names = [_joined(names[id(part)], name) for part, name in first_places]
            if initialise is not None and was_meta:
                initialise(names[id(module)], module)
            pairs = zip(full_names, parameters, owned.get(i, []), strict=True)
            made = {name: parameter for name, parameter, meta in pairs if parameter is not meta}
            self._missing += made
            if initialise is not None:
                self._check_filled(made)
            self._send_from_rank_0(parameters)
            named = dict(zip(map(id, parameters), full_names, strict=True))
            alike = by(lambda p: (p.dtype, p.device, p.requires_grad, self.shards(p)), parameters)
            flats = [Flat(same, places, [named[id(p)] for p in same], self) for same in alike]
            for parameter, meta in zip(parameters, owned.get(i, []), strict=True):
                if parameter is not meta:
                    shards += [(part, name, parameter) for part, name in places[id(parameter)]]
                    for part, name in places[id(parameter)]:
                        setattr(part, name, meta)
            ancestors = {id(self.module)}
            ancestors |= {id(m) for m, inner in zip(modules, inside, strict=True) if id(module) in inner}
            built[i] = Unit(names[id(module)], module, flats, ancestors)
        for part, name, parameter in shards:
            setattr(part, name, parameter)
        if initialise is not None:
            buffers = dict(self.module.named_buffers())
            self._check_filled({name: buffers[name] for name in self._missing if name in buffers})
            self._missing = []
        self._send_from_rank_0(self.module.buffers())
        self._root, self._units = built[-1], [built[i] for i in range(len(modules))]
        self._all_units = (*self._units, self._root)

    def _owned(self, inside: Sequence[set[int]]) -> tuple[dict[int, list[nn.Parameter]], dict[int, list]]:
        """The parameters of each unit by its index, -1 for the root's; and where each parameter stands."""
        owners: dict[int, set[int]] = {}
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
        owned: dict[int, list[nn.Parameter]] = {}
        for key, found in owners.items():
            owned.setdefault(found.pop() if len(found) == 1 else -1, []).append(parameters[key])
        return owned, places

    def _made_real(self, parameter: nn.Parameter, places: dict[int, list]) -> nn.Parameter:
        """The parameter; for one on the meta device a new one in its places, full of NaN."""
        if not parameter.is_meta:
            return parameter
        real = nn.Parameter(_empty(parameter, self._made_on), parameter.requires_grad)
        places[id(real)] = places[id(parameter)]
        for part, name in places[id(real)]:
            setattr(part, name, real)
        return real

    def _make_buffers_real(self, *, must_fill: bool) -> None:
        for prefix, part in self.module.named_modules():
            for name, buffer in part._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                full_name = _joined(prefix, name)
                if not must_fill and name in part._non_persistent_buffers_set:
                    raise ValueError(
                        f"The buffer {full_name} is on the meta device and in no state dict. Give "
                        f"`initialise`, which fills it."
                    )
                part._buffers[name] = _empty(buffer, self._made_on)
                self._missing.append(full_name)

    def _check_filled(self, made: Mapping[str, Tensor]) -> None:
        """Raise if `initialise` left one of these without values."""
        for name, tensor in made.items():
            if group.has_numbers(tensor) and bool(tensor.isnan().any()):
                raise ValueError(
                    f"`initialise` left {name} without values. It is called with the name and the module of "
                    f"each unit, and must fill all weights and buffers there that are not on the meta device."
                )

    @torch.no_grad()
    def _send_from_rank_0(self, tensors: Iterable[Tensor]) -> None:
        source = dist.get_global_rank(self.process_group, 0) if self.process_group else 0
        for tensor in tensors:
            tensor.data = tensor.data.contiguous()
            if tensor.numel():  # as bytes, which every backend can send
                dist.broadcast(tensor.data.view(-1).view(torch.uint8), source, self.process_group)

    # gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Gradients that `no_sync` kept are dropped, too."""
        for unit in self._all_units:
            unit.show("parameters")
            for flat in unit.flats:
                flat.drop_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The norm of all gradients of the whole model, which are scaled down if it is above `max_norm`.

        All ranks must call it. `torch.nn.utils.clip_grad_norm_` would see one rank's part only.
        """
        sharded = set(map(id, self.sharded_parameters()))
        trained = [p for p in self.module.parameters() if p.grad is not None]
        return group.clip_grad_norm_(
            [p.grad for p in trained],
            max_norm,
            counted=[p.grad for p in trained if id(p) in sharded or self.rank == 0],  # equal ones once
            process_groups=[self.process_group],
            device=self.device,
        )

    # from parts to wholes and back

    @property
    def device(self) -> torch.device:
        """Where the shards are."""
        return self._flats()[0].shard.device

    def _flats(self) -> list[Flat]:
        return [flat for unit in self._all_units for flat in unit.flats]

    def sharded_parameters(self) -> list[nn.Parameter]:
        """The parameters of which this rank holds a part; the others are whole and equal on all ranks."""
        return [parameter for flat in self._flats() if flat.is_sharded for parameter in flat.parameters]

    def held_by_kind(self) -> dict[str, list[Tensor]]:
        """What this rank holds now besides its parameters and their `.grad`, for whoever counts memory."""
        flats = self._flats()
        gradients = [flat.gradient for flat in flats] + [flat.reduced for flat in flats]
        gradients += [t for flat in flats if flat.reducing for t in flat.reducing[1:]]
        gradients += [whole.grad for flat in flats for whole in flat.wholes]
        wholes = [tensor for flat in flats for tensor in (flat.whole, flat.shard)]
        return {"parameters": wholes, "gradients": [t for t in gradients if t is not None]}

    @torch.no_grad()
    def wholes_of(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The wholes of which each rank gives its parts, on every rank.

        Parts are anything in the shape of this rank's parameters, by their names in the module: weights,
        gradients, averages. All ranks must call it with the same names.
        """
        names = _names_by_parameter(self.module)
        found: dict[str, Tensor] = {}
        for flat in self._flats():
            given = [next((n for n in names[id(p)] if n in parts), None) for p in flat.parameters]
            dtypes = {parts[name].dtype for name in given if name is not None}
            for dtype in sorted(dtypes, key=str):
                shard = torch.zeros(flat.layout.chunk, dtype=dtype, device=flat.shard.device)
                for name, (_, in_shard) in zip(given, flat.parts, strict=True):
                    if name is not None and parts[name].dtype == dtype:
                        shard[in_shard].copy_(parts[name].reshape(-1))
                whole = shard
                if flat.is_sharded:
                    whole = shard.new_empty(flat.layout.length)
                    dist.all_gather_single(whole, shard, group=self.process_group)
                views = flat.layout.views(whole)
                for parameter, name, view in zip(flat.parameters, given, views, strict=True):
                    if name is not None and parts[name].dtype == dtype:
                        value = view.clone()
                        found |= {n: value for n in names[id(parameter)] if n in parts}
        return {name: found[name] for name in parts}

    @torch.no_grad()
    def parts_of(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of wholes in the shape of the parameters, by their names. No communication."""
        names, found = _names_by_parameter(self.module), {}
        for flat in self._flats():
            for parameter, (where, _) in zip(flat.parameters, flat.parts, strict=True):
                for name in names[id(parameter)]:
                    if name in wholes:
                        found[name] = wholes[name].reshape(-1)[where].view_as(parameter).clone()
        return {name: found[name] for name in wholes}

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict of the module as one process has it, on every rank. All ranks must call it."""
        names, state = _names_by_parameter(self.module), self.module.state_dict(keep_vars=True)
        wholes = self.wholes_of({name: t for name, t in state.items() if id(t) in names})
        return {name: wholes[name] if id(t) in names else t.detach().clone() for name, t in state.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a state dict of the module as one process has it. No communication."""
        own = self.module.state_dict(keep_vars=True)
        if own.keys() != state_dict.keys():
            differ = ", ".join(sorted(own.keys() ^ state_dict.keys()))
            raise ValueError(f"The state dict and the module differ in: {differ}.")
        names = _names_by_parameter(self.module)
        for name, tensor in own.items():
            if id(tensor) in names:
                tensor.data.copy_(self.parts_of({name: state_dict[name]})[name])
            else:
                tensor.copy_(state_dict[name])
        self._missing = []


def _empty(like: Tensor, device: torch.device | str) -> Tensor:
    """As `torch.empty_like` on a device, but what nobody fills shows: it is NaN."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    return made.fill_(torch.nan) if made.is_floating_point() or made.is_complex() else made.zero_()


def _joined(*names: str) -> str:
    """Names of a module and of what is in it, as torch writes them."""
    return ".".join(filter(None, names))


def _names_by_parameter(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
