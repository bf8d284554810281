"""Where the ranks of a world live: what a place must do. `local` is this machine, the part `nodes` an allocation.

A host starts, feeds, hears and ends processes. It does not know what a cell is: messages stay packed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from . import devices
from .messages import HostEvent, StartRank


class Host(ABC):
    """Starts ranks, hands messages to them, says what came from them, ends them. What is not abstract: one machine."""

    choice: devices.Choice
    ranks: Sequence[int]  # those that are processes
    names: Sequence[str] = ()  # of the nodes, in the order of their ranks
    pids: dict[int, int]  # rank -> process id (on its node)

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Its local rank, the ranks on its node (0: all of the world), the node's name ("" on one machine)."""
        return rank, 0, ""

    def reachable(self, rank: int) -> bool:
        """Whether a process can be started in the place of `rank`."""
        return True

    def clock_offset(self, rank: int) -> float:
        """Seconds by which the clock of the rank's machine is ahead of ours."""
        return 0.0

    @abstractmethod
    def address_for(self, rank: int) -> str:
        """The folder or address of the store, as the machine of `rank` reaches it."""

    def prepare_store(self, generation: int) -> None:
        """Make sure that the store is there before ranks join `generation`, and drop what older ones left in it."""
        return None

    @abstractmethod
    def start(self, orders: Sequence[StartRank]) -> None:
        """Start a process for each of `orders`; its `Joined` tells more."""

    @abstractmethod
    def send(self, ranks: Sequence[int], message: bytes, *, control: bool = False) -> None:
        """Give a packed message to the main threads of `ranks`, or to their control threads, without waiting."""

    @abstractmethod
    def kill(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` at once; `ProcessExited` follows."""

    @abstractmethod
    def end(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`, and hear nothing of them any more."""

    @abstractmethod
    def pump(self, timeout: float) -> list[HostEvent]:
        """What has come from the ranks, after waiting at most `timeout` seconds for something."""

    @abstractmethod
    def stop(self) -> None:
        """End all ranks, and give back whatever the host holds. Safe to call twice."""
