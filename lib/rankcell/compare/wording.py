"""What is said of a tensor: how the ranks hold it, and what went wrong with it."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from ..results import grouped, name_ranks
from .comparison import KINDS, Row
from .layouts import Sum

BEFORE = "the weights before the step"
GONE = "on no rank"
UPDATES = "look at the learning rate, the weight decay, how it clips and the optimizer's state"
NO_GRADIENT = "who changes it in place, and do all ranks make the same change?"
UNEVEN = "each rank has a mean over its own samples, and not equally many: add up sums and counts, and divide then"
LEFT_OUT = "rows get no gradient: does the loss leave them out?"
ALIKE = ", the same on all"
APART = ", not the same on all"
CUT = f"{ALIKE}, where each has a part of its own"
REORDERED = ", in another order"
TURNED = f"all of it{REORDERED}"
GIVEN = "what it is given"
ALL_BUT = "all before it does but"


def said(
    row: Row, *, used_as_whole: bool, past: list[Row], holders: Iterable[int], mesh: Mapping[str, int], ranks: Set[int]
) -> Row:
    """The row to blame, with a sentence for the learner. `holders` are the ranks that hold it, `ranks` all; `past` are
    those of its kind that come before it.
    """
    step = row.step if row.kind == "parameter" else row.step + 1
    when = f"{'after' if row.kind == 'parameter' else 'in'} step {step}" if step > 1 else ""
    where = ", ".join(filter(None, (f"line {row.line}" if row.line else "", when)))
    where = f" ({where})" if where else ""
    what = row.says or _sentence(row, used_as_whole, sorted(set(holders) - set(row.ranks)), mesh, len(ranks), past)
    return replace(row, says=f"`{row.title}`{where}: {what}")


def _sentence(
    row: Row, used_as_whole: bool, others: list[int], mesh: Mapping[str, int], world_size: int, past: list[Row]
) -> str:
    who = name_ranks(row.ranks) if row.ranks else "no rank"
    over = f"over {' and '.join(row.axes)}" if row.axes else f"over {who}"
    side, what = "forward", "each rank holds a partial sum"
    if row.kind != "output":
        side, what = "backward", "the gradient of its output is a partial sum on each rank"
    if used_as_whole:
        return f"{what}, and it is used as if it were whole: an all-reduce {over} is missing in the {side}"
    if row.status == "partial":
        if abs(row.factor - 1) <= 1e-3:
            return f"partial {over}: its gradients are never summed"
        along = f" {over}" if row.axes else ""
        own = f"each rank has that of its own part of the batch ({over}): its gradients are never averaged{along}"
        return f"{own}. Is the module called through what averages them (DistributedDataParallel), or past it?"
    change = "its change without a gradient" if row.clue == NO_GRADIENT else "the gradient is right, and the update"
    if row.status == "scaled" and row.kind == "parameter" and row.step:
        return f"{who}: {change} is {row.layout}: {row.clue or UPDATES}"
    if row.status == "scaled" and row.kind != "parameter":
        return _scaled(row, others, mesh, world_size, past)
    if row.status == "missing" and row.kind == "grad_output":
        found = f"no gradient comes back to it on {who}, and in one process one does"
        return f"{found}: something between it and the loss is unknown to autograd"
    if row.status == "missing":
        have = "has" if len(row.ranks) == 1 else "have"
        return f"{who} {have} the parameter and no gradient, and one process has one"
    if row.kind == "parameter" and row.step == 0:
        more = f": {row.clue}" if row.clue else ""
        return f"{who}: other weights than one process has, before anything is computed{more}"
    if row.kind == "parameter" and row.layout == BEFORE:
        than = f"than {name_ranks(others)}" if others else "than one process after its step"
        return f"{who} {'holds' if len(row.ranks) == 1 else 'hold'} older weights {than}: no update reached them"
    if row.kind == "parameter":
        return f"{who}: {change} is wrong ({row.layout}): {row.clue or UPDATES}"
    if row.kind == "grad" and row.layout.endswith("rounded"):
        return f"{who}: {row.layout}: is it sent or added up in 16 bits?"
    if row.kind == "grad":
        clue = row.clue or ("is it reduced once more after it was cut?" if row.layout.endswith(CUT) else "")
        asks = f": {clue}" if clue else ""
        return f"{who}: no part, multiple or sum of the gradient of one process ({row.layout}){asks}"
    fits = f"the {KINDS[row.kind]} fits no layout on {who} ({row.layout}), and"
    if row.clue.startswith(ALL_BUT):
        return f"{fits} {row.clue}"
    look = _of_output(row, past) if row.kind == "output" else _of_gradient(row, past)
    more = f"{'' if look.endswith('?') else '.'} {row.clue[0].upper()}{row.clue[1:]}" if row.clue else ""
    return f"{fits} {look}{more}"


def _of_output(row: Row, past: list[Row]) -> str:
    """Where to look, if an output is the first that fits nowhere."""
    way = f"at what becomes of `{past[-1].title}` on the way" if past else f"at {GIVEN}"
    look = f"all before it does, weights too: look at the forward here, or {way}"
    if row.clue.startswith(f"{GIVEN} is right"):
        look = look.partition(", or ")[0]
    elif row.clue.startswith(GIVEN):
        look = f"all before it does, weights too: look {way}{' to it' * bool(past)}"
    else:
        look += " (gathered, cut, sent?)" if past else " (is it the part of this rank?): nothing is computed before it"
    return look


def _of_gradient(row: Row, past: list[Row]) -> str:
    """Where to look, if the gradient of an output is the first that fits nowhere."""
    if not past:
        look = "the forward is right: look at the loss, this gradient is the first that comes back from it. Are its "
        look += "targets right, is a sum in it summed again on the way back, does what it gathers send gradients back?"
        return look
    came = [r.title for r in past if not r.name.startswith(f"{row.name}.")]
    at = f"of what uses it, from `{came[-1]}` to here" if came else "here"
    return f"all before it does, weights too: look at the backward {at}"


def _scaled(row: Row, others: list[int], mesh: Mapping[str, int], world_size: int, past: list[Row]) -> str:
    who = name_ranks(row.ranks)
    if is_weighted(row):
        return (
            f"{row.layout.replace(' it', ' the dense one')}: the losses of {who} do not count alike. A mean of "
            f"means is not the mean over all where ranks have different numbers of samples or tokens; a loss scale "
            f"must be the same on all"
        )
    if row.factor == 0.0:
        asks = row.clue or "does each clip by its own norm, without the others' parts, or divide by its own loss scale?"
        return f"{who}: {row.layout.replace(' it', ' the gradient of one process')}: {asks}"
    k = row.factor
    of_size = " or ".join(axis for axis, size in mesh.items() if size == round(max(k, 1 / k if k else k)))
    if others and row.kind == "grad":
        hint = f"the gradients of {name_ranks(others)} are right: is the loss scale the same, or what they send scaled?"
    elif abs(k - round(k)) < 1e-3 and k > 1.5:
        more = "" if of_size or round(k) == world_size else ", or counted more than once"
        more = more or ", or summed once too often" * (row.kind == "grad")
        over = f" over {of_size}" if of_size else ""
        hint = f"a sum{over} where a mean is meant{more}"
        if row.kind == "grad_output" and past and not more:
            hint = f"between `{past[-1].title}` and here the way back sums{over} what each rank has whole already (an "
            hint += "all-reduce too many in the backward?), or sums where a mean is meant"
    elif k > 0 and abs(1 / k - round(1 / k)) < 1e-3:
        hint = "a mean where a sum is meant, or divided once too often"
        if of_size and len(row.ranks) == world_size:
            hint += f", by the size of {of_size}: is a count summed over ranks that share what is counted?"
    else:
        hint = "divided by another number than one process: by other tokens, or by a norm that counts other numbers?"
    names = {"grad": "the dense gradient", "grad_output": "the gradient of its output in one process"}
    more = f"{'' if hint.endswith('?') else '.'} {row.clue[0].upper()}{row.clue[1:]}" if row.clue else ""
    return f"{times_words(k)} {names.get(row.kind, 'the tensor of one process')} on {who}: {hint}{more}"


def is_weighted(row: Row) -> bool:
    """Whether a gradient that travels back is another multiple of the dense one on each rank."""
    return row.kind == "grad_output" and row.status == "scaled" and row.factor == 0.0


def times_words(k: float) -> str:
    """A factor: "4 times", "1/4 of"."""
    if abs(k - round(k)) < 1e-3:
        return f"{round(k)} times"
    return f"1/{round(1 / k)} of" if k > 0 and abs(1 / k - round(1 / k)) < 1e-3 else f"{k:.3g} times"


def others_words(factors: Mapping[int, float]) -> str:
    """Factors that differ between the ranks."""
    ranks = grouped((f"{k:.4g}", rank) for rank, k in factors.items())
    each = ", ".join(f"{k} on {name_ranks(some)}" for k, some in ranks.items())
    many = f"{min(factors.values()):.3g} to {max(factors.values()):.3g}"
    return f"each rank another multiple of it: {each if len(ranks) < 5 else many}"


def partial_words(total: Sum) -> str:
    """Pieces that add up: over which axes, or which ranks."""
    over = f"over {' and '.join(total.axes)}" if total.axes else f"over {name_ranks(total.ranks)}"
    return f"partial {over}" if abs(total.factor - 1) < 1e-3 else f"each its own part of the batch ({over})"


def cut_words(kind: str, whole: tuple[int, ...], shapes: Iterable[tuple[int, ...]], rows: bool, columns: bool) -> str:
    """Which dims of a tensor are cut, as far as shapes tell."""
    pairs = [zip(shape, whole, strict=True) for shape in shapes if len(shape) == len(whole)]
    dims = {d for of_shape in pairs for d, (a, b) in enumerate(of_shape) if a != b}
    if dims:
        word = "part of the batch" if dims == {0} and kind in ("output", "grad_output") else ""
        return word or f"sharded on dim {', '.join(map(str, sorted(dims)))}"
    if rows and columns:
        return "sharded on rows and columns"
    return "other rows on each" if rows else "sharded on the last dim"
