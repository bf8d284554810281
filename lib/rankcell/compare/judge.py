"""How the ranks hold each tensor: the trace of several ranks against that of one process, in the order of computing.

What counts are the gradients and the updated parameters (and, where nothing is trained, the last outputs); `blame`
finds the first tensor that explains what is wrong with them. `check.against` is the public name of `compare`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ..errors import UserFacingError
from ..results import Run, grouped, name_ranks, name_some
from . import clues, layouts, wording
from .beside import Beside, dropped_out, gradients_of_ranks, set_aside, steps_elsewhere, still_alike
from .blame import before, first_wrong, right_elsewhere
from .comparison import FINAL, Comparison, Row
from .coverage import ROUNDED, are_near, covered, moved
from .reference import NOT_FINITE, ROUNDING, SLACK, TOLERANCE, Fit, Piece, Reference, Traced, Tried, matrix_of, typical
from .reference import matrix_of_calls as _matrix
from .wording import ALIKE, APART, BEFORE, CUT, GONE, LEFT_OUT, NO_GRADIENT, UNEVEN

NOISE = 0.1  # times the floor, in 16 bits the floor: no optimizer's update of such a gradient is compared
TINY = 0.01  # times the tolerance: what is lost of a gradient by adding in another order
FACTORS = 10.0  # times the tolerance: multiples that differ by less are the same


class NothingToCompare(UserFacingError, ValueError):
    """The Run or the trace that was given holds no trace, or not one of the other."""


def compare(
    run: Run, one: Any, *, mesh: Mapping[str, int] | None = None, names: Mapping[str, str] | None = None
) -> Comparison:
    """How the tensors traced in `run` make up those of `one`, the trace of one process; see `check.against`."""
    dense = _dense(one)
    ranks = _ranks(run, names or {})
    if mesh is not None and (places := int(np.prod(list(mesh.values())))) != run.world_size:
        raise NothingToCompare(f"The mesh {dict(mesh)} has {places} places, and the Run has {run.world_size} ranks.")
    judge = Judge(dense, ranks, mesh, getattr(one, "beside", ()))
    rows = set_aside(judge, judge.rows())
    if not rows:
        some = sorted({name for _, name, *_ in ranks})[:4]
        raise NothingToCompare(
            f"No tensor of the ranks has a name of the dense model. The ranks have {', '.join(map(repr, some))}; say "
            f"which is which with names={{'the ranks' name': 'the dense name'}}."
        )
    first, blamed = None, first_wrong(rows)
    if blamed is not None and (odd := steps_elsewhere(judge, rows)):
        rows, blamed = [odd if r.key == odd.key else r for r in rows], (odd, False)
    beside = Beside(() if judge.has_dropout else getattr(one, "beside", ()), ranks, SLACK * judge.tolerance)
    rows, blamed = beside.told(rows, blamed, judge.holders)
    if blamed is not None:
        row, used_as_whole = clues.explained(judge, rows, *blamed)
        holders = {*judge.holders.get(row.name, ())}
        if row.kind == "grad":  # without one of its own a rank has none that is right
            holders &= {rank for rank, _ in ranks.get((row.kind, row.name, row.step, 0), ())}
        holders |= right_elsewhere(row, rows)
        all_ranks = {rank for pairs in ranks.values() for rank, _ in pairs}
        past = before(row, rows)
        first = wording.said(
            row, used_as_whole=used_as_whole, past=past, holders=holders, mesh=mesh or {}, ranks=all_ranks
        )
    known = {name for kind, name, *_ in dense if kind == "parameter"}
    strangers = sorted({k[1] for k in ranks if k[0] == "parameter" and k[1] not in known})
    have = "has" if len(strangers) == 1 else "have"
    note = f"{name_some(strangers)} {have} no partner in the dense model: not compared."
    return Comparison(tuple(rows), first, (note,) if strangers else ())


_Key = tuple[str, str, int, int]  # kind, name, step, part
_OfRanks = dict[_Key, list[tuple[int, Traced]]]


def _dense(one: Any) -> dict[_Key, list[Traced]]:
    entries = getattr(one, "entries", one)
    if isinstance(entries, Run) or not isinstance(entries, Sequence) or not entries:
        raise NothingToCompare(
            "There is no trace of one process to compare with. Make one in the notebook: "
            "`with rankcell.trace(dense) as one: loss(dense(x), y).backward()`."
        )
    found = grouped(((e.kind, e.name, e.step, e.part), e) for e in entries)
    for entries in found.values():
        entries.sort(key=lambda e: e.call)  # gradients come in another order
    return found


def _ranks(run: Run, names: Mapping[str, str]) -> _OfRanks:
    if not isinstance(run, Run) or not any(r.trace for r in run.ran):
        raise NothingToCompare(
            "The ranks have traced nothing. In the rank cell, put what is to be compared into "
            "`with rankcell.trace(model):`, and give the cell a name: `%%ranks 4 -o run`."
        )
    if run.failed:
        raise NothingToCompare(f"The Run failed on {name_ranks([r.rank for r in run.failed])}. Repair that first.")
    # of an uneven shard nothing is left for the last rank
    found = ((r.rank, e) for r in run.ran for e in r.trace if 0 not in e.shape)
    return grouped(((e.kind, _renamed(e.name, names), e.step, e.part), (rank, e)) for rank, e in found)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for ours in sorted(names, key=len, reverse=True):
        if ours == "" or name == ours or name.startswith(f"{ours}."):
            return ".".join(filter(None, (names[ours], name[len(ours) :].removeprefix("."))))
    return name


class Judge:
    """Goes through the tensors in the order of computing, and remembers what it has seen of each rank."""

    def __init__(
        self, dense: dict[_Key, list[Traced]], ranks: _OfRanks, mesh: Mapping[str, int] | None, beside: Sequence[Traced]
    ) -> None:
        self.dense, self.ranks, self.mesh = dense, ranks, mesh
        self.given = grouped(((e.name, e.step, e.part), e) for e in beside if e.kind == "given")
        self.seen = layouts.SeenPlaces()
        self.where: dict[tuple[str, int, tuple[int, ...]], Fit] = {}  # parameter, rank, shape
        self.multiples: dict[int, dict[float, None]] = {}  # step -> those of the gradients that travel back
        self.by_size = 1.0  # how many times the tensor its pieces are, if all rows are as often on the ranks
        self.stages: set[tuple[str, int]] = set()  # modules of which a rank has some inner ones only
        self.holders: dict[str, dict[int, Fit | None]] = {}  # parameter -> rank -> where it lies
        self.forward: dict[tuple[str, int, int, int, int], tuple[Piece, Reference]] = {}  # outputs that fit
        self.rows_of: dict[tuple[str, str, int], dict[int, Any]] = {}  # by the key of a Row: rank -> a Map or None
        theirs = [(key, rank, e) for key, pairs in ranks.items() for rank, e in pairs]
        # one that drops what one process drops is no matter of chance
        self.has_dropout = any(e.mask and e.mask not in {d.mask for d in dense.get(k, ())} for k, _, e in theirs)
        worst = max(TOLERANCE.get(e.dtype, 0.0) for e in chain(*dense.values(), (e for *_, e in theirs))) or 1e-4
        self.world_size = float(len({rank for _, rank, _ in theirs}))
        depth = len({name for kind, name, *_ in dense if kind == "output"})
        self.in_16_bits = worst >= TOLERANCE["float16"]
        # torch adds 1e-6 to the norm by which it clips, and a clip of one's own may not
        clips = [e.value for e in (*beside, *(e for *_, e in theirs)) if e.kind == "clip"]
        self.of_clip = min(1e-3, max((2e-6 / norm for norm, limit in clips if norm > limit), default=0.0))
        self.tolerance = worst * min(4.0, max(1.0, depth**0.5 / 3))
        sizes = grouped((kind, typical(_matrix(es))) for (kind, *_), es in dense.items())
        self.floors = {kind: 0.01 * float(np.median(values)) for kind, values in sizes.items()}

    def rows(self) -> list[Row]:
        """One for each tensor of the dense model that the ranks have, in order."""
        found: list[Row] = []
        for key, entries in sorted(self.dense.items(), key=lambda item: item[1][0].order):
            kind, name, step, _ = key
            if pairs := self.ranks.get(key):
                found.append(self._row(key, entries, pairs))
            elif kind == "grad_output" and (cut := _cut_off(self, name, step)):
                found.append(Row(name, kind, step, GONE, "missing", cut))
            elif kind in FINAL and name in self.holders:
                holders = tuple(sorted(self.holders[name]))
                if kind == "grad":
                    found.append(Row(name, kind, step, GONE, "missing", holders))
                elif any(k == "parameter" and s == step for k, _, s, _ in self.ranks):
                    found.append(Row(name, kind, step, BEFORE, "none", holders))
        learns = any(kind == "grad" for kind, *_ in self.dense)
        return found if learns else [*found, *gradients_of_ranks(self.ranks, self.holders)]

    def _row(self, key: _Key, entries: Sequence[Traced], pairs: Sequence[tuple[int, Traced]]) -> Row:
        kind, name, step, _ = key
        ranks = tuple(sorted({rank for rank, _ in pairs}))
        row = Row(name, kind, step, "", "fits", ranks, next((e.line for _, e in pairs if e.line), 0))
        masked = [(rank, e) for rank, e in pairs if e.mask]
        if bool(masked) != any(e.mask for e in entries):
            here, there = ("on the ranks", "in one process") if masked else ("in one process", "on the ranks")
            says = f"the dropout acts {here} and not {there}: `train()` or `eval()`?"
            return row.found("none", f"a dropout acts {here} only", says=says)
        if masked and self.has_dropout:
            return dropped_out(row, masked)
        if self.has_dropout and kind != "parameter":
            return row.found("skipped", "not compared: a dropout is on")
        lacking = sorted(set(self.holders.get(name, ())) - set(ranks)) if kind in FINAL else []
        if lacking and kind == "parameter":
            return row.found("none", BEFORE, ranks=tuple(lacking))
        if self.has_dropout and step:
            return still_alike(row, pairs, self.holders.get(name, {}), self.tolerance)
        if kind == "parameter" and step and self._is_noise(name, step - 1):
            return row.found("skipped", "not compared: its gradient is noise")
        reference, pieces = self._pieces(key)
        if kind == "parameter" and step:
            reference, pieces = self._update(key, reference, pieces)
        if kind not in FINAL and reference.n * reference.f > 1 and all(p.n * p.f == 1 for p in pieces):
            return row.found("skipped", "a number: not compared")
        if reference.n * reference.f == 1 and not reference.is_noise:
            return _number(row, reference, pieces, self.forward)
        self.by_size = reference.multiple_by_size(pieces)
        fits = [self._place(key, p, reference) for p in pieces]
        if kind == "parameter" and step == 0:
            self.holders[name] = {p.rank: fit for p, fit in zip(pieces, fits, strict=True)}
        shape = entries[0].shape if len(entries) == 1 else ()
        if kind == "parameter" and step and ("grad", name, step - 1, 0) not in self.dense:
            row = replace(row, clue=NO_GRADIENT)
        found = self._judged(row, key, reference, shape, list(zip(pieces, fits, strict=True)))
        if kind == "grad" and found.status != "fits" and self._is_lost(name, step, pieces, reference):
            return row.found("skipped", "not compared: noise")
        is_start = kind == "parameter" and step == 0 and found.status == "none"
        if is_start and are_near(pieces, reference) and self._is_noise(name, 0):
            return row.found("skipped", "not compared: its gradient is noise")  # of which earlier steps made something
        if lacking and found.status == "fits":
            return found.found("missing", f"{found.layout}, but not there", ranks=tuple(lacking))
        return found

    def _pieces(self, key: _Key) -> tuple[Reference, list[Piece]]:
        """The tensor of one process, all calls one below the other, and what the ranks have of it."""
        kind, name, *_ = key
        floor, space = 0.0 if kind == "parameter" else self.floors[kind], name if kind in FINAL else ""
        tolerance = max(self.tolerance, self.of_clip if kind in FINAL else 0.0)
        reference = Reference(_matrix(self.dense[key]), tolerance, floor, self.dense[key][0].shape, space)
        return reference, [Piece(rank, e.call, e.shape, matrix_of(e)) for rank, e in self.ranks[key]]

    def lost(self, row: Row) -> tuple[Reference, Tried] | None:
        """The tensor of a row in one process, and what the ranks have of it, if some of that fits nowhere."""
        for key in self.ranks:
            if key[:3] == (row.kind, row.name, row.step) and key in self.dense:
                reference, pieces = self._pieces(key)
                tried = [(p, self._place(key, p, reference)) for p in pieces]
                if any(fit is None for _, fit in tried):
                    return reference, tried
        return None

    def _update(self, key: _Key, reference: Reference, pieces: Sequence[Piece]) -> tuple[Reference, list[Piece]]:
        """By how much a step changed a parameter, in one process and on the ranks: little beside the parameter."""
        kind, name, step, part = key
        earlier = (kind, name, step - 1, part)
        before = {rank: Piece(rank, e.call, e.shape, matrix_of(e)) for rank, e in self.ranks.get(earlier, [])}
        old = self.dense.get(earlier)
        if not old:
            return reference, list(pieces)
        was = _matrix(old)
        if any(p.rank not in before or before[p.rank].shape != p.shape for p in pieces):
            now, then = (
                [_lies_in(p, m, self.seen) for p in pieces] for m in (reference, replace(reference, matrix=was))
            )
            if all(then) and not any(now):  # it is cut otherwise than before, and has not changed
                return reference, [replace(p, matrix=np.zeros_like(p.matrix)) for p in pieces]
            return reference, list(pieces)
        change = reference.matrix - was
        rounding = ROUNDING.get(old[0].dtype, 0.0) * typical(was) / self.tolerance
        slack = None
        if gradient := self.dense.get(("grad", name, step - 1, 0)):  # Adam makes a whole step of the smallest one
            size = np.abs(_matrix(gradient))
            noise = (1.0 if self.in_16_bits else TINY) * self.tolerance * typical(size)
            slack = np.abs(change).max(initial=0.0) * np.minimum(1.0, noise / np.maximum(size, 1e-300))
        changed = replace(reference, matrix=change, floor=rounding, slack=slack)
        return changed, [replace(p, matrix=p.matrix - before[p.rank].matrix) for p in pieces]

    def _is_noise(self, name: str, step: int) -> bool:
        """Whether a parameter's gradient is so small that an optimizer may make anything of it; or, where it has none,
        that of its twin in another part of the model, of which it may be the moving average.
        """
        gradient = self.dense.get(("grad", name, step, 0))
        if gradient is None:
            ending = name.partition(".")[2]
            return any(
                self._is_noise(n, step)
                for kind, n, s, _ in self.dense
                if kind == "grad" and s == step and ending and ending in (n, n.partition(".")[2])
            )
        return typical(_matrix(gradient)) < (1.0 if self.in_16_bits else NOISE) * self.floors["grad"]

    def _is_lost(self, name: str, step: int, pieces: Sequence[Piece], reference: Reference) -> bool:
        """Whether a gradient is noise in one process, and little more on the ranks, which round and clip elsewhere."""
        small = all(typical(p.matrix) < self.floors["grad"] for p in pieces)
        return small and (reference.is_noise or (self.in_16_bits and self._is_noise(name, step)))

    def _place(self, key: _Key, piece: Piece, reference: Reference) -> Fit | None:
        kind, name, step, part = key
        if kind in FINAL:
            return self._place_of_parameter(piece, reference, changes=kind == "parameter" and step > 0)
        fit = layouts.place(piece, reference, self.seen)
        place = (name, step, part, piece.rank, piece.call)
        if kind == "output":
            if fit is not None:
                self.forward[place] = piece, reference
            return fit
        usual = self.multiples.setdefault(step, {self.world_size: None})
        for k in () if fit is not None else (*reversed(usual), self.by_size):
            # rows that were taken for others, which looked like them on the way forward
            if fit := layouts.place(replace(piece, matrix=piece.matrix / k), reference, self.seen):
                fit = replace(fit, factor=fit.factor * k)
                break
        if fit is not None and fit.factor != 1.0:
            usual.pop(fit.factor, None)
            usual[fit.factor] = None  # the last one is tried first
        if fit is None or fit.rows is None or place not in self.forward:
            return fit
        # a gradient belongs to the rows that the rank has of that output, which tells rows of zeros apart
        output, whole = self.forward[place]
        are_alike = whole.matrix.shape == reference.matrix.shape and output.shape == piece.shape
        if not are_alike or whole.factor(output.matrix, fit.rows, fit.columns) is not None:
            return fit
        both = Reference(np.hstack([whole.matrix / whole.scale, reference.matrix / reference.scale]), self.tolerance)
        ours = np.hstack([output.matrix / whole.scale, piece.matrix / fit.factor / reference.scale])
        found = both.locate_rows(replace(piece, matrix=ours), None)
        return replace(fit, rows=found[0], sure=found[1]) if found and fit.columns is None else None

    def _place_of_parameter(self, piece: Piece, reference: Reference, *, changes: bool) -> Fit | None:
        """A gradient lies where its parameter does, and so does an update."""
        key = (reference.space, piece.rank, piece.shape)
        known = self.where.get(key)
        if known is not None and known.flat is None:
            k = reference.factor(piece.matrix, known.rows, known.columns)
            return None if k is None else replace(known, factor=k)
        changes = changes and known is None
        fit = layouts.place(piece, reference, self.seen) if known is None else None
        if not changes and (fit is None or fit.factor != 1.0):
            flat = layouts.place_flat(piece, reference, self.seen)
            if flat is not None and (fit is None or flat.factor == 1.0):
                fit = flat
        if fit is not None and fit.sure and not changes:
            self.where[key] = replace(fit, factor=1.0)
        return fit

    def _judged(self, row: Row, key: _Key, reference: Reference, shape: tuple[int, ...], tried: Tried) -> Row:
        lost = [p for p, fit in tried if fit is None and not self._is_of_a_stage(p, key)]
        placed = [(p, fit) for p, fit in tried if fit is not None]
        if lost:
            pieces = [p for p, _ in tried]
            total = None if row.kind == "parameter" else layouts.sums(pieces, reference, self.seen, self.mesh)
            if total is not None:
                return row.found("partial", wording.partial_words(total), axes=total.axes, factor=total.factor)
            return _lost(row, reference, lost, tried, self.seen)
        if not placed:
            return row.found("skipped", "of a stage: not compared")
        factors = {p.rank: fit.factor for p, fit in placed}
        worst = max((fit.factor for _, fit in placed), key=lambda k: abs(k - 1))
        if worst == 1.0:
            self.rows_of[row.key] = {p.rank: fit.rows for p, fit in placed if fit.sure}
            return moved(covered(row, reference, shape, placed), self.rows_of)
        wrong = tuple(sorted({p.rank for p, fit in placed if fit.factor != 1.0}))
        if row.kind == "grad_output" and (found := _calls_apart(row, placed)):
            return found
        # of gradients that travel back the losses of all ranks count together
        odd = [fit.factor for _, fit in placed if fit.factor != 1.0 or row.kind == "grad_output"]
        same = max(odd) - min(odd) <= (near := FACTORS * self.tolerance * abs(worst)) or _comes_twice(row, placed, near)
        # any number is a multiple of another, as one that all ranks have is of the parts of each
        if not same and reference.matrix.size > 1 and len({p.matrix.tobytes() for p, _ in placed}) == 1:
            return row.found("none", _nowhere(row, reference, [p for p, _ in placed], self.seen), ranks=wrong)
        layout = f"{wording.times_words(worst)} it" if same else wording.others_words(factors)
        return row.found("scaled", layout, ranks=wrong, factor=worst if same else 0.0)

    def _is_of_a_stage(self, piece: Piece, key: _Key) -> bool:
        """Whether a rank has but some of the modules within this one, and its tensor is that of the last of them."""
        kind, name, step, _ = key
        if kind != "output":
            return kind == "grad_output" and (name, piece.rank) in self.stages
        prefix = f"{name}." if name else ""
        inner = {n for k, n, *_ in self.dense if k == "output" and n.startswith(prefix) and n != name}
        of_rank = {k: [e for r, e in ps if r == piece.rank] for k, ps in self.ranks.items() if k[0] == kind}
        held = {n for (_, n, *_), es in of_rank.items() if es}
        if not inner - held:
            return False
        order = {n: es[0].order for (k, n, s, _), es in self.dense.items() if k == kind and s == step and n in inner}
        is_cut = not name and max(order, key=order.__getitem__) not in held
        own = (e for (_, n, s, _), es in of_rank.items() if n in inner and s == step for e in es)
        if is_cut or any(e.shape == piece.shape and np.array_equal(matrix_of(e), piece.matrix) for e in own):
            self.stages.add((name, piece.rank))  # what it sends on may be made of its last module's output
            return True
        return False


def _cut_off(judge: Judge, name: str, step: int) -> tuple[int, ...]:
    """Ranks that compute a module whose own parameters all end without a gradient there."""
    learns = [n for n in judge.holders if n.rpartition(".")[0] == name and ("grad", n, step, 0) in judge.dense]
    if not learns or any(("grad", n, step, 0) in judge.ranks for n in learns):
        return ()
    return tuple(sorted({rank for rank, _ in judge.ranks.get(("output", name, step, 0), [])}))


def _lies_in(piece: Piece, reference: Reference, seen: layouts.SeenPlaces) -> bool:
    fit = layouts.place(piece, reference, seen)
    return fit is not None and fit.factor == 1.0


def _comes_twice(row: Row, placed: Sequence[tuple[Piece, Fit]], near: float) -> bool:
    """Whether gradients come back to each call several times, as one that is part of a loss does, everywhere alike."""
    passes = [*grouped(((p.rank, p.call), fit.factor) for p, fit in placed).values()]
    alike = len({*map(len, passes)}) == 1 < len(passes[0])
    return row.kind == "grad_output" and alike and bool(np.ptp(passes, axis=0).max() <= near)


def _calls_apart(row: Row, placed: Sequence[tuple[Piece, Fit]]) -> Row | None:
    """A module is called several times, and of one call all ranks have another multiple than of the next."""
    calls = {p.call: fit.factor for p, fit in placed}
    near = 1e-3 * max(map(abs, calls.values()))
    if np.ptp([*calls.values()]) <= near or any(abs(fit.factor - calls[p.call]) > near for p, fit in placed):
        return None
    each = ["as it is" if k == 1.0 else f"{wording.times_words(k)} it" for _, k in sorted(calls.items())]
    layout = ", ".join(f"call {n}: {words}" for n, words in enumerate(each, 1))
    says = f"its calls do not count alike ({layout}): is each loss divided by the same number?"
    return row.found("scaled", layout, factor=0.0, says=says)


def _number(row: Row, reference: Reference, pieces: Sequence[Piece], forward: Mapping[Any, tuple[Piece, Any]]) -> Row:
    """A single number, such as a loss: the same everywhere, or a sum or mean of what the ranks have."""
    wanted = float(reference.matrix[0, 0])
    values = [float(p.matrix.sum()) for p in pieces]
    limit = SLACK * reference.tolerance * max(abs(wanted), reference.scale)
    if all(abs(v - wanted) <= limit for v in values):
        return row.found("fits", "the same on all")
    for n, layout in ((1, "parts of a sum"), (len(values), "the mean of the ranks'")):
        if abs(sum(values) / n - wanted) <= limit:
            words = wording.partial_words(layouts.Sum(row.ranks, n)) if row.kind == "grad" else layout
            return row.found("partial" if row.kind == "grad" else "batch", words, factor=n)
    if wanted and (row.kind == "grad" or (row.kind == "parameter" and row.step)):  # any number is a multiple of it
        k = values[0] / wanted if max(values) - min(values) <= limit else 0.0
        each = wording.others_words({p.rank: v / wanted for p, v in zip(pieces, values, strict=True)})
        return row.found("scaled", f"{wording.times_words(k)} it" if k else each, factor=k)
    rows = {place[3]: p.n for place, (p, _) in forward.items() if place[1] == row.step}  # of a rank, last seen
    shares = [rows.get(p.rank, 0) for p in pieces]
    if any(shares) and abs(np.average(values, weights=shares) - wanted) <= limit:
        return row.found("none", "means over own samples", says=UNEVEN)
    return row.found("none", "another number")


def _lost(row: Row, reference: Reference, lost: Sequence[Piece], tried: Tried, seen: layouts.SeenPlaces) -> Row:
    is_one = row.kind == "grad" and reference.matrix.size > 1 and all(p.matrix.size == 1 for p, _ in tried)
    if is_one and len({p.matrix.tobytes() for p, _ in tried}) > 1:
        return row.found("skipped", "one number on each: not compared")
    return row.found("none", _nowhere(row, reference, lost, seen), ranks=tuple(sorted({p.rank for p in lost})))


def _nowhere(row: Row, reference: Reference, lost: Sequence[Piece], seen: layouts.SeenPlaces) -> str:
    """What can be said of pieces that fit nowhere."""
    piece = lost[0]
    if row.kind == "parameter" and row.step and not any(p.matrix.any() for p in lost):
        return BEFORE
    if any(np.isin(p.matrix, NOT_FINITE).any() for p in lost) and not np.isin(reference.matrix, NOT_FINITE).any():
        return "NaN or infinity"
    if row.kind == "grad_output":
        empty, rows = sum(int((~p.matrix.any(1)).sum()) for p in lost), sum(p.n for p in lost)
        if empty > 2 * rows * (1 - reference.matrix.any(1).mean()):
            length = piece.shape[-2] if len(piece.shape) > 2 else rows
            places = {int(n) % length for p in lost for n in np.flatnonzero(~p.matrix.any(1))}
            which = name_ranks(sorted(places)).replace("rank", "position")
            at = f" ({which} of a rank's {length})" if 2 * len(places) <= length else ""
            return f"{empty} of {rows} {LEFT_OUT}{at}"
    same = ""
    if len(lost) == len(row.ranks) > 1:
        kinds, is_cut = len({p.matrix.tobytes() for p in lost}), piece.matrix.shape != reference.matrix.shape
        same = (CUT if is_cut else ALIKE) if kinds == 1 else APART * (row.kind == "grad" and not is_cut)
    parts = [reference.part(*where)[0] for where in seen.both(piece, reference)]
    share = min((typical(piece.matrix - part) / max(typical(part), 1e-30) for part in parts), default=0.0)
    if not parts or (share < ROUNDED and piece.matrix.shape != reference.matrix.shape):
        return f"other numbers{same}"
    if share >= ROUNDED:
        sizes = sorted({f"{typical(p.matrix) / max(typical(parts[0]), 1e-30):.2g}" for p in lost}, key=float)
        grown = f", {' to '.join(sizes[:: max(1, len(sizes) - 1)])} times as large" if row.kind == "grad" else ""
        return f"other numbers ({share:.0%} off{grown}){same}"
    off_by = f"{share:.1%} off" if share >= 1e-3 else f"{share:.1e} off"
    return f"{off_by}{same}" if row.kind == "parameter" else f"{off_by}, as if rounded"
