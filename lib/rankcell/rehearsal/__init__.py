"""Ranks without a backend: one rank of a large job, rehearsed without values, or all of a small one in one process.

    cluster   "128xh100x8": how long an operation takes there, by the planner's numbers; what crosses nodes
    clock     seconds that pass on the streams of a GPU that is not there
    stage     inside a rank: fake tensors, a process group of one that acts as many, what each operation costs

    meeting   where the ranks of one process meet: who has come to which operation, and who waits
    turns     threads of which one runs at a time
    answers   what each collective gives, from what all ranks gave to it

`engine/worker` asks `stage` for the clock, the tensors and the answers of the process group, and `engine/together` asks
`meeting` for the answers; everything else of a cell (its names, output, errors, lines) is as on ranks that are
processes, and so is what it leaves behind.
"""

from .cluster import Cluster, sent_by_level

__all__ = ["Cluster", "sent_by_level"]
