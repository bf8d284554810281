"""What stands in a rank cell: the options of its line, and the last expression that is its value.

The magic, the ranks and the export of a script read a cell alike, because they all read it here.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Sequence
from typing import Any

LENT = ("rank", "world_size", "device", "torch", "dist")  # names that every rank cell finds


def ranks(text: str) -> list[int]:
    """Ranks from "2", "0,2" or "0-2"."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if not match:
            raise argparse.ArgumentTypeError(f"{text!r} names no ranks. Write 2, or 0,2, or 0-2.")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def names(text: str) -> list[str]:
    """Names from "a,b"."""
    found = [n.strip() for n in text.split(",") if n.strip()]
    wrong = [n for n in found if not n.isidentifier()]
    if wrong or not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names. Write x or x,y.")
    return found


def name(text: str) -> list[str]:
    """One name."""
    found = names(text)
    if len(found) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} are {len(found)} names, and one Run needs one.")
    return found


def seconds(text: str) -> float:
    """A time above 0, in seconds."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time. Write a number of seconds above 0, such as 60."
        )
    return found


def count(text: str) -> int:
    """A number of nodes."""
    if not re.fullmatch("[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of nodes. Write for example --nodes 2.")
    return int(text)


def rank(text: str) -> int:
    """The number of one rank."""
    if not re.fullmatch("[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no rank. Write for example --as 7.")
    return int(text)


def rehearsed(line: str) -> tuple[str, bool]:
    """A `%%ranks` line, and whether it says "1 of N", which is taken out of it."""
    found = re.match(r"\s*1\s+of\s+(?=\d)", line)
    return (line[found.end() :], True) if found else (line, False)


# The options of the `%%ranks` line, as argparse takes them.
OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--only",),
        {
            "type": ranks,
            "metavar": "RANKS",
            "help": "run on these ranks of the world only: 2, or 0,2, or 0-2",
        },
    ),
    (
        ("--push",),
        {"type": names, "metavar": "NAMES", "help": "copy these names from the notebook to the ranks first"},
    ),
    (
        ("--pull",),
        {"type": names, "metavar": "NAMES", "help": "afterwards fetch these names, each as a list by rank"},
    ),
    (("-o", "--out"), {"type": name, "metavar": "NAME", "help": "name the Run in the notebook"}),
    (("--timeout",), {"type": seconds, "metavar": "SECONDS", "help": "interrupt the ranks after this time"}),
    (
        ("--device",),
        {
            "default": "auto",
            "metavar": "DEVICE",
            "help": "cpu, cuda (ranks share what GPUs there are), or auto (a GPU for each rank, else the CPU)",
        },
    ),
    (
        ("--nodes",),
        {
            "type": count,
            "metavar": "NODES",
            "help": "spread the ranks over so many nodes of the Slurm allocation that the notebook runs in",
        },
    ),
    (
        ("--start",),
        {
            "choices": ("forkserver", "spawn"),
            "default": "forkserver",
            "help": "how ranks are started: from a process that has torch, or as torch.multiprocessing.spawn does",
        },
    ),
    (("--fresh",), {"action": "store_true", "help": "start new ranks first: no names from earlier cells"}),
    (
        ("--against",),
        {
            "type": name,
            "metavar": "MODEL",
            "help": "compare the cell's one forward and backward with those of this model, in one process",
        },
    ),
    (
        ("--on",),
        {
            "metavar": "CLUSTER",
            "help": "where `%%%%ranks 1 of 1024` rehearses one rank without computing: 128xh100x8 are 128 nodes of 8",
        },
    ),
    (
        ("--as",),
        {"dest": "as_rank", "type": rank, "metavar": "RANK", "help": "... and which rank, by default 0"},
    ),
    (("--values",), {"action": "store_true", "help": "record what the tensors of every communication held"}),
)


def option_strings() -> list[str]:
    """The options as they are written: `-o`, `--out`, `--push` ..., by name."""
    return sorted(flag for flags, _ in OPTIONS for flag in flags)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options in the words behind `%%ranks`; words that are none of them are passed over.

    Raises:
        argparse.ArgumentError: an option has no value, or one that is none.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("world_size", type=int)
    for flags, how in OPTIONS:
        parser.add_argument(*flags, **how)
    return parser.parse_known_args(words)[0]


def split(source: str, filename: str = "<cell>") -> tuple[ast.Module, ast.Expression | None]:
    """The cell's statements, and its last expression apart if the cell shows its value."""
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not is_silenced(source):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    return tree, last


def is_silenced(source: str) -> bool:
    """Whether the cell's last expression ends in a semicolon, which hides its value as in any notebook."""
    passed_over = (tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.DEDENT)
    last = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in passed_over:
                last = token.string
    except (tokenize.TokenError, SyntaxError):
        return False
    return last == ";"
