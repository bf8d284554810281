"""Which of the tensors that are not as they should be is to blame: the first in the order of computing that fits
nowhere, or the partial sums just before it that somebody took for whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, takewhile

import numpy as np

from ..results import grouped, name_ranks, name_some
from .comparison import FINAL, Row
from .wording import ALIKE, ALL_BUT, REORDERED, TURNED, is_weighted, times_words

CLOSE = 0.01  # multiples that differ by less, as a share, are one


def first_wrong(rows: Sequence[Row]) -> tuple[Row, bool] | None:
    """The row to blame, and whether it is a partial sum that is used as if it were whole; None if all is well."""
    trained = [r for r in rows if r.kind == "grad" or (r.kind == "parameter" and r.step)]
    updated = {(r.name, r.step - 1): r for r in trained if r.kind == "parameter"}
    wrong = [r for r in trained if not _is_right(r, updated)]
    start = [r for r in rows if r.kind == "parameter" and r.step == 0 and r.status not in ("fits", "skipped")]
    dropouts = [r for r in rows if r.status == "none" and r.says and r.kind == "output"]
    if start or dropouts:
        return [*start, *dropouts][0], False
    outputs = [r for r in rows if r.kind == "output" and r.status != "skipped"]
    if not wrong and (trained or not outputs or outputs[-1].status not in ("none", "uncovered")):
        return None
    shares = grouped((r.step, r.status == "uncovered") for r in outputs)
    # where few outputs of a step are, rows that look alike were taken for one another
    doubtful = [step for step, share in shares.items() if 2 * sum(share) < len(share)]
    rows = [replace(r, status="patchy") if r.status == "uncovered" and r.step in doubtful else r for r in rows]
    for row in rows:
        if not _explains(row, rows, wrong):
            continue
        sums = _right_before(row, rows, "partial") if row.kind in ("output", "grad_output") else None
        gaps = _right_before(row, rows, "patchy")
        if row.kind == "output" and sums is gaps is None and (order := _reordered_for(row, rows)):
            return order, False
        sums = sums or _sum_missing_behind(row, rows)
        return sums or gaps or _other_multiple_before(row, rows) or row, sums is not None
    return (wrong[0], False) if wrong else None


def right_elsewhere(row: Row, rows: Sequence[Row]) -> set[int]:
    """Ranks where most gradients are right, as those of another stage, where most of this row's ranks are wrong."""
    grads = [r for r in rows if r.kind == row.kind == "grad" and r.step == row.step and r.status != "skipped"]
    ranks = {rank: [r.status == "fits" for r in grads if rank in r.ranks] for r in grads for rank in r.ranks}
    right = {rank for rank, fits in ranks.items() if 2 * sum(fits) > len(fits)}
    return right if right.isdisjoint(row.ranks) else set()


def _sum_missing_behind(row: Row, rows: Sequence[Row]) -> Row | None:
    """Where gradients that travel back first were partial sums of what all ranks hold whole, if no parameter behind it
    has its gradient summed, `row` among them.
    """
    rows = [r for r in rows if r.step == row.step]
    whole = {r.name for r in rows if r.kind == "output" and r.layout == "the same on all"}
    sums = [r for r in rows if r.kind == "grad_output" and r.layout.startswith("partial over") and r.name in whole]
    behind = [r for r in rows if r.kind == "grad" and r.name.rpartition(".")[0] in {s.name for s in sums}]
    return sums[0] if row in behind and all(r.status in ("partial", "skipped") for r in behind) else None


def before(row: Row, rows: Sequence[Row]) -> list[Row]:
    """What comes before a tensor in its step and is of its kind, without what was not compared."""
    past = takewhile(lambda r: r.key != row.key, rows)
    return [r for r in past if r.step == row.step and r.kind == row.kind and r.status != "skipped"]


def between(row: Row, rows: Sequence[Row]) -> str:
    """Which weights have wrong gradients, and which right ones, in the module whose gradient came back before a wrong
    one: where they are used without calling their own modules.
    """
    past = before(row, rows) if row.kind == "grad_output" else []
    called = {r.name for r in rows if r.kind == "output"}
    grads = [r for r in rows if r.kind == "grad" and r.step == row.step and r.name.rpartition(".")[0] not in called]
    inside = [r for r in grads if past and r.name.startswith(f"{past[-1].name}.")]
    wrong, right = (name_some([r.name for r in inside if r.status == status]) for status in ("none", "fits"))
    return f"the gradients of {wrong} are wrong, too, and those of {right} are right" if wrong and right else ""


def given(row: Row, rows: Sequence[Row]) -> str:
    """Where a weight's gradient is wrong and all before it is right: the partial sum that its module may be given."""
    layer = next((r for r in rows if r.key == (row.name.rpartition(".")[0], "output", row.step)), row)
    past = before(layer, rows) if row.kind == "grad" and layer is not row else []
    if not past or past[-1].status != "partial":
        return ""
    return f"is what its module is given whole? `{past[-1].title}`, computed just before, is {past[-1].layout}"


def where_scaled(row: Row, rows: Sequence[Row], sizes: Sequence[float], calls: int) -> str:
    """Whether what travels back has the factor of a gradient, and from where on; ranks of these `sizes` may average.
    `calls` are the least that a module has on a rank.
    """
    way = [r for r in rows if (r.kind, r.step) == ("grad_output", row.step) and r.status in ("fits", "scaled")]
    if row.factor == 0.0 or not way:
        return ""
    for a, b in pairwise(way):
        if abs(a.factor - 1) < CLOSE and abs(b.factor / row.factor - 1) < CLOSE:
            return f"it comes back to `{b.title}` like that already, and to `{a.title}` right: look between the two"
    usual, averaged = (any(abs(k / n - 1) < CLOSE for n in sizes) for k in (way[0].factor, way[0].factor / row.factor))
    alike, others = abs(way[0].factor / row.factor - 1) < CLOSE, [r for r in rows if r.key[1:] == row.key[1:]]
    averaged |= not usual and alike
    if np.ptp([r.factor for r in way]) > CLOSE or way[0].factor == 1.0 or usual == averaged:
        return ""
    if averaged:
        many = f" Each rank has {calls} micro-batches." if calls > 1 else ""
        return f"what comes back from the loss is {times_words(way[0].factor)} it already: by what is it divided?{many}"
    if alike and not any(r.status == "fits" for r in others):
        asks = "is the loss to be divided, or are the gradients to be averaged after it?"
        return f"what comes back from the loss is {times_words(way[0].factor)} it, too: {asks}"
    return "what comes back from the loss is right: look at what is done with the gradients after that"


def of_stages(row: Row, rows: Sequence[Row]) -> str:
    """What is said of gradients with another factor on each stage of a pipeline, or each rank; "" if there is one."""
    scaled = [r for r in rows if r.kind == row.kind == "grad" and r.step == row.step and r.status == "scaled"]
    stages = {r.ranks: r.factor for r in scaled if all(r.factor for r in scaled)}
    is_one = len({*chain(*stages)}) < sum(map(len, stages)) or np.ptp([*stages.values(), row.factor]) <= CLOSE
    if is_one or any(abs(r.factor / stages[r.ranks] - 1) > CLOSE for r in scaled):
        return ""
    each = ", ".join(f"{times_words(k)} it on {name_ranks(ranks)}" for ranks, k in stages.items())
    if any(abs(k / row.factor**n - 1) > CLOSE for n, k in enumerate(stages.values(), 1)):
        return f"{each}: does each clip by its own norm, or divide by a number of its own?"
    right = "".join(f", right on {name_ranks([*who])}" for who in [right_elsewhere(row, rows)] if who)
    return f"multiplied once more on each stage on the way back: {each}{right}"


def added_up(row: Row, rows: Sequence[Row]) -> str:
    """How many gradients of parameters are wrong, and where, if what travels back is right."""
    grads = [r for r in rows if (r.kind, r.step) == (row.kind, row.step) and r.status != "skipped"]
    wrong = [r for r in grads if r.status == "none"]
    back = {r.status for r in rows if (r.kind, r.step) == ("grad_output", row.step)} - {"skipped"}
    if row.kind != "grad" or len(wrong) < 2 or back != {"fits"}:
        return ""
    who = name_ranks(sorted({rank for r in wrong for rank in r.ranks}))
    asks = "is each micro-batch added up once, and over the right ranks?"
    return f"{len(wrong)} of {len(grads)} are wrong, on {who}, and what travels back is right: {asks}"


def lacks_rows(row: Row, rows: Sequence[Row]) -> str:
    """Which output before a wrong one has rows on no rank, where most have none."""
    past = before(row, rows) if row.kind == "output" else []
    lacking = [r for r in past if r.layout.endswith(" nowhere")]
    if not lacking or 2 * len(lacking) >= len(past):
        return ""
    missing = lacking[0].says.replace(": the ranks share the batch wrongly", "")
    return f"{ALL_BUT} `{lacking[0].title}`, of which {missing}: is that right?"


def comes_back(row: Row, rows: Sequence[Row]) -> str:
    """Where a loss inside the model is another number, what is wrong with the first gradient behind it."""
    at = "grad_output", row.step
    back = (r for r in rows if (r.kind, r.step) == at and r.status not in ("fits", "skipped"))
    if row.layout != "another number" or row.kind != "output" or (first := next(back, None)) is None:
        return ""
    return f"what comes back to `{first.title}` on {name_ranks(first.ranks)}: {first.layout}"


def cut_in_pieces(row: Row, rows: Sequence[Row]) -> str:
    """What is cut in pieces, right before a wrong output: one of the outputs that are cut, or a weight beside it."""
    around = row.name.rpartition(".")[0]
    shards = takewhile(lambda r: r.layout.startswith("sharded"), reversed(before(row, rows)))
    weights = (r for r in rows if r.kind == "parameter" and r.step == row.step)
    near = [r for r in shards if r.name.startswith(around)]
    beside = [r for r in weights if r.name.rpartition(".")[0] in (row.name, around)]
    if flat := [r.title for r in beside if r.layout == "sharded, flat"]:
        return f"`{flat[0]}` is cut along no single dim (sharded, flat): is what uses it cut alike?"
    near += beside
    return next((f"`{r.title}`, just before, is cut{r.clue}: is what uses it cut alike?" for r in near if r.clue), "")


def _is_right(row: Row, updated: Mapping[tuple[str, int], Row]) -> bool:
    """Whether a gradient or an updated parameter is as it should be. Gradients that stay partial are right where the
    update is, or is at least the same on all ranks: an optimizer that shards its states reduces them itself.
    """
    if row.kind == "grad" and row.status in ("partial", "missing") and (update := updated.get((row.name, row.step))):
        alike = update.layout.endswith(ALIKE) or (update.status == "scaled" and update.factor != 0.0)
        summed = row.status == "partial" and alike and {*update.ranks} >= {*row.ranks}
        return update.status in ("fits", "skipped") or summed
    return row.status in ("fits", "skipped")


def _explains(row: Row, rows: Sequence[Row], wrong: Sequence[Row]) -> bool:
    """Whether what is wrong may come from this tensor."""
    if row.kind in FINAL:
        return row in wrong
    if row.kind == "output":
        return row.status in ("missing", "uncovered", "scaled") or (row.status == "none" and not _made_right(row, rows))
    return (row.status in ("none", "missing", "uncovered") or is_weighted(row)) and not _ends_well(row, rows)


def _made_right(row: Row, rows: Sequence[Row]) -> bool:
    """Whether an output that fits nowhere did no harm: what the module around it makes of it is right again."""
    around = row.name.rpartition(".")[0]
    outputs = [r for r in rows if r.kind == "output" and r.step == row.step]
    return bool(around) and any(r.name == around and r.status == "fits" for r in outputs)


def _ends_well(row: Row, rows: Sequence[Row]) -> bool:
    """Whether what lies inside did no harm: the gradient that leaves a module around this one is right again, or those
    of all parameters are, but for one factor.
    """
    grads = [r for r in rows if r.kind == "grad" and r.step == row.step and r.status != "skipped"]
    factors = [r.factor if r.status in ("fits", "scaled") else 0.0 for r in grads]
    if len(factors) > 1 and factors[0] and np.ptp(factors) <= 1e-3 * abs(factors[0]):
        return True
    travelling = [r for r in rows if r.kind == "grad_output" and r.step == row.step]
    parts = row.name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        around = ".".join(parts[:count])
        inside = [i for i, r in enumerate(travelling) if r.name == around or r.name.startswith(f"{around}.")]
        after = travelling[inside[-1] + 1] if inside[-1] + 1 < len(travelling) else None
        if after is not None and after.status in ("fits", "partial", "scaled") and not is_weighted(after):
            return True
    return False


def _reordered_for(row: Row, rows: Sequence[Row]) -> Row | None:
    """The output before a wrong one, or the weights in the module around it, whose rows stand in another order than one
    process has them.
    """
    says = "its rows stand in another order than in one process{}, and what is made of them is wrong"
    turned = [r for r in rows[: rows.index(row)] if (r.kind, r.step, r.layout) == ("output", row.step, TURNED)]
    if turned:
        return replace(turned[0], says=f"{says.format(turned[0].clue)}: is this order meant?")
    around = row.name.rpartition(".")[0]
    for r in rows:
        is_start = r.kind == "parameter" and not r.step
        if is_start and r.layout.endswith(REORDERED) and around and r.name.startswith(f"{around}."):
            return replace(r, says=says.format(""))
    return None


def _right_before(row: Row, rows: Sequence[Row], status: str) -> Row | None:
    """The first of one status right before a tensor that fits nowhere; of gradients that travel back also beside it."""
    if row.status != "none":
        return None
    found, at = None, rows.index(row) - 1
    kind = "output" if rows[at].kind == "output" else row.kind  # sums may reach the loss, whose gradient comes first
    module = rows[at].name.rpartition(".")[0] if kind == "grad_output" else ""  # several may use the same tensor
    beside = [r.key for r in rows if module and r.status == "fits" and r.name.rpartition(".")[0] == module]
    while at >= 0 and rows[at].kind == kind and (rows[at].status in (status, "skipped") or rows[at].key in beside):
        found, at = rows[at] if rows[at].status == status else found, at - 1
    return found


def _other_multiple_before(row: Row, rows: Sequence[Row]) -> Row | None:
    """Where gradients that travel back became another multiple, right before one that fits nowhere: a sum of both."""
    past = before(row, rows)
    if row.status != "none" or row.kind != "grad_output" or not past or past[-1].status != "scaled":
        return None
    others = [i for i, r in enumerate(past) if abs(r.factor - past[-1].factor) > 1e-3 * past[-1].factor]
    return past[others[-1] + 1] if others else None
