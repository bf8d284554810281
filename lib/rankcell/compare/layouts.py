"""How the tensors of several ranks make up one: found from their numbers, without being told.

A piece may lie in the reference as it is, or times a factor. Several pieces that fit nowhere may still add up: they are
partial sums. It knows no modules and no words; `judge` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import numpy as np

from .reference import SLACK, Fit, Map, Piece, Reference

WINDOW = 16  # numbers of a flat piece that are looked for together


class SeenPlaces:
    """Which rows and columns a rank was seen to have of a tensor of some size: it will have them again."""

    def __init__(self) -> None:
        self._maps: dict[tuple, list[Map]] = {}
        self.flat: dict[tuple, Map] = {}

    def rows(self, piece: Piece, reference: Reference) -> Iterator[Map | None]:
        """Rows that the piece may have, the likeliest first."""
        if piece.n == reference.n:
            yield None
        yield from self._maps.get((reference.space, piece.rank, piece.call, reference.n, piece.n), ())

    def columns(self, piece: Piece, reference: Reference) -> Iterator[Map | None]:
        """Columns that the piece may have, the likeliest first."""
        if piece.f == reference.f:
            yield None
        yield from self._maps.get((reference.space, piece.rank, reference.f, piece.f), ())

    def both(self, piece: Piece, reference: Reference) -> Iterator[tuple[Map | None, Map | None]]:
        """Rows and columns that the piece may have."""
        return product(self.rows(piece, reference), self.columns(piece, reference))

    def learn(self, piece: Piece, reference: Reference, fit: Fit) -> None:
        """Remember where a piece was found."""
        of_rows = reference.space, piece.rank, piece.call, reference.n, piece.n
        of_columns = reference.space, piece.rank, reference.f, piece.f
        for key, found in ((of_rows, fit.rows), (of_columns, fit.columns)) if fit.sure else ():
            maps = self._maps.setdefault(key, [])
            if found is not None and len(maps) < 4 and not any(np.array_equal(found, other) for other in maps):
                maps.append(found)


def place(piece: Piece, reference: Reference, seen: SeenPlaces) -> Fit | None:
    """Where the piece lies in the reference, as it is or times a factor; None if nowhere."""
    scaled: Fit | None = None
    for rows, columns in seen.both(piece, reference):
        k = reference.factor(piece.matrix, rows, columns)
        if k == 1.0:
            return Fit(rows, columns)
        if k is not None and (scaled is None or abs(k - 1) < abs(scaled.factor - 1)):
            scaled = Fit(rows, columns, k)
    for rows, columns, sure in _located(piece, reference, seen):
        if reference.factor(piece.matrix, rows, columns) == 1.0:
            found = Fit(rows, columns, sure=sure)
            seen.learn(piece, reference, found)
            return found
    return scaled or _scaled_block(piece, reference)


def _scaled_block(piece: Piece, reference: Reference) -> Fit | None:
    """The block of rows of which a piece is a multiple, if it is one of one block only."""
    starts = range(0, reference.n, piece.n) if reference.n % piece.n == 0 and piece.f == reference.f else ()
    blocks = [np.arange(n, n + piece.n) for n in starts]
    found = [(rows, k) for rows in blocks if (k := reference.factor(piece.matrix, rows, None)) is not None]
    return Fit(found[0][0], None, found[0][1]) if len(found) == 1 else None


def _located(piece: Piece, reference: Reference, seen: SeenPlaces) -> Iterator[tuple[Map | None, Map | None, bool]]:
    """Rows and columns that a piece has by its numbers alone, and whether no others would do."""
    if piece.f == reference.f:
        yield from ((rows, None, True) for rows in _blocks(piece, reference))
        if located := reference.locate_rows(piece, None):
            yield located[0], None, located[1]
        return
    for known in seen.rows(piece, reference):
        if located := reference.locate_columns(piece, known):
            yield known, *located
    if 1 < piece.f < reference.f and reference.f % piece.f == 0:
        for start in range(0, reference.f, piece.f):
            block = np.arange(start, start + piece.f)
            if located := reference.locate_rows(piece, block):
                yield located[0], block, located[1]


def _blocks(piece: Piece, reference: Reference) -> list[Map]:
    """The rows of the block that a piece is, if no other would do: together its rows tell repeated tokens apart."""
    whole, mine = reference.shape[:-1], piece.shape[:-1]
    is_cut = len(mine) == len(whole) and mine != whole and not any(a % b for a, b in zip(whole, mine, strict=True))
    if not is_cut or np.prod(whole) != reference.n:
        return []
    begins = np.linalg.norm(reference.matrix - piece.matrix[0], axis=1) <= reference.row_limits
    found = [b for b in _cut(whole, mine) if begins[b[0]] and reference.factor(piece.matrix, b, None) == 1.0]
    return found if len(found) == 1 else []


@cache
def _cut(whole: tuple[int, ...], mine: tuple[int, ...]) -> list[Map]:
    """The rows of each block of these sizes."""
    places = np.arange(np.prod(whole)).reshape(whole)
    chosen = product(*(_parts(a, b) for a, b in zip(whole, mine, strict=True)))
    return [places[np.ix_(*parts)].reshape(-1) for parts in chosen]


def _parts(whole: int, mine: int) -> list[Map]:
    """Each part of a dim, and each two half parts of a zigzag."""
    places, count = np.arange(whole), whole // mine
    halves = np.split(places, 2 * count) if mine % 2 == 0 and count > 1 else []
    return [*np.split(places, count), *(np.append(halves[i], halves[-1 - i]) for i in range(len(halves) // 2))]


def place_flat(piece: Piece, reference: Reference, seen: SeenPlaces) -> Fit | None:
    """Where the numbers of a piece lie in the flattened reference. Zeros at the end of a piece are padding."""
    numbers, flat = piece.matrix.reshape(-1), reference.matrix.reshape(-1)
    key = (reference.space, piece.rank, len(numbers), len(flat))
    known = seen.flat.get(key)
    if known is not None:
        k = reference.factor_flat(numbers[known >= 0], known[known >= 0])
        if k is not None:
            return Fit(None, None, k, flat=known)
    # weights that are all alike, as those of a norm, lie anywhere: their gradients tell more
    known = _find_numbers(numbers, flat, SLACK * reference.tolerance * reference.scale)
    if known is None:
        return None
    seen.flat[key] = known
    return Fit(None, None, flat=known)


def _find_numbers(numbers: np.ndarray, flat: np.ndarray, limit: float) -> Map | None:
    """For each number its place in `flat`, -1 for padding; None if they are not all found."""
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    places = np.full(len(numbers), -1, dtype=np.int64)
    used, after = len(np.trim_zeros(numbers, "b")), 0
    for start in range(0, used, WINDOW):
        window = numbers[start : min(start + WINDOW, used)]
        low, high = np.searchsorted(ordered, (window[0] - limit, window[0] + limit))
        # the last one goes on, or another stretch begins
        for begin in (after, *sorted(order[low : min(high, low + 4096)])):
            part = flat[begin : begin + len(window)]
            if len(part) == len(window) and (np.abs(part - window) <= limit).all():
                after = begin + len(window)
                places[start : start + len(window)] = np.arange(begin, after)
                break
        else:
            return None
    return places


@dataclass(frozen=True)
class Sum:
    """Pieces that add up to `factor` times the reference: the ranks of each sum, and the axes that they differ on."""

    ranks: tuple[int, ...]
    factor: float
    axes: tuple[str, ...] = ()


def partial(
    pieces: Sequence[Piece], reference: Reference, seen: SeenPlaces, mesh: Mapping[str, int] | None
) -> Sum | None:
    """How pieces that fit nowhere alone add up to the same part of the reference; None if they do not."""
    first = pieces[0]
    if any(p.matrix.shape != first.matrix.shape for p in pieces):
        return None
    for rows, columns in seen.both(first, reference):
        same = [
            p
            for p in pieces
            if _is_among(rows, seen.rows(p, reference)) and _is_among(columns, seen.columns(p, reference))
        ]
        best: Sum | None = None
        several = len({p.rank for p in same}) > 1 or (rows is None and len(same) > 1)  # ranks, or calls for all rows
        for group, axes in _groups(same, mesh) if several else ():
            total = np.sum([p.matrix for p in group], axis=0)
            k = reference.factor(total, rows, columns)
            if k is None and not reference.space and reference.is_but_for_a_bias(total, rows, columns):
                k = 1.0
            if k is not None:
                found = Sum(tuple(sorted({p.rank for p in group})), k, axes)
                if k == 1.0:
                    return found
                best = best or found
        if best is not None:
            return best
    return None


def sums(pieces: Sequence[Piece], reference: Reference, seen: SeenPlaces, mesh: Mapping[str, int] | None) -> Sum | None:
    """How all pieces are parts of sums; None if one is not."""
    left, found = list(pieces), None
    while left:
        total = partial(left, reference, seen, mesh)
        if total is None or (found is not None and abs(total.factor - found.factor) > 1e-3):
            return None
        found = found or total
        left = [p for p in left if p.rank not in total.ranks] if total.axes else []
    return found


def _is_among(wanted: Map | None, maps: Iterator[Map | None]) -> bool:
    return any(m is wanted or (m is not None and wanted is not None and np.array_equal(m, wanted)) for m in maps)


def _groups(pieces: Sequence[Piece], mesh: Mapping[str, int] | None) -> Iterator[tuple[list[Piece], tuple[str, ...]]]:
    """Sets of pieces that may add up, the likeliest first, with the axes of the mesh that they differ on."""
    names, sizes = list(mesh or ()), tuple((mesh or {}).values())
    where = {p.rank: np.unravel_index(p.rank, sizes) for p in pieces} if mesh else {}
    for count in range(1, len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            others = [i for i in range(len(names)) if i not in chosen]
            start = where[pieces[0].rank]
            group = [p for p in pieces if all(where[p.rank][i] == start[i] for i in others)]
            if len({p.rank for p in group}) > 1:
                yield group, tuple(names[i] for i in chosen)
    yield list(pieces), ()
