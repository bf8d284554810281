"""The ranks of a world on several nodes of a Slurm allocation: `%%ranks 4 --nodes 2`, `Ranks(4, nodes=2)`.

    allocation   in the notebook: a `engine.host.Host` that starts an agent on each node, by one `srun`
    agent        on a node: starts, feeds and ends its ranks as the notebook does on one machine

Slurm launches and ends; nothing here replaces it, submits a job, or compares the ranks' calls: that is as on one
machine. What agent and notebook say to each other is not encrypted, as torch's own traffic between nodes is not; both
prove first that they know a key (`engine/channel`), which travels in a file that only the user can read.
"""
