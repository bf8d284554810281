"""Where the ranks of a world live: on this machine, on the nodes of an allocation, or one of them in a rehearsal.

A host starts, feeds, hears and ends processes. It does not know what a cell is: messages stay packed.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from .. import errors, extensions
from . import devices
from .local import Local, room
from .messages import HostEvent, StartRank
from .nodes import Nodes


class Host(Protocol):
    """Starts ranks, hands messages to them, says what came from them, ends them."""

    choice: devices.Choice
    notes: list[str]  # what the learner should know about this place
    on: str  # the cluster that is rehearsed, or ""

    @property
    def ranks(self) -> Sequence[int]:
        """Those that are processes."""
        ...

    @property
    def names(self) -> list[str]:
        """The names of the nodes, in the order of their ranks; empty on one machine."""
        ...

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id (on its node)."""
        ...

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Its local rank, the ranks on its node (0: all of the world), the node's name ("" on one machine)."""
        ...

    def address_for(self, rank: int) -> str:
        """The folder or address of the store, as the machine of `rank` reaches it."""
        ...

    def prepare_store(self, generation: int) -> None:
        """Make sure that the store is there before ranks join `generation`, and drop what older ones left in it."""
        ...

    def reachable(self, rank: int) -> bool:
        """Whether a process can be started in the place of `rank`."""
        ...

    def clock_offset(self, rank: int) -> float:
        """Seconds by which the clock of the rank's machine is ahead of ours."""
        ...

    def start(self, orders: Sequence[StartRank]) -> None:
        """Start a process for each of `orders`; its `Joined` tells more."""
        ...

    def send(self, ranks: Sequence[int], message: bytes, *, control: bool = False) -> None:
        """Give a packed message to the main threads of `ranks`, or to their control threads, without waiting."""
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

    def fallback(self, error: errors.StartError) -> "Host | None":
        """Another host in the place of this one, whose ranks could not be started; None if there is none."""
        ...


class ThisMachine(Local):
    """All ranks are processes of this machine, with a CUDA MPS of their own where the choice wants one.

    Raises:
        WorldSizeError: the machine cannot hold that many ranks. ValueError: there is no such device.
    """

    on = ""

    def __init__(
        self, world_size: int, device: str, method: str, choice: devices.Choice | None = None
    ) -> None:
        choice = choice or devices.choose(world_size, device, devices.look(mps=device == "cuda"))
        most, why = room()
        if world_size > most:
            raise errors.WorldSizeError(f"{world_size} ranks do not fit on this machine: {why}")
        self.ranks = range(world_size)
        self.names: list[str] = []
        self._method = method
        self._mps = devices.MpsDaemon()
        if choice.start_mps and (problem := self._mps.start()):
            assert choice.instead is not None
            choice = replace(choice.instead, better=f"{problem}. {choice.instead.better}")
        self.choice = choice
        # what the learner has set himself stays
        environment = {k: v for k, v in choice.environment.items() if k not in os.environ}
        super().__init__(world_size, choice.backend, environment | self._mps.environment, method)

    def stop(self) -> None:
        """End all ranks, and the MPS. Safe to call twice."""
        super().stop()
        self._mps.stop()

    def fallback(self, error: errors.StartError) -> "ThisMachine | None":
        """The same with the next choice: ranks that share a GPU could not be started with the best one."""
        if self.choice.instead is None:
            return None
        self.stop()
        found = ThisMachine(len(self.ranks), "", self._method, self.choice.instead)
        why = (str(error).splitlines() or [""])[-1][:200]
        found.notes.append(f"The ranks did not start over {self.choice.note}: {why}")
        return found


class Rehearsal(Local):
    """The one process that rehearses `rank` of a job of `world_size` ranks on the cluster `on`.

    Raises:
        ValueError: there is no such cluster or rank.
    """

    def __init__(self, world_size: int, on: str, rank: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} does not exist among {world_size} ranks: they are 0 to {world_size - 1}."
            )
        self._cluster = extensions.find("1 of N, cluster").parse(on, world_size)
        self.ranks, self.on = (rank,), on
        self.names: list[str] = []
        self.choice = devices.Choice(
            "cpu",
            "fake",
            f"Rank {rank} of {world_size} rehearses alone, as on {self._cluster}: its tensors have shapes and no "
            f"numbers, and its times are predicted.",
        )
        super().__init__(1, "gloo")

    def place_of(self, rank: int) -> tuple[int, int, str]:
        """Local rank, ranks on the node, and its name."""
        per_node = self._cluster.per_node
        return rank % per_node, per_node, self._cluster.node_of(rank)

    def fallback(self, error: errors.StartError) -> None:
        """There is none."""


def host_for(world_size: int, *, device: str, nodes: int | None, method: str, on: str, as_rank: int) -> Host:
    """The place of the ranks of a world, as `world.Ranks` is asked for it; no rank is started yet."""
    if on:
        return Rehearsal(world_size, on, as_rank)
    if nodes is None:
        return ThisMachine(world_size, device, method)
    return Nodes(world_size, nodes, device)
