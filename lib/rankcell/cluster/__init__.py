"""From the notebook to a cluster: job scripts, snapshots, exported notebooks, and a Slurm to try them on.

Jobs are started by Slurm and torchrun; nothing here launches ranks. `scripts` writes what they read, `export`
turns rank cells into a program for them (`dataflow` finds what they need of the ordinary cells, `standalone`
is what the program needs of us), `snapshots` lets a program that was stopped go on, `slurm` gives jobs to a
Slurm.
"""
