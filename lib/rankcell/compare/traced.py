"""One tensor that a trace has seen, and the random vectors by which ranks sum theirs up. It needs no torch."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

NOT_FINITE = (7e7, 5e7, -5e7)  # stand for NaN, infinity and minus infinity, so that sums can be compared


@cache
def weights(n: int) -> np.ndarray:
    """`(n, 2)` random numbers, the same for everybody."""
    return np.random.Generator(np.random.PCG64(n)).standard_normal((n, 2))


def matrix_of(shape: tuple[int, ...], of_parameter: bool) -> tuple[int, int]:
    """The rows and columns as which a tensor counts in a trace: of a parameter all dims but the first are columns, else
    all but the last are rows.
    """
    if len(shape) < 2:
        return math.prod(shape), 1
    cut = 1 if of_parameter else len(shape) - 1
    return math.prod(shape[:cut]), math.prod(shape[cut:])


@dataclass(frozen=True)
class Traced:
    """One tensor that `rankcell.trace` saw: whole where one process keeps it, else as a few sums of its numbers.

    The tensor counts as a matrix, `n` rows by `f` columns: all its dims but the last are rows, of a parameter all but
    the first are columns. `rows` `(n, 2)` are its products with two vectors of f random weights, `columns` `(2, f)`
    those with two of n: enough to tell how the tensors of several ranks make up one. `flat` are numbers in a row, from
    each place in `at`. Arrays are numpy's, of float64.
    """

    name: str  # of the module or parameter
    kind: str  # "output", "grad_output", "grad" or "parameter"; "input" and "cotangent" for `replay`
    step: int  # steps of the optimizer before it
    call: int = 0  # which call of the module it belongs to
    part: int = 0  # which tensor of the module's output
    order: int = 0  # counts what was seen
    line: int = 0  # of the learner's code, 0 where it is not known
    shape: tuple[int, ...] = ()
    dtype: str = ""
    whole: Any = None
    rows: Any = None
    columns: Any = None
    flat: Any = None
    at: tuple[int, ...] = ()
    mask: str = ""  # a digest of where a dropout put zeros
    before: str = ""  # and of what it was given

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns."""
        return matrix_of(self.shape, self.kind in ("grad", "parameter"))

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(a.nbytes for a in (self.whole, self.rows, self.columns, self.flat) if a is not None)
