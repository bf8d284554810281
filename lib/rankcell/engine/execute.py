"""Inside a rank: from the source of a cell to the value of its last expression."""

import ast
import asyncio
import inspect
import linecache
from collections.abc import Sequence
from typing import Any

from ..source import split


def execute(source: str, filename: str, names: dict[str, Any]) -> Any:
    """Run `source` in `names`; the value of its last expression. `await` may stand outside of functions."""
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    tree, last = split(source, filename)
    parts = [compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]
    if last is not None:
        parts.append(compile(last, filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    if any(code.co_flags & inspect.CO_COROUTINE for code in parts):
        return asyncio.run(_awaited(parts, names))
    return [eval(code, names) for code in parts][-1]


async def _awaited(parts: Sequence[Any], names: dict[str, Any]) -> Any:
    value = None
    for code in parts:
        value = eval(code, names)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value
