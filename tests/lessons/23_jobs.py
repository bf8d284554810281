"""What the notebook 23_jobs says is right, and wrong answers to its exercises; tests/judge.py runs them."""

# wrong: ex1-solution: exports the rank above srun | each task has its own RANK, set inside it; yours: ['0', '0', '0', '0']
script = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --time=10
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
srun --cpus-per-task=2 --kill-on-bad-exit=1 python train.py nodes.pt
"""

# wrong: ex1-solution: lets the others wait for a rank that failed | `srun` ends the others
script = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --time=10
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --cpus-per-task=2 bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python train.py nodes.pt'
"""

# wrong: ex1-solution: a port above 65535 for some jobs | in every job; by job number, yours: {39999: {'69499'}}
script = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --time=10
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((29500 + SLURM_JOB_ID % 40000))
srun --cpus-per-task=2 --kill-on-bad-exit=1 bash -c '
    RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS python train.py nodes.pt'
"""

# wrong: ex1-solution: four tasks, somewhere | may become 3 and 1
script = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks=4 --cpus-per-task=2 --time=10
export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --cpus-per-task=2 --kill-on-bad-exit=1 bash -c '
    RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS python train.py nodes.pt'
"""

# right: ex1-solution: the port of each job by another sum, the CPUs by a variable
script = r"""#!/bin/bash
#SBATCH -J train
#SBATCH -p main -N 2
#SBATCH -n 4 -c 2 --ntasks-per-node 2
#SBATCH -t 0-00:10 -o log-%j
set -eo pipefail
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export MASTER_ADDR=$(scontrol show hostnames | head -n1) MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun -K sh -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=4 exec python3 -u ./train.py nodes.pt' | cat
"""

# right: ex1-solution: the job script runs on the first node
script = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --time=10
export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --cpus-per-task=2 --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS python train.py nodes.pt'
"""

# right: ex1-solution: a file of its own for each task's line
script = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --time=00:10:00
cat > rank.sh <<'END'
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export MASTER_PORT=$((1024 + SLURM_JOB_ID % 60000))
python train.py nodes.pt
END
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_NODELIST" | sed -n 1p)
srun --export ALL -c 2 -K1 --output=train.log bash rank.sh
"""

# after: srun-run
# %%slurm
_ranks = [re.search(r"rank (\d) of 4 on (\w+): local rank (\d)", line).groups() for line in by_srun]
_hosts = [host for _, host, _ in _ranks]
assert [rank for rank, _, _ in _ranks] == [*"0123"] and [local for *_, local in _ranks] == [*"0101"], by_srun
assert _hosts[0] == _hosts[1] < _hosts[2] == _hosts[3], "two on a node, dealt in blocks"

# after: two-nodes-run
# %%slurm
assert by_torchrun == by_srun, "torchrun numbers them as srun does, where the names of the nodes are in order"

# after: queue
# %%slurm
assert queue.count("PENDING") == 1 and "-11%2]" in queue, "one line for all tasks that wait"

# after: missing
# %%slurm
assert missing() == [7] and [name for name, state in states.items() if state != "COMPLETED"] == [f"{job}_7"]
_losses = {t: float(Path(f"result-{t}.txt").read_text().split()[1]) for t in range(12) if t != 7}
assert min(_losses, key=_losses.get) == 8, "the best rate is 2 / (1 + 10), nearest to it 0.18"
_weights = torch.tensor([1.0, 1.0], dtype=torch.float64)
for _ in range(50):
    _weights -= 0.18 * torch.tensor([1.0, 10.0]) * _weights
check.close_to((torch.tensor([1.0, 10.0]) * _weights**2).sum().item() / 2, _losses[8], rtol=0.05)

# wrong: ex2-solution: the rows are still counted from 0 | task 1 has (0.001, 16), task 2 (0.001, 32); yours: [(0.001, 32)
tune = """#!/bin/bash
#SBATCH --array=1-12%3 --output=tune-%A_%a.out --time=10 --cpus-per-task=2
python tune.py
"""

def pair(task, rates=RATES, sizes=SIZES):
    return ([(rate, size) for rate in rates for size in sizes] * 2)[task]

# wrong: ex2-solution: one file for all tasks | several print into ['tune-4242.out']
tune = """#!/bin/bash
#SBATCH --array=1-12%3 --output=tune-%A.out --time=00:10:00 --cpus-per-task=2
python tune.py
"""

def pair(task, rates=RATES, sizes=SIZES):
    rate, size = divmod(task - 1, len(sizes))
    return rates[rate], sizes[size]

# wrong: ex2-solution: every task does the first, and all pairs have the lengths of the lesson | the rates 1 and 2, each with the sizes 5, 6 and 7
tune = """#!/bin/bash
#SBATCH --array=1-12%3 --output=%a.out --time=10 --cpus-per-task=2
SLURM_ARRAY_TASK_ID=1 python tune.py
"""

def pair(task, rates=RATES, sizes=SIZES):
    return (rates * 4)[(task - 1) // 4], (sizes * 4)[(task - 1) % 4]

# wrong: ex2-solution: a command above the lines for sbatch | yours below it: ['#SBATCH --array=1-12%3
tune = """#!/bin/bash
set -e
#SBATCH --array=1-12%3 --output=%a.out --time=10 --cpus-per-task=2
python tune.py
"""

def pair(task, rates=RATES, sizes=SIZES):
    return [(rate, size) for rate in rates for size in sizes][task - 1]

# right: ex2-solution
tune = """#!/bin/bash
#SBATCH -a 1-12:1%3 -n 1 -c 2
#SBATCH -t 0-0:10 -o tune-%j.log
cd "$SLURM_SUBMIT_DIR" && python ./tune.py
echo done
"""

def pair(task, rates=RATES, sizes=SIZES):
    rate, size = divmod(task - 1, len(sizes))
    return rates[rate], sizes[size]

# right: ex2-solution: hands the number on as a word
tune = """#!/bin/bash
#SBATCH --array=1-12%3 --output=tune-%A_%a.out --time=10 --cpus-per-task=2
python tune.py $SLURM_ARRAY_TASK_ID
"""

def pair(task, rates=RATES, sizes=SIZES):
    return rates[(task - 1) // len(sizes)], sizes[(task - 1) % len(sizes)]

# right: ex2-solution: by uv, with a step of its own
tune = """#!/bin/bash
#SBATCH --array=1-4,5-12%3 --cpus-per-task=2 --time=10 --output=%A-%a
srun --cpus-per-task=2 uv run python tune.py
"""

import itertools

def pair(task, rates=RATES, sizes=SIZES):
    return list(itertools.product(rates, sizes))[task - 1]

# after: real-number
# Table 4 of the paper: GPUs, and sequences of a batch for each of its data-parallel groups
assert each == {8192: 32, 16384: 16}
assert 8192 // 8 == 1024 and 16384 // 8 == 2048, "the nodes"

# wrong: ex3-solution: two torchruns on each node | `srun` starts one torchrun on each node; yours on ['0', '0', '1', '1']
tasks, cpus = "2", "2"
options = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
options += " --rdzv-endpoint=$head:$((20000 + SLURM_JOB_ID % 10000))"

# wrong: ex3-solution: the port of the examples | two jobs have two ports; yours:
tasks, cpus = "1", "4"
options = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$head:29500"

# wrong: ex3-solution: each node meets itself | they meet at a store of torch's own
tasks, cpus = "1", "4"
options = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=$head:$((2000 + SLURM_JOB_ID % 10000))"

# right: ex3-solution: by other spellings
tasks, cpus = 1, 4
options = "--nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_id $SLURM_JOB_ID"
options += " --rdzv_endpoint ${head}:$((SLURM_JOB_ID % 20000 + 10000))"

# right: ex3-solution: by a shell of its own for the port
tasks = cpus = "1"
cpus = "4"
options = """--rdzv-endpoint="$head:$(expr 1024 + $SLURM_JOB_ID % 50000)" --rdzv-id="$SLURM_JOBID" \\
    --max-restarts=0 --nproc-per-node=2 --nnodes=2 --rdzv-backend=c10d"""

# after: mistakes
# %%slurm
_version = tuple(map(int, slurm.run("srun", "--version").split()[-1].split(".")[:2]))
_said = {line.split(":")[0]: line.split(":")[1].split() for line in said.splitlines() if ":" in line}
assert _said["exported before srun"] == list("0000"), "exported before srun all ranks are 0"
assert _said["set inside the task"] == list("0123"), "set inside they are 0 to 3"
assert _said["srun alone"] == ["CPUs=4" if (22, 5) <= _version < (23, 11) else "CPUs=8"], "said once"
assert _said["said again"] == ["CPUs=8"], "said again, each of four tasks has two"
assert _said["status after a pipe"] == ["0"], "a pipe hides that srun failed"

# after: two-jobs
# %%slurm
assert all("COLOUR: blue" in text and "no such function" in text for text in said.values()), "a variable only"
assert "env: False" in said["bare"] and "env: True" in said["alone"], (
    "the Python of env, where it is asked for"
)
assert "GPUs: 0\n" in said["alone"] or "GPUs: None" in said["alone"], "at most one GPU is seen"

# after: dependencies
# %%slurm
assert "DependencyNeverSatisfied" in waits, "afterok waits for ever"
assert (len(others), best) == (10, Path("result-8.txt").read_text()), "afterany collects what there is"

# wrong: ex4-solution: lets the collector start at once | the collector's dependency is afterok:101; yours: None
def finish(script="sweep.sh", collect="collect.sh"):
    again = slurm.submit(f"--array={','.join(map(str, missing()))}%2", script)
    return again, slurm.submit(collect)

# wrong: ex4-solution: an array of nothing, where nothing is missing | missing are []: `finish` submits ['last.sh']
def finish(script="sweep.sh", collect="collect.sh"):
    again = slurm.submit(f"--array={','.join(map(str, missing()))}%2", script)
    return again, slurm.submit(f"--dependency=afterok:{again}", collect)

# wrong: ex4-solution: runs all from the first to the last that is missing | these tasks run, and no others
def finish(script="sweep.sh", collect="collect.sh"):
    gone = missing()
    again = slurm.submit(f"--array={gone[0]}-{gone[-1]}%2", script) if gone else None
    return again, slurm.submit(*[f"--dependency=afterok:{again}"] * bool(gone), collect)

# right: ex4-solution
def finish(script="sweep.sh", collect="collect.sh"):
    tasks = ",".join(f"{task}-{task}" for task in missing())
    again = slurm.submit("-a", f"{tasks}%2", script) if tasks else None
    return again, slurm.submit(*["-d", f"afterok:{again}"] * bool(again), collect)
