"""What a model computes in a block of code: outputs, their gradients, gradients of parameters, updates.

Hooks look and change nothing, and are gone after the block. In the notebook's one process tensors are kept whole: they
are what others are compared with. On a rank of a tensor of n rows and f columns 2 (n + f) numbers stay: its products
with random vectors that everybody can make again. Sums of tensors, multiples and parts of them show in those products,
so `layouts` finds from them how ranks share a tensor. This module compares nothing.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ..engine import current
from ..engine.operation import kind_of
from .traced import NOT_FINITE, Traced, matrix_of, weights

LIMIT = 1 << 30  # bytes that one process keeps at most
WHOLE = 4096  # numbers of a parameter that a rank sends as they are
WINDOWS, WINDOW = 64, 16  # of a larger one: so many places, so many numbers from each
_PACKAGE = str(Path(__file__).parent.parent)
# What wrappers call the one module that they hold: DDP, FSDP (ours, too), torch.compile, checkpoint wrappers.
_WRAPPED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class TraceTooLarge(Exception):
    """One process would keep more than `LIMIT`."""


class Trace:
    """Everything that `model` computes while the block runs; `entries` afterwards.

    Args:
        model: a module; several, in a list or a dictionary; or what holds its stages, such as a `Pipeline`.
        whole: keep tensors as they are, instead of sums of their numbers.

    Raises:
        TypeError: there is no module in `model`.
        TraceTooLarge: whole tensors would take more than 1 GiB.
    """

    def __init__(self, model: Any, *, whole: bool = True) -> None:
        self.entries: list[Traced] = []
        self.whole = whole
        self._places: list[tuple[str, nn.Module]] = []
        for part in _modules(model):
            self._places += _walk(part, "")
        if not self._places:
            raise TypeError(f"trace needs a module, or several; a {type(model).__name__} holds none.")
        self._handles: list[Any] = []
        self._calls: dict[int, int] = {}
        self._steps: dict[int, int] = {}  # by optimizer
        self._inside = 0  # optimizers whose step runs: one may call another
        self._nbytes = 0
        self._order = 0
        # the last tensor, its version, and what was kept of it
        self._last: tuple[Tensor | None, int, dict[str, Any]] = (None, 0, {})
        self._updated: int | None = None  # step of an update that is still to be noted
        self._next_forward: Any = None
        self._arrived: dict[tuple[int, str], int] = {}  # parameter -> when its gradient last came
        self._awaited: set[tuple[int, str]] = set()  # parameters whose gradients we hear of
        # calls by module that a checkpoint may repeat
        self._without_graph: dict[int, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        counts = Counter(e.kind for e in self.entries)
        what = ", ".join(f"{count} {kind}s" for kind, count in counts.items())
        return f"Trace of {len(self._places)} modules: {what or 'nothing yet'}; {self._nbytes / 1e6:.1f} MB"

    def __enter__(self) -> "Trace":
        self._parameters(0)
        for name, module in self._places:
            self._handles.append(module.register_forward_hook(self._after_forward(name)))
            self._await_gradients(module)
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._last = (None, 0, {})
        if kind is None:
            self._note_update()
        elif self._next_forward is not None:
            self._next_forward.remove()
        if kind is None and not self._steps:
            self._gradients(0)
            self._parameters(1, only_if_changed=True)

    def _await_gradients(self, module: nn.Module) -> None:
        """Hear of the gradients of a module's parameters; frozen ones may thaw later."""
        for parameter, owned in _own(module):
            key = (id(module), parameter)
            if owned.requires_grad and owned.is_leaf and key not in self._awaited:
                self._awaited.add(key)
                self._handles.append(owned.register_post_accumulate_grad_hook(self._gradient_came(key)))

    def _after_forward(self, name: str) -> Any:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # a checkpoint computes it once more
                self._repeated(module, output)
                return
            self._await_gradients(module)
            call = self._calls.get(id(module), 0)
            self._calls[id(module)] = call + 1
            about: dict[str, Any] = {
                "name": name,
                "step": max(self._steps.values(), default=0),
                "call": call,
                "line": _line(),
            }
            mask, before = _mask(module, given, output)
            for part, tensor in enumerate(tree_leaves(output)):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    of_part = about | {"part": part}
                    self._keep(self._made("output", tensor, **of_part, mask=mask, before=before))
                    if tensor.requires_grad:
                        self._handles.append(tensor.register_hook(self._after_backward(of_part)))
                    else:
                        self._without_graph.setdefault(id(module), []).append(of_part)

        return hook

    def _repeated(self, module: nn.Module, output: Any) -> None:
        """Of what a checkpoint computes again, gradients come back to this time's outputs; they have the line and the
        number of the first time's.
        """
        waiting = self._without_graph.get(id(module), [])
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and waiting:
                self._handles.append(tensor.register_hook(self._after_backward(waiting.pop(0))))

    def _after_backward(self, about: dict[str, Any]) -> Any:
        def hook(gradient: Tensor) -> None:
            self._keep(self._made("grad_output", gradient, **about))

        return hook

    def _gradient_came(self, key: tuple[int, str]) -> Any:
        def hook(_: Tensor) -> None:
            self._order += 1
            self._arrived[key] = self._order

        return hook

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._inside += 1
        if self._inside == 1:
            self._gradients(self._steps.get(id(optimizer), 0))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._note_update()
            self._updated = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
            if self._next_forward is None:
                self._next_forward = register_module_forward_pre_hook(lambda *_: self._note_update())

    def _note_update(self) -> None:
        """Note the parameters after a step, when the next forward begins: ranks may send each other theirs before."""
        if self._next_forward is not None:
            self._next_forward.remove()
            self._next_forward = None
        step, self._updated = self._updated, None
        if step is not None:
            self.entries = [e for e in self.entries if not (e.kind == "parameter" and e.step == step)]
            self._parameters(step)

    def _gradients(self, step: int) -> None:
        """Note the gradients as they are now, unless another optimizer has stepped with them."""
        if any(e.kind == "grad" and e.step == step for e in self.entries):
            return
        noted: list[tuple[int, str, Tensor]] = []
        for name, module in self._places:
            for parameter, owned in _own(module):
                if owned.grad is not None:
                    came = self._arrived.get((id(module), parameter), 1 << 60)
                    noted.append((came, _joined(name, parameter), owned.grad))
        for _, name, gradient in sorted(noted, key=lambda n: n[0]):
            self._keep(self._made("grad", gradient, name, step))

    def _parameters(self, step: int, *, only_if_changed: bool = False) -> None:
        before = {e.name: e for e in self.entries if e.kind == "parameter"}
        seen: dict[int, Traced] = {}
        made: list[Traced] = []
        for name, module in self._places:
            for parameter, owned in _own(module):
                full = _joined(name, parameter)
                tied = seen.get(id(owned))
                if tied is None:
                    tied = seen[id(owned)] = self._made("parameter", owned, full, step)
                elif not self.whole:
                    continue  # a rank holds it once
                made.append(replace(tied, name=full))
        if only_if_changed and all(e.name in before and _same(e, before[e.name]) for e in made):
            return
        self._keep(*made)

    def _keep(self, *made: Traced) -> None:
        for entry in made:
            self._nbytes += entry.nbytes
            self.entries.append(entry)
        if self.whole and self._nbytes > LIMIT:
            raise TraceTooLarge(
                f"trace keeps the tensors of one process whole, and they take more than {LIMIT >> 20} MiB. Trace a "
                f"smaller batch, a shorter sequence or fewer layers: the same bugs show."
            )

    def _made(self, kind: str, tensor: Tensor, name: str, step: int, **about: Any) -> Traced:
        self._order += 1
        with torch.no_grad():
            last, version, kept = self._last
            if (
                last is not tensor or version != tensor._version
            ):  # else a module returns what one inside it does
                local = local_part(tensor)
                kept = {"shape": tuple(local.shape), "dtype": str(local.dtype).removeprefix("torch.")}
                # a copy of what is whole: what is computed in place afterwards must not change it
                kept |= (
                    {"whole": to_numpy(local)} if self.whole else _sums(local, kind in ("grad", "parameter"))
                )
                self._last = tensor, tensor._version, kept
        return Traced(name, kind, step, order=self._order, **about, **kept)


def of(model: Any) -> AbstractContextManager[Trace]:
    """`rankcell.trace`: on a rank what is traced goes with the cell's result."""
    return Trace(model) if current.recorder is None else on_rank(current.recorder, model)


@contextmanager
def on_rank(recorder: Any, model: Any) -> Iterator[Trace]:
    """Trace `model` while the block runs; the entries go with the cell's result, also if it fails."""
    trace = Trace(model, whole=False)
    try:
        with trace:
            yield trace
    finally:
        recorder.trace += tuple(trace.entries)


def _sums(tensor: Tensor, of_parameter: bool) -> dict[str, Any]:
    """What is kept of a tensor on a rank. One with a single column has nothing to add up: its numbers, twice."""
    n, f = matrix_of(tuple(tensor.shape), of_parameter)
    matrix = np.nan_to_num(tensor.cpu().double().numpy().reshape(n, f), True, *NOT_FINITE)
    rows = matrix @ weights(f) if f != 1 else matrix[:, [0, 0]]
    kept = {"rows": rows, "columns": weights(n).T @ matrix}
    if of_parameter:
        at, places = ((0,), slice(None)) if n * f <= WHOLE else _windows(n * f)
        kept |= {"flat": matrix.reshape(-1)[places], "at": at}
    return kept


@lru_cache(1000)
def _windows(length: int) -> tuple[tuple[int, ...], Any]:
    """Places all over a flat tensor, and the indices of the numbers that are kept from there on."""
    at = np.linspace(0, length - WINDOW, WINDOWS).astype(int)
    return tuple(at.tolist()), (at[:, None] + np.arange(WINDOW)).reshape(-1)


def _same(a: Traced, b: Traced) -> bool:
    pairs = ((a.whole, b.whole), (a.rows, b.rows), (a.columns, b.columns))
    return all(x is None or np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def _mask(module: nn.Module, given: Any, output: Any) -> tuple[str, str]:
    """Digests of where a dropout that is on put zeros, and of what it was given."""
    if "Dropout" not in type(module).__name__ or not module.training or not getattr(module, "p", 0):
        return "", ""
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    if not tensors or not isinstance(output, Tensor):
        return "", ""
    with torch.no_grad():
        return _digest(local_part(output) == 0), _digest(local_part(tensors[0]).float())


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().numpy().tobytes()).hexdigest()[:16]


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy of a tensor; of 16 bits as 32, which numpy has."""
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    return wide.to("cpu", copy=True).numpy()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without its graph."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point() and not parameter.is_meta:
            yield name, parameter


def _line() -> int:
    """The line of the learner's code that is running, not of the models and layers that come with us."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_learners(frame.f_code):
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return 0


@lru_cache(10_000)
def _is_learners(code: Any) -> bool:
    return kind_of(code) is True and not code.co_filename.startswith(_PACKAGE)


def _modules(model: Any) -> list[nn.Module]:
    """The modules in `model`: itself, a collection's, or the stages of what drives several."""
    if isinstance(model, nn.Module):
        return [model]
    for name in ("modules", "stages"):
        held = getattr(model, name, None)
        if isinstance(held, Mapping):
            model = held
    if isinstance(model, Mapping):
        model = list(model.values())
    if isinstance(model, Iterable):
        return [part for part in model if isinstance(part, nn.Module)]
    stage = getattr(model, "submod", None)  # torch's PipelineStage
    return [stage] if isinstance(stage, nn.Module) else []


def _walk(module: nn.Module, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, by the name that it has without wrappers."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    children = [(part, child) for part, child in module._modules.items() if child is not None]
    if len(children) == 1 and children[0][0] in _WRAPPED:
        yield from _walk(children[0][1], name, seen)
        return
    yield name, module
    for part, child in children:
        yield from _walk(child, _joined(name, part), seen)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
