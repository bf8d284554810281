"""The tensor of one process, what a rank has of it, and where the one lies in the other: for which rows and columns of
the reference, and which factor k, is the piece k times that part of it?
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

Map = np.ndarray  # indices into the reference's rows or columns

# What may be lost by computing in another order, as a share of a tensor's typical number.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}
# The share of a number that may be lost when it is stored.
ROUNDING = {"float64": 2**-53, "float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}
SLACK = 4.0  # a row or column may be off by so many times the error of one of its numbers
NEARLY = 4.0  # a row that is farther away by less than this may be the one that is meant, too
MOST_PAIRS = 1 << 23  # rows times rows that are compared at once
NOT_FINITE = (7e7, 5e7, -5e7)  # stand for NaN, infinity and minus infinity, so that they can be compared


@dataclass(frozen=True)
class Traced:
    """One tensor that `rankcell.trace` saw: a copy of it, as a numpy array (of 16 bits as 32), and whose it is."""

    name: str  # of the module or parameter
    kind: str  # "output", "grad_output", "grad" or "parameter"
    step: int  # steps of the optimizer before it
    value: Any
    dtype: str = ""  # that of the tensor
    call: int = 0  # which call of the module it belongs to
    part: int = 0  # which tensor of the module's output
    order: int = 0  # counts what was seen
    line: int = 0  # of the learner's code, 0 where it is not known
    dropped: str = ""  # a digest of what a dropout that is on was given

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor."""
        return tuple(getattr(self.value, "shape", ()))

    @property
    def mask(self) -> bytes:
        """Where a dropout put zeros; empty for what is no dropout's output."""
        return (self.value == 0).tobytes() if self.dropped else b""


def typical(matrix: np.ndarray) -> float:
    """The size of a tensor's typical number: the root of the mean square."""
    flat = matrix.reshape(-1)  # einsum: a library's threads cost more here than they give
    return float(np.einsum("i,i->", flat, flat) / max(1, flat.size)) ** 0.5


def matrix_of(entry: Traced) -> np.ndarray:
    """A tensor as a matrix: all its dims but the last are rows, of a parameter all but the first are columns."""
    value = np.asarray(entry.value, dtype=np.float64)
    if value.ndim < 2:
        value = value.reshape(-1, 1)
    elif entry.kind in ("grad", "parameter"):
        value = value.reshape(len(value), -1)
    else:
        value = value.reshape(-1, value.shape[-1])
    return value if np.isfinite(value).all() else np.nan_to_num(value, True, *NOT_FINITE)


def matrix_of_calls(entries: Sequence[Traced]) -> np.ndarray:
    """The tensors of all calls, one below the other, as far as their widths agree."""
    matrices = [matrix_of(e) for e in entries]
    return np.concatenate([m for m in matrices if m.shape[1] == matrices[0].shape[1]])


@cache
def _weights(n: int) -> np.ndarray:
    """`(n, 2)` random numbers: the products of rows with them tell rows apart."""
    return np.ones((1, 2)) if n == 1 else np.random.Generator(np.random.PCG64(n)).standard_normal((n, 2))


def _norms(matrix: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("ij,ij->i", matrix, matrix))


class _Sizes:
    matrix: np.ndarray

    @property
    def n(self) -> int:
        """Rows."""
        return len(self.matrix)

    @property
    def f(self) -> int:
        """Columns."""
        return int(self.matrix.shape[1])


@dataclass(frozen=True)
class Piece(_Sizes):
    """What one rank has of a tensor, from one call of its module."""

    rank: int
    call: int
    shape: tuple[int, ...]
    matrix: np.ndarray  # (n, f)


@dataclass(frozen=True)
class Fit:
    """Where a piece lies in the reference: `factor` times these rows and columns of it (None: all), or the places
    `flat` of it. `sure` says that no other rows would have done.
    """

    rows: Map | None
    columns: Map | None
    factor: float = 1.0
    sure: bool = True
    flat: Map | None = None


Tried = Sequence[tuple[Piece, Fit | None]]  # pieces, and where they were found


@dataclass
class Reference(_Sizes):
    """The tensor of one process. Below `floor` a number is noise; pieces of tensors of the same `space` lie in the
    same places; by `slack` the numbers of an update may be off besides.
    """

    matrix: np.ndarray
    tolerance: float
    floor: float = 0.0
    shape: tuple[int, ...] = ()  # of one call
    space: str = ""
    slack: np.ndarray | None = None
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = max(typical(self.matrix), self.floor, 1e-30)

    @cached_property
    def is_noise(self) -> bool:
        """Whether there is nothing in it to compare."""
        return typical(self.matrix) <= self.tolerance * self.floor

    def multiple_by_size(self, pieces: Sequence[Piece]) -> float:
        """How many times it the pieces are by their sizes, if each row is on as many ranks as every other."""
        sizes = [typical(p.matrix) ** 2 * p.matrix.size for p in pieces]
        return (sum(sizes) / sum(p.matrix.size for p in pieces)) ** 0.5 / self.scale or 1.0

    def part(self, rows: Map | None, columns: Map | None) -> tuple[np.ndarray, np.ndarray | None]:
        """The part with these rows and columns (None: all), and its slack."""
        part, slack = self.matrix, self.slack
        if rows is not None:
            part, slack = part[rows], None if slack is None else slack[rows]
        if columns is not None:
            part, slack = part[:, columns], None if slack is None else slack[:, columns]
        return part, slack

    @cached_property
    def row_limits(self) -> np.ndarray:
        """By how much its rows may be off."""
        return self.limits(self.matrix, self.slack)

    def limits(self, part: np.ndarray, slack: np.ndarray | None = None) -> np.ndarray:
        """By how much the rows of a part may be off."""
        limits = SLACK * self.tolerance * np.maximum(_norms(part), self.scale * part.shape[1] ** 0.5)
        return limits if slack is None else limits + SLACK * _norms(slack)

    def factor(self, matrix: np.ndarray, rows: Map | None, columns: Map | None) -> float | None:
        """k, if a matrix is k times the part with these rows and columns; None if there is no such k."""
        return self._factor(matrix, *self.part(rows, columns))

    def factor_flat(self, numbers: np.ndarray, places: Map) -> float | None:
        """k, if `numbers` are k times those at these places of the flattened reference; None if there is no such k."""
        flat, slack = (None if m is None else m.reshape(-1, 1)[places] for m in (self.matrix, self.slack))
        assert flat is not None
        return self._factor(numbers[:, None], flat, slack)

    def _factor(self, matrix: np.ndarray, part: np.ndarray, slack: np.ndarray | None) -> float | None:
        if matrix.shape != part.shape:
            return None
        if np.array_equal(matrix, part):
            return 1.0
        power = float(np.einsum("ij,ij->", part, part))
        k = float(np.einsum("ij,ij->", matrix, part) / power) if power > 0 else 1.0
        if abs(k - 1) < SLACK * self.tolerance or self.is_noise:
            k = 1.0
        off, grown = matrix - k * part, max(1.0, abs(k))
        if abs(k) < 1e-6 or not (_norms(off) <= grown * self.limits(part, slack)).all():
            return None
        return k if (_norms(off.T) <= grown * self.limits(part.T, None if slack is None else slack.T)).all() else None

    def is_but_for_a_bias(self, matrix: np.ndarray, rows: Map | None, columns: Map | None) -> bool:
        """Whether a matrix differs from that part by the same in every row: a bias added elsewhere, or by all."""
        part, slack = self.part(rows, columns)
        limits = self.limits(part, slack)
        if 2 * (_norms(part - part[:1]) <= 4 * limits).sum() > len(part):
            return False
        off = matrix - part
        return bool((_norms(off - off.mean(0)) <= 2 * limits).all())

    def locate_rows(self, piece: Piece, columns: Map | None) -> tuple[Map, bool] | None:
        """The rows of the reference that a piece with these columns has, and whether no others would do."""
        part, slack = self.part(None, columns)
        return _nearest(piece.matrix, part, self.row_limits if columns is None else self.limits(part, slack))

    def locate_columns(self, piece: Piece, rows: Map | None) -> tuple[Map, bool] | None:
        """The columns of the reference that a piece with these rows has."""
        part, slack = self.part(rows, None)
        return _nearest(piece.matrix.T, part.T, self.limits(part.T, None if slack is None else slack.T))


def _nearest(rows: np.ndarray, targets: np.ndarray, limits: np.ndarray) -> tuple[Map, bool] | None:
    """For each row the index of the target within the limits, and whether no other would do; None if one has none. The
    nearest one counts, and those hardly farther: 16 bits have wide limits. Where there is still a choice, neighbours of
    rows belong to neighbours of targets.
    """
    if len(rows) * len(targets) > MOST_PAIRS:
        return None
    points, targets = rows @ _weights(rows.shape[1]), targets @ _weights(rows.shape[1])
    # one product after the other: `all` over an axis of two takes longer than all the rest
    close = np.abs(points[:, :1] - targets[:, 0]) <= limits
    close &= np.abs(points[:, 1:] - targets[:, 1]) <= limits
    count = close.sum(1)
    if (count == 0).any():
        return None
    many = np.flatnonzero(count > 1)
    if len(many):
        off = np.abs(points[many, :1] - targets[:, 0]) + np.abs(points[many, 1:] - targets[:, 1])
        off[~close[many]] = np.inf
        close[many] = off <= NEARLY * off.min(1, keepdims=True) + limits / 100
        count[many] = close[many].sum(1)
    found = np.where(count == 1, close.argmax(1), -1)
    for order, step in ((range(1, len(points)), 1), (range(len(points) - 2, -1, -1), -1)):
        for i in order:
            beside = found[i - step] + step
            if found[i] < 0 and found[i - step] >= 0 and 0 <= beside < len(targets) and close[i, beside]:
                found[i] = beside
    sure = bool((found >= 0).all()) and len(np.unique(found)) == len(found)
    return np.where(found >= 0, found, close.argmax(1)), sure
