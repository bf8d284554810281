"""A program in the place of srun, scontrol, hostname, torchrun, python or uv while `dry_run` runs a job script: `srun`
starts its tasks one after the other, `python` and `torchrun` note how they were called and print one line for each of
their two outputs. It imports nothing of the package. `python fake_commands.py srun --ntasks=4 python train.py`
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The options of sbatch and srun whose meaning a dry run knows: https://slurm.schedmd.com/srun.html, read 2026-11.
OPTIONS = """-a --array  -c --cpus-per-task  -d --dependency  -e --error  -m --distribution  -n --ntasks  -N --nodes
-o --output  -t --time  -w --nodelist  --ntasks-per-node  -K --kill-on-bad-exit"""
# Usual ones that change nothing in it: what stands behind them is their value, and not yet the command.
OF_NO_EFFECT = """-A --account  -C --constraint  -D --chdir  -G --gpus  -J --job-name  -p --partition  -q --qos
-x --exclude  --comment  --cpu-bind  --export  --gpu-bind  --gpus-per-node  --gpus-per-task  --gres  --mail-type
--mail-user  --mem  --mem-per-cpu  --mpi  --ntasks-per-core  --reservation  --signal"""


def read_options(words: Sequence[str], so_far: argparse.Namespace | None = None) -> argparse.Namespace:
    """What sbatch and srun make of words: options by name, in the place of those `so_far`; the rest as `command`."""
    reader = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for names in re.findall(r"(?:-\w )?--\S+", f"{OPTIONS}  {OF_NO_EFFECT}"):
        reader.add_argument(*names.split())
    reader.add_argument("--exact", action="store_true")
    reader.add_argument("command", nargs="...")
    bare = ("-K", "--kill-on-bad-exit")  # srun reads no value behind these
    return reader.parse_known_args(["-K1" if word in bare else str(word) for word in words], so_far)[0]


def srun(words: Sequence[str]) -> int:
    """Start the tasks of a step in turn; one that fails may end the others, which then never start. 0: all is well."""
    env, said = os.environ, read_options(words)
    nodes = int(said.nodes or env["SLURM_NNODES"])
    on_each = said.ntasks_per_node and nodes * int(said.ntasks_per_node)
    size = int(said.ntasks or on_each or env["SLURM_NTASKS"])
    # as in Slurm 22.05 and 23.02, and as if the step had --exact: what only sbatch was told counts for nothing
    cpus = said.cpus_per_task or env.get("SRUN_CPUS_PER_TASK") or "1"
    ends_all = (said.kill_on_bad_exit or env.get("SLURM_KILL_BAD_EXIT", "0")) != "0"
    status = 0
    for rank in range(size):
        node = rank * nodes // size
        at = {"PROCID": rank, "NTASKS": size, "NODEID": node, "LOCALID": rank - -(-node * size // nodes)}
        task = env | {f"SLURM_{key}": str(value) for key, value in at.items()}
        task |= {"CPUS": cpus, "SLURMD_NODENAME": f"node{7 + node}"}
        output = Path(said.output).open("a") if said.output else None
        status |= subprocess.run(said.command, env=task, stdout=output, stderr=output).returncode
        if status and ends_all:
            break
    return status


def program(words: Sequence[str]) -> int:
    """Note the call, print a line of output and one of errors. Returns the status that the dry run wants."""
    env = os.environ
    task = env.get("SLURM_ARRAY_TASK_ID", env["SLURM_PROCID"])
    with Path(env["NOTES"]).open("a") as notes:
        print(json.dumps({"words": list(words), **env}), file=notes)
    print("a line of", task, flush=True)
    print("trouble of", task, file=sys.stderr, flush=True)
    return int(env["END_WITH"])


def main(name: str, words: Sequence[str]) -> int:
    if name == "uv":  # uv run COMMAND
        os.execvp(words[1], list(words[1:]))
    if name in ("hostname", "scontrol"):
        print(os.environ["SLURMD_NODENAME"] if name == "hostname" else "node7\nnode8")
        return 0
    return srun(words) if name == "srun" else program([name, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
