"""Rank cells: notebook cells that run on several real ranks, and pictures of what each of them did."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("rankcell runs on Linux and macOS. On Windows, use it inside WSL2.")

from . import extensions
from .engine import current
from .errors import (
    AllocationError,
    Deadlock,
    EngineError,
    PullError,
    PushError,
    RankError,
    RankLost,
    RankMismatch,
    RanksInterrupted,
    RankTimeout,
    StartError,
    WorldSizeError,
)
from .results import Event, Memory, RankResult, Run

if TYPE_CHECKING:
    from .engine.world import Ranks, run

__all__ = ["Event", "Memory", "RankResult", "Ranks", "Run", "memory", "run", "span", "spans", "trace", "watch"]
__all__ += ["AllocationError", "Deadlock", "EngineError", "PullError", "PushError", "RankError", "RankLost"]
__all__ += ["RankMismatch", "RankTimeout", "RanksInterrupted", "StartError", "WorldSizeError"]


def __getattr__(name: str) -> Any:
    """`Ranks` and `run`, when asked for: who only wants `rankcell.parallel` needs torch and no notebook."""
    if name in ("Ranks", "run"):
        from .engine import world

        return getattr(world, name)
    raise AttributeError(f"module 'rankcell' has no attribute {name!r}")


def span(name: str) -> AbstractContextManager[None]:
    """On a rank: record the time spent inside as computing called `name`. Elsewhere it does nothing.

    with span("forward"):
        loss = model(x).sum()
    """
    return nullcontext() if current.recorder is None else current.recorder.span(name)


def spans(model: Any) -> AbstractContextManager[None]:
    """On a rank: record forward and backward of each part of `model` in the block as computing.

    with rankcell.spans(model):
        model(x).sum().backward()
    """
    return nullcontext() if current.recorder is None else extensions.find("rankcell.spans")(model)


def watch(array: Any) -> AbstractContextManager[None]:
    """On a rank: record with every communication in the block what `array` holds, 64 numbers at most.

    with rankcell.watch(x):
        ring_all_reduce(x)

    `draw.messages.steps(run)` shows then who held what, step by step.
    """
    return nullcontext() if current.recorder is None else current.recorder.watch(array)


def memory(*owners: Any) -> AbstractContextManager[Any]:
    """Measure what the block inside holds in memory, by kind, after every operation of torch.

    with rankcell.memory(model, optimizer) as held:
        loss = model(x).sum()
        held.phase = "backward"
        loss.backward()
    held.peak, held.samples

    `owners` are modules, optimizers and tensors; what they own are states. On a rank the samples are also in
    `run.ranks[r].memory`, and a `span` names the phase.
    """
    return extensions.find("rankcell.memory")(*owners)


def trace(model: Any) -> AbstractContextManager[Any]:
    """Trace what `model` computes in the block: outputs, their gradients, gradients of parameters, updated parameters.

    with rankcell.trace(dense) as one:                # in the notebook, one process
        loss(dense(x), y).backward()

    On the ranks of a cell it goes with the Run, and `check.against(run, one)` says how the ranks' tensors make up those
    of one process. `model` may be a list of modules (`model 0`, `model 1`, ...), or what holds a pipeline's stages. The
    steps of any optimizer in the block count, what modules are given, and the norms by which
    `torch.nn.utils.clip_grad_norm_` clips. Numbers stay as they are, bit for bit.
    """
    return extensions.find("rankcell.trace")(model)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext rankcell`: the magics `%%ranks` and `%ranks`, and how a Run shows."""
    from . import magics

    if getattr(shell, "_rankcell", None) is None:
        shell._rankcell = magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext rankcell`: ends all ranks."""
    from . import magics

    if getattr(shell, "_rankcell", None) is not None:
        magics.unload(shell, shell._rankcell)
        shell._rankcell = None
