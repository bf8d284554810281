"""What stands in a rank cell: the options of its line, and the last expression that is its value."""

import argparse
import ast
import contextlib
import functools
import itertools
import re
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from .errors import OptionError, unknown_option

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
LENT = ("rank", "world_size", "device", "torch", "dist")  # names that every rank cell finds


def _ranks(text: str) -> list[int]:
    """Ranks from "2", "0,2" or "0-2"."""
    found: list[int] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)):
            raise argparse.ArgumentTypeError(f"{text!r} names no ranks. Write 2, or 0,2, or 0-2.")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _names(text: str) -> list[str]:
    """Names from "a,b"."""
    found = [n.strip() for n in text.split(",") if n.strip()]
    if not found or not all(n.isidentifier() for n in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names. Write x or x,y.")
    return found


def _name(text: str) -> str:
    found = _names(text)
    if len(found) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} are {len(found)} names, and one Run needs one.")
    return found[0]


def _seconds(text: str) -> float:
    """A time above 0, in seconds."""
    with contextlib.suppress(ValueError):
        if (found := float(text)) > 0:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is no time. Write a number of seconds above 0, such as 60.")


def _whole(what: str, example: str, text: str) -> int:
    """A whole number above 0."""
    if not re.fullmatch("[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}. Write for example {example}.")
    return int(text)


def marks(value: Any, most: int = 1000) -> tuple[list[Any], list[Any]]:
    """What differs when `value` was changed in place: itself, its members and theirs, up to `most`. Then the same as
    they are, to be kept: none of their ids is given to another one meanwhile.
    """
    found = [value]
    for item in found:  # which grows meanwhile
        with contextlib.suppress(RuntimeError):  # a thread of the learner's changes it just now
            found += itertools.islice(_members(item), most - len(found))
    return [item if type(item) in _PLAIN else id(item) for item in found], found


def _members(item: Any) -> Iterator[Any]:
    """What is in a list, tuple, set, deque, dict or instance of a class of the notebook, without running its code; of
    a tensor or model how often each of its weights was changed.
    """
    kind, torch = type(item), sys.modules.get("torch")
    if torch and issubclass(kind, (torch.Tensor, torch.nn.Module)):
        weights = [item] if issubclass(kind, torch.Tensor) else item.parameters()
        yield from (0 if p.is_inference() else p._version for p in weights)
        return
    for base in (list, tuple, set, deque, dict):
        if issubclass(kind, base):
            yield base.__len__(item)  # tells of those that are too many to look at
            yield from itertools.chain.from_iterable(dict.items(item)) if base is dict else base.__iter__(item)
    if kind.__module__ == "__main__" and kind.__dictoffset__ and not issubclass(kind, type):
        for name, inner in object.__getattribute__(item, "__dict__").items():
            if not isinstance(vars(kind).get(name), functools.cached_property):  # made by whoever reads it
                yield from (name, inner)


# The options of the `%%ranks` line, as argparse takes them.
# fmt: off
OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--only",), {"type": _ranks, "metavar": "RANKS", "help":
        "run on these ranks of the world only: 2, or 0,2, or 0-2"}),
    (("--push",), {"type": _names, "metavar": "NAMES", "help":
        "copy these names from the notebook to the ranks first"}),
    (("--pull",), {"type": _names, "metavar": "NAMES", "help":
        "afterwards fetch these names, each as a list by rank"}),
    (("-o", "--out"), {"type": _name, "metavar": "NAME", "help": "name the Run in the notebook"}),
    (("--timeout",), {"type": _seconds, "metavar": "SECONDS", "help": "interrupt the ranks after this time"}),
    (("--device",), {"default": "auto", "metavar": "DEVICE", "help":
        "cpu, cuda (ranks share what GPUs there are), or auto (a GPU for each rank, else the CPU)"}),
    (("--nodes",), {"type": functools.partial(_whole, "number of nodes", "--nodes 2"), "metavar": "NODES", "help":
        "spread the ranks over so many nodes of the Slurm allocation that the notebook runs in"}),
    (("--start",), {"choices": ("forkserver", "spawn"), "default": "forkserver", "help":
        "how ranks are started: from a process that has torch, or as torch.multiprocessing.spawn does"}),
    (("--values",), {"action": "store_true", "help": "record what the tensors of every communication held"}),
)
# fmt: on


def option_strings() -> list[str]:
    """The options as they are written: `-o`, `--out`, `--push` ..., by name."""
    return sorted(flag for flags, _ in OPTIONS for flag in flags)


@functools.cache  # to build it costs 0.8 ms, a tenth of a cell that prints
def parser() -> argparse.ArgumentParser:
    """That of the words behind `%%ranks`."""
    made = argparse.ArgumentParser("%%ranks", add_help=False, exit_on_error=False)
    number = functools.partial(_whole, "number of ranks", "`%%ranks 4`")
    made.add_argument("world_size", nargs="?", type=number, help="how many ranks: `%%%%ranks 4`")
    for flags, how in OPTIONS:
        made.add_argument(*flags, **how)
    return made


def parse_line(line: str) -> argparse.Namespace:
    """The options of a whole `%%ranks` line, without its comment; OptionError says what to write."""
    try:
        options, more = parser().parse_known_args(shlex.split(line, comments=True))
    except argparse.ArgumentError as error:
        what = str(error.message)
        if what == "expected one argument":
            flag = str(error.argument_name).rpartition("/")[2]
            wanted = next(how["metavar"] for flags, how in OPTIONS if flag in flags)
            what = f"{flag} needs {wanted} behind it. `%%ranks?` explains the options."
        raise OptionError(what) from None
    except ValueError as error:  # a quotation mark without its other one
        raise OptionError(f"`%%ranks {line}`: {error}.") from None
    if more and more[0].startswith("-"):
        raise OptionError(unknown_option(more[0].partition("=")[0], option_strings(), "%%ranks"))
    if more:
        how = "Write `%%ranks N [options]`; names are separated by commas without spaces."
        said = f"{more[0]!r} is one word too many in the `%%ranks` line."
        raise OptionError(f"{said} {how} `%%ranks?` explains the options.")
    if options.world_size is None:
        raise OptionError("how many ranks? Write for example `%%ranks 4`.")
    return options


def split(source: str, filename: str = "<cell>") -> tuple[ast.Module, ast.Expression | None]:
    """The cell's statements, and its last expression apart if the cell shows its value: a semicolon hides it."""
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return tree, None
    line = source.split("\n")[(last.end_lineno or 1) - 1].encode()
    if line[last.end_col_offset :].lstrip().startswith(b";"):
        return tree, None
    tree.body.pop()
    return tree, ast.Expression(last.value)
