"""How the tensors of several ranks make up one: found from their numbers, without being told.

`Reference` is the tensor of one process, a matrix of N rows and F columns; a `Piece` is what a rank has of it, as sums
(see `traced.Traced`). Every question has the same form: for which rows and columns of the reference, and which factor
k, do the sums of the piece come out? Several pieces that fit nowhere may still add up: they are partial sums. It knows
no modules and no words; `judge` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

import numpy as np

from .traced import NOT_FINITE, weights

Map = np.ndarray  # indices into the reference's rows or columns

# What may be lost by computing in another order, as a share of a tensor's typical number.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}
# The share of a number that may be lost when it is stored.
ROUNDING = {"float64": 2**-53, "float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}
SLACK = (
    4.0  # a sum of f products with random weights may be off by so many times sqrt(f) of one number's error
)
EXACT = 1e-3  # the share of a limit by which rows may differ that were computed alike
MOST_PAIRS = 1 << 23  # rows times rows that are compared at once


def typical(matrix: np.ndarray) -> float:
    """The size of a tensor's typical number: the root of the mean square."""
    flat = matrix.reshape(-1)  # einsum: a library's threads cost more here than they give
    return float(np.einsum("i,i->", flat, flat) / max(1, flat.size)) ** 0.5


@dataclass(frozen=True)
class Piece:
    """What one rank has of a tensor, from one call of its module."""

    rank: int
    call: int
    shape: tuple[int, ...]
    rows: np.ndarray  # (n, 2)
    columns: np.ndarray  # (2, f)
    flat: np.ndarray | None = None
    at: tuple[int, ...] = ()

    def minus(self, other: "Piece") -> "Piece":
        """By how much this one is more than another of the same shape."""
        flat = None if self.flat is None or other.flat is None else self.flat - other.flat
        return replace(self, rows=self.rows - other.rows, columns=self.columns - other.columns, flat=flat)

    def times(self, k: float) -> "Piece":
        """The piece of k times the tensor."""
        flat = None if self.flat is None else k * self.flat
        return replace(self, rows=k * self.rows, columns=k * self.columns, flat=flat)

    @property
    def n(self) -> int:
        """Rows."""
        return len(self.rows)

    @property
    def f(self) -> int:
        """Columns."""
        return int(self.columns.shape[1])


@dataclass(frozen=True)
class Fit:
    """Where a piece lies in the reference: `factor` times these rows and columns of it.

    `sure` says that no other rows would have done. `flat` are places in the flattened reference instead.
    """

    rows: Map | None
    columns: Map | None
    factor: float = 1.0
    sure: bool = True
    flat: Map | None = None


@dataclass
class Reference:
    """The tensor of one process. `floor` is the size below which a number is noise.

    `slack` is for updates: by how much each number may be off besides.
    """

    matrix: np.ndarray
    tolerance: float
    floor: float = 0.0
    shape: tuple[int, ...] = ()  # of one call
    calls: int = 1
    slack: np.ndarray | None = None
    scale: float = field(init=False)
    _sums: dict = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.matrix = np.nan_to_num(np.asarray(self.matrix, dtype=np.float64), True, *NOT_FINITE)
        self.scale = max(
            float(np.sqrt(np.mean(self.matrix**2))) if self.matrix.size else 0.0, self.floor, 1e-30
        )

    @property
    def n(self) -> int:
        """Rows."""
        return len(self.matrix)

    @property
    def f(self) -> int:
        """Columns."""
        return int(self.matrix.shape[1])

    @cached_property
    def is_noise(self) -> bool:
        """Whether there is nothing in it to compare."""
        return typical(self.matrix) <= self.tolerance * self.floor

    @cached_property
    def row_sums(self) -> np.ndarray:
        """`(N, 2)`, as a piece with all columns has them."""
        return self._weighted(self.matrix)

    @cached_property
    def row_limits(self) -> np.ndarray:
        """`(N,)`: by how much the sums of a row may be off."""
        return self._limits(self.matrix, self.slack)

    def _weighted(self, matrix: np.ndarray) -> np.ndarray:
        return matrix.repeat(2, 1) if matrix.shape[1] == 1 else matrix @ weights(matrix.shape[1])

    def _limits(self, matrix: np.ndarray, slack: np.ndarray | None) -> np.ndarray:
        sizes = np.sqrt(np.einsum("ij,ij->i", matrix, matrix) / max(1, matrix.shape[1]))
        limits = SLACK * self.tolerance * np.sqrt(matrix.shape[1]) * np.maximum(sizes, self.scale)
        return limits if slack is None else limits + SLACK * np.linalg.norm(slack, axis=1)

    def _part(self, matrix: np.ndarray | None, rows: Map | None, columns: Map | None) -> np.ndarray | None:
        if matrix is None or (rows is None and columns is None):
            return matrix
        if columns is None:
            return matrix[rows]
        return matrix[:, columns] if rows is None else matrix[np.ix_(rows, columns)]

    def sums(
        self, rows: Map | None, columns: Map | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Row sums, column sums and their limits, of the part with these rows and columns (None: all)."""
        key = (None if rows is None else rows.tobytes(), None if columns is None else columns.tobytes())
        if key not in self._sums:
            self._sums[key] = self._new_sums(rows, columns)
        return self._sums[key]

    def _new_sums(
        self, rows: Map | None, columns: Map | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        part, slack = self._part(self.matrix, rows, columns), self._part(self.slack, rows, columns)
        assert part is not None
        if columns is None:
            chosen = slice(None) if rows is None else rows
            row_sums, row_limits = self.row_sums[chosen], self.row_limits[chosen]
        else:
            row_sums, row_limits = self._weighted(part), self._limits(part, slack)
        column_sums = weights(len(part)).T @ part
        return row_sums, column_sums, row_limits, self._limits(part.T, None if slack is None else slack.T)

    def factor(
        self, rows: np.ndarray, columns: np.ndarray, fit: tuple[Map | None, Map | None]
    ) -> float | None:
        """k, if sums of rows and of columns are k times those of that part; None if there is no such k."""
        row_sums, column_sums, row_limits, column_limits = self.sums(*fit)
        if rows.shape != row_sums.shape or columns.shape != column_sums.shape:
            return None
        power = float(np.sum(row_sums**2) + np.sum(column_sums**2))
        k = float((np.sum(rows * row_sums) + np.sum(columns * column_sums)) / power) if power > 0 else 1.0
        if abs(k - 1) < SLACK * self.tolerance or self.is_noise:
            k = 1.0
        grown = max(1.0, abs(k))
        off = np.abs(rows - k * row_sums).max(1)
        off_columns = np.abs(columns - k * column_sums).max(0)
        fits = (off <= grown * row_limits).all() and (off_columns <= grown * column_limits).all()
        return k if fits and abs(k) >= 1e-6 else None

    def is_but_for_a_bias(self, rows: np.ndarray, fit: tuple[Map | None, Map | None]) -> bool:
        """Whether row sums differ from those of that part by the same in every row: a bias that is added elsewhere, or
        by every rank.
        """
        row_sums, _, limits, _ = self.sums(*fit)
        alike = np.abs(row_sums - row_sums[:1]).max(1) <= 4 * limits
        if rows.shape != row_sums.shape or 2 * alike.sum() > len(rows):
            return False
        off = rows - row_sums
        return bool((np.abs(off - off.mean(0)).max(1) <= 2 * limits).all())

    def locate_rows(self, piece: Piece, columns: Map | None) -> tuple[Map, bool] | None:
        """The rows of the reference that a piece with these columns has, and whether no others would do."""
        if columns is None:
            targets, limits = self.row_sums, self.row_limits
        else:
            part = self.matrix[:, columns]
            slack = self._part(self.slack, None, columns)
            targets, limits = self._weighted(part), self._limits(part, slack)
        return _nearest(piece.rows, targets, limits)

    def locate_columns(self, piece: Piece, rows: Map | None) -> tuple[Map, bool] | None:
        """The columns of the reference that a piece with these rows has."""
        part = self.matrix if rows is None else self.matrix[rows]
        if len(part) != piece.n:
            return None
        slack = self._part(self.slack, rows, None)
        limits = self._limits(part.T, None if slack is None else slack.T)
        return _nearest(piece.columns.T, (weights(len(part)).T @ part).T, limits)


def _nearest(points: np.ndarray, targets: np.ndarray, limits: np.ndarray) -> tuple[Map, bool] | None:
    """For each of the points `(n, 2)` the index of the target `(N, 2)` within the limits; None if one has none.

    Neighbours of points belong to neighbours of targets, where there is a choice.
    """
    if len(points) * len(targets) > MOST_PAIRS:
        return None
    # rows are often computed alike to the last bit: what is nearest of all is no matter of the tolerance then
    exactly = _within(points, targets, EXACT * limits)
    return exactly if exactly is not None and exactly[1] else _within(points, targets, limits) or exactly


def _within(points: np.ndarray, targets: np.ndarray, limits: np.ndarray) -> tuple[Map, bool] | None:
    # one sum after the other: `all` over an axis of two takes longer than all the rest
    close = np.abs(points[:, :1] - targets[:, 0]) <= limits
    close &= np.abs(points[:, 1:] - targets[:, 1]) <= limits
    count = close.sum(1)
    if (count == 0).any():
        return None
    found = np.where(count == 1, close.argmax(1), -1)
    for order, step in ((range(1, len(points)), 1), (range(len(points) - 2, -1, -1), -1)):
        for i in order:
            beside = found[i - step] + step
            if found[i] < 0 and found[i - step] >= 0 and 0 <= beside < len(targets) and close[i, beside]:
                found[i] = beside
    sure = bool((found >= 0).all()) and len(np.unique(found)) == len(found)
    return np.where(found >= 0, found, close.argmax(1)), sure


class Memory:
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


def place(piece: Piece, reference: Reference, memory: Memory, space: str) -> Fit | None:
    """Where the piece lies in the reference, as it is or times a factor; None if nowhere."""
    scaled: Fit | None = None
    for rows, columns in product(
        memory.rows(space, piece, reference), memory.columns(space, piece, reference)
    ):
        k = reference.factor(piece.rows, piece.columns, (rows, columns))
        if k == 1.0:
            return Fit(rows, columns)
        if k is not None and (scaled is None or abs(k - 1) < abs(scaled.factor - 1)):
            scaled = Fit(rows, columns, k)
    found = _search(piece, reference, memory, space)
    if found is not None:
        memory.learn(space, piece, reference, found)
        return found
    return scaled or (_chunk(piece, reference) if space else None)


def _chunk(piece: Piece, reference: Reference) -> Fit | None:
    """A parameter's rows in one piece, times a factor: weights that are all alike told nothing of where it lies."""
    if piece.f != reference.f or not 3 <= piece.n < reference.n <= 64 * piece.n:
        return None
    for start in range(0, reference.n - piece.n + 1, piece.n):
        rows = np.arange(start, start + piece.n)
        k = reference.factor(piece.rows, piece.columns, (rows, None))
        if k is not None:
            return Fit(rows, None, k, sure=False)
    return None


def _search(piece: Piece, reference: Reference, memory: Memory, space: str) -> Fit | None:
    """Where the piece lies as it is, by its numbers alone."""
    candidates: list[tuple[Map | None, Map | None, bool]] = []
    if piece.f == reference.f:
        located = reference.locate_rows(piece, None)
        if located is not None:
            candidates.append((located[0], None, located[1]))
    if piece.f != reference.f:
        for known in memory.rows(space, piece, reference):
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
        voted = None if space or rows is None else _voted(rows, reference, piece.shape[:-1])
        if voted is not None and reference.factor(piece.rows, piece.columns, (voted, columns)) == 1.0:
            return Fit(voted, columns)
        if reference.factor(piece.rows, piece.columns, (rows, columns)) == 1.0:
            return Fit(rows, columns, sure=sure)
    return None


def _voted(rows: Map, reference: Reference, part: tuple[int, ...]) -> Map | None:
    """The combination of places on each dim that most of the rows speak for: rows that look alike, such as the first of
    two sequences that begin with one token, may have been taken for each other.
    """
    whole = reference.shape[:-1]
    if len(whole) != len(part) or not part or reference.calls != 1 or int(np.prod(part)) != len(rows):
        return None
    places = np.stack(np.unravel_index(rows, whole)).reshape(-1, *part)
    chosen = []
    for dim in range(len(part)):
        along = np.moveaxis(places[dim], dim, 0).reshape(part[dim], -1)
        chosen.append(np.array([np.bincount(line).argmax() for line in along]))
    if any(len(np.unique(c)) < len(c) for c in chosen):
        return None
    return np.ravel_multi_index(np.ix_(*chosen), whole).reshape(-1)


def place_flat(piece: Piece, reference: Reference, memory: dict, space: str) -> Fit | None:
    """Where the numbers of a piece lie in the flattened reference, window by window.

    Zeros at the end of a piece are padding.
    """
    if piece.flat is None:
        return None
    flat = reference.matrix.reshape(-1)
    key = (space, piece.rank, len(piece.flat), len(flat))
    known = memory.get(key)
    if known is None:
        known = _find_windows(piece, flat, reference)
        if known is None:
            return None
        memory[key] = known
    inside = known >= 0
    mine, theirs = piece.flat[inside], flat[known[inside]]
    power = float(theirs @ theirs)
    k = float(mine @ theirs) / power if power > 0 else 1.0
    if abs(k - 1) < SLACK * reference.tolerance or reference.is_noise:
        k = 1.0
    limit = SLACK * reference.tolerance * np.maximum(np.abs(theirs), reference.scale) * max(1.0, abs(k))
    if reference.slack is not None:
        limit = limit + SLACK * reference.slack.reshape(-1)[known[inside]]
    if (np.abs(mine - k * theirs) > limit).any() or abs(k) < 1e-6:
        # weights that are all alike, as those of a norm, lie anywhere: their gradients tell more
        known = _find_windows(piece, flat, reference)
        if known is None:
            return None
        memory[key], k = known, 1.0
    return Fit(None, None, k, flat=known)


def _find_windows(piece: Piece, flat: np.ndarray, reference: Reference) -> Map | None:
    """For each number of the piece its place in `flat`, -1 for padding; None if they are not all found."""
    assert piece.flat is not None
    width = len(piece.flat) // len(piece.at) if len(piece.at) > 1 else min(16, len(piece.flat))
    numbers = piece.flat
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    places = np.full(len(numbers), -2, dtype=np.int64)
    limit = SLACK * reference.tolerance * reference.scale
    used = len(np.trim_zeros(numbers, "b"))
    places[used:] = -1
    for start in range(0, used, width):
        window = numbers[start : min(start + width, used)]
        if start and places[start - 1] >= 0:  # the last one goes on
            begin = int(places[start - 1]) + 1
            if len(piece.at) == 1 and _fits(flat, begin, window, limit):
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
    memory: Memory,
    space: str,
    mesh: Mapping[str, int] | None,
) -> Sum | None:
    """How pieces that fit nowhere alone add up to the same part of the reference; None if they do not."""
    if len(pieces) < 2:
        return None
    first = pieces[0]
    if any((p.n, p.f) != (first.n, first.f) for p in pieces):
        return None
    candidates = product(memory.rows(space, first, reference), memory.columns(space, first, reference))
    for rows, columns in candidates:
        same = [p for p in pieces if _may_have(p, rows, columns, reference, memory, space)]
        if len(same) < 2:
            continue
        best: Sum | None = None
        for group, axes in _groups(same, mesh):
            total_rows = np.sum([p.rows for p in group], axis=0)
            total_columns = np.sum([p.columns for p in group], axis=0)
            k = reference.factor(total_rows, total_columns, (rows, columns))
            if k is None and not space and reference.is_but_for_a_bias(total_rows, (rows, columns)):
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
    piece: Piece, rows: Map | None, columns: Map | None, reference: Reference, memory: Memory, space: str
) -> bool:
    def among(wanted: Map | None, maps: Iterator[Map | None]) -> bool:
        return any(
            m is wanted or (m is not None and wanted is not None and np.array_equal(m, wanted)) for m in maps
        )

    return among(rows, memory.rows(space, piece, reference)) and among(
        columns, memory.columns(space, piece, reference)
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
        if not any(np.allclose(piece.rows, k.rows, rtol=1e-5, atol=1e-12) for k in kinds):
            kinds.append(piece)
    if 1 < len(kinds) < len(pieces):
        yield kinds, ()
    for own in by_rank.values():
        if 1 < len(own) < len(pieces):
            yield own, ()


def coverage(fits: Sequence[Fit], reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """How many of the fits have each row, and each column, of the reference."""
    rows, columns = np.zeros(reference.n, dtype=int), np.zeros(reference.f, dtype=int)
    for fit in fits:
        if fit.flat is not None:
            inside = fit.flat[fit.flat >= 0]
            rows[np.unique(inside // reference.f)] += 1
            columns[:] += 1
            continue
        rows[slice(None) if fit.rows is None else fit.rows] += 1
        columns[slice(None) if fit.columns is None else fit.columns] += 1
    return rows, columns
