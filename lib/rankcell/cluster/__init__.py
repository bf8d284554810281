"""From the notebook to a cluster: job scripts, snapshots, and a Slurm to try them on.

    scripts    job scripts for Slurm and torchrun, each line with its reason (in lines.toml)
    snapshots  a training that was stopped goes on to the same bits
    dry_run    what a job script does, with stand-ins (fake_commands) in the place of srun and its programs
    slurm      gives jobs to a Slurm; the magics `%slurm` and `%%slurm` of lessons 23 and 24

Jobs are started by Slurm and torchrun: nothing here launches ranks, and rank cells on several nodes are the engine's.
"""
