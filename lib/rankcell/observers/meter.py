"""`rankcell.memory`: what one process holds while a block of code runs, by kind: states, activations, the rest. After
every operation of torch it notes which storages came, went or changed their size, and whose they are. Each counts once;
what a library allocates and frees inside an operation is not seen. Fake tensors have storages as real ones have.
"""

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..engine import current
from ..results import KINDS, Memory

MAX_SAMPLES = 20_000  # then every second one goes; the highest of all is kept
_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
_STATES = ("parameters", "optimizer", "gradients", "activations")  # whose a storage is, if several want it


class Meter:
    """Measures what is held while its `with` block runs: `samples`, and `peak`, the highest of them.

    `owners` are modules, optimizers and tensors (parameters that are in no module); `began` is zero of the samples'
    times, as `clock()` says, by default the moment the block begins. A saved tensor that is changed in place before
    backward is not noticed inside the block: torch compares versions only of tensors that nobody watches.
    """

    def __init__(self, *owners: Any, began: float | None = None) -> None:
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._tensors: list[Tensor] = []
        for owner in tree_leaves(list(owners)):
            if isinstance(owner, torch.nn.Module):
                self._modules += owner.modules()
            elif isinstance(owner, torch.optim.Optimizer):
                self._optimizers.append(owner)
            elif isinstance(owner, Tensor):
                self._tensors.append(owner)
            elif owner is not None:
                what = f"what a {type(owner).__name__} holds"
                raise TypeError(f"rankcell.memory cannot tell {what}. Name modules, optimizers and tensors.")
        self.began = began
        self.phase = ""  # the part of the program that the next samples belong to
        # address of a storage: reference, number. The reference does not keep it, and tells when it is gone.
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._count = 0
        self._nbytes: dict[int, int] = {}  # by number, of the storages alive at the last look
        self._changed: dict[int, int] = {}  # by number, sizes that differ since then; 0 of one that is gone
        self._kinds: dict[int, str] = {}  # by number; a storage that was ever somebody's has been all along
        # parameters that the owners ever showed, by id: FSDP shows now the shard, now the whole
        self._trained: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.device = next((p.device for p in self._parameters()), torch.device("cpu"))
        self._log: list[tuple[float, str, dict[int, int]]] = []  # when, phase, what changed
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Meter":
        if self.began is None:
            self.began = time.monotonic()
        self.look()
        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", self._resizing()))
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved))
        self._stack.enter_context(_Watch(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.look()
        self._ask_owners()
        self._seen.clear()

    @property
    def samples(self) -> tuple[Memory, ...]:
        """What was held after each operation that changed it, in order of time."""
        held, sizes, found = dict.fromkeys(KINDS, 0), dict[int, int](), list[Memory]()
        for at, phase, changes in self._log:
            for number, size in changes.items():
                held[self._kinds.get(number, "rest")] += size - sizes.get(number, 0)
                sizes[number] = size
            found.append(Memory(at=at - (self.began or 0.0), phase=phase, **held))
        return tuple(found)

    @property
    def peak(self) -> Memory:
        """The sample in which most was held."""
        return max(self.samples, key=lambda sample: sample.total)

    def _save(self, tensor: Tensor) -> Tensor:
        """Autograd keeps this one for backward."""
        self._claim([tensor], "activations")
        return tensor.detach()  # the tensor itself may be the output that keeps the graph

    def _claim(self, tensors: Iterable[Any], kind: str) -> None:
        seen, kinds = self._seen, self._kinds
        for tensor in tensors:
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                if (known := seen.get(tensor.untyped_storage()._cdata)) is not None and kinds.get(known[1]) == kind:
                    continue  # the usual case, and this is called for every parameter again and again
            for storage in _storages(tensor, self.device.type):  # one, or those of the parts of a DTensor
                _, number = seen.get(storage._cdata) or self._meet(storage)
                if (now := kinds.get(number)) is None or _STATES.index(kind) < _STATES.index(now):
                    kinds[number] = kind

    def _meet(self, storage: torch.UntypedStorage) -> tuple[Any, int]:
        """Give a storage that is new a number."""
        address, number = storage._cdata, self._count

        def gone(_: Any) -> None:
            if self._seen.get(address, (None, -1))[1] == number:
                del self._seen[address]
                self._changed[number] = 0

        found = self._seen[address] = weakref.ref(storage, gone), number
        self._count += 1
        self._changed[number] = storage.nbytes()
        return found

    def _resizing(self) -> Any:
        """`resize_` of a storage, which no operation tells: FSDP takes memory away by it and gives it back."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            result = original(storage, *args, **kwargs)
            if (found := self._seen.get(storage._cdata)) is not None:
                self._changed[found[1]] = storage.nbytes()
            return result

        return resize_

    def seen(self, operation: Any, leaves: Iterable[Any], result: Any) -> None:
        if operation in _LOOKS_ONLY:
            return
        for tensor in (*leaves, *tree_leaves(result)):
            for storage in _storages(tensor, self.device.type):
                if (found := self._seen.get(storage._cdata)) is None:
                    self._meet(storage)
                elif self._nbytes.get(found[1]) != (nbytes := storage.nbytes()):
                    self._changed[found[1]] = nbytes
        self.look()

    def look(self) -> None:
        """Note what is held now, if it is not what was held before."""
        if self._log and self._log[-1][1] == self.phase and not self._news(self._changed.copy()):
            return
        self._ask_owners()
        changed, self._changed = self._changed, {}  # the collector may free a storage, and note it, at any time
        changes = self._news(changed)
        for number, size in changes.items():
            if size:
                self._nbytes[number] = size
            else:
                self._nbytes.pop(number, None)
        self._log.append((time.monotonic(), self.phase, changes))
        if len(self._log) > MAX_SAMPLES:
            self._thin()

    def _news(self, changed: dict[int, int]) -> dict[int, int]:
        """Sizes that differ from those at the last look."""
        return {n: size for n, size in changed.items() if size != self._nbytes.get(n, 0)}

    def _ask_owners(self) -> None:
        """Find out which storages are states. What was once found holds for the storage's whole life."""
        for parameter in self._parameters():
            self._trained.setdefault(id(parameter), parameter)
        parameters = list(self._trained.values())
        self._claim(parameters, "parameters")
        self._claim([p.grad for p in parameters if p.grad is not None], "gradients")
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                self._claim(state.values(), "optimizer")

    def _parameters(self) -> list[Tensor]:
        """The parameters and buffers that the owners show now. It is called after most operations."""
        shown: list[Any] = list(self._tensors)
        for module in self._modules:
            shown += module._parameters.values()
            shown += module._buffers.values()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                shown += group["params"]
        return [tensor for tensor in shown if tensor is not None]

    def _thin(self) -> None:
        """Forget every second sample, but not the highest: what changed in it is told by the next."""
        totals = [sample.total for sample in self.samples]
        highest = totals.index(max(totals))
        log, self._log, missed = self._log, [], dict[int, int]()
        for i, (at, phase, changes) in enumerate(log):
            missed |= changes
            if i % 2 == 0 or i in (highest, len(log) - 1):
                self._log.append((at, phase, missed))
                missed = {}


# they hold nothing; autograd asks more of them for fake tensors than for real ones
_LOOKS_ONLY = {torch.ops.aten.detach.default, torch.ops.prim.device.default}


class _Watch(TorchDispatchMode):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if any(is_traceable_wrapper_subclass(leaf) for leaf in leaves):
            return NotImplemented  # a DTensor: let it call operations on its parts, which come here again
        result = operation(*args, **(kwargs or {}))
        self.meter.seen(operation, leaves, result)
        return result


def _storages(tensor: Any, device: str) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor on the kind of device that is measured; of what is no tensor, none."""
    if type(tensor) is FakeTensor:
        if tensor.fake_device.type == device:
            yield tensor.untyped_storage()
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name), device)
    elif isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == device:
        yield tensor.untyped_storage()


def measure(*owners: Any) -> contextlib.AbstractContextManager[Meter]:
    """What `rankcell.memory` gives: a `Meter`; on a rank its samples go with the cell's result."""
    return Meter(*owners) if current.recorder is None else _on_rank(current.recorder, owners)


@contextlib.contextmanager
def _on_rank(recorder: Any, owners: Iterable[Any]) -> Iterator[Meter]:
    meter = Meter(*owners, began=recorder.began)
    recorder.meters.append(meter)
    try:
        with meter:
            yield meter
    finally:
        if meter in recorder.meters:  # a new cell has begun meanwhile
            recorder.meters.remove(meter)
        recorder.memory += meter.samples
