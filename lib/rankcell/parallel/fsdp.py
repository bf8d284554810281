"""Fully sharded data parallelism, ZeRO stage 3: parameters, gradients and optimizer states in W equal parts.

`FSDP` gathers a unit (a block, say) when it computes, frees it afterwards, and leaves each rank with its part
of the averaged gradients. It is the final form of lesson 09, and runs in any process group. `ZeRO2`, in
`parallel.zero`, is the same without freeing parameters.

Not covered: optimizers that look at a whole matrix (Adafactor, Muon, L-BFGS), offloading, gradients of
parameters' gradients, and units that some ranks run and others do not (told at the end of backward).
"""

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import group
from .shards import Flat, Sharded, Unit


class _Edge(torch.autograd.Function):
    """The tensors it is given; calls `begin` when a gradient comes back to any of them.

    A hook on the tensor would do the same, but is lost when the tensor is changed in place.
    """

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.begin = begin
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # views of them could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(gradient is not None for gradient in gradients):
            ctx.begin()
        return None, *gradients


class FSDP(Sharded):
    """ZeRO stage 3: `module`, of which each rank keeps 1/W, and a whole unit only while it computes with it.

    Forward: all-gather a unit's parameters, compute, free them. Backward: all-gather them again, compute,
    free them, reduce-scatter the gradients. The next unit is gathered while one computes.

        model = FSDP(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after wrapping: it sees the shards
        loss(model(x)).backward()  # every `grad` is this rank's part of the average over ranks
        optimizer.step()

    The parameters of `module` keep their names and hold this rank's part: `(1, 1, n)` of a matrix, where n is
    0 if the matrix lies wholly on other ranks. Rank 0's weights and buffers are sent to all at the start.
    Vectors (biases, norm weights) are few; they stay whole on each rank and are all-reduced, unless
    `shard_vectors` is set. All ranks must run the same units in the same order.

    A model built under `torch.device("meta")` is made real one unit after the other, and is never whole on
    any rank: by `initialise`, or later by `load_full_state_dict`.

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
        initialise: fills the weights of a unit of a model on the meta device: `initialise(name, unit)`, with
            the name "" for what is in no unit. Weights of other units are without memory meanwhile.
        device: where a model on the meta device is made real; torch's default device by default.
    """

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
        initialise: Callable[[str, nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            module,
            process_group=process_group,
            units=list(_default_units(module) if units is None else units),
            shard_vectors=shard_vectors,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            initialise=initialise,
            device=device,
        )
        self.reshard_after_forward = reshard_after_forward and not self.keeps_parameters
        self._synchronizes = True
        self._changed = False  # gradients came that were not synchronised yet
        self._will_finish = False  # the running backward will call `_backward_has_ended`
        self._builds_graph = False  # the running backward has create_graph=True
        self._between = "parameters"  # what modules see of a unit that does not compute
        self._order: list[Unit] = []  # as the last forward ran them
        self._running: list[Unit] = []
        self._reducing: list[Flat] = []
        self._history = 0  # a digest of what was gathered and reduced since the ranks last compared it
        for unit in self._all_units:
            for flat in unit.flats:
                for index, whole in enumerate(flat.wholes):
                    whole.register_post_accumulate_grad_hook(self._taker(unit, flat, index))
        for unit in self._units:
            unit.module.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after(unit), always_call=True)

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if self._missing:
            raise RuntimeError(
                f"No weights were given to {', '.join(self._missing)}: the model was on the meta device. "
                f"Call `load_full_state_dict`, or give `initialise`."
            )
        if _in_backward():  # a checkpoint around the whole model computes it again
            return self._run(args, kwargs)
        if self._will_finish:  # a backward raised, or was interrupted
            self._forget()
        for unit in self._all_units:
            if self._synchronizes or not self.keeps_parameters:
                unit.free(outdated=True)  # the optimizer may have changed the shards
            unit.open_calls = 0
            unit.show("absent")
        self._order, self._running = self._running or self._order, []
        self._between = "absent"
        try:
            return self._run(args, kwargs)
        finally:
            self._between = "parameters"
            for unit in self._all_units:
                unit.show("parameters")
                if not unit.open_calls or (self.reshard_after_forward and unit is not self._root):
                    unit.free()  # also one that was gathered ahead and not used

    def _run(self, args: Any, kwargs: Any) -> Any:
        self._gather(self._root)
        self._root.wait()
        self._root.show("wholes")
        if not self._running:
            self._gather_ahead(self._order, 0)
        args, kwargs = self._cast((args, kwargs))
        return self._watch(self._root, self.module(*args, **kwargs))

    def _before(self, unit: Unit) -> Callable:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
            self._gather(unit)
            unit.wait()
            unit.show("wholes")
            if not _in_backward():
                self._running.append(unit)
                self._gather_ahead(self._order, len(self._running))
            return self._cast((args, kwargs))

        return before

    def _after(self, unit: Unit) -> Callable:
        def after(module: nn.Module, args: tuple, output: Any) -> Any:
            if not unit.in_backward:  # else a checkpoint runs it again, and its backward is still to come
                unit.show(self._between)
            calls = unit.open_calls
            output = self._watch(unit, output, passed_through=args)
            if not unit.in_backward and (self.reshard_after_forward or unit.open_calls == calls):
                unit.free()
            return output

        return after

    def _gather(self, unit: Unit) -> None:
        if unit.gather():
            self._note("gather", unit)

    def _gather_ahead(self, order: Sequence[Unit], place: int) -> None:
        """Start to gather the unit that comes next, where that is known."""
        if 0 <= place < len(order):
            self._gather(order[place])

    def _note(self, what: str, unit: Unit) -> None:
        """Add to the digest of this rank's collectives: 24 bits, which a float32 holds exactly."""
        self._history = zlib.crc32(f"{self._history} {what} {unit.name}".encode()) & 0xFFFFFF

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

    def _watch(self, unit: Unit, output: Any, passed_through: Any = ()) -> Any:
        """`output`, such that `_begin_backward` is called when a gradient reaches one of its tensors."""
        if not torch.is_grad_enabled():
            return output
        inputs = {id(t) for t in _tensors(passed_through)}
        tensors = [t for t in _tensors(output) if t.requires_grad and id(t) not in inputs]
        tensors = list({id(t): t for t in tensors}.values())
        if not tensors:
            if (unknown := _unknown(output)) is not None and any(flat.is_trained for flat in unit.flats):
                raise TypeError(
                    f"{unit.name or 'The module'} returned a {type(unknown).__name__}, in which "
                    f"{type(self).__name__} finds no tensor to learn from when its backward begins. Return "
                    f"tensors (in tuples, lists, dictionaries or dataclasses), and make the object outside."
                )
            return output
        runs = self._running
        place = len(runs) - 1 - runs[::-1].index(unit) if unit in runs else len(runs)
        is_open = not _in_backward()  # what a checkpoint computes again was counted the first time
        unit.open_calls += is_open
        unit.was_called = True

        def begin() -> None:
            nonlocal is_open
            self._begin_backward(unit, runs, place)
            unit.open_calls -= is_open
            is_open = False

        return _replaced(output, dict(zip(map(id, tensors), _Edge.apply(begin, *tensors), strict=True)))

    def _begin_backward(self, unit: Unit, runs: Sequence[Unit], place: int) -> None:
        """Have the unit whole, reduce what is behind, gather what comes next."""
        self._builds_graph = torch.is_grad_enabled()  # it will run again, and needs all units whole
        self._expect_end()
        for needed in (self._root, unit):
            needed.in_backward = needed.was_called = True
            self._gather(needed)
            needed.wait()
            needed.show("wholes")  # a checkpoint in its forward will compute with them again
        for other in self._units:
            apart = not (other.is_around(unit) or unit.is_around(other))
            if other.was_called and other.open_calls <= 0 and apart and not self._builds_graph:
                self._end_backward(other)
        self._gather_ahead(runs, place - 1)

    def _end_backward(self, unit: Unit) -> None:
        """Free the unit and start to reduce its gradients."""
        unit.show("parameters")
        unit.free()
        unit.in_backward = False
        if not self._synchronizes:
            return  # its gradients stay whole, and the next ones are added
        unit.was_called = False
        for flat in unit.flats:
            if flat.is_trained:
                for earlier in self._reducing:  # one at a time, so that memory holds one at a time
                    earlier.wait_reduced()
                flat.reduce()
                self._reducing.append(flat)
        self._note("reduce", unit)

    def _taker(self, unit: Unit, flat: Flat, index: int) -> Callable[[Tensor], None]:
        def take(whole: Tensor) -> None:
            if whole.grad is None:  # the hook runs, but no gradient came this way
                return
            if not (unit.in_backward or unit is self._root or self.keeps_parameters):
                raise RuntimeError(
                    f"A gradient reached the weights of {unit.name} but none of its outputs, so they were "
                    f"not gathered. Return from its forward, as tensors, all that the loss is made of."
                )
            unit.was_called = True
            self._expect_end()
            flat.take(index)

        return take

    def _expect_end(self) -> None:
        self._changed = True
        if not self._will_finish:
            self._will_finish = True
            # torch has no public name for "when this backward ends"; its own DDP and FSDP use the same
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_has_ended)

    def _backward_has_ended(self) -> None:
        if self._builds_graph:
            self._will_finish = False
        else:
            self.finish_gradient_synchronization()

    def finish_gradient_synchronization(self) -> None:
        """Wait until every parameter's `grad` is this rank's part of the average over ranks.

        Every backward ends with it by itself. Call it after a `no_sync` that has no synchronized backward
        behind it; all ranks must. A parameter that no rank used keeps the gradient it had. It does nothing if
        the gradients are averaged already.

        Raises:
            RuntimeError: the ranks did not run the same units in the same order.
        """
        if not self._changed:
            return
        for unit in (*reversed(self._units), self._root):
            if unit.was_called:
                self._end_backward(unit)
            unit.open_calls = 0
            unit.show("parameters")
            unit.free()
        if self._synchronizes:
            flats = list(dict.fromkeys(self._reducing))
            for flat in flats:
                flat.wait_reduced()
            used, is_finite = self._all_reduce_rest(flats)
            for flat in flats:
                flat.assign([used.pop(0) for _ in flat.parameters])
            if not is_finite:
                self._tell_grad_scaler()
            self._reducing, self._changed = [], False
        self._will_finish = False

    @torch.no_grad()
    def _all_reduce_rest(self, flats: Sequence[Flat]) -> tuple[list[bool], bool]:
        """Sum the gradients of vectors, in one all-reduce.

        With them each rank tells what it got, if it is finite, and the digest of its collectives. Returns
        which parameters any rank used, and whether all gradients are finite.
        """
        flags = [i in flat.received for flat in flats for i in range(len(flat.parameters))]
        rest = [flat for flat in flats if not flat.is_sharded]
        infinite = [(~flat.reduced.isfinite()).any() for flat in flats if flat.is_sharded]
        digests = [self._history if rank == self.rank else 0 for rank in range(self.world_size)]
        told = torch.tensor([*flags, 0, *digests], dtype=torch.float32, device=self.device)
        if infinite:
            told[len(flags)] = torch.stack(infinite).any()
        group.all_reduce_together([told, *(flat.gradient for flat in rest)], self.process_group)
        for flat in rest:
            flat.reduced, flat.gradient = flat.gradient, None
        if not group.has_numbers(told):  # in a rehearsal all ranks are as this one
            return flags, True
        *used, n_infinite = told[: len(flags) + 1].tolist()
        self._compare(told[len(flags) + 1 :].tolist())
        return [count > 0 for count in used], n_infinite == 0

    @torch.no_grad()
    def _tell_grad_scaler(self) -> None:
        """Put a NaN into this rank's gradients because there is one, or an infinity, on some rank.

        A GradScaler looks at the part that a rank has, and all must skip the step or none.
        """
        gradients = (p.grad for p in self.module.parameters() if p.grad is not None and p.numel())
        if (gradient := next(gradients, None)) is not None:
            gradient.view(-1)[0] = torch.nan

    def _compare(self, digests: Sequence[float]) -> None:
        self._history = 0
        if len(set(digests)) > 1:
            ran = ", ".join(unit.name for unit in self._running) or "no unit"
            self._forget()
            raise RuntimeError(
                f"The ranks did not gather the same units in the same order, so weights were mixed. This "
                f"rank's last forward ran {ran}. Run the same units on all ranks, or keep those that some "
                f"ranks leave out from being units (`units=`), or use DDP."
            )

    def _forget(self) -> None:
        """After a backward that raised: let go of what it left."""
        for unit in self._all_units:
            unit.forget()
        self._order, self._running, self._reducing, self._history = [], [], [], 0
        self._will_finish = self._changed = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's gradients and send none; the next one outside averages the sum.

        Until then each rank keeps them whole: as many bytes as the model has, not 1/W of it. FSDP gathers
        parameters in each forward and backward as ever, ZeRO2 only in the first forward inside, so weights
        must not change inside. To drop what was kept, call `zero_grad` of this module; an optimizer's cannot.
        """
        for unit in self._all_units:
            unit.free(outdated=True)
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before


def _in_backward() -> bool:
    # torch has no public name for "a backward is running"; its own checkpointing asks the same
    return torch._C._current_graph_task_id() != -1


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

    found = entries(module)
    # nn.MultiheadAttention computes with its child's weight itself
    if not found and not isinstance(module, nn.MultiheadAttention):
        found = [m for m in module.children() if type(m).forward is not nn.Module.forward]
    return [m for m in dict.fromkeys(found) if next(m.parameters(), None) is not None]


_HARMLESS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _inside(value: Any) -> list[Any] | None:
    """What is in a tuple, list, dictionary or dataclass; None of anything else."""
    if isinstance(value, Mapping):
        return list(value.values())
    if hasattr(value, "__dataclass_fields__"):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    return list(value) if isinstance(value, (list, tuple)) else None


def _tensors(value: Any) -> list[Tensor]:
    """The tensors inside tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in _inside(value) or () for tensor in _tensors(item)]


def _unknown(value: Any) -> Any:
    """The first thing inside that may hold tensors where `_tensors` does not find them, or None."""
    if value is None or isinstance(value, (Tensor, *_HARMLESS)):
        return None
    if (inside := _inside(value)) is None:
        return value
    return next((found for item in inside if (found := _unknown(item)) is not None), None)


def _replaced(value: Any, by: Mapping[int, Tensor]) -> Any:
    """`value` with the tensors replaced whose `id` is in `by`; tuples, lists and so on are new ones."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if _inside(value) is None:
        return value
    if isinstance(value, (list, tuple)):
        items = [_replaced(item, by) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    new = copy.copy(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            new[key] = _replaced(item, by)
    else:
        for name, item in zip(value.__dataclass_fields__, _inside(value), strict=True):
            object.__setattr__(new, name, _replaced(item, by))  # a dataclass may be frozen
    return new
