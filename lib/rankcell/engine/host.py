"""What a world needs of the place where its ranks live: one machine (`local.py`) or several (`nodes.py`).

A host starts, feeds, hears and ends processes. It does not know what a cell is: messages stay packed.
"""

from collections.abc import Sequence
from typing import Protocol

from .messages import HostEvent, StartRank


class Host(Protocol):
    """Starts ranks, hands messages to them, says what came from them, ends them."""

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id (on its node)."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the learner should know about this place."""
        ...

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Its local rank, the ranks on its node (0: all of the world), the node's name ("" on one machine)."""
        ...

    def address_for(self, rank: int) -> str:
        """The folder or address of the store, as the machine of `rank` reaches it."""
        ...

    def reachable(self, rank: int) -> bool:
        """Whether a process can be started in the place of `rank`."""
        ...

    def clock_offset(self, rank: int) -> float:
        """Seconds by which the clock of the rank's machine is ahead of ours."""
        ...

    def start(self, orders: Sequence[StartRank]) -> None:
        """Start a process for each of `orders`; its `Ready` says that it has joined."""
        ...

    def send(self, ranks: Sequence[int], message: bytes) -> None:
        """Give a packed message to the main threads of `ranks`, without waiting."""
        ...

    def ask(self, ranks: Sequence[int], message: bytes) -> None:
        """Give a packed message to the control threads of `ranks`, without waiting."""
        ...

    def kill(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` at once; `ProcessExited` follows."""
        ...

    def end(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`, and hear nothing of them any more."""
        ...

    def pump(self, timeout: float) -> list[HostEvent]:
        """What has come from the ranks, after waiting at most `timeout` seconds for something."""
        ...

    def stop(self) -> None:
        """End all ranks, and give back whatever the host holds. Safe to call twice."""
        ...
