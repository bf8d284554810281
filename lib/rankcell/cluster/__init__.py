"""From the notebook to a cluster: job scripts, snapshots, and a Slurm to try them on.

Jobs are started by Slurm and torchrun: nothing here launches ranks, and rank cells on several nodes are the engine's.
"""
