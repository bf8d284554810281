"""Inside a rank: from the source of a cell to the value of its last expression."""

import ast
import asyncio
import inspect
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..source import split

MAX_STEPS = 5_000  # lines noted per rank with `--step`

NoteStep = Callable[[int, dict[str, str]], None]  # line about to run (0: the end), values of the names


def execute(
    source: str, filename: str, names: dict[str, Any], *, step: Sequence[str] | None = None, note: NoteStep
) -> Any:
    """Run `source` in `names`, and return the value of its last expression, as a notebook cell does.

    `await` may stand outside of functions. With `step`, `note` is called before every line of a rank cell with
    what those names hold.
    """
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    tree, last = split(source, filename)
    parts = [compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]
    if last is not None:
        parts.append(compile(last, filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    if any(code.co_flags & inspect.CO_COROUTINE for code in parts):
        return _traced(lambda: asyncio.run(_awaited(parts, names)), names, step, note)
    return _traced(lambda: [eval(code, names) for code in parts][-1], names, step, note)


async def _awaited(parts: Sequence[Any], names: dict[str, Any]) -> Any:
    value = None
    for code in parts:
        value = eval(code, names)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


def _traced(run: Callable[[], Any], names: dict[str, Any], step: Sequence[str] | None, note: NoteStep) -> Any:
    if step is None:
        return run()
    sys.settrace(_tracer(names, step, note))
    try:
        return run()
    finally:
        sys.settrace(None)
        note(0, _shown(names, step))


def _tracer(names: Mapping[str, Any], shown: Sequence[str], note: NoteStep) -> Any:
    """A trace function that notes every line of a rank cell before it runs, and what `shown` are then."""
    count = 0

    def on_line(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line" and count < MAX_STEPS:
            count += 1
            note(frame.f_lineno, _shown({**names, **frame.f_locals}, shown))
        return on_line

    return lambda frame, *_: on_line if frame.f_code.co_filename.startswith("<cell") else None


def _shown(scope: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {name: _short(scope[name]) for name in names if name in scope}


def _short(value: Any) -> str:
    """A value in a few characters: a tensor by its numbers if they are few, else by its shape."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= 8:
            numbers = ", ".join(f"{v:.4g}" for v in value.detach().flatten().tolist())
            return f"[{numbers}]" if value.dim() else numbers
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
