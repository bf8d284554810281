"""Traces whatever models a cell calls, and keeps what one process needs to do the same: inputs, and the gradient that
reached each model's output. For `%%ranks --against`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .trace import Trace, local_part, to_numpy
from .traced import Traced

LIMIT = 64 << 20  # bytes of inputs and of gradients that travel to the notebook


class Follow:
    """While the block runs, traces each module with parameters that is called from outside of any other."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder  # of the rank: what is traced goes with the cell's result
        self.entries: list[Traced] = []
        self._traces: list[Trace] = []
        self._roots: dict[int, int] = {}  # module -> its calls so far
        self._known: set[int] = set()
        self._stack = ExitStack()
        self._handles: list[Any] = []
        self._nbytes = 0

    def __enter__(self) -> "Follow":
        self._handles.append(nn.modules.module.register_module_forward_pre_hook(self._called))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.__exit__(kind, error, traceback)
        for trace in self._traces:
            self.entries += trace.entries
        self._recorder.trace += tuple(self.entries)

    def _called(self, module: nn.Module, given: tuple) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes it once more
        if id(module) in self._roots:
            self._roots[id(module)] += 1
        elif id(module) not in self._known and next(module.parameters(), None) is not None:
            self._known |= {id(part) for part in module.modules()}
            self._roots[id(module)] = 0
            self._traces.append(self._stack.enter_context(Trace(module, whole=False)))
            self._handles.append(module.register_forward_hook(self._answered))
        else:
            return
        self._keep("input", given, self._roots[id(module)])

    def _answered(self, module: nn.Module, _: Any, output: Any) -> None:
        for part, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                kept = partial(self._keep, "cotangent", call=self._roots[id(module)], first=part)
                self._handles.append(tensor.register_hook(kept))

    def _keep(self, kind: str, value: Any, call: int, *, first: int = 0) -> None:
        for part, tensor in enumerate(_tensors(value), start=first):
            local = local_part(tensor)
            self._nbytes += local.numel() * local.element_size()
            if self._nbytes > LIMIT:
                return  # the notebook says that it is missing
            shape = tuple(local.shape)
            entry = Traced(
                "", kind, 0, call, part, shape=shape, dtype=str(local.dtype), whole=to_numpy(local)
            )
            self.entries.append(entry)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
