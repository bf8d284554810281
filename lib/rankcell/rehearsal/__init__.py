"""One rank of a large job, rehearsed without the others and without values.

    cluster   "128xh100x8": how long an operation takes there, by the planner's numbers; what crosses nodes
    clock     seconds that pass on the streams of a GPU that is not there
    host      in the notebook: starts the one process
    stage     inside a rank: fake tensors, a process group of one that acts as many, what each operation costs

It computes nothing: what depends on numbers (`.item()`, a loss) is an error. `engine/worker` asks `stage` for the
clock, the tensors and the answers of the process group; everything else of a cell (its names, output, errors, lines)
is as on other ranks, and so is what it leaves behind.
"""

from .cluster import Cluster, sent_by_level

__all__ = ["Cluster", "sent_by_level"]
