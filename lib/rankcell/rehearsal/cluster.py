"""The machine that a rehearsal plays on: nodes of equal GPUs, and what an operation costs there.

Rates and latencies are the planner's (`planner.chips`, `planner.communication`): rings inside a node at the bus
bandwidth that NVLink reaches, rings across nodes at what the ports of the GPUs carry that share a node. Nothing
here needs torch.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import costs
from ..planner import chips, communication, stacks
from ..results import Event, Run

INSIDE, BETWEEN = "inside a node", "between nodes"
_FORM = "Write nodes x GPU x GPUs per node, such as 128xh100x8."


@dataclass(frozen=True, eq=False)
class Cluster:
    """`nodes` of `per_node` GPUs each."""

    nodes: int
    chip: chips.Chip
    per_node: int

    @classmethod
    def parse(cls, text: str, world_size: int) -> "Cluster":
        """The cluster that "128xh100x8" names; "h100" alone: as many nodes of 8 as `world_size` ranks need.

        Raises:
            ValueError: there is no such GPU, or the cluster has not `world_size` of them.
        """
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?([a-z][a-z0-9 .-]*?)(?:\s*x\s*(\d+))?\s*", text.lower())
        if match is None:
            raise ValueError(f"{text!r} names no cluster. {_FORM}")
        chip = chips.find(match[2])
        per_node = int(match[3] or min(world_size, chip.node))
        nodes = int(match[1] or math.ceil(world_size / max(1, per_node)))
        if nodes * per_node != world_size:
            raise ValueError(
                f"{text!r} has {nodes} x {per_node} = {nodes * per_node} GPUs, and the job has {world_size} ranks: "
                f"one rank per GPU. {_FORM}"
            )
        return cls(nodes, chip, per_node)

    def __str__(self) -> str:
        many = f"{self.nodes} nodes of {self.per_node}" if self.nodes > 1 else f"{self.per_node}"
        return f"{many} {self.chip.name}"

    def node_of(self, rank: int) -> str:
        """The name of the node on which `rank` runs; "" if there is one node only."""
        return f"node {rank // self.per_node}" if self.nodes > 1 else ""

    def seconds(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Seconds of one operation of the group `ranks` on arrays of `nbytes`: the input of each rank.

        Rings as in `planner.communication`. Of an all_gather every rank's input is a share of the array, of an
        all_to_all it is spread over all ranks; a broadcast or reduce goes down a pipelined tree.
        """
        n = len(ranks)
        if n < 2:
            return 0.0
        here = Counter(rank // self.per_node for rank in ranks)
        port, steps = self.chip.network * communication.PORT, math.ceil(math.log2(n))
        crosses = len(here) > 1
        bandwidth = min(self.chip.bus, max(here.values()) * port) if crosses else self.chip.bus
        latency = self.chip.alpha_across if crosses else self.chip.alpha
        if op in ("barrier", "monitored_barrier"):
            return 2 * steps * latency
        if op in ("broadcast", "reduce"):
            return steps * latency + nbytes / bandwidth
        if op in ("send", "recv"):
            return latency + nbytes / bandwidth
        if op == "all_to_all":
            away = (n - here[ranks[0] // self.per_node]) / n * nbytes
            inside = (n - 1) / n * nbytes - away
            return latency + inside / self.chip.bus + away / port
        whole = nbytes * n if op in ("all_gather", "gather") else nbytes
        return float((2 if op == "all_reduce" else 1) * communication.ring(whole, n, bandwidth, latency))

    def compute_seconds(self, flops: float, nbytes: float, number_format: str) -> float:
        """Seconds of one kernel: what takes longer, its `flops` or the `nbytes` that cross the GPU's memory."""
        rate = self.chip.peak(number_format) * stacks.efficiency(self.chip, number_format)
        return max(flops / rate, nbytes / self.chip.hbm)


def sent_by_level(run: Run | Iterable[Event], nodes: Sequence[str] = ()) -> dict[str, float]:
    """Bytes that the ranks of `run` sent, "inside a node" and "between nodes", as few as the operations need.

    `nodes`, the name of each rank's node, is taken from a run. A ring over k ranks of each node goes from node to
    node once per k steps; of an all_to_all every rank's share goes where that rank is.
    """
    sent = {INSIDE: 0.0, BETWEEN: 0.0}
    events: Iterable[Event] = run.events if isinstance(run, Run) else run
    nodes = nodes or (run.nodes if isinstance(run, Run) else ())
    for e in events:
        n = len(e.ranks)
        if e.kind != "comm" or n < 2 or e.op not in ("send", *_RINGS):
            continue
        whole = e.nbytes * n if e.op in ("all_gather", "gather") else e.nbytes
        total = e.nbytes if e.op == "send" else costs.bytes_sent(e.op, whole, n)
        share = _share_between(e, nodes)
        sent[BETWEEN] += share * total
        sent[INSIDE] += (1 - share) * total
    return sent


_RINGS = "all_reduce reduce_scatter all_gather all_to_all broadcast reduce gather scatter".split()


def _share_between(e: Event, nodes: Sequence[str]) -> float:
    """The share of an operation's bytes that goes from node to node."""
    if not nodes:
        return 0.0
    if e.op == "send":
        return float(e.peer is not None and nodes[e.rank] != nodes[e.peer])
    by_node = Counter(nodes[rank] for rank in e.ranks)
    if len(by_node) == 1:
        return 0.0
    if e.op == "all_to_all":
        return (len(e.ranks) - by_node[nodes[e.rank]]) / (len(e.ranks) - 1)
    return len(by_node) / len(e.ranks)
