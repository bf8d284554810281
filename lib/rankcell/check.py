"""Verdicts that stand under a cell: is it equal, is it the same on all ranks, is it what the formula says.

A right answer is a `Verdict`, one green line with its numbers; a wrong one raises `CheckFailed`, with what was
expected, what came, and where they differ most. It takes tensors, arrays, numbers, and lists and dictionaries of them;
two NaN at the same place are equal. It computes nothing about ranks and draws nothing.
"""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import extensions
from .errors import UserFacingError
from .results import Run, name_ranks, name_some

ROUNDING = 1e-12  # of the largest number: a difference below it is that of float64 and says nothing
_SHOWN = 8  # numbers of a value that a verdict spells out


class CheckFailed(UserFacingError, AssertionError):
    """A check that did not hold: what was expected, what came, and where they differ most."""


@dataclass(frozen=True)
class Verdict:
    """A check that held: a sentence with its numbers, or one per line."""

    text: str

    def __repr__(self) -> str:
        return "\n".join(f"✓ {line}" for line in self.text.split("\n"))

    def _repr_html_(self) -> str:
        # a veil of green over the page's own colours: readable on light and dark pages, glaring on none
        return (
            '<div class="rankcell-check" style="display:inline-block;padding:.15em .6em;border-radius:4px;'
            'border-left:3px solid #009e73;background:rgba(0,158,115,.12);color:inherit">'
            f"{html.escape(repr(self)).replace(chr(10), '<br>')}</div>"
        )


def that(condition: Any, sentence: str) -> Verdict:
    """`sentence`, if `condition` holds."""
    if not bool(condition):
        raise CheckFailed(f"This does not hold: {sentence.rstrip('.')}.")
    return Verdict(sentence)


def every(*verdicts: Verdict, says: str = "") -> Verdict:
    """Several checks that all held, in one: their sentences, or the one that `says` all of them."""
    for verdict in verdicts:
        if not getattr(verdict, "ok", True):
            raise CheckFailed(verdict.text)
    times = Counter(verdict.text for verdict in verdicts)  # a check for each rank says the same for each
    return Verdict(says or "\n".join(t if n == 1 else f"{t} ({n} times)" for t, n in times.items()))


def close_to(actual: Any, expected: Any, *, rtol: float = 1e-6, atol: float = 0.0, name: str = "") -> Verdict:
    """Every number of `actual` is within `atol + rtol * |expected|` of the one expected.

    `name` says what they are, "bytes that rank 0 sent", in the verdict and to a wrong answer.
    """
    worst, count = _compare(actual, expected, rtol, atol, of=name)
    head = name or ("as expected" if count == 1 else f"{count:,} numbers as expected")
    sizes = [np.abs(x[np.isfinite(x)]).max(initial=0) for x in _leaves(expected).values() if x.dtype.kind in "iuf"]
    off = f" (largest difference {worst:.2g})" if worst > ROUNDING * max(sizes, default=0) else ""
    return Verdict(f"{head}: {_show(actual)}{off}")


def equals_dense(parallel: Any, dense: Any, *, atol: float = 1e-6, rtol: float = 0.0, name: str = "") -> Verdict:
    """`parallel` (tensors, or a list or dictionary of them) equals what one process computed; `name` says what."""
    worst, count = _compare(parallel, dense, rtol, atol, "one process has", "the parallel run has", of=name)
    of = f"{name}: " if name else ""
    equal = "1 number equals that" if count == 1 else f"{count:,} numbers equal those"
    return Verdict(f"{of}{equal} of one process (largest difference {worst:.2g}, allowed {atol:.2g})")


def same_on_all_ranks(values: Any, *, atol: float = 0.0) -> Verdict:
    """All ranks hold the same; `values` is a `Run` or a list by rank."""
    by_rank = [(r.rank, r.value) for r in values.ran] if isinstance(values, Run) else [*enumerate(values)]
    if len(by_rank) < 2:
        raise CheckFailed(f"Only {len(by_rank)} value came: nothing to compare. Give one value per rank.")
    (first, expected), *others = by_rank
    for rank, value in others:
        try:
            _compare(value, expected, 0.0, atol, f"rank {first} has", f"rank {rank} has")
        except AssertionError as error:
            raise CheckFailed(f"Rank {rank} does not hold what rank {first} holds. {error}") from None
    return Verdict(f"{name_ranks([rank for rank, _ in by_rank])} hold the same: {_show(expected)}")


def sharded(
    parts: Sequence[Any], whole: Any, dim: int | None = None, *, name: str, atol: float = 1e-10, why: str = ""
) -> Verdict:
    """Rank r holds part r of `whole`, cut along `dim` as `tensor_split` cuts; all of it where `dim` is None.

    `parts` are the ranks' tensors in order, `name` says what they are, `why` is what a wrong answer is told beside the
    difference. No dim adds up partial sums: add them before.
    """
    dense = _array(whole)
    if missing := [rank for rank, part in enumerate(parts) if part is None]:
        raise CheckFailed(f"{name}: there is none on {name_ranks(missing)}.")
    expected = [dense] * len(parts) if dim is None else np.array_split(dense, len(parts), axis=dim)
    whose = "all of the dense tensor" if dim is None else "its part of the dense tensor"
    worst = 0.0
    for rank, (part, mine) in enumerate(zip(map(_array, parts), expected, strict=True)):
        if part.shape != mine.shape:
            raise CheckFailed(f"{name}: rank {rank} has {_shape(part)}, {whose} is {_shape(mine)}.{_hint(why)}")
        off = float(np.abs(part - mine).max(initial=0.0))
        if not off <= atol:
            raise CheckFailed(f"{name}: rank {rank} is off by {off:.3g} from {whose}; allowed is {atol:g}.{_hint(why)}")
        worst = max(worst, off)
    held = "all ranks have what one process has" if dim is None else f"each rank has its part, along dim {dim}"
    return Verdict(f"{name}: {held} (largest difference {worst:.2g})")


def _hint(why: str) -> str:
    return f" {why[:1].upper()}{why[1:]}." if why else ""


def calls(run: Run, expected: Sequence[str], *, why: str = "") -> Verdict:
    """Every rank made exactly these calls, in this order, such as `["all_gather", "all_reduce"]`; none: `[]`.

    `why` is what a wrong answer is told beside the calls.
    """
    wanted = ", ".join(expected) or "nothing"
    if not run.ran:
        raise CheckFailed("no rank ran, so there is nothing to compare.")
    for result in run.ran:
        made = [e.op for e in result.events if e.kind == "comm"]
        if made != list(expected):
            sent = ", ".join(made) or "nothing"
            raise CheckFailed(f"expected {wanted} on every rank; rank {result.rank} sent {sent}.{_hint(why)}")
    return Verdict(f"every rank sent {wanted}")


def against(run: Run, one: Any, *, mesh: dict[str, int] | None = None, names: dict[str, str] | None = None) -> Any:
    """How the tensors that the ranks traced make up those of one process, and which went wrong first.

    with rankcell.trace(dense) as one: ...         # in the notebook; and `with rankcell.trace(model): ...` in a
    check.against(run, one, mesh={"dp": 2, "tp": 2})   # cell `%%ranks 4 -o run`

    The comparison is true if gradients and updates are those of one process, and its `first` says which tensor went
    wrong first, and why. It does not raise; `check.every` and `check.that` do.

    Args:
        mesh: axes and their sizes in the order of the ranks, so that sums are named by axis.
        names: the dense names of modules that are called otherwise on the ranks, by the beginning of their names.

    Raises NothingToCompare where the Run or the trace is none, the Run ended with an error, or no name is in both.
    """
    return extensions.find("check.against")(run, one, mesh=mesh, names=names)


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor; bfloat16 has no numpy type of its own
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.double()
        value = value.numpy()
    if isinstance(value, (list, tuple)) and any(hasattr(v, "detach") for v in value):
        value = [_array(v) for v in value]  # tensors of one number each
    return np.asarray(value)


def _is_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (bool, int, float, np.number)) or getattr(v, "ndim", None) == 0 for v in values)


def _leaves(value: Any, name: str = "") -> dict[str, np.ndarray]:
    """The arrays inside nested dictionaries and lists, by name; a list of numbers is one array."""
    if isinstance(value, Mapping):
        return {n: a for key, v in value.items() for n, a in _leaves(v, f"{name}[{key!r}]").items()}
    if isinstance(value, (list, tuple)) and not _is_numbers(value):
        return {n: a for i, v in enumerate(value) for n, a in _leaves(v, f"{name}[{i}]").items()}
    return {name: _array(value)}


def _compare(
    actual: Any, expected: Any, rtol: float, atol: float, owner: str = "expected", other: str = "got", *, of: str = ""
) -> tuple[float, int]:
    """Largest difference and how many numbers were compared; raises where one is beyond the tolerance."""
    of = f"{of}: " if of else ""
    mine, theirs = _leaves(actual), _leaves(expected)
    if mine.keys() != theirs.keys():
        if "" in mine or "" in theirs:  # one of them has no entries, but is itself an array
            raise CheckFailed(f"{of}{owner[0].upper()}{owner[1:]} {_show(expected)}, {other} {_show(actual)}.")
        missing, extra = [*(theirs.keys() - mine.keys())], [*(mine.keys() - theirs.keys())]
        parts = [f"missing {name_some(missing)}"] if missing else []
        parts += [f"not expected {name_some(extra)}"] if extra else []
        raise CheckFailed(f"{of}The entries differ: {'; '.join(parts)}.")
    worst, wrong, count = 0.0, 0, 0
    where, wanted, found = "", 0.0, 0.0  # the place of the largest difference, and the two numbers
    for name, x in mine.items():
        y = theirs[name]
        at = f" at {name}" if name else ""
        if x.shape != y.shape:
            raise CheckFailed(f"{of}The shapes differ{at}: {owner} {_shape(y)}, {other} {_shape(x)}.")
        count += x.size
        if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
            if not np.array_equal(x, y):
                said = f"{owner} {_show(y.tolist())}, {other} {_show(x.tolist())}"
                raise CheckFailed(f"{of}The values differ{at}: {said}.")
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore"):
            off = np.where((np.isnan(x) & np.isnan(y)) | (x == y), 0.0, np.abs(x - y))
        off = np.where(np.isnan(off), np.inf, off)  # one of the two is NaN
        wrong += int((off > atol + rtol * np.where(np.isfinite(y), np.abs(y), 0.0)).sum())
        if off.max(initial=0.0) > worst:
            index = np.unravel_index(int(off.argmax()), off.shape)
            worst, wanted, found = float(off[index]), float(y[index]), float(x[index])
            where = name + (f"[{', '.join(map(str, index))}]" if index else "")
    if wrong:
        differ = f"{wrong:,} of {count:,} numbers {'differs' if wrong == 1 else 'differ'}. "
        place = f"The largest difference is at {where}: {owner}" if where else owner[0].upper() + owner[1:]
        nan = np.isnan(found) != np.isnan(wanted)
        share = f"{rtol:g} of the expected number"
        allowed = f"{atol:g} + {share}" if atol and rtol else share if rtol else f"{atol:g}"
        raise CheckFailed(
            f"{of}{differ if count > 1 else ''}{place} {_number(wanted)}, {other} {_number(found)}. "
            f"{'One of them is NaN' if nan else f'The difference is {_number(worst)}'}. Allowed: {allowed}."
        )
    return worst, count


def _shape(array: np.ndarray) -> str:
    return str(tuple(array.shape)) if array.ndim else "a single number"


def _number(x: float) -> str:
    return f"{float(x):.10g}"


def _rounded(x: float) -> str:
    """A number that is right: whole ones in full, others to four digits."""
    return _number(x) if float(x).is_integer() else f"{float(x):.4g}"


def _show(value: Any) -> str:
    """A value in a few characters: numbers as they would be said, long ones cut."""
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {_show(v)}" for key, v in value.items()) + "}"
    elif isinstance(value, (list, tuple)) and not _is_numbers(value):
        text = "[" + ", ".join(_show(v) for v in value) + "]"
    else:
        array = _array(value)
        if array.dtype.kind not in "biuf":
            text = repr(array.item() if array.ndim == 0 else value)
        elif not array.ndim:  # a large one with its thousands apart; in a list the commas would mislead
            text = f"{float(array):,.0f}" if 1e5 <= abs(float(array)) < 1e12 else _rounded(float(array))
        else:
            more = f", … {array.size - _SHOWN} more" if array.size > _SHOWN else ""
            text = f"[{', '.join(_rounded(x) for x in array.ravel()[:_SHOWN])}{more}]"
    return text if len(text) <= 100 else text[:99] + "…"
