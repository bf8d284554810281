"""Inside a rank that rehearses: fake tensors, a process group of one that acts as many, what each operation costs.

Tensors have shapes, dtypes and storages of the right size, and no memory behind them (torch's FakeTensorMode); only
short integer tensors that the program makes itself (a mesh, places in a text) keep their numbers. Operations of
torch advance the clock by what they would take, and the meter looks after each. Communication passes torch's
dispatcher as on a real rank, is recorded there, and is answered here instead of by a backend.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch._C._distributed_c10d import Reducer, _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ..observers.meter import Meter
from ..results import at_line
from .clock import StreamClock
from .cluster import Cluster

KNOWN = 1 << 16  # integers at most in a tensor whose numbers are kept
_FORMATS = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8"}
_FREE = set("empty empty_like empty_strided new_empty new_empty_strided lift_fresh detach resize_".split())
_MAKES = set("arange zeros ones full eye randint randperm linspace tril_indices scalar_tensor".split())
_ITEM = "a number of a tensor, as `.item()`, `.tolist()`, `float(x)` or `if x:` ask for it"
_FUNCTIONAL = ("_c10d_functional", "_dtensor")


class RehearsalError(RuntimeError):
    """A rank that rehearses was asked for something that only computing gives."""

    def __init__(self, what: str, line: int = 0) -> None:
        where = f" at {at_line(line)}" if line else ""
        super().__init__(
            f"{what[0].upper()}{what[1:]}{where}: a rehearsal cannot know that. Its tensors have shapes and no "
            f"numbers. Leave it out of the cell, or run the cell on real ranks: `%%ranks 4`."
        )


class _Fakes(FakeTensorMode):
    """torch's fake tensors, of which short ones of integers remember their numbers."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        short = t.numel() <= KNOWN and not t.is_floating_point() and not t.is_complex()
        return super().may_turn_const(t) or (
            short and type(t) is torch.Tensor and t.layout is torch.strided and t.device.type == "cpu"
        )


class Rehearsal:
    """The fake tensors, the clock and the answers of the process group around a rank that rehearses.

    Args:
        cluster: where the job would run.
        recorder: of this rank.
        caller: the line of the learner's code that runs now, and the function of torch it has called.
    """

    def __init__(self, cluster: Cluster, recorder: Any, caller: Any) -> None:
        self.cluster, self.recorder, self.caller = cluster, recorder, caller
        self.clock = StreamClock()
        self.fakes = _Fakes()
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # storages that an operation on the way will fill
        self.pending: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self.meter: Any = None
        self.integers = False  # tensors of integers are real now: C++ reads them
        self.outlining = False  # DTensor asks for the shape of a result: nothing is computed or held
        module = torch.nn.modules.module
        module.register_module_parameter_registration_hook(lambda module, *_: self.modules.add(module))
        module.register_module_buffer_registration_hook(lambda module, *_: self.modules.add(module))
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.optimizers.add(optimizer))
        self._replace_what_reads_numbers()

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Inside, tensors are fake, operations take no time but the clock's, and memory is measured."""
        self.clock.begin()
        self.pending.clear()
        self.meter = meter = Meter(began=0.0, clock=self.clock, watches=False)
        meter.modules, meter.optimizers = self.modules, self.optimizers
        swap = torch.utils.swap_tensors

        def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
            # `model.to(dtype)` swaps fake parameters, to which nobody may hold a weak reference then
            known = self.fakes.fake_tensor_converter.meta_converter.tensor_memo
            for key in [key for key, tensor in known.items() if tensor is a or tensor is b]:
                del known[key]
            meter.forget(a)
            meter.forget(b)
            swap(a, b)

        try:
            with (
                mock.patch("torch.utils.swap_tensors", swap_tensors),
                self.clock.running(),
                self.fakes,
                _Dispatched(self),
                meter,
            ):
                yield
        finally:
            self.recorder.memory = self.recorder.memory or meter.samples

    def _replace_what_reads_numbers(self) -> None:
        """DDP compares shapes and orders buckets in C++, in tensors of integers that it reads: those are real.

        Two more are short ways: a mesh of a thousand ranks is a thousand fake numbers, and of a thousand parts of a
        parameter FSDP2 looks at one.
        """

        def with_flag(function: Any, flag: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                with mock.patch.object(self, flag, True):
                    return function(*args, **kwargs)

            return call

        def text(tensor: FakeTensor, spec: str) -> str:
            if spec and tensor.constant is None:
                self._has_none(f"the number behind `:{spec}` in a text")
            return format(tensor.constant, spec) if spec else repr(tensor)

        def numpy(*_: Any, **__: Any) -> NoReturn:
            self._has_none("an array of numbers, as `.numpy()` gives it")

        tolist, outline = FakeTensor.tolist, ShardingPropagator._propagate_tensor_meta_non_cached
        replaced: list[tuple[Any, str, Any]] = [
            (
                dist,
                "_verify_params_across_processes",
                with_flag(dist._verify_params_across_processes, "integers"),
            ),
            (Reducer, "_rebuild_buckets", with_flag(Reducer._rebuild_buckets, "integers")),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", with_flag(outline, "outlining")),
            (FakeTensor, "tolist", lambda t: tolist(t) if t.constant is None else t.constant.tolist()),
            (FakeTensor, "__format__", text),
            (FakeTensor, "numpy", numpy),
            (_fsdp_param, "_chunk_with_empty", _Chunks),
        ]
        for owner, name, function in replaced:
            setattr(owner, name, function)

    def _has_none(self, what: str) -> NoReturn:
        raise RehearsalError(what, self.caller()[0])

    def faked(self, value: Any) -> Any:
        """What a cell is given, with fakes in place of the tensors in it and of the weights of modules."""

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, torch.nn.Module):
                for module in leaf.modules():
                    for named in (module._parameters, module._buffers):
                        named.update({k: fake(t) for k, t in named.items()})  # type: ignore[arg-type]
                self.modules.update(leaf.modules())
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
                return leaf
            known = self.fakes.may_turn_const(leaf)
            return self.fakes.fake_tensor_converter.from_real_tensor(self.fakes, leaf, make_constant=known)

        return tree_map(fake, value)

    # what the recorder asks instead of the backend

    def issue(self, o: Any, returns: int, filled: Any, inputs: list[Any], outputs: list[Any]) -> Any:
        """Answer the operation `o` as a backend would; its end is noted in it. See `record.Stage`."""
        if o.op == "recv" and o.peer is None:
            raise RehearsalError("a receive from any rank: nobody knows which one comes first", o.line)
        if all(not isinstance(t, FakeTensor) for t in (*inputs, *outputs)):
            _fill(o.op, inputs, outputs)
        o.done = self.clock.communicate(o.group, self.cluster.seconds(o.op, o.nbytes, o.ranks))
        for tensor in outputs:
            if isinstance(tensor, FakeTensor) and tensor.constant is not None:
                self.fakes.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)
            storage = tensor.untyped_storage()
            self.pending[storage._cdata] = weakref.ref(storage), o
        future: Any = torch.futures.Future()
        future.set_result(list(outputs))
        work = _create_work_from_future(future).boxed()
        if returns < 2:
            return work if returns else None
        return filled, work

    def wait(self, o: Any) -> None:
        """The current stream waits for the operation `o`."""
        self.clock.wait_until(o.done)

    # what each operation of torch is

    def operate(self, operation: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """One operation of torch: its result, with the time on the clock that it takes."""
        if operation is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self.outlining:
            return operation(*args, **kwargs)
        if operation.namespace == "c10d":
            with torch._C._DisableTorchDispatch():
                return operation(*args, **kwargs)
        if operation.namespace in _FUNCTIONAL and operation._opname != "wait_tensor":
            with _Dispatched(self):
                return operation._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if self.pending:
            self._await(leaves)
        if operation.namespace in _FUNCTIONAL:  # lets go of the Work, which holds its tensors
            return operation._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if self.integers and (real := _as_real(operation, args, kwargs)) is not None:
            return real
        if operation._opname in _MAKES and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            known = self._known(operation, args, kwargs)
            if known is not None:
                return known
        try:
            result = operation(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            item = operation._opname == "_local_scalar_dense"
            what = _ITEM if item else f"a result of {operation._opname} whose shape depends on the numbers"
            raise RehearsalError(what, self.caller()[0]) from error
        except UnsupportedOperatorException as error:
            what = f"torch does not know what shape {operation} gives"
            raise RehearsalError(what, self.caller()[0]) from error
        self.clock.work(self._seconds(operation, args, kwargs, leaves, result))
        self.meter.seen(operation, leaves, result)
        return result

    def _await(self, leaves: list[Any]) -> None:
        """The operation reads or writes what a communication on the way fills: it waits for it."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                found = self.pending.pop(leaf.untyped_storage()._cdata, None)
                if found is not None and found[0]() is not None:
                    self.clock.wait_until(found[1].done)
                    self.recorder.close(found[1])

    def _known(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """A short tensor of integers that the program makes, with its numbers; None for others."""
        dtype = kwargs.get("dtype")
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            return None
        if kwargs.get("device") not in (None, torch.device("cpu"), "cpu"):
            return None
        outline = operation(*args, **kwargs)
        if outline.numel() > KNOWN or outline.is_floating_point() or outline.is_complex():
            return outline
        with torch._C._DisableTorchDispatch():
            real = operation(*args, **kwargs)
        return self.fakes.fake_tensor_converter.from_real_tensor(self.fakes, real, make_constant=True)

    def _seconds(self, operation: Any, args: Any, kwargs: Any, leaves: list[Any], result: Any) -> float:
        """How long the kernel of an operation takes; 0 for what only looks at a tensor in another way."""
        if operation._opname in _FREE or _is_view(operation):
            return 0.0
        tensors = {id(t): t for t in (*leaves, *tree_leaves(result)) if isinstance(t, torch.Tensor)}
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        count = flop_registry.get(operation._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count is not None else 0
        number_format = next(
            (_FORMATS[t.dtype] for t in leaves if getattr(t, "dtype", None) in _FORMATS), "tf32"
        )
        return self.cluster.compute_seconds(flops, nbytes, number_format)


class _Chunks(Sequence[torch.Tensor]):
    """The parts of `tensor.chunk(n_chunks, dim)`, and empty ones up to `n_chunks`: each made when it is looked at."""

    def __init__(self, tensor: torch.Tensor, n_chunks: int, dim: int) -> None:
        self.tensor, self.n_chunks, self.dim = tensor, n_chunks, dim

    def __len__(self) -> int:
        return self.n_chunks

    def __getitem__(self, i: Any) -> Any:
        length = self.tensor.shape[self.dim]
        size = -(-length // self.n_chunks)
        if i * size >= length:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, i * size, min(size, length - i * size))


class _Dispatched(TorchDispatchMode):
    """Sees every operation of torch before the fake tensors do."""

    def __init__(self, stage: Rehearsal) -> None:
        super().__init__()
        self.stage = stage

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(not isinstance(leaf, FakeTensor) and is_traceable_wrapper_subclass(leaf) for leaf in leaves):
            return NotImplemented  # a DTensor: let it call operations on its parts, which come here again
        return self.stage.operate(operation, args, kwargs, leaves)


def _is_view(operation: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns)


def _as_real(operation: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on real integers alone; None for others."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    dtype = kwargs.get("dtype")
    if any(isinstance(t, FakeTensor) for t in tensors):
        return None
    if not tensors and (dtype is None or dtype.is_floating_point):
        return None
    with torch._C._DisableTorchDispatch():
        return operation(*args, **kwargs)


def _fill(op: str, inputs: list[Any], outputs: list[Any]) -> None:
    """Real integers, which all ranks have alike: every rank's part of a gathered array is ours."""
    with torch._C._DisableTorchDispatch():
        if op == "all_gather" and len(outputs) > 1:
            for output in outputs:
                output.copy_(inputs[0])
