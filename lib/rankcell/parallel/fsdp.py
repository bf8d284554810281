"""Fully sharded data parallelism, ZeRO stage 3: parameters, gradients and optimizer states in W equal parts.

`FSDP` gathers a unit (a block, say) when it computes, frees it afterwards, and leaves each rank with its part
of the averaged gradients. It is the final form of lesson 09, and runs in any process group. `ZeRO2`, in
`parallel.zero`, is the same without freeing parameters.

What it does not do: units of several dtypes, other dtypes to compute or sum in, accumulation without communication,
offloading, optimizers that look at a whole matrix (Muon, L-BFGS), a checkpoint around the whole or with
`use_reentrant=True`, parameters that some ranks use and others do not. torch's `fully_shard` has most of that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import group
from .shards import Places, Unit


class _Edge(torch.autograd.Function):
    """The tensors it is given; calls `passed` when their gradients have come back.

    A hook on the tensor would do the same, but is lost when the tensor is changed in place.
    """

    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # views of them could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(gradient is not None for gradient in gradients):
            ctx.passed()
        return None, *gradients


def _with_edge(value: Any, passed: Callable[[], None]) -> Any:
    """`value` with the tensors in it, in lists, dictionaries and so on, behind one `_Edge`."""
    leaves, form = tree_flatten(value)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places or not torch.is_grad_enabled():
        return value
    for i, tensor in zip(places, _Edge.apply(passed, *(leaves[i] for i in places)), strict=True):
        leaves[i] = tensor
    return tree_unflatten(leaves, form)


class FSDP(nn.Module):
    """ZeRO stage 3: `module`, of which each rank keeps 1/W, and a whole unit only while it computes with it.

    Forward: all-gather a unit's parameters, compute, free them. Backward: all-gather them again, compute,
    free them, reduce-scatter the gradients. The next unit is gathered while one computes. Units are the
    entries of ModuleLists and Sequentials, or the children where there are none. What is in no unit, and
    weights tied across units, form one of their own, whole from the beginning of forward to the end of
    backward.

        model = FSDP(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after wrapping: it sees the shards
        loss(model(x)).backward()  # every `grad` is this rank's part of the average over ranks
        optimizer.step()

    The parameters of `module` keep their names and hold this rank's part: `(1, 1, n)` of a matrix, `(n,)` of
    anything else, where n is 0 if it lies wholly on other ranks. Rank 0's weights and buffers are sent to all at
    the start. All ranks must run the same units in the same order.

    Args:
        module: any module; it is changed in place.
        process_group: the ranks to share with; all by default.
        initialise: for a model on the meta device, which is never whole on any rank: fills the weights of a
            unit, `initialise(name, unit)`, with the name "" for what is in no unit.
        device: where a model on the meta device is made real; torch's default device by default.
    """

    keeps_parameters = False

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        initialise: Callable[[str, nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.module, self.process_group = module, process_group
        group.place(process_group, type(self).__name__)
        modules = _units(module)
        names, (owned, places) = {m: name for name, m in module.named_modules()}, _owned(module, modules)
        built = []
        for part in (module, *modules):  # the root's first: `initialise` finds the others on the meta device
            parameters = [_made_real(p, places, device) for p in owned.get(part, [])]
            if initialise is not None:
                initialise(names[part], part)
            group.broadcast_each(parameters, process_group)
            stand = [places[p] for p in parameters]
            built.append(Unit(part, parameters, stand, process_group, keep=self.keeps_parameters))
        group.broadcast_each(module.buffers(), process_group)
        self._root, *self._units = built
        self._all_units = (*self._units, self._root)
        self._order: list[Unit] = []  # as the last forward ran them
        self._running: list[Unit] = []
        self._will_finish = False  # the running backward will call `finish_gradient_synchronization`
        for unit in self._units:
            unit.module.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after(unit), always_call=True)

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        self._will_finish = False  # a backward that raised did not finish
        for unit in self._all_units:
            unit.free(outdated=True)  # the optimizer may have changed the shards
            unit.in_backward = False
            unit.drop_gradients()
        self._order, self._running = self._running, []
        try:
            self._root.ready()
            _gather_next(self._order, 0)
            output = self.module(*args, **kwargs)
        finally:
            for unit in self._units:
                unit.free()  # also one that was gathered ahead and not used
            self._root.show(wholes=False)
        runs = self._running
        if not torch.is_grad_enabled():
            self._root.free()
        return _with_edge(output, lambda: self._begin_backward(self._root, runs, len(runs)))

    def _before(self, unit: Unit) -> Callable[..., Any]:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
            unit.ready()
            if not _in_backward():  # else a checkpoint runs it again
                self._running.append(unit)
                _gather_next(self._order, len(self._running))
            return _with_edge((args, kwargs), lambda: self._end_backward(unit))

        return before

    def _after(self, unit: Unit) -> Callable[..., Any]:
        def after(module: nn.Module, args: tuple, output: Any) -> Any:
            if _in_backward():  # its backward is still to come
                return output
            unit.free()
            runs, place = self._running, len(self._running) - 1
            return _with_edge(output, lambda: self._begin_backward(unit, runs, place))

        return after

    # backward

    def _begin_backward(self, unit: Unit, runs: Sequence[Unit], place: int) -> None:
        """A gradient has reached a unit: have it whole, and gather what comes next."""
        if not self._will_finish:
            self._will_finish = True
            # torch has no public name for "when this backward ends"; its own DDP and FSDP use the same
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_gradient_synchronization)
        for needed in (self._root, unit):
            needed.ready()
            needed.in_backward = True
        _gather_next(runs, place - 1)

    def _end_backward(self, unit: Unit) -> None:
        """A gradient has come out at a unit's inputs: free it, and start to reduce its gradients."""
        unit.free()
        unit.in_backward = False
        for earlier in self._all_units:  # one at a time, so that memory holds one at a time
            earlier.wait_reduced()
        unit.reduce()

    def finish_gradient_synchronization(self) -> None:
        """Wait until every parameter's `grad` is this rank's part of the average. Every backward ends with it."""
        if not self._will_finish:
            return
        for unit in (*reversed(self._units), self._root):
            if unit.in_backward:  # its inputs wanted no gradient
                self._end_backward(unit)
            unit.free()
        for unit in self._all_units:
            unit.assign()
        self._will_finish = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The norm of all gradients of the whole model, which are scaled down if it is above `max_norm`.

        All ranks must call it. `torch.nn.utils.clip_grad_norm_` would see one rank's part only.
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        groups, device = [self.process_group], self._all_units[0].shard.device
        return group.clip_grad_norm_(gradients, max_norm, counted=gradients, process_groups=groups, device=device)

    # what a rank holds, and from parts to wholes and back

    def held_by_kind(self) -> dict[str, list[Tensor]]:
        """What this rank holds now besides its parameters and their `.grad`, for whoever counts memory."""
        units = self._all_units
        gradients = [t for unit in units for t in (unit.gradient, unit.reduced, *(unit.reducing or ())[1:])]
        gradients += [whole.grad for unit in units for whole in unit.wholes]
        wholes = [tensor for unit in units for tensor in (unit.whole, unit.shard)]
        return {"parameters": wholes, "gradients": [t for t in gradients if isinstance(t, Tensor)]}

    @torch.no_grad()
    def wholes_of(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The wholes of which each rank gives its parts, on every rank.

        Parts are anything in the shape of this rank's parameters, by their names in the module: weights,
        gradients, averages. All ranks must call it with the same names.
        """
        names: dict[nn.Parameter, list[str]] = {}  # a tied one has several
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).extend([name] if name in parts else [])
        found: dict[str, Tensor] = {}
        for unit in self._all_units:
            shard = unit.shard.new_zeros(unit.layout.chunk)
            for parameter, in_shard in zip(unit.parameters, unit.parts, strict=True):
                for name in names[parameter]:
                    shard[in_shard].copy_(parts[name].reshape(-1))
            whole = shard.new_empty(unit.layout.length)
            if unit.parameters:
                dist.all_gather_single(whole, shard, group=self.process_group)
            for parameter, view in zip(unit.parameters, unit.layout.views(whole), strict=True):
                found |= {name: view.clone() for name in names[parameter]}
        return {name: found[name] for name in parts}

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict of the module as one process has it, on every rank. All ranks must call it."""
        state = self.module.state_dict()
        names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        return {name: t.clone() for name, t in state.items()} | self.wholes_of({n: state[n] for n in names})


def _owned(
    module: nn.Module, units: Sequence[nn.Module]
) -> tuple[dict[nn.Module, list[nn.Parameter]], dict[nn.Parameter, Places]]:
    """The parameters of each unit and of the root, `module` itself; and where each parameter stands.

    The root's are those in no unit, and those that stand in more than one.
    """
    unit_of = {part: unit for unit in units for part in unit.modules()}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    places: dict[nn.Parameter, Places] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, set()).add(unit_of.get(part, module))
            places.setdefault(parameter, []).append((part, name))
    owned: dict[nn.Module, list[nn.Parameter]] = {}
    for parameter, found in owners.items():
        owned.setdefault(found.pop() if len(found) == 1 else module, []).append(parameter)
    return owned, places


def _made_real(
    parameter: nn.Parameter, places: dict[nn.Parameter, Places], device: torch.device | str | None
) -> nn.Parameter:
    """The parameter; for one on the meta device a new one in its places, to be filled."""
    if not parameter.is_meta:
        return parameter
    empty = torch.empty_like(parameter, device=device or torch.get_default_device())
    real = nn.Parameter(empty, parameter.requires_grad)
    places[real] = places[parameter]
    for part, name in places[real]:
        setattr(part, name, real)
    return real


def _gather_next(order: Sequence[Unit], place: int) -> None:
    """Start to gather the unit that comes next, where that is known."""
    if 0 <= place < len(order):
        order[place].gather()


def _in_backward() -> bool:
    # torch has no public name for "a backward is running"; its own checkpointing asks the same
    return torch._C._current_graph_task_id() != -1


def _units(module: nn.Module) -> list[nn.Module]:
    """Entries of the outermost ModuleLists and Sequentials, else the children, that have parameters."""

    def entries(part: nn.Module) -> list[nn.Module]:
        found = []
        for child in part.children():
            is_entry = isinstance(part, (nn.ModuleList, nn.Sequential)) and not isinstance(child, nn.ModuleList)
            found += [child] if is_entry else entries(child)
        return found

    found = entries(module) or list(module.children())
    return [m for m in dict.fromkeys(found) if next(m.parameters(), None) is not None]
