"""`rankcell.spans`: when each module of a model computes, forward and backward, by hooks that are taken off again.
Times are those of the thread that runs Python: on a GPU, when the work was enqueued.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from time import monotonic as clock
from typing import Any

import torch
from torch import nn

from ..engine import current

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WRAPPED = "module"  # what DistributedDataParallel, FSDP and ours call the model inside


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts that `model` is made of, by name, lists entered."""
    while [name for name, _ in model.named_children()] == [_WRAPPED]:
        model = model.get_submodule(_WRAPPED)
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, _CONTAINERS):
            found |= {f"{name}.{inner}": module for inner, module in parts_of(child).items()}
        else:
            found[name] = child
    return found


def spans(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Record forward and backward of the model's modules as compute spans of this rank while the block runs."""
    return watched(parts_of(model), current.recorder.note_span)


@contextlib.contextmanager
def watched(modules: dict[str, nn.Module], note: Callable[[str, float, float], None]) -> Iterator[None]:
    """Inside, `note(name, begin, end)` is called after "forward NAME" and "backward NAME" of each module.

    Backward of a module begins when the gradients of its outputs are there, and ends when those of its inputs
    are; where no input has a gradient, when the last of its parameters has one.
    """
    with contextlib.ExitStack() as hooks, warnings.catch_warnings():
        for name, module in modules.items():
            for handle in _watch(name, module, note):
                hooks.callback(handle.remove)
        # torch's hint at what `after_backward` takes care of
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients")
        yield


def _watch(name: str, module: nn.Module, note: Callable[[str, float, float], None]) -> list[Any]:
    forwards: list[float] = []
    backwards: list[list[float]] = []  # begin, and the latest gradient of a parameter

    def after_backward(_: nn.Module, grad_inputs: Any, __: Any) -> None:
        if any(gradient is not None for gradient in grad_inputs):
            end(backwards[-1], clock())
        else:  # torch calls this as early as the hook before it: its parameters come now
            entry = backwards[-1]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: end(entry, entry[1] or clock()))

    def after_gradient(_: torch.Tensor) -> None:
        for entry in backwards:
            entry[1] = clock()

    def end(entry: list[float], at: float) -> None:
        if entry in backwards:
            backwards.remove(entry)
            note(f"backward {name}", entry[0], at)

    trained = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
    return [
        module.register_forward_pre_hook(lambda *_: forwards.append(clock())),
        module.register_forward_hook(lambda *_: note(f"forward {name}", forwards.pop(), clock()), always_call=True),
        module.register_full_backward_pre_hook(lambda *_: backwards.append([clock(), 0.0])),
        module.register_full_backward_hook(after_backward),
        *(p.register_post_accumulate_grad_hook(after_gradient) for p in trained),
    ]
