"""What stands beside the tensors of a step: a model's buffers, what its optimizer goes by and when it steps, by which
norm gradients are clipped, who drops what. It says why an output, a gradient or an update is wrong, and finds a buffer
that went wrong where all else is right.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..results import grouped, name_ranks, placed
from .comparison import Row
from .reference import Fit, Traced, matrix_of, matrix_of_calls, typical
from .wording import BEFORE, GONE, NO_GRADIENT

OF_ALL = "its settings and state are those of one process: does the step need the whole tensor, or that of all ranks?"
KINDS = ("buffer", "optimizer", "clip")
SMALL = 0.1  # times a typical number: such signs do not count
ENOUGH, SURE = 32, 0.95  # so many signs, and this share of them, tell that an update is made of another gradient
ANOTHER = "and not made of `.grad`: is what it is made of, and clipped by, that of all ranks and every micro-batch?"
_Blamed = tuple[Row, bool] | None
_Holders = Mapping[str, Mapping[int, Fit | None]]


class Beside:
    """Buffers and optimizers of one process and of each rank."""

    def __init__(self, one: Iterable[Traced], ranks: Mapping[Any, Iterable[tuple[int, Traced]]], off: float) -> None:
        self._one = {(e.kind, e.name, e.step): e for e in one}
        self._ranks = {key[:3]: dict(pairs) for key, pairs in ranks.items() if key[0] in KINDS}
        self._off = off  # by how much a number may be off, as a share of a typical one

    def told(self, rows: list[Row], blamed: _Blamed, holders: _Holders) -> tuple[list[Row], _Blamed]:
        """With what made the row to blame wrong, or a buffer to blame if all else is right; `holders` of parameters."""
        if blamed is None:
            wrong = next(filter(self._was_right, self._buffers()), None)
            return (rows, None) if wrong is None else ([*rows, wrong], (wrong, False))
        row = self._explained(blamed[0], holders.get(blamed[0].name, {}))
        return [row if r is blamed[0] else r for r in rows], (row, blamed[1])

    def _explained(self, row: Row, holders: Mapping[int, Fit | None]) -> Row:
        if row.kind == "parameter" and row.step:
            clip = self._of_clip(row.step - 1)
            if row.says and clip:
                return replace(row, says=f"{row.says} {clip}")
            return row if row.clue == NO_GRADIENT else replace(row, clue=self._of_optimizer(row, holders) or clip)
        if row.kind == "grad":
            return replace(row, clue=row.clue or self._of_clip(row.step))
        inside = f"{row.name}." if row.name else ""
        for r in self._buffers() if row.kind == "output" and row.status == "none" and not row.says else ():
            if r.name.startswith(inside) and r.step <= row.step and {*r.ranks} & {*row.ranks}:
                when = "afterwards " if r.step == row.step else ""
                return replace(row, clue=f"{when}its buffer `{r.name.removeprefix(inside)}` {r.layout}{r.clue}")
        return row

    def _of_clip(self, step: int) -> str:
        """Where gradients are clipped by another norm than in one process."""
        for key in (k for k in self._ranks if (k[0], k[2]) == ("clip", step) and self._one):
            have, one = self._ranks[key], self._one.get(key)
            norms = {rank: float(e.value[0]) for rank, e in have.items()}
            off = one is None or any(abs(norm - one.value[0]) > self._off * one.value[0] for norm in norms.values())
            clips = any(e.value[0] > e.value[1] for e in (*have.values(), *([one] if one else [])))
            if off and clips:
                line = next(iter(have.values())).line
                each = grouped((f"{norm:.3g}", rank) for rank, norm in norms.items())
                said = ", ".join(f"{norm} on {name_ranks(ranks)}" for norm, ranks in each.items())
                there = f"by {one.value[0]:.3g} in one process" if one else "one process does not clip"
                asks = "is that before the gradients of all ranks are averaged, or a norm without the others' parts?"
                return f"`clip_grad_norm_`{placed(line)} clips by the norm {said}, and {there}: {asks}"
        return ""

    def _was_right(self, wrong: Row) -> bool:
        """Whether a buffer began as in one process, and some rank has written it since."""
        began, now = (self._ranks.get(("buffer", wrong.name, step), {}) for step in (0, wrong.step + 1))
        written = any((e.value != now[rank].value).any() for rank, e in began.items() if rank in now)
        return written and all(r.name != wrong.name or r.step >= 0 for r in self._buffers())

    def _buffers(self) -> Iterator[Row]:
        """Those that go wrong on ranks that hold all of it. A sum or mean over the ranks may be meant so."""
        for (kind, name, step), e in self._one.items():
            whole, parts = e.value, {r: t.value for r, t in self._ranks.get((kind, name, step), {}).items()}
            if kind != "buffer" or not parts or any(part.shape != whole.shape for part in parts.values()):
                continue
            total = np.sum([*parts.values()], axis=0)
            wrong = tuple(r for r, part in parts.items() if not self._same(part, whole))
            if wrong and not self._same(total, whole) and not self._same(total / len(parts), whole):
                is_order = all(self._same(_sorted(parts[r]), _sorted(whole)) for r in wrong)
                has = "has the rows of one process in another order" if is_order else "has other numbers"
                layout = f"{has} on {name_ranks(wrong)}"
                says = f"this buffer {layout}, and gradients and weights are right"
                is_own = len(wrong) == len(parts) == len({part.tobytes() for part in parts.values()}) > 1
                asks = ", other ones on each: is it made of a rank's own part, and not of all ranks'?" * is_own
                yield Row(name, kind, step - 1, layout, "none", wrong, says=says, clue=asks)

    def _of_optimizer(self, row: Row, holders: Mapping[int, Fit | None]) -> str:
        key = "optimizer", row.name, row.step - 1
        one, have = self._one.get(key), self._ranks.get(key, {})
        if one is None or not {*row.ranks} <= {*have}:
            return ""
        for name, whole in one.value.items():
            if bare := [r for r, e in have.items() if name not in e.value and e.dtype == one.dtype]:
                lost = ", ".join(f"`{k}`" for k in one.value if k not in have[bare[0]].value)
                return f"its optimizer has no {lost} on {name_ranks(bare)}, which one process has: is its state lost?"
            parts = {r: e.value[name] for r, e in have.items() if name in e.value}
            if off := [r for r, part in parts.items() if not self._lies_in(part, whole, holders.get(r))]:
                here, there = (", ".join(f"{v:.4g}" for v in value.flat) for value in (parts[off[0]], whole))
                said = f": {here}, and not {there}" if whole.size <= 2 else ""
                return f"its optimizer has another `{name}` on {name_ranks(off)} than in one process{said}"
        early = {r: [k for k in e.value if k not in one.value and e.value[k].any()] for r, e in have.items()}
        if begun := [r for r, names in early.items() if names and have[r].dtype == one.dtype]:
            name, who = early[begun[0]][0], name_ranks(begun)
            return f"its optimizer begins with `{name}` on {who}, and in one process without: was it stepped before?"
        # later its state is not kept
        return OF_ALL if key[2] == 0 and {e.dtype for e in have.values()} == {one.dtype} else ""

    def _lies_in(self, part: np.ndarray, whole: np.ndarray, fit: Fit | None) -> bool:
        """Whether a setting or a state is that of one process, or lies in it as its parameter does."""
        if part.shape == whole.shape or fit is None or (fit.rows is fit.columns is fit.flat is None):
            return part.shape != whole.shape or self._same(part, whole)
        if fit.flat is not None:
            return self._same(part.reshape(-1)[fit.flat >= 0], whole.reshape(-1)[fit.flat[fit.flat >= 0]])
        part, whole = (matrix_of(Traced("", "parameter", 0, value)) for value in (part, whole))
        whole = whole if fit.rows is None else whole[fit.rows]
        return self._same(part, whole if fit.columns is None else whole[:, fit.columns])

    def _same(self, part: np.ndarray, whole: np.ndarray) -> bool:
        return part.shape == whole.shape and bool((np.abs(part - whole) <= self._off * typical(whole)).all())


def _sorted(value: np.ndarray) -> np.ndarray:
    rows = value.reshape(len(value), -1) if value.ndim else value.reshape(1, 1)
    return rows[np.lexsort(rows.T)]


def set_aside(judge: Any, rows: Sequence[Row]) -> list[Row]:
    """The rows, without gradients that no optimizer steps on: their signs are not those of one process, and those of
    the update are; or none is left, and weights change. Optimizers that shard their states leave such behind.
    """
    grads = [r for r in rows if r.kind == "grad"]
    lost, left = [r for r in grads if r.status == "none"], {r.step for r in grads if r.layout != GONE}
    updates = {(r.name, r.step - 1): r for r in rows if r.kind == "parameter"}
    votes: dict[int, list[bool]] = {}
    for r in lost:
        votes.setdefault(r.step, []).extend(_as_in_one(judge, r))
    changed = {}
    for r in (*lost, *(r for r in grads if r.step not in left)):
        update = updates.get((r.name, r.step))
        if update is None or (r in lost and (len(votes[r.step]) < ENOUGH or np.mean(votes[r.step]) < SURE)):
            continue
        if update.status not in ("fits", "skipped"):
            if r.step or update.status == "missing" or update.layout == BEFORE:
                continue
            says = f"{name_ranks(update.ranks)}: the update is not right ({update.layout}), {ANOTHER}"
            changed[update.key] = replace(update, says=says)
        changed[r.key] = r.found("skipped", "not what is stepped on")
    return [changed.get(r.key, r) for r in rows]


def _as_in_one(judge: Any, row: Row) -> list[bool]:
    """Of numbers of a gradient whose sign is another than in one process: whether their update goes as there."""
    keys = [("grad", row.name, row.step, 0), *(("parameter", row.name, row.step + n, 0) for n in (0, 1))]
    if any(key not in judge.dense or key not in judge.ranks for key in keys):
        return []
    whole, before, after = (matrix_of(judge.dense[key][0]) for key in keys)
    wanted = after - before if row.step else -whole  # later steps have a memory
    ours = [{rank: matrix_of(e) for rank, e in judge.ranks[key]} for key in keys]
    found: list[bool] = []
    for own, before, after in ([of.get(rank, whole[:0]) for of in ours] for rank in row.ranks):
        if own.shape == before.shape == after.shape == whole.shape:
            size = np.minimum(*(np.abs(g) / max(typical(g), 1e-30) for g in (own, whole)))
            odd = (own * whole < 0) & (size > SMALL) & (after != before)
            found += [*((after - before) * wanted > 0)[odd]]
    return found


def steps_elsewhere(judge: Any, rows: Sequence[Row]) -> Row | None:
    """Where ranks update their weights after another number of calls of a module than one process, of as many."""
    for row in (r for r in rows if r.kind == "output"):
        keys = [("output", row.name, step, 0) for step in range(1 + max(key[2] for key in judge.ranks))]
        one = [len(judge.dense.get(key, ())) for key in keys]
        here = {rank: [sum(r == rank for r, _ in judge.ranks.get(key, ())) for key in keys] for rank in row.ranks}
        odd = {rank: n for rank, n in here.items() if n != one and sum(n) == sum(one)}
        at = [next(s for s, (a, b) in enumerate(zip(n, one, strict=True)) if a != b) for n in odd.values()]
        if odd and row.step == min(at):
            rank, of_rank = next((rank, n[row.step]) for rank, n in odd.items() if n[row.step] != one[row.step])
            where = f"before the update of step {row.step + 1} its calls are {of_rank} on rank {rank}"
            says = f"{where}, and {one[row.step]} in one process: is a step skipped in one of them, for an overflow on "
            says += "its own part, or made too often?"
            return row.found("none", "other calls before the update", ranks=tuple(odd), says=says)
    return None


def of_gradient(judge: Any, row: Row, rows: Sequence[Row]) -> str:
    """What is told of a gradient that fits nowhere by what made it: the calls of layers, the weights, who uses it."""
    if row.kind == "grad_output":
        return _users(judge, row)
    if row.kind != "grad":
        return ""
    wrong = [r for r in rows if (r.kind, r.step, r.status) == ("grad", row.step, "none")]
    return next(filter(None, (_counted(judge, r) for r in wrong)), "") or _weights_in_gradients(judge, wrong)


def _users(judge: Any, row: Row) -> str:
    """The modules that are given an output, if there are several."""
    key = ("output", row.name, row.step, 0)
    made = matrix_of_calls(judge.dense[key]) if key in judge.dense else None
    users = [
        name
        for (name, step, _), es in judge.given.items()
        if step == row.step and made is not None and np.array_equal(matrix_of_calls(es), made)
    ]
    outer = [name for name in dict.fromkeys(users) if not any(name.startswith(f"{other}.") for other in users)]
    named = " and ".join(f"`{name}`" for name in outer)
    return f"{named} are given it, and each sends back its part of this gradient" if len(outer) > 1 else ""


def _counted(judge: Any, row: Row) -> str:
    """How often what comes back in each call of a layer is in the gradient of its weight or bias, if not alike."""
    layer, _, leaf = row.name.rpartition(".")
    given = {(rank, e.call): matrix_of(e) for rank, e in judge.ranks.get(("given", layer, row.step, 0), ())}
    parts: dict[int, dict[int, np.ndarray]] = {}  # call, rank
    for rank, e in judge.ranks.get(("grad_output", layer, row.step, 0), ()):
        back, x = matrix_of(e), given.get((rank, e.call))
        if leaf != "bias" and (x is None or len(x) != len(back)):
            return ""
        parts.setdefault(e.call, {})[rank] = (back.sum(0) if leaf == "bias" else back.T @ x).ravel()
    grads = judge.ranks.get(("grad", row.name, row.step, 0), ())
    rank, found = next(((r, matrix_of(e).ravel()) for r, e in grads if r in row.ranks), (0, np.zeros(0)))
    for ranks in ({r for of in parts.values() for r in of}, {rank}):  # all may have been added up
        columns = [sum(part for r, part in of.items() if r in ranks) for _, of in sorted(parts.items())]
        # fewer numbers than calls, or none, tell nothing
        if not 1 < len(columns) < min(9, len(found)) or not found.any():
            continue
        if any(np.shape(column) != found.shape for column in columns):
            continue
        times, _, independent, _ = np.linalg.lstsq(np.stack(columns, 1), found, rcond=1e-6)
        off = typical(np.stack(columns, 1) @ times - found)
        share = times / (max(times, key=abs) or 1.0)
        if independent == len(columns) and off <= 10 * judge.tolerance * typical(found) and np.ptp(share) > 0.01:
            each = ", ".join(f"call {n} counts {k:.3g} times" for n, k in enumerate(np.round(share, 3) + 0.0, 1))
            return f"in `{row.title}` {each}: what becomes of `.grad` from one backward to the next?"
    return ""


def _weights_in_gradients(judge: Any, wrong: Sequence[Row]) -> str:
    """How many times its own weights each wrong gradient holds beside that of one process, if that is one number."""
    shares = []
    for r in wrong:
        key, start = ("grad", r.name, r.step, 0), ("parameter", r.name, r.step, 0)
        if key not in judge.dense or start not in judge.dense:
            return ""
        one, weights = (matrix_of(judge.dense[k][0]) for k in (key, start))
        for own in (matrix_of(e) for rank, e in judge.ranks.get(key, ()) if rank in r.ranks):
            if own.shape != one.shape or not weights.any():
                return ""
            share = float(((own - one) * weights).sum() / (weights**2).sum())
            if typical(own - one - share * weights) > 10 * judge.tolerance * typical(own):
                return ""
            shares.append(share)
    if len(wrong) < 2 or np.ptp(shares) > 0.01 * abs(shares[0]):
        return ""
    asks = "does a term of the loss on the weights themselves (L2) count once for each rank?"
    return f"{len(wrong)} gradients are off by {shares[0]:.3g} times their own weights: {asks}"


def gradients_of_ranks(ranks: Mapping[Any, Iterable[tuple[int, Traced]]], known: Iterable[str]) -> Iterator[Row]:
    """The rows to blame where ranks have gradients, and one process has none at all."""
    for (kind, name, step, _), pairs in ranks.items():
        have = tuple(sorted({rank for rank, e in pairs if np.any(e.value)}))
        if kind == "grad" and name in known and have:
            says = (
                f"{name_ranks(have)} {'has' if len(have) == 1 else 'have'} gradients, and one process has none: does "
            )
            says += "only one of the two skip the backward (a condition, a batch that is left out)?"
            yield Row(name, kind, step, "not in one process", "none", have, says=says)


def dropped_out(row: Row, masked: Sequence[tuple[int, Traced]]) -> Row:
    """Where a dropout is on: the same zeros where ranks were given the same, others where not."""
    alike: dict[tuple[int, str], dict[bytes, list[int]]] = {}  # call, what was given -> masks -> their ranks
    for i, (rank, e) in enumerate(masked):
        alike.setdefault((e.call, e.dropped), {}).setdefault(e.mask, []).append(rank)
        for other, o in masked[:i]:
            if (e.call, e.mask, e.shape) == (o.call, o.mask, o.shape) and e.dropped != o.dropped:
                says = "the same dropout mask on ranks that hold different parts: seed it by rank"
                return row.found("none", "the same mask", ranks=(other, rank), says=says)
    for masks in alike.values():
        if len(masks) > 1:
            *_, most, few = sorted(masks.values(), key=len, reverse=True)
            says = f"drops other numbers on {name_ranks(few)} than on {name_ranks(most)}"
            says += ", though all were given the same: the ranks part"
            return row.found("none", "masks differ", ranks=tuple(few), says=says)
    return row.found("skipped", "dropout")


def still_alike(row: Row, pairs: Sequence[tuple[int, Traced]], held: Mapping[int, Fit | None], tolerance: float) -> Row:
    """After a step with dropout: ranks that began with the same part of a parameter still have the same."""
    firsts: dict[tuple, tuple[int, Traced]] = {}
    for rank, e in pairs:
        if (fit := held.get(rank)) is None:
            continue
        place = tuple(None if m is None else m.tobytes() for m in (fit.rows, fit.columns, fit.flat))
        other, first = firsts.setdefault(place, (rank, e))
        size = typical(matrix_of(first))
        if first.shape != e.shape or np.abs(first.value - e.value).max(initial=0.0) > tolerance * size:
            says = f"ranks {other} and {rank} hold the same part of it, and after the step other numbers"
            return row.found("none", "ranks differ", ranks=(other, rank), says=says)
    return row.found("skipped", "not compared: a dropout is on")
