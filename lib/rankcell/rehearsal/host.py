"""In the notebook: the one process that rehearses, as a host of a world."""

from ..engine import devices
from ..engine.local import Local
from .cluster import Cluster


class RehearsalHost(Local):
    """The one process that rehearses `rank` of a job of `world_size` ranks on the cluster `on`.

    Raises:
        ValueError: there is no such cluster or rank.
    """

    def __init__(self, world_size: int, on: str, rank: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} does not exist among {world_size} ranks: they are 0 to {world_size - 1}."
            )
        self._cluster = Cluster.parse(on, world_size)
        note = (
            f"Rank {rank} of {world_size} rehearses alone, as on {self._cluster}: its tensors have shapes and no "
            f"numbers, and its times are predicted."
        )
        super().__init__(1, devices.Choice("cpu", "fake", note))
        self.ranks, self.on = (rank,), on

    def place_of(self, rank: int) -> tuple[int, int, str]:
        per_node = self._cluster.per_node
        return rank % per_node, per_node, self._cluster.node_of(rank)
