"""One tensor that a trace has seen. It needs no torch."""

from dataclasses import dataclass
from typing import Any


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
        return tuple(self.value.shape)

    @property
    def mask(self) -> bytes:
        """Where a dropout put zeros; empty for what is no dropout's output."""
        return (self.value == 0).tobytes() if self.dropped else b""
