"""The tensor of one process, what a rank has of it, and where the one lies in the other.

Every question has the same form: for which rows and columns of the reference, and which factor k, do the sums of the
piece come out?
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

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
