"""How the tensors of several ranks make up one: found from their numbers, without being told.

A piece may lie in the reference as it is, or times a factor. Several pieces that fit nowhere may still add up: they are
partial sums. It knows no modules and no words; `judge` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from .reference import SLACK, Fit, Map, Piece, Reference

WINDOW = 16  # numbers of a flat piece that are looked for together


class SeenPlaces:
    """Which rows and columns a rank was seen to have of a tensor of some size: it will have them again.

    Rows of activations are also remembered dim by dim: who has samples 2 and 3 of 8 has them of every tensor.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple, list[Map]] = {}
        self._columns: dict[tuple, list[Map]] = {}
        self._dims: dict[tuple, list[Map]] = {}

    def rows(self, space: str, piece: Piece, reference: Reference) -> Iterator[Map | None]:
        """Rows that the piece may have, the likeliest first."""
        if piece.n == reference.n:
            yield None
        yield from self._by_dims(space, piece, reference)
        yield from self._rows.get((space, piece.rank, piece.call, reference.n, piece.n), ())

    def columns(self, space: str, piece: Piece, reference: Reference) -> Iterator[Map | None]:
        """Columns that the piece may have, the likeliest first."""
        if piece.f == reference.f:
            yield None
        yield from self._columns.get((space, piece.rank, reference.f, piece.f), ())

    def learn(self, space: str, piece: Piece, reference: Reference, fit: Fit) -> None:
        """Remember where a piece was found."""
        if not fit.sure:
            return
        if fit.rows is not None:
            _add(self._rows.setdefault((space, piece.rank, piece.call, reference.n, piece.n), []), fit.rows)
            whole, part = reference.shape[:-1], piece.shape[:-1]
            if not space and len(whole) == len(part) and part:
                each = _dims_of(fit.rows, whole, part)
                for extent, mine, found in zip(whole, part, each or (), strict=False):
                    if extent != mine:
                        _add(self._dims.setdefault((piece.rank, piece.call, extent, mine), []), found)
        if fit.columns is not None:
            _add(self._columns.setdefault((space, piece.rank, reference.f, piece.f), []), fit.columns)

    def _by_dims(self, space: str, piece: Piece, reference: Reference) -> Iterator[Map]:
        """Rows by what is known of each dim."""
        whole, part = reference.shape[:-1], piece.shape[:-1]
        if space or len(whole) != len(part) or not part or (whole == part and reference.calls == 1):
            return
        choices: list[list[Map]] = []
        for extent, mine in zip(whole, part, strict=True):
            known = self._dims.get((piece.rank, piece.call, extent, mine), [])
            choices.append([np.arange(extent)] if extent == mine else known)
        offset = piece.call * int(np.prod(whole)) if 1 < reference.calls > piece.call else 0
        for chosen in product(*choices):
            yield offset + np.ravel_multi_index(np.ix_(*chosen), whole).reshape(-1)


def _dims_of(rows: Map, whole: tuple[int, ...], part: tuple[int, ...]) -> list[Map] | None:
    """The places on each dim, if rows are all combinations of some; None if they are not."""
    places = np.stack(np.unravel_index(rows % int(np.prod(whole)), whole)).reshape(-1, *part)
    found = []
    for dim in range(len(part)):
        along = np.moveaxis(places[dim], dim, 0).reshape(part[dim], -1)
        if (along != along[:, :1]).any():
            return None
        found.append(along[:, 0])
    return found


def _add(maps: list[Map], found: Map) -> None:
    if len(maps) < 4 and not any(np.array_equal(found, other) for other in maps):
        maps.append(found)


def place(piece: Piece, reference: Reference, seen: SeenPlaces, space: str) -> Fit | None:
    """Where the piece lies in the reference, as it is or times a factor; None if nowhere."""
    scaled: Fit | None = None
    for rows, columns in product(seen.rows(space, piece, reference), seen.columns(space, piece, reference)):
        k = reference.factor(piece.matrix, rows, columns)
        if k == 1.0:
            return Fit(rows, columns)
        if k is not None and (scaled is None or abs(k - 1) < abs(scaled.factor - 1)):
            scaled = Fit(rows, columns, k)
    found = _search(piece, reference, seen, space)
    if found is not None:
        seen.learn(space, piece, reference, found)
        return found
    return scaled


def _search(piece: Piece, reference: Reference, seen: SeenPlaces, space: str) -> Fit | None:
    """Where the piece lies as it is, by its numbers alone."""
    candidates: list[tuple[Map | None, Map | None, bool]] = []
    if piece.f == reference.f:
        located = reference.locate_rows(piece, None)
        if located is not None:
            candidates.append((located[0], None, located[1]))
    if piece.f != reference.f:
        for known in seen.rows(space, piece, reference):
            located = reference.locate_columns(piece, known)
            if located is not None:
                candidates.append((known, located[0], located[1]))
        if not candidates and piece.f < reference.f and piece.f > 1 and reference.f % piece.f == 0:
            for start in range(0, reference.f, piece.f):
                block = np.arange(start, start + piece.f)
                located = reference.locate_rows(piece, block)
                if located is not None:
                    candidates.append((located[0], block, located[1]))
                    break
    for rows, columns, sure in candidates:
        if reference.factor(piece.matrix, rows, columns) == 1.0:
            return Fit(rows, columns, sure=sure)
    return None


def place_flat(piece: Piece, reference: Reference, known_places: dict, space: str) -> Fit | None:
    """Where the numbers of a piece lie in the flattened reference. Zeros at the end of a piece are padding."""
    numbers, flat = piece.matrix.reshape(-1), reference.matrix.reshape(-1)
    key = (space, piece.rank, len(numbers), len(flat))
    known = known_places.get(key)
    if known is None:
        known = _find_numbers(numbers, flat, reference)
        if known is None:
            return None
        known_places[key] = known
    inside = known >= 0
    mine, theirs = numbers[inside], flat[known[inside]]
    power = float(theirs @ theirs)
    k = float(mine @ theirs) / power if power > 0 else 1.0
    if abs(k - 1) < SLACK * reference.tolerance or reference.is_noise:
        k = 1.0
    limit = SLACK * reference.tolerance * np.maximum(np.abs(theirs), reference.scale) * max(1.0, abs(k))
    if reference.slack is not None:
        limit = limit + SLACK * reference.slack.reshape(-1)[known[inside]]
    if (np.abs(mine - k * theirs) > limit).any() or abs(k) < 1e-6:
        # weights that are all alike, as those of a norm, lie anywhere: their gradients tell more
        known = _find_numbers(numbers, flat, reference)
        if known is None:
            return None
        known_places[key], k = known, 1.0
    return Fit(None, None, k, flat=known)


def _find_numbers(numbers: np.ndarray, flat: np.ndarray, reference: Reference) -> Map | None:
    """For each number its place in `flat`, -1 for padding; None if they are not all found."""
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    places = np.full(len(numbers), -2, dtype=np.int64)
    limit = SLACK * reference.tolerance * reference.scale
    used = len(np.trim_zeros(numbers, "b"))
    places[used:] = -1
    for start in range(0, used, WINDOW):
        window = numbers[start : min(start + WINDOW, used)]
        if start and places[start - 1] >= 0:  # the last one goes on
            begin = int(places[start - 1]) + 1
            if _fits(flat, begin, window, limit):
                places[start : start + len(window)] = np.arange(begin, begin + len(window))
                continue
        low = np.searchsorted(ordered, window[0] - limit)
        high = np.searchsorted(ordered, window[0] + limit, "right")
        for begin in sorted(order[low : min(high, low + 4096)]):
            if _fits(flat, int(begin), window, limit):
                places[start : start + len(window)] = np.arange(begin, begin + len(window))
                break
        else:
            return None
    return places


def _fits(flat: np.ndarray, begin: int, window: np.ndarray, limit: float) -> bool:
    part = flat[begin : begin + len(window)]
    return len(part) == len(window) and bool((np.abs(part - window) <= limit).all())


@dataclass(frozen=True)
class Sum:
    """Pieces that add up to `factor` times the reference: the ranks of each sum, and the axes that they differ on."""

    ranks: tuple[int, ...]
    factor: float
    axes: tuple[str, ...] = ()


def partial(
    pieces: Sequence[Piece],
    reference: Reference,
    seen: SeenPlaces,
    space: str,
    mesh: Mapping[str, int] | None,
) -> Sum | None:
    """How pieces that fit nowhere alone add up to the same part of the reference; None if they do not."""
    if len(pieces) < 2:
        return None
    first = pieces[0]
    if any((p.n, p.f) != (first.n, first.f) for p in pieces):
        return None
    candidates = product(seen.rows(space, first, reference), seen.columns(space, first, reference))
    for rows, columns in candidates:
        same = [p for p in pieces if _may_have(p, rows, columns, reference, seen, space)]
        if len(same) < 2:
            continue
        best: Sum | None = None
        for group, axes in _groups(same, mesh):
            total = np.sum([p.matrix for p in group], axis=0)
            k = reference.factor(total, rows, columns)
            if k is None and not space and reference.is_but_for_a_bias(total, rows, columns):
                k = 1.0
            if k is None:
                continue
            found = Sum(tuple(sorted({p.rank for p in group})), k, axes)
            if k == 1.0:
                return found
            best = best or found
        if best is not None:
            return best
    return None


def _may_have(
    piece: Piece, rows: Map | None, columns: Map | None, reference: Reference, seen: SeenPlaces, space: str
) -> bool:
    def among(wanted: Map | None, maps: Iterator[Map | None]) -> bool:
        return any(
            m is wanted or (m is not None and wanted is not None and np.array_equal(m, wanted)) for m in maps
        )

    return among(rows, seen.rows(space, piece, reference)) and among(
        columns, seen.columns(space, piece, reference)
    )


def _groups(
    pieces: Sequence[Piece], mesh: Mapping[str, int] | None
) -> Iterator[tuple[list[Piece], tuple[str, ...]]]:
    """Sets of pieces that may add up, the likeliest first, with the axes of the mesh that they differ on."""
    by_rank: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_rank.setdefault(piece.rank, []).append(piece)
    if mesh:
        names, sizes = list(mesh), tuple(mesh.values())
        where = {rank: np.unravel_index(rank, sizes) for rank in by_rank if rank < int(np.prod(sizes))}
        for count in range(1, len(names) + 1):
            for chosen in combinations(range(len(names)), count):
                start = where.get(pieces[0].rank)
                if start is None:
                    continue
                others = [i for i in range(len(names)) if i not in chosen]
                ranks = [r for r, at in where.items() if all(at[i] == start[i] for i in others)]
                if len(ranks) > 1:
                    yield [p for r in ranks for p in by_rank[r]], tuple(names[i] for i in chosen)
    yield list(pieces), ()
    kinds: list[Piece] = []
    for piece in pieces:
        if not any(np.allclose(piece.matrix, k.matrix, rtol=1e-5, atol=1e-12) for k in kinds):
            kinds.append(piece)
    if 1 < len(kinds) < len(pieces):
        yield kinds, ()
    for own in by_rank.values():
        if 1 < len(own) < len(pieces):
            yield own, ()
