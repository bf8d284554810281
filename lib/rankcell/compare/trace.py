"""What a model computes in a block of code: outputs, their gradients, gradients of parameters, updates.

Hooks look and change nothing, and are gone after the block. Tensors are kept as they are.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..engine import current
from ..engine.operation import dtype_name, kind_of
from .reference import Traced

LIMIT = 1 << 30  # bytes that a process keeps at most
_PACKAGE = str(Path(__file__).parent.parent)
# What wrappers call the one module that they hold: DDP, FSDP (ours, too), torch.compile, checkpoint wrappers.
_WRAPPED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class TraceTooLarge(Exception):
    """A process would keep more than `LIMIT`."""


class Trace:
    """All that `model` computes while the block runs: `entries`; `beside` these, what modules are given, buffers, what
    optimizers and clips go by.

    Args:
        model: a module; several, in a list or a dictionary; or what holds its stages, such as a `Pipeline`.
        on_rank: a parameter that several modules share is kept once, not under each name.

    Raises TypeError if there is no module in `model`, TraceTooLarge if the tensors take more than 1 GiB.
    """

    def __init__(self, model: Any, *, on_rank: bool = False) -> None:
        self.entries: list[Traced] = []
        self.beside: list[Traced] = []
        self._on_rank = on_rank
        parts = [[*_walk(part, "", set())] for part in _modules(model)]
        self._places = [place for part in parts for place in part]
        # of several models each is called by its place; the stages of one are all "", as it is
        is_list = isinstance(model, (list, tuple)) and len(parts) > 1
        self._called = {id(part[0][1]): f"model {n}" for n, part in enumerate(parts) if is_list}
        if not self._places:
            raise TypeError(f"trace needs a module, or several; a {type(model).__name__} holds none.")
        self._handles: list[Any] = []
        self._calls: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()  # by optimizer
        self._inside = 0  # optimizers whose step runs: one may call another
        self._nbytes = 0
        self._order = 0
        self._kept: Any = WeakTensorKeyDictionary()  # tensor -> what was kept of it, kept once
        self._counted: set[int] = set()
        self._updated: int | None = None  # step of an update that is still to be noted
        self._next_forward: Any = None
        self._arrived: dict[tuple[int, str], int] = {}  # parameter -> when its gradient last came, if we hear of it
        # calls by module that a checkpoint may repeat
        self._without_graph: dict[int, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        what = ", ".join(f"{count} {kind}s" for kind, count in Counter(e.kind for e in self.entries).items())
        return f"Trace of {len(self._places)} modules: {what or 'nothing yet'}; {self._nbytes / 1e6:.1f} MB"

    def __enter__(self) -> "Trace":
        self._parameters(0)
        for place, module in self._places:
            name = place or self._called.get(id(module), "")
            before = partial(self._before_forward, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._after_forward, name)))
            self._await_gradients(module)
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        # what both torch.nn.utils.clip_grad_norm_ and clip_grads_with_norm_ call, however the program has named them
        clips = mock.patch.object(clip_grad, "_clip_grads_with_norm_", self._clipped(clip_grad._clip_grads_with_norm_))
        clips.start()
        self._handles.append(SimpleNamespace(remove=clips.stop))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._kept.clear()
        if kind is None:
            self._note_update()
        elif self._next_forward is not None:
            self._next_forward.remove()
        if kind is None and not self._steps:
            self._gradients(0, {})
            self._parameters(1, only_if_changed=True)
        elif kind is None:
            self._buffers(max(self._steps.values()))

    def _clipped(self, clip: Any) -> Any:
        """`clip`, noting by which norm."""

        def noting(parameters: Any, limit: float, norm: Tensor, *args: Any, **kwargs: Any) -> None:
            step = max(self._steps.values(), default=0)
            if not hasattr(norm, "to_local"):  # a DTensor's part says nothing, and the whole costs a collective
                nth = sum(e.kind == "clip" and e.step == step for e in self.beside)
                self._put(self.beside, Traced(f"{nth}", "clip", step, np.array([float(norm), limit]), line=_line()))
            clip(parameters, limit, norm, *args, **kwargs)

        return noting

    def _await_gradients(self, module: nn.Module) -> None:
        """Hear of the gradients of a module's parameters; frozen ones may thaw later."""

        def came(key: tuple[int, str], _: Tensor) -> None:
            self._order += 1
            self._arrived[key] = self._order

        for name, parameter in _own(module):
            key = (id(module), name)
            if parameter.requires_grad and parameter.is_leaf and key not in self._arrived:
                self._arrived[key] = 1 << 60
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(came, key)))

    def _before_forward(self, name: str, module: nn.Module, *given: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint computes it once more
            about: dict[str, Any] = {"step": max(self._steps.values(), default=0), "call": self._calls[id(module)]}
            tensors = (t for t in tree_leaves(given) if isinstance(t, Tensor))
            for part, tensor in enumerate(tensors):
                if tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_complex()):
                    self._put(self.beside, self._made("given", tensor, name, **about, part=part))

    def _after_forward(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        tensors = [(n, t) for n, t in enumerate(tree_leaves(output)) if isinstance(t, Tensor)]
        if torch._C._current_graph_task_id() != -1:
            # a checkpoint computes it once more: gradients come to this time's outputs, with the line and the number of
            # the first time's
            waiting = self._without_graph.get(id(module), [])
            for _, tensor in tensors:
                if tensor.requires_grad and waiting:
                    self._await_backward(tensor, waiting.pop(0))
            return
        self._await_gradients(module)
        step = max(self._steps.values(), default=0)
        about: dict[str, Any] = {"name": name, "step": step, "call": self._calls[id(module)], "line": _line()}
        self._calls[id(module)] += 1
        dropped = _dropped(module, given)
        for part, tensor in tensors:
            if tensor.is_floating_point():
                of_part = about | {"part": part}
                self._put(self.entries, self._made("output", tensor, **of_part, dropped=dropped))
                if tensor.requires_grad:
                    self._await_backward(tensor, of_part)
                else:
                    self._without_graph.setdefault(id(module), []).append(of_part)

    def _await_backward(self, tensor: Tensor, about: dict[str, Any]) -> None:
        hook = tensor.register_hook(lambda g: self._put(self.entries, self._made("grad_output", g, **about)))
        self._handles.append(hook)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._inside += 1
        if self._inside == 1:
            self._step = self._steps[id(optimizer)]  # of the outermost
            self._gradients(self._step, self._optimized(optimizer))
        else:
            self._optimized(optimizer)  # what it goes by counts, and not what is around it

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._note_update()
            self._steps[id(optimizer)] += 1
            self._updated = self._steps[id(optimizer)]
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

    def _optimized(self, optimizer: Any) -> dict[int, Tensor]:
        """Note what the optimizer goes by. By parameter: what it steps on, itself or a copy ("master weights")."""
        every = [(_joined(n, p), owned) for n, module in self._places for p, owned in _own(module)]
        ours = {id(owned): (name, owned) for name, owned in reversed(every)}  # of several names the first
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [(name, p) for name, p in every if p.requires_grad and ours[id(p)][0] == name]
        stepped: dict[int, Tensor] = {id(p): p for p in theirs if id(p) in ours}
        if len(theirs) == len(trained) and not stepped:
            pairs = [*zip(trained, theirs, strict=True)]
            if all(_is_copy(p, other) for (_, p), other in pairs):
                stepped = {id(p): other for (_, p), other in pairs}
                ours = {id(other): named for named, other in pairs}
        step = self._step
        for group in optimizer.param_groups:
            for p in (p for p in group["params"] if id(p) in ours):
                values = {key: _value(v) for key, v in (group | (optimizer.state.get(p) or {})).items()}
                # a state that began right goes on from gradients, which are compared: it is kept once
                known = {k: v for k, v in values.items() if v is not None and (v.size <= 2 or not step)}
                self._put(self.beside, Traced(ours[id(p)][0], "optimizer", step, known, type(optimizer).__name__))
        return stepped

    def _gradients(self, step: int, stepped: Mapping[int, Tensor]) -> None:
        """Note the gradients as they are now; where another optimizer has stepped, only those that are `stepped` on."""
        there = {e.name for e in self.entries if e.kind == "grad" and e.step == step}
        noted = [
            (self._arrived.get((id(module), parameter), 1 << 60), _joined(name, parameter), gradient)
            for name, module in self._places
            for parameter, owned in _own(module)
            if (gradient := stepped.get(id(owned), owned).grad) is not None and (not there or id(owned) in stepped)
        ]
        anew = {name for _, name, _ in noted}
        self.entries = [e for e in self.entries if not (e.kind == "grad" and e.step == step and e.name in anew)]
        for _, name, gradient in sorted(noted, key=lambda n: n[0]):
            self._put(self.entries, self._made("grad", gradient, name, step))

    def _parameters(self, step: int, *, only_if_changed: bool = False) -> None:
        self._buffers(step)
        before = {e.name: e for e in self.entries if e.kind == "parameter"}
        seen: dict[int, Traced] = {}
        made: list[Traced] = []
        for name, module in self._places:
            for parameter, owned in _own(module):
                full = _joined(name, parameter)
                if id(owned) not in seen:
                    seen[id(owned)] = self._made("parameter", owned, full, step)
                elif self._on_rank:
                    continue
                made.append(replace(seen[id(owned)], name=full))
        is_old = (e.name in before and np.array_equal(e.value, before[e.name].value, equal_nan=True) for e in made)
        if not only_if_changed or not all(is_old):
            self._put(self.entries, *made)

    def _buffers(self, step: int) -> None:
        for place, module in self._places:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
                    self._put(self.beside, Traced(_joined(place, key), "buffer", step, to_numpy(local_part(buffer))))

    def _put(self, among: list[Traced], *made: Traced) -> None:
        for entry in made:
            among.append(entry)
            values = entry.value.values() if isinstance(entry.value, dict) else (entry.value,)
            self._nbytes += sum(value.nbytes for value in values if id(value) not in self._counted)
            self._counted.update(map(id, values))
        if self._nbytes > LIMIT:
            raise TraceTooLarge(
                f"trace keeps the tensors whole, and they take more than {LIMIT >> 20} MiB. Trace a smaller batch, a "
                f"shorter sequence or fewer layers: the same bugs show."
            )

    def _made(self, kind: str, tensor: Tensor, name: str, step: int, **about: Any) -> Traced:
        self._order += 1
        value = to_numpy(local_part(tensor))  # a copy: what is computed in place afterwards must not change it
        if np.array_equal(kept := self._kept.get(tensor, np.empty(0)), value):  # it is what another module returned
            value = kept
        self._kept[tensor] = value
        return Traced(name, kind, step, value, dtype_name(tensor.dtype), order=self._order, **about)


def of(model: Any) -> AbstractContextManager[Trace]:
    """`rankcell.trace`: on a rank what is traced goes with the cell's result."""
    return Trace(model) if current.recorder is None else _on_rank(current.recorder, model)


@contextmanager
def _on_rank(recorder: Any, model: Any) -> Iterator[Trace]:
    trace = Trace(model, on_rank=True)
    try:
        with trace:
            yield trace
    finally:
        recorder.trace += (*trace.entries, *trace.beside)


def _dropped(module: nn.Module, given: Any) -> str:
    """A digest of what a dropout that is on was given; "" for other modules."""
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    probability: Any = getattr(module, "p", 0)
    is_on = "Dropout" in type(module).__name__ and module.training and probability
    return hashlib.sha256(to_numpy(local_part(tensors[0])).tobytes()).hexdigest()[:16] if is_on and tensors else ""


def _is_copy(parameter: Tensor, other: Tensor) -> bool:
    """Whether an optimizer's tensor is this parameter or a stretch of its numbers, perhaps with more bits."""
    ours, theirs = local_part(parameter).flatten(), local_part(other).to(parameter.dtype).flatten()
    begins = (ours == theirs[0]).nonzero().flatten()[:64].tolist() if len(theirs) else [0]
    return any(torch.equal(ours[n : n + len(theirs)], theirs) for n in begins)


def _value(value: Any) -> np.ndarray | None:
    """A number, some of them or a tensor that an optimizer goes by; None for anything else."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return to_numpy(local_part(value))
    numbers = value if isinstance(value, tuple) else (value,)
    return np.array(value, float) if all(isinstance(n, int | float) for n in numbers) else None


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
    stack = ((frame.f_code, line) for frame, line in walk_stack(sys._getframe(1)))
    return next((n for code, n in stack if kind_of(code) is True and not code.co_filename.startswith(_PACKAGE)), 0)


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


def _walk(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, by the name that it has without wrappers."""
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
