"""Which tensor went wrong first: the trace of several ranks against that of one process.

`compare` pairs tensors by name, has `layouts` say for each how the ranks' tensors make up the one, and decides: what
counts are the gradients and the updated parameters (and, where nothing is trained, the last outputs). If one of them is
wrong, the first tensor in the order of computing that fits nowhere is to blame, or the partial sums just before it that
somebody took for whole. `check.against` is its public name.
"""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import UserFacingError
from ..results import Run, name_ranks
from . import layouts
from .layouts import Fit, Piece, Reference
from .traced import NOT_FINITE, Traced

NOISE = 0.1  # times the floor: no optimizer's update of such a gradient is compared
TINY = 0.01  # times the tolerance: what is lost of a gradient by adding in another order
FACTORS = 10.0  # times the tolerance: multiples that differ by less are the same
BEFORE = "the weights before the step"
REORDERED = ", in another order"
SHOWN = 12  # rows of the table that is shown
_KINDS = {
    "output": "output",
    "grad_output": "gradient of the output",
    "grad": "gradient",
    "parameter": "weights",
}
_FINAL = ("grad", "parameter")
_ROUNDED = 0.02  # a tensor that is off by less than this share looks like one that was rounded


class NothingToCompare(UserFacingError, ValueError):
    """The Run or the trace that was given holds no trace, or not one of the other."""


@dataclass(frozen=True)
class Row:
    """How the ranks hold one tensor of the dense model.

    `kind` is "output", "grad_output", "grad" or "parameter"; `status` is "fits", "scaled", "partial", "none",
    "missing", "batch" (a number of which each rank has its part), "uncovered" (rows of the batch are on no rank, or on
    more ranks than others), "patchy" (many single rows seem to be on no rank) or "skipped" (nothing to compare).
    `ranks` are those that hold it; of a tensor that is wrong, those where it is.
    """

    name: str
    kind: str
    step: int
    layout: str
    status: str
    ranks: tuple[int, ...]
    line: int = 0
    factor: float = 1.0
    axes: tuple[str, ...] = ()
    says: str = ""

    @property
    def title(self) -> str:
        """The tensor in words."""
        return f"{self.name or 'the model'}{'.grad' if self.kind == 'grad' else ''}"


@dataclass(frozen=True)
class Comparison:
    """What `check.against` found: `ok`, the `first` wrong tensor, a row for each tensor in the order of computing."""

    rows: tuple[Row, ...]
    first: Row | None
    notes: tuple[str, ...] = ()
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ok", self.first is None)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def text(self) -> str:
        """The verdict in a sentence or two."""
        if self.first is not None:
            return self.first.says
        counts = {k: sum(r.kind == k for r in self.rows) for k in _KINDS}
        what = ", ".join(f"{n} {_plural(_KINDS[k], n)}" for k, n in counts.items() if n)
        return f"the ranks' tensors make up those of one process: {what}"

    def _shown(self) -> Sequence[Row]:
        """The rows around the first wrong one; of a right comparison the first of each kind."""
        if self.first is None:
            kinds = {r.kind: 0 for r in self.rows}
            shown = []
            for row in self.rows:
                kinds[row.kind] += 1
                if kinds[row.kind] <= SHOWN // len(kinds):
                    shown.append(row)
            return shown
        at = next((i for i, r in enumerate(self.rows) if (r.name, r.kind, r.step) == _key(self.first)), 0)
        start = max(0, min(at - SHOWN // 2, len(self.rows) - SHOWN))
        return self.rows[start : start + SHOWN]

    def __repr__(self) -> str:
        lines = [f"{'✓' if self.ok else '✗'} {self.text}"]
        for row in self._shown():
            mark = ">" if self.first is not None and _key(row) == _key(self.first) else " "
            lines.append(f" {mark} {row.title:<34} {_KINDS[row.kind]:<22} {row.layout}")
        if len(self.rows) > SHOWN:
            lines.append(f"   ({len(self.rows)} tensors in all: `.rows`)")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        colour, veil = ("#009e73", "0,158,115") if self.ok else ("#d55e00", "213,94,0")
        cells = []
        for row in self._shown():
            strong = self.first is not None and _key(row) == _key(self.first)
            style = f"font-weight:600;background:rgba({veil},.12)" if strong else ""
            cells.append(
                f'<tr style="{style}"><td style="text-align:left"><code>{html.escape(row.title)}</code></td>'
                f'<td style="text-align:left">{_KINDS[row.kind]}</td><td style="text-align:left">'
                f'{html.escape(row.layout)}</td><td style="text-align:left">{_who(row)}</td></tr>'
            )
        more = f"<p>{len(self.rows)} tensors in all: <code>.rows</code></p>" if len(self.rows) > SHOWN else ""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f'<div class="rankcell-check" style="display:inline-block;padding:.15em .6em;border-radius:4px;'
            f'border-left:3px solid {colour};background:rgba({veil},.12);color:inherit">'
            f"{'✓' if self.ok else '✗'} {html.escape(self.text)}</div>"
            f'<table style="font-size:.9em;margin-top:.4em"><thead><tr><th style="text-align:left">tensor</th>'
            f'<th style="text-align:left">what</th><th style="text-align:left">on the ranks</th>'
            f'<th style="text-align:left">where</th></tr></thead><tbody>{"".join(cells)}</tbody></table>{more}{notes}'
        )


def compare(
    run: Run,
    one: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    names: Mapping[str, str] | Callable[[str], str] | None = None,
    rtol: float | None = None,
) -> Comparison:
    """How the tensors traced in `run` make up those of `one`, the trace of one process; see `check.against`."""
    dense = _dense(one)
    ranks = _ranks(run, names)
    places = run.world_size if mesh is None else int(np.prod(list(mesh.values())))
    if mesh is not None and places != run.world_size:
        raise NothingToCompare(
            f"The mesh {dict(mesh)} has {places} places, and the Run has {run.world_size} ranks."
        )
    judge = _Judge(dense, ranks, mesh, rtol)
    rows = judge.rows()
    if not rows:
        some = sorted({name for _, name, *_ in ranks})[:4]
        raise NothingToCompare(
            f"No tensor of the ranks has a name of the dense model. The ranks have {', '.join(map(repr, some))}; say "
            f"which is which with names={{'the ranks' name': 'the dense name'}}."
        )
    return Comparison(tuple(rows), _first(rows, judge), tuple(judge.notes))


_Key = tuple[str, str, int, int]  # kind, name, step, part


def _dense(one: Any) -> dict[_Key, list[Traced]]:
    entries = getattr(one, "entries", one)
    if isinstance(entries, Run) or not isinstance(entries, Sequence) or not entries:
        raise NothingToCompare(
            "There is no trace of one process to compare with. Make one in the notebook: "
            "`with rankcell.trace(dense) as one: loss(dense(x), y).backward()`."
        )
    if any(e.whole is None for e in entries):
        raise NothingToCompare(
            "The second trace was made on a rank. Make that of one process in the notebook."
        )
    found: dict[_Key, list[Traced]] = {}
    for e in entries:
        found.setdefault((e.kind, e.name, e.step, e.part), []).append(e)
    for entries in found.values():
        entries.sort(key=lambda e: e.call)  # gradients come in another order
    return found


def _ranks(run: Run, names: Any) -> dict[_Key, list[tuple[int, Traced]]]:
    if not isinstance(run, Run) or not any(r.trace for r in run.ran):
        raise NothingToCompare(
            "The ranks have traced nothing. In the rank cell, put what is to be compared into "
            "`with rankcell.trace(model):`, and give the cell a name: `%%ranks 4 -o run`."
        )
    found: dict[_Key, list[tuple[int, Traced]]] = {}
    for result in run.ran:
        for e in result.trace:
            if 0 in e.shape:
                continue  # of an uneven shard nothing is left for the last rank
            found.setdefault((e.kind, _renamed(e.name, names), e.step, e.part), []).append((result.rank, e))
    return found


def _renamed(name: str, names: Any) -> str:
    if names is None:
        return name
    if callable(names):
        return str(names(name))
    for ours in sorted(names, key=len, reverse=True):
        if name == ours or name.startswith(f"{ours}."):
            return f"{names[ours]}{name[len(ours) :]}".lstrip(".")
        if ours == "":
            return f"{names[ours]}.{name}" if name else str(names[ours])
    return name


class _Judge:
    """Goes through the tensors in the order of computing, and remembers what it has seen of each rank."""

    def __init__(
        self,
        dense: dict[_Key, list[Traced]],
        ranks: dict[_Key, list[tuple[int, Traced]]],
        mesh: Mapping[str, int] | None,
        rtol: float | None,
    ) -> None:
        self.dense, self.ranks, self.mesh = dense, ranks, mesh
        self.memory = layouts.Memory()
        self.flats: dict[tuple, np.ndarray] = {}
        self.notes: list[str] = []
        self.where: dict[tuple[str, int, tuple[int, ...]], Fit] = {}  # parameter, rank, shape
        self.stages: set[tuple[str, int]] = set()  # modules of which a rank has some inner ones only
        self.holders: dict[str, dict[int, Fit | None]] = {}  # parameter -> rank -> where it lies
        self.multiples: dict[tuple[int, int], float] = {}  # rank, step -> of the gradient that travels back
        self.forward: dict[tuple[str, int, int, int, int], tuple[Piece, Reference]] = {}  # outputs that fit
        self.has_dropout = any(
            e.mask and e.mask not in {d.mask for d in dense.get(key, ())}
            for key, pairs in ranks.items()
            for _, e in pairs
        )  # one that drops what one process drops is no matter of chance
        types = {e.dtype for es in dense.values() for e in es} | {
            e.dtype for ps in ranks.values() for _, e in ps
        }
        worst = max(types, key=lambda t: layouts.TOLERANCE.get(t, 0.0))
        depth = len({name for kind, name, *_ in dense if kind == "output"})
        self.tolerance = rtol or layouts.TOLERANCE.get(worst, 1e-4) * min(4.0, max(1.0, depth**0.5 / 3))
        sizes: dict[str, list[float]] = {}
        for (kind, *_), entries in dense.items():
            sizes.setdefault(kind, []).append(layouts.typical(_matrix(entries)))
        self.floors = {kind: 0.01 * float(np.median(values)) for kind, values in sizes.items()}

    def rows(self) -> list[Row]:
        """One for each tensor of the dense model that the ranks have, in order."""
        found: list[Row] = []
        for key, entries in sorted(self.dense.items(), key=lambda item: item[1][0].order):
            kind, name, step, _ = key
            pairs = self.ranks.get(key, [])
            if not pairs:
                if kind == "grad" and name in self.holders:
                    found.append(
                        Row(name, kind, step, "on no rank", "missing", tuple(sorted(self.holders[name])))
                    )
                if kind == "grad_output" and (cut := self._cut_off(name, step)):
                    found.append(Row(name, kind, step, "on no rank", "missing", cut))
                if kind == "parameter" and step and name in self.holders:
                    found += self._never_updated(name, step)
                continue
            found.append(self._row(key, entries, pairs))
        return [*self._strangers(), *found]

    def _never_updated(self, name: str, step: int) -> list[Row]:
        """A parameter that no rank updates, where others are; where none is, the ranks have taken no such step."""
        if any(k == "parameter" and s == step for k, _, s, _ in self.ranks):
            return [Row(name, "parameter", step, BEFORE, "none", tuple(sorted(self.holders[name])))]
        note = f"One process took optimizer step {step}, and no rank did: updates from there on are not compared."
        if not any("no rank did" in other for other in self.notes):
            self.notes.append(note)
        return []

    def _cut_off(self, name: str, step: int) -> tuple[int, ...]:
        """Ranks that compute a module whose own parameters all end without a gradient there."""
        own = [n for n in self.holders if n.rpartition(".")[0] == name]
        learns = [n for n in own if ("grad", n, step, 0) in self.dense]
        if not learns or any(("grad", n, step, 0) in self.ranks for n in learns):
            return ()
        return tuple(sorted({rank for rank, _ in self.ranks.get(("output", name, step, 0), [])}))

    def reference(self, key: _Key, entries: Sequence[Traced]) -> Reference:
        """The tensor of one process, all calls one below the other."""
        kind = key[0]
        matrix = _matrix(entries)
        floor = 0.0 if kind == "parameter" else self.floors[kind]
        return Reference(matrix, self.tolerance, floor, entries[0].shape, len(entries))

    def _row(self, key: _Key, entries: Sequence[Traced], pairs: Sequence[tuple[int, Traced]]) -> Row:
        kind, name, step, _ = key
        line = next((e.line for _, e in pairs if e.line), 0)
        ranks = tuple(sorted({rank for rank, _ in pairs}))
        row = Row(name, kind, step, "", "fits", ranks, line)
        masked = [(rank, e) for rank, e in pairs if e.mask]
        if bool(masked) != any(e.mask for e in entries):
            here, there = ("on the ranks", "in one process") if masked else ("in one process", "on the ranks")
            says = f"the dropout acts {here} and not {there}: `train()` or `eval()`?"
            return replace(row, status="none", layout=f"a dropout acts {here} only", says=says)
        if masked and self.has_dropout:
            return self._dropped_out(row, masked)
        if self.has_dropout and kind != "parameter":
            return replace(row, status="skipped", layout="not compared: a dropout is on")
        lacking = sorted(set(self.holders.get(name, ())) - set(ranks)) if kind in _FINAL else []
        if lacking and kind == "parameter":
            return replace(row, status="none", layout=BEFORE, ranks=tuple(lacking))
        if self.has_dropout and step:
            return self._alike(row, pairs)
        if kind == "parameter" and step and self._is_noise(name, step - 1):
            return replace(row, status="skipped", layout="not compared: its gradient is noise")
        reference = self.reference(key, entries)
        space = name if kind in _FINAL else ""
        pieces = [_piece(rank, e) for rank, e in pairs]
        if kind == "parameter" and step:
            reference, pieces = self._update(key, reference, pieces)
        if kind not in _FINAL and reference.n * reference.f > 1 and all(p.n * p.f == 1 for p in pieces):
            return replace(row, status="skipped", layout="a number: not compared")
        if reference.n * reference.f == 1 and not reference.is_noise:
            return self._number(row, reference, pieces)
        fits = [self._place(p, reference, space, kind, step) for p in pieces]
        if kind not in _FINAL:
            fits = [self._of_own_rows(key, p, reference, fit) for p, fit in zip(pieces, fits, strict=True)]
        if kind == "parameter" and step == 0:
            self.holders[name] = {p.rank: fit for p, fit in zip(pieces, fits, strict=True)}
        found = self._judged(row, key, reference, entries, pieces, fits, space)
        if lacking and found.status == "fits":
            found = replace(
                found, status="missing", layout=f"{found.layout}, but not there", ranks=tuple(lacking)
            )
        return found

    def _update(
        self, key: _Key, reference: Reference, pieces: Sequence[Piece]
    ) -> tuple[Reference, list[Piece]]:
        """By how much a step changed a parameter, in one process and on the ranks: little beside the parameter."""
        kind, name, step, part = key
        earlier = (kind, name, step - 1, part)
        before = {rank: _piece(rank, e) for rank, e in self.ranks.get(earlier, [])}
        old = self.dense.get(earlier)
        if not old or any(p.rank not in before or before[p.rank].shape != p.shape for p in pieces):
            return reference, list(pieces)
        was = _matrix(old)
        if was.shape != reference.matrix.shape:
            return reference, list(pieces)
        change = reference.matrix - np.nan_to_num(was, True, *NOT_FINITE)
        rounding = layouts.ROUNDING.get(old[0].dtype, 0.0) * layouts.typical(was) / self.tolerance
        slack = None
        gradient = self.dense.get(("grad", name, step - 1, 0))
        if gradient:  # Adam makes a whole step of the smallest one
            size = np.abs(_matrix(gradient))
            noise = TINY * self.tolerance * layouts.typical(size)
            slack = np.abs(change).max(initial=0.0) * np.minimum(1.0, noise / np.maximum(size, 1e-300))
        changed = Reference(change, self.tolerance, rounding, reference.shape, slack=slack)
        return changed, [p.minus(before[p.rank]) for p in pieces]

    def _alike(self, row: Row, pairs: Sequence[tuple[int, Traced]]) -> Row:
        """After a step with dropout: ranks that began with the same part of a parameter still have the same."""
        firsts: dict[tuple, tuple[int, Traced]] = {}
        for rank, e in pairs:
            fit = self.holders.get(row.name, {}).get(rank)
            if fit is None:
                continue
            place = tuple(None if m is None else m.tobytes() for m in (fit.rows, fit.columns, fit.flat))
            other, first = firsts.setdefault(place, (rank, e))
            size = layouts.typical(first.rows)
            if first.shape != e.shape or np.abs(first.rows - e.rows).max(initial=0.0) > self.tolerance * size:
                says = f"ranks {other} and {rank} hold the same part of it, and after the step other numbers"
                return replace(row, status="none", layout="ranks differ", ranks=(other, rank), says=says)
        return replace(row, status="skipped", layout="not compared: a dropout is on")

    def _is_noise(self, name: str, step: int) -> bool:
        """Whether the gradient of a parameter is so small that an optimizer may make anything of it; or, where it has
        none, that of its twin in another part of the model, of which it may be the moving average.
        """
        gradient = self.dense.get(("grad", name, step, 0))
        if gradient is None:
            ending = name.partition(".")[2]
            return any(
                self._is_noise(n, step)
                for kind, n, s, _ in self.dense
                if kind == "grad" and s == step and ending and ending in (n, n.partition(".")[2])
            )
        return layouts.typical(_matrix(gradient)) < NOISE * self.floors["grad"]

    def _place(self, piece: Piece, reference: Reference, space: str, kind: str, step: int) -> Fit | None:
        if kind not in _FINAL:
            fit = layouts.place(piece, reference, self.memory, space)
            usual = self.multiples.get((piece.rank, step))
            if fit is None and kind == "grad_output" and usual is not None:
                # rows that were taken for others, which looked like them on the way forward
                fit = layouts.place(piece.times(1 / usual), reference, self.memory, space)
                fit = fit and replace(fit, factor=fit.factor * usual)
            if fit is not None and kind == "grad_output" and fit.factor != 1.0:
                self.multiples[piece.rank, step] = fit.factor
            return fit
        key = (space, piece.rank, piece.shape)
        known = self.where.get(key)
        # a gradient lies where its parameter does, and so does an update
        if known is not None and known.flat is None:
            k = reference.factor(piece.rows, piece.columns, (known.rows, known.columns))
            return None if k is None else replace(known, factor=k)
        fit = layouts.place(piece, reference, self.memory, space) if known is None else None
        changes = kind == "parameter" and step and known is None
        if not changes and (fit is None or fit.factor != 1.0):
            flat = layouts.place_flat(piece, reference, self.flats, space)
            if flat is not None and (fit is None or flat.factor == 1.0):
                fit = flat
        if fit is not None and fit.sure and not changes:
            self.where[key] = replace(fit, factor=1.0)
        return fit

    def _of_own_rows(self, key: _Key, piece: Piece, reference: Reference, fit: Fit | None) -> Fit | None:
        """The fit; None for a gradient that belongs to other rows than the rank has of that output."""
        kind, name, step, part = key
        place = (name, step, part, piece.rank, piece.call)
        if fit is None or kind == "output":
            if fit is not None:
                self.forward[place] = piece, reference
            return fit
        if not fit.sure or fit.rows is None or place not in self.forward:
            return fit
        output, whole = self.forward[place]
        if whole.matrix.shape != reference.matrix.shape or output.shape != piece.shape:
            return fit
        return fit if whole.factor(output.rows, output.columns, (fit.rows, fit.columns)) is not None else None

    def _number(self, row: Row, reference: Reference, pieces: Sequence[Piece]) -> Row:
        """A single number, such as a loss: the same everywhere, or a sum or mean of what the ranks have."""
        wanted = float(reference.matrix[0, 0])
        values = [float(p.rows[0, 0]) for p in pieces if p.n * p.f == 1]
        limit = layouts.SLACK * self.tolerance * max(abs(wanted), reference.scale)
        if len(values) != len(pieces):
            return replace(row, status="none", layout="another shape")
        if all(abs(v - wanted) <= limit for v in values):
            return replace(row, layout="the same on all")
        for total, what in (
            (sum(values), "parts of a sum"),
            (sum(values) / len(values), "the mean of the ranks'"),
        ):
            if abs(total - wanted) <= limit:
                return replace(row, layout=what, status="batch")
        return replace(row, status="none", layout="another number")

    def _dropped_out(self, row: Row, masked: Sequence[tuple[int, Traced]]) -> Row:
        """Where a dropout is on: the same zeros where ranks were given the same, others where not."""
        for call in sorted({e.call for _, e in masked}):
            here = [(rank, e) for rank, e in masked if e.call == call]
            for i, (rank, e) in enumerate(here):
                for other, o in here[:i]:
                    if e.before == o.before and e.mask != o.mask:
                        says = (
                            "drops other numbers on each rank, though all were given the same: the ranks part"
                        )
                        return replace(
                            row, status="none", layout="masks differ", ranks=(other, rank), says=says
                        )
                    if e.before != o.before and e.mask == o.mask and e.shape == o.shape:
                        says = "the same dropout mask on ranks that hold different parts: seed it by rank"
                        return replace(
                            row, status="none", layout="the same mask", ranks=(other, rank), says=says
                        )
        return replace(row, status="skipped", layout="dropout")

    def _judged(
        self,
        row: Row,
        key: _Key,
        reference: Reference,
        entries: Sequence[Traced],
        pieces: Sequence[Piece],
        fits: Sequence[Fit | None],
        space: str,
    ) -> Row:
        whole_shape = entries[0].shape if len(entries) == 1 else ()
        lost = [p for p, fit in zip(pieces, fits, strict=True) if fit is None]
        placed = [(p, fit) for p, fit in zip(pieces, fits, strict=True) if fit is not None]
        lost = [p for p in lost if not self._is_of_a_stage(p, key)]
        if not lost and not placed:
            return replace(row, status="skipped", layout="of a stage: not compared")
        if not lost:
            factors = [fit.factor for _, fit in placed]
            worst = max(factors, key=lambda k: abs(k - 1))
            if worst == 1.0:
                return self._whole(row, reference, whole_shape, placed)
            total, same = None, max(factors) - min(factors) <= FACTORS * self.tolerance * abs(worst)
            if not same and row.kind != "parameter":  # what is the same everywhere is no part of a sum
                total = self._sum(pieces, reference, space)
            # a single number is always a multiple: where the ranks differ, their mean may be meant, too
            of_one = reference.n * reference.f == 1
            if total is not None and (total.factor == 1.0 or (of_one and total.factor == len(total.ranks))):
                return replace(
                    row, status="partial", layout=_partial_words(total), axes=total.axes, factor=total.factor
                )
            wrong = tuple(sorted({p.rank for p, fit in placed if fit.factor != 1.0}))
            layout = f"{_times(worst)} it" if same else "each rank another multiple of it"
            return replace(row, status="scaled", layout=layout, ranks=wrong, factor=worst if same else 0.0)
        total = self._sum(pieces, reference, space) if row.kind != "parameter" else None
        if total is not None:
            return replace(
                row, status="partial", layout=_partial_words(total), axes=total.axes, factor=total.factor
            )
        return replace(
            row,
            status="none",
            ranks=tuple(sorted({p.rank for p in lost})),
            layout=self._nowhere(key, reference, lost),
        )

    def _is_of_a_stage(self, piece: Piece, key: _Key) -> bool:
        """Whether a rank has but some of the modules within this one, and its tensor is that of the last of them."""
        kind, name, step, _ = key
        if kind == "grad_output":
            return (name, piece.rank) in self.stages
        if kind != "output":
            return False
        prefix = f"{name}." if name else ""
        inner = {n for k, n, *_ in self.dense if k == "output" and n.startswith(prefix) and n != name}
        if not inner - self._inside(piece.rank):
            return False
        for (k, n, s, _), pairs in self.ranks.items():
            if k == kind and n in inner and s == step:
                for rank, e in pairs:
                    if (rank, e.shape) == (piece.rank, piece.shape) and np.array_equal(e.rows, piece.rows):
                        self.stages.add((name, rank))
                        return True
        return False

    def _inside(self, rank: int) -> set[str]:
        """Names of the modules that a rank calls."""
        return {n for (k, n, *_), ps in self.ranks.items() if k == "output" for r, _ in ps if r == rank}

    def _sum(self, pieces: Sequence[Piece], reference: Reference, space: str) -> layouts.Sum | None:
        """How all pieces are parts of sums; None if one is not."""
        left, found = list(pieces), None
        while left:
            total = layouts.partial(left, reference, self.memory, space, self.mesh)
            if total is None or (found is not None and abs(total.factor - found.factor) > 1e-3):
                return None
            found = found or total
            left = [p for p in left if p.rank not in total.ranks] if len(total.ranks) < len(left) else []
            if len(left) == 1:
                return None
            if not total.axes:
                break
        return found

    def _whole(
        self, row: Row, reference: Reference, shape: tuple[int, ...], placed: Sequence[tuple[Piece, Fit]]
    ) -> Row:
        """The row of a tensor whose pieces all lie in it; something may still be on no rank."""
        cut_rows = any(fit.rows is not None for _, fit in placed)
        cut_columns = any(fit.columns is not None for _, fit in placed)
        is_flat = any(fit.flat is not None for _, fit in placed)
        layout = "the same on all" if len({p.rank for p, _ in placed}) > 1 else "as it is"
        if is_flat:
            layout = "sharded, flat"
        elif cut_rows or cut_columns:
            layout = _cut_words(row.kind, shape, [p.shape for p, _ in placed], cut_rows, cut_columns)
        if row.kind == "parameter" and not row.step and any(map(_is_reordered, (fit for _, fit in placed))):
            layout += REORDERED
        sure = all(fit.sure for _, fit in placed)
        if row.kind == "parameter" and not row.step and not is_flat and sure:
            rows, columns = layouts.coverage([fit for _, fit in placed], reference)
            missing, of = max((int((held == 0).sum()), len(held)) for held in (rows, columns))
            if missing:
                says = f"{missing} of its {of} rows or columns are on no rank: do several ranks hold the same part?"
                return replace(
                    row, status="uncovered", layout=f"{layout}; {missing} of {of} nowhere", says=says
                )
        if row.kind in ("output", "grad_output") and cut_rows and sure:
            rows, _ = layouts.coverage([fit for _, fit in placed], reference)
            missing, most = int((rows == 0).sum()), int(rows.max())
            says = f"{missing} of {len(rows)} rows are on no rank, others on {most}: the ranks share the batch wrongly"
            nowhere = f"{layout}; {missing} of {len(rows)} rows nowhere"
            if _is_whole_gap(rows, reference.shape):
                return replace(row, status="uncovered", layout=nowhere, says=says)
            if 4 * missing >= len(rows):
                return replace(row, status="patchy", layout=nowhere, says=says)
            if not missing and _are_whole_samples(rows == most, reference.shape):
                several = int((rows == most).sum())
                layout = f"{layout}; {several} of {len(rows)} rows {most} times"
                says = f"{several} of {len(rows)} rows are on {most} ranks, others on {rows.min()}: they count more"
                return replace(row, status="uncovered", layout=layout, says=says)
        return replace(row, layout=layout)

    def _nowhere(self, key: _Key, reference: Reference, lost: Sequence[Piece]) -> str:
        """What can be said of pieces that fit nowhere."""
        piece = lost[0]
        if key[0] == "parameter" and key[2] and not any(p.rows.any() or p.columns.any() for p in lost):
            return BEFORE
        if (piece.n, piece.f) == (reference.n, reference.f):
            off = float(np.linalg.norm(piece.rows - reference.row_sums))
            share = off / max(float(np.linalg.norm(reference.row_sums)), 1e-30)
            if share < _ROUNDED:
                off_by = f"{share:.1%} off" if share >= 1e-3 else f"{share:.1e} off"
                return off_by if key[0] == "parameter" else f"{off_by}, as if rounded"
            return f"other numbers ({share:.0%} off)"
        return "other numbers"

    def _strangers(self) -> list[Row]:
        """Parameters under names that the dense model does not have: looked for in all of its numbers."""
        known = {name for kind, name, *_ in self.dense if kind == "parameter"}
        strangers = [k for k in self.ranks if k[0] == "parameter" and k[1] not in known and k[2] == 0]
        if not strangers:
            return []
        whole: dict[tuple[str, int], Reference] = {}
        found: list[Row] = []
        for kind, name, step, part in sorted(
            (k for k in self.ranks if k[0] in _FINAL and k[1] not in known),
            key=lambda k: self.ranks[k][0][1].order,
        ):
            if (kind, step) not in whole:
                parts = [
                    e for k, es in self.dense.items() if k[0] == "parameter" and k[2] == 0 for e in es[:1]
                ]
                values = [self.dense.get((kind, e.name, step, 0)) for e in parts]
                flat = [
                    (v[0] if v else replace(e, whole=np.zeros(e.shape))).whole.reshape(-1, 1)
                    for e, v in zip(parts, values, strict=True)
                ]
                whole[kind, step] = Reference(
                    np.concatenate(flat), self.tolerance, self.floors.get(kind, 0.0)
                )
            pairs = self.ranks[kind, name, step, part]
            pieces = [_piece(rank, e) for rank, e in pairs]
            fits = [layouts.place_flat(p, whole[kind, step], self.flats, name) for p in pieces]
            ranks = tuple(sorted({rank for rank, _ in pairs}))
            if (
                step == 0
                and kind == "parameter"
                and all(np.ptp(p.flat) == 0 for p in pieces if p.flat is not None)
            ):
                self.notes.append(
                    f"{name} is one number many times, and found nowhere by its numbers: not compared."
                )
                continue
            if any(fit is None for fit in fits):
                if step == 0 and kind == "parameter":
                    self.notes.append(f"{name} has no partner in the dense model: not compared.")
                    continue
                found.append(Row(name, kind, step, "other numbers", "none", ranks))
            elif any(fit is not None and fit.factor != 1.0 for fit in fits):
                k = next(fit.factor for fit in fits if fit is not None and fit.factor != 1.0)
                found.append(Row(name, kind, step, f"{_times(k)} it", "scaled", ranks, factor=k))
            else:
                found.append(Row(name, kind, step, "sharded, flat", "fits", ranks))
        skipped = {note.split(" ")[0] for note in self.notes}
        return [row for row in found if row.name not in skipped]


def _is_whole_gap(rows: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether whole samples, or whole positions, are on no rank; single rows may only look like others."""
    if (rows > 0).all():
        return False
    leading = shape[:-1]
    if int(np.prod(leading)) != len(rows):
        return 2 * int((rows == 0).sum()) > len(rows)
    return any(per_place.all(1).any() for per_place in _along(rows == 0, leading))


def _are_whole_samples(chosen: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether some but not all rows are chosen, and those are all rows of some places of one dim."""
    leading = shape[:-1]
    if chosen.all() or not chosen.any() or int(np.prod(leading)) != len(chosen):
        return False
    return any((along.all(1) | ~along.any(1)).all() for along in _along(chosen, leading))


def _along(chosen: np.ndarray, leading: tuple[int, ...]) -> Iterable[np.ndarray]:
    """For each dim a matrix with a row for each place on it."""
    grid = chosen.reshape(leading)
    for dim, extent in enumerate(leading):
        yield np.moveaxis(grid, dim, 0).reshape(extent, -1)


def _first(rows: Sequence[Row], judge: _Judge) -> Row | None:
    """The row to blame, with what is to be said of it; None if all is well."""
    trained = [r for r in rows if r.kind == "grad" or (r.kind == "parameter" and r.step)]
    updated = {(r.name, r.step - 1): r.status == "fits" for r in rows if r.kind == "parameter" and r.step}
    wrong = [r for r in trained if not _is_right(r, updated)]
    start = [r for r in rows if r.kind == "parameter" and r.step == 0 and r.status != "fits"]
    masks = [r for r in rows if r.status == "none" and r.says and r.kind == "output"]  # of dropouts
    if start:
        return _said(start[0], rows, judge)
    if masks:
        return replace(masks[0], says=f"`{masks[0].title}`{_at(masks[0])}: {masks[0].says}")
    outputs = [r for r in rows if r.kind == "output" and r.status != "skipped"]
    if not wrong and (trained or not outputs or outputs[-1].status not in ("none", "uncovered")):
        return None
    by_name = {_key(r): r for r in rows}
    by_name |= {_key(r): r for r in rows if r.status != "fits"}  # of several outputs one that is wrong
    uncovered = sum(r.status == "uncovered" for r in outputs)
    if 2 * uncovered < len(outputs):  # rows that look alike were taken for one another
        rows = [replace(r, status="patchy") if r.status == "uncovered" else r for r in rows]
    for row in rows:
        bad = row.status in ("none", "missing", "uncovered") or row in wrong or _is_weighted(row)
        bad = bad or (row.kind == "output" and row.status == "scaled")
        if not bad or (row.kind in _FINAL and row not in wrong):
            continue
        if row.kind == "output" and row.status == "none" and _is_inside_of_a_right_one(row, by_name):
            continue
        if row.kind == "grad_output" and _ends_well(row, rows):
            continue
        if row.kind == "grad_output" and (above := by_name.get((row.name, "output", row.step))) is not None:
            if above.status == "none" and _is_inside_of_a_right_one(above, by_name):
                continue
        sums = _partial_before(row, rows)
        gaps = _right_before(row, rows, "patchy")
        if row.kind == "output" and sums is gaps is None and (order := _reordered_for(row, rows)):
            return _said(order, rows, judge)
        whole = _partial_of_a_whole(row, rows) if row.kind == "grad" and row.status == "partial" else None
        return _said(sums or gaps or whole or row, rows, judge, used_as_whole=bool(sums or whole))
    return _said(wrong[0], rows, judge) if wrong else None


def _is_right(row: Row, updated: Mapping[tuple[str, int], bool]) -> bool:
    """Whether a gradient or an updated parameter is as it should be. Gradients that stay partial are right where the
    update is: an optimizer that shards its states reduces them itself.
    """
    if row.status in ("fits", "skipped"):
        return True
    return (
        row.kind == "grad"
        and row.status in ("partial", "missing")
        and updated.get((row.name, row.step), False)
    )


def _ends_well(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the gradient that leaves a module around this one is right again: what lies inside did no harm."""
    travelling = [r for r in rows if r.kind == "grad_output" and r.step == row.step]
    parts = row.name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        around = ".".join(parts[:count])
        inside = [i for i, r in enumerate(travelling) if r.name == around or r.name.startswith(f"{around}.")]
        after = travelling[inside[-1] + 1] if inside[-1] + 1 < len(travelling) else None
        if after is not None and after.status in ("fits", "partial", "scaled") and not _is_weighted(after):
            return True
    return False


def _is_weighted(row: Row) -> bool:
    """Whether a gradient that travels back is another multiple of the dense one on each rank."""
    return row.kind == "grad_output" and row.status == "scaled" and row.factor == 0.0


def _is_inside_of_a_right_one(row: Row, by_name: Mapping[tuple[str, str, int], Row]) -> bool:
    """Whether a module around this one has the right output: its inside is then as its author wants it."""
    parts = row.name.split(".")
    around = (".".join(parts[:i]) for i in range(len(parts) - 1, -1, -1)) if row.name else ()
    return any(
        (above := by_name.get((name, "output", row.step))) is not None and above.status == "fits"
        for name in around
    )


def _partial_before(row: Row, rows: Sequence[Row]) -> Row | None:
    """The first of the partial sums that stand right before a tensor that fits nowhere."""
    return _right_before(row, rows, "partial") if row.kind in ("output", "grad_output") else None


def _partial_of_a_whole(row: Row, rows: Sequence[Row]) -> Row | None:
    """Where a gradient is a partial sum because that of an output is: the first of these that all ranks have alike. Who
    has all of an output needs all of its gradient.
    """
    alike = {r.name for r in rows if r.kind == "output" and r.layout == "the same on all"}
    partial = [r for r in rows if r.kind == "grad_output" and r.status == "partial" and r.step == row.step]
    if abs(row.factor - 1) > 1e-3 or not partial or partial[0].name not in alike:
        return None
    return partial[0] if abs(partial[0].factor - 1) < 1e-3 else None


def _reordered_for(row: Row, rows: Sequence[Row]) -> Row | None:
    """The weights whose rows stand in another order than one process has them, in the module around a wrong output."""
    around = row.name.rpartition(".")[0]
    for r in rows:
        if r.kind == "parameter" and not r.step and r.layout.endswith(REORDERED):
            if around and r.name.startswith(f"{around}."):
                says = (
                    "its rows stand in another order than in one process, and what is made of them is wrong"
                )
                return replace(r, says=says)
    return None


def _is_reordered(fit: Fit) -> bool:
    """Whether a part has its rows or columns in another order than the whole."""
    return fit.sure and any(m is not None and (np.diff(m) < 0).any() for m in (fit.rows, fit.columns))


def _right_before(row: Row, rows: Sequence[Row], status: str) -> Row | None:
    """The first of those of one status that stand right before a tensor that fits nowhere."""
    if row.status != "none":
        return None
    found, at = None, rows.index(row) - 1
    while at >= 0 and rows[at].kind == row.kind and rows[at].status in (status, "skipped"):
        found, at = rows[at] if rows[at].status == status else found, at - 1
    return found


def _said(row: Row, rows: Sequence[Row], judge: _Judge, *, used_as_whole: bool = False) -> Row:
    """The row with a sentence for the learner."""
    where, who = _at(row), name_ranks(row.ranks) if row.ranks else "no rank"
    over = f"over {' and '.join(row.axes)}" if row.axes else f"over {who}"
    if row.says:
        what = row.says
    elif used_as_whole and row.kind == "output":
        what = (
            f"each rank holds a partial sum, and it is used as if it were whole: an all-reduce {over} is missing in "
            f"the forward"
        )
    elif used_as_whole:
        what = (
            f"the gradient of its output is a partial sum on each rank, and it is used as if it were whole: an "
            f"all-reduce {over} is missing in the backward"
        )
    elif row.status == "partial":
        what = f"partial {over}: its gradients are never summed"
        if abs(row.factor - 1) > 1e-3:
            what = (
                f"each rank has that of its own part of the batch ({over}): its gradients are never averaged"
            )
    elif row.status == "scaled":
        what = _scaled(row, judge)
    elif row.status == "missing" and row.kind == "grad_output":
        what = (
            f"no gradient comes back to it on {who}, and in one process one does: something between it and the loss is "
            f"unknown to autograd"
        )
    elif row.status == "missing":
        have = "has" if len(row.ranks) == 1 else "have"
        what = f"{who} {have} the parameter and no gradient, and one process has one"
    elif row.kind == "parameter" and row.step == 0:
        what = f"{who}: other weights than one process has, before anything is computed"
    elif row.kind == "parameter" and row.layout == BEFORE:
        others = sorted({r for r in judge.holders.get(row.name, {}) if r not in row.ranks})
        than = f"than {name_ranks(others)}" if others else "than one process after its step"
        what = (
            f"{who} {'holds' if len(row.ranks) == 1 else 'hold'} older weights {than}: no update reached them"
        )
    elif row.kind == "parameter":
        what = f"{who}: the gradient is right and the update is not ({row.layout})"
    elif row.kind == "grad" and row.layout.endswith("rounded"):
        what = f"{who}: {row.layout}: is it sent or added up in 16 bits?"
    elif row.kind == "grad":
        what = f"{who}: no part, multiple or sum of the gradient of one process ({row.layout})"
    else:
        side = "forward" if row.kind == "output" else "backward"
        what = (
            f"the {_KINDS[row.kind]} fits no layout on {who} ({row.layout}), and all before it does: look at the "
            f"{side} here"
        )
    return replace(row, says=f"`{row.title}`{where}: {what}")


def _scaled(row: Row, judge: _Judge) -> str:
    who = name_ranks(row.ranks)
    if _is_weighted(row):
        return (
            f"on each rank another multiple of the dense one: the losses of {who} do not count alike. A mean of "
            f"means is not the mean over all where ranks have different numbers of samples or tokens"
        )
    if row.factor == 0.0:
        return f"{who}: each rank has another multiple of the gradient of one process: does each clip by its own norm?"
    sizes = {judge_size: axis for axis, judge_size in (judge.mesh or {}).items()}
    n = len({rank for pairs in judge.ranks.values() for rank, _ in pairs})
    k = row.factor
    if abs(k - round(k)) < 1e-3 and k > 1:
        over = f" over {sizes[round(k)]}" if round(k) in sizes else ""
        hint = (
            f"a sum{over} where a mean is meant"
            if round(k) == n or round(k) in sizes
            else "a sum where a mean is meant, or counted more than once"
        )
    elif k > 0 and abs(1 / k - round(1 / k)) < 1e-3:
        hint = "a mean where a sum is meant, or divided once too often"
    else:
        hint = "divided by another number than one process"
    what = "the dense gradient" if row.kind == "grad" else "the tensor of one process"
    return f"{_times(k)} {what} on {who}: {hint}"


def _who(row: Row) -> str:
    return name_ranks(row.ranks) if row.ranks else ""


def _at(row: Row) -> str:
    return f" (line {row.line})" if row.line else ""


def _key(row: Row) -> tuple[str, str, int]:
    return row.name, row.kind, row.step


def _times(k: float) -> str:
    if abs(k - round(k)) < 1e-3:
        return f"{round(k)} times"
    if k > 0 and abs(1 / k - round(1 / k)) < 1e-3:
        return f"1/{round(1 / k)} of"
    return f"{k:.3g} times"


def _plural(word: str, n: int) -> str:
    if n == 1 or word == "weights":
        return word
    return word.replace("gradient", "gradients", 1) if word.startswith("gradient") else f"{word}s"


def _partial_words(total: layouts.Sum) -> str:
    over = f"over {' and '.join(total.axes)}" if total.axes else f"over {name_ranks(total.ranks)}"
    if abs(total.factor - 1) < 1e-3:
        return f"partial {over}"
    return f"each its own part of the batch ({over})"


def _cut_words(
    kind: str, whole: tuple[int, ...], shapes: Iterable[tuple[int, ...]], rows: bool, columns: bool
) -> str:
    """Which dims of a tensor are cut, as far as shapes tell."""
    dims: set[int] = set()
    for shape in shapes:
        if len(shape) == len(whole):
            dims |= {d for d, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b}
    if dims:
        word = "part of the batch" if dims == {0} and kind in ("output", "grad_output") else ""
        return word or f"sharded on dim {', '.join(map(str, sorted(dims)))}"
    if rows and columns:
        return "sharded on rows and columns"
    return "other rows on each" if rows else "sharded on the last dim"


def _piece(rank: int, e: Traced) -> Piece:
    return Piece(rank, e.call, e.shape, e.rows, e.columns, e.flat, e.at)


def _matrix(entries: Sequence[Traced]) -> np.ndarray:
    """The tensors of all calls, one below the other, as far as their widths agree."""
    matrices = [e.whole.reshape(e.matrix) for e in entries]
    width = matrices[0].shape[1]
    return np.concatenate([m for m in matrices if m.shape[1] == width]).astype(np.float64)
