"""Whether pieces that all lie in a tensor make up all of it: some rows may be on no rank, or on too many."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..results import name_ranks
from .comparison import FINAL, Row
from .reference import Fit, Piece, Reference, typical
from .wording import REORDERED, TURNED, cut_words

ROUNDED = 0.02  # a tensor that is off by less than this share looks like one that was rounded
NEAR = 0.3  # by less than this share steps along gradients of rounding alone may have moved a parameter


def covered(row: Row, reference: Reference, shape: tuple[int, ...], placed: Sequence[tuple[Piece, Fit]]) -> Row:
    """The row of a tensor whose pieces all lie in it; something may still be on no rank."""
    fits = [fit for _, fit in placed]
    cut_rows, cut_columns = any(f.rows is not None for f in fits), any(f.columns is not None for f in fits)
    is_flat, sure = any(f.flat is not None for f in fits), all(f.sure for f in fits)
    layout = "the same on all" if len({p.rank for p, _ in placed}) > 1 else "as it is"
    if is_flat:
        layout = "sharded, flat"
    elif cut_rows or cut_columns:
        layout = cut_words(row.kind, shape, [p.shape for p, _ in placed], cut_rows, cut_columns)
        pieces = _pieces(row.kind, reference, placed) if sure else ""
        layout, row = layout + pieces.partition(" (")[0], replace(row, clue=pieces)
    if row.kind == "output" and cut_rows and all(p.n == reference.n for p, _ in placed):
        order = np.arange(reference.n) if fits[0].rows is None else fits[0].rows
        layout, first = TURNED, ", ".join(map(str, order[:16]))
        row = replace(row, clue=f" ({first}{', ...' * (len(order) > 16)})")
    is_start = row.kind == "parameter" and not row.step
    maps = (m for f in fits if f.sure for m in (f.rows, f.columns) if m is not None)
    if is_start and any((np.diff(m) < 0).any() for m in maps):
        layout += REORDERED
    if is_start and not is_flat and sure:
        for word, held in zip(("row", "column"), _coverage(fits, reference), strict=True):
            if lacking := np.flatnonzero(held == 0).tolist():
                which = name_ranks(lacking).replace("rank", word)
                which = which if len(which) < 60 else f"{len(lacking)} {word}s"
                says = f"{which} of its {len(held)} {'is' if len(lacking) == 1 else 'are'} on no rank: is the cut "
                says += "rounded down, or do several ranks hold the same part?"
                return row.found("uncovered", f"{layout}; {len(lacking)} of {len(held)} nowhere", says=says)
    flat = [f.flat for f in fits if f.flat is not None]
    size = reference.matrix.size
    if is_start and len(flat) == len(fits) and len(np.unique(reference.matrix)) > 0.9 * size:  # else a place is chance
        held = np.unique(np.concatenate(flat))
        if missing := size - int((held >= 0).sum()):
            says = f"{missing} of its {size} numbers are on no rank: were they loaded?"
            return row.found("uncovered", f"{layout}; {missing} of {size} nowhere", says=says)
    if row.kind not in FINAL and cut_rows and sure:
        rows, _ = _coverage(fits, reference)
        missing, most = int((rows == 0).sum()), int(rows.max())
        nowhere, gap = f"{missing} of {len(rows)} rows", _is_whole_gap(rows, reference.shape)
        same = _sharers(placed, rows == most) if rows.min() < most else ""
        if gap or 4 * missing >= len(rows):
            says = f"{nowhere} are on no rank, others on {most}: the ranks share the batch wrongly{same}"
            return row.found("uncovered" if gap else "patchy", f"{layout}; {nowhere} nowhere", says=says)
        if not missing and _are_whole_samples(rows == most, reference.shape):
            several = f"{int((rows == most).sum())} of {len(rows)} rows"
            says = f"{several} are on {most} ranks, others on {rows.min()}: they count more{same}"
            return row.found("uncovered", f"{layout}; {several} {most} times", says=says)
    blocks = [(f.rows, f.columns) for f in fits if f.rows is not None and f.columns is not None]
    if row.kind == "output" and sure and len(blocks) == len(fits):
        lacks = np.ones((reference.n, reference.f))
        for block in blocks:
            lacks[np.ix_(*block)] = 0
        if lacks.any():
            share = f"{lacks.mean():.0%} of it"
            says = f"each rank has its own features of its own rows only, and {share} is on no rank: what is put "
            says += "together from these ranks belongs to different samples or positions"
            return row.found("patchy", f"{layout}; {share} nowhere", says=says)
    return row.found("fits", layout)


def moved(row: Row, rows_of: Mapping[tuple[str, str, int], Mapping[int, Any]]) -> Row:
    """The row of an output; with what to look at if some ranks have other rows than in the step before."""
    before = rows_of.get((row.name, row.kind, row.step - 1), {})
    others = [r for r, rows in rows_of[row.key].items() if r in before and not np.array_equal(rows, before[r])]
    if row.kind != "output" or row.status != "uncovered" or not others or 2 * len(others) > len(before):
        return row
    who = name_ranks(others)
    says = f"other rows of the batch on {who} than in step {row.step}: look at the data that {who} is given"
    return replace(row, ranks=tuple(others), says=f"{says} ({row.says.partition(':')[0]})")


def _is_whole_gap(rows: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether whole samples, or whole positions, are on no rank; single rows may only look like others."""
    gaps = rows == 0
    if int(np.prod(shape[:-1])) != len(rows):
        return 2 * int(gaps.sum()) > len(rows)
    return any(along.all(1).any() for along in _along(gaps, shape))


def _are_whole_samples(chosen: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether some but not all rows are chosen, and those are all rows of some places of one dim."""
    if chosen.all() or not chosen.any() or int(np.prod(shape[:-1])) != len(chosen):
        return False
    return any((along.all(1) | ~along.any(1)).all() for along in _along(chosen, shape))


def _along(chosen: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    """For each dim a matrix with a row for each place on it."""
    grid = chosen.reshape(shape[:-1])
    return [np.moveaxis(grid, dim, 0).reshape(extent, -1) for dim, extent in enumerate(grid.shape)]


def _coverage(fits: Sequence[Fit], reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """How many of the fits have each row, and each column, of the reference."""
    rows, columns = np.zeros(reference.n, dtype=int), np.zeros(reference.f, dtype=int)
    for fit in fits:
        rows[slice(None) if fit.rows is None else fit.rows] += 1
        columns[slice(None) if fit.columns is None else fit.columns] += 1
    return rows, columns


def _pieces(kind: str, reference: Reference, placed: Sequence[tuple[Piece, Fit]]) -> str:
    """In how many runs of neighbours a rank has rows of a weight, or places on the last dim; "" if it is one."""
    for piece, fit in placed:
        is_rows = kind in FINAL and fit.rows is not None
        held, whole = (fit.rows, reference.n) if is_rows else (fit.columns, reference.f)
        if held is not None and (is_rows or kind not in FINAL or len(piece.shape) < 3):
            runs = np.split(held, np.flatnonzero(np.diff(held) != 1) + 1)
            has = name_ranks([*np.concatenate(runs[:4])]).removeprefix("ranks ") + ", ..." * (len(runs) > 4)
            if len(runs) > 1:
                return f" in {len(runs)} pieces (rank {piece.rank} has {has} of {whole})"
    return ""


def _sharers(placed: Sequence[tuple[Piece, Fit]], chosen: np.ndarray) -> str:
    """Which ranks hold the same ones of the chosen rows, in brackets; "" if none do."""
    holders: dict[int, set[int]] = {}
    for piece, fit in placed:
        for n in range(len(chosen)) if fit.rows is None else fit.rows.tolist():
            holders.setdefault(n, set()).add(piece.rank)
    groups = Counter(tuple(sorted(holders[n])) for n in np.flatnonzero(chosen).tolist())
    some = [who for who in sorted(groups) if len(who) > 1]
    words = [f"{name_ranks(who)} {'another' if n else 'hold the same'} {groups[who]}" for n, who in enumerate(some)]
    return f" ({', '.join([*words[:2], '...'][: len(words)])})" if words else ""


def are_near(pieces: Sequence[Piece], reference: Reference) -> bool:
    """Whether each piece is about the reference, or a shard of about its size."""
    size = typical(reference.matrix)
    return all(
        typical(p.matrix - reference.matrix) <= NEAR * size
        if p.matrix.shape == reference.matrix.shape
        else typical(p.matrix) <= 2 * size
        for p in pieces
    )
