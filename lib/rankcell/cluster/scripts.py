"""Job scripts for Slurm, line by line, each with the reason why it stands there.

A `Script` is frozen data: shown as a table in a notebook, a plain script when written to a file. It submits
nothing. What the options of sbatch and srun mean: https://slurm.schedmd.com/sbatch.html, read 2026-11.
"""

import html
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STOPPED = 75  # exit status of a program that was told to leave and has saved (EX_TEMPFAIL of sysexits.h)


@dataclass(frozen=True)
class Line:
    """One line of a job script, and why it is there. `text` may go over several lines of the file."""

    text: str
    why: str


@dataclass(frozen=True)
class Script:
    """A job script. `str(script)` is what goes into the file."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "".join(f"{line.text}\n" for line in self.lines)

    def __repr__(self) -> str:
        return "\n".join(
            "\n".join([line.text, *(f"    # {part}" for part in _wrap(line.why))]) for line in self.lines
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left;vertical-align:top"><pre style="margin:0;white-space:pre-wrap">'
            f"{html.escape(line.text)}</pre></td>"
            f'<td style="text-align:left;vertical-align:top">{_code(line.why)}</td></tr>'
            for line in self.lines
        )
        head = '<tr><th style="text-align:left">job script</th><th style="text-align:left">why</th></tr>'
        return f'<table class="dataframe"><thead>{head}</thead><tbody>{rows}</tbody></table>'

    def write(self, path: str | Path) -> Path:
        """Write the script, without the explanations, to `path`. Returns the path."""
        path = Path(path)
        path.write_text(str(self), "utf-8")
        path.chmod(0o755)
        return path


def array(
    command: str,
    *,
    tasks: int,
    at_once: int = 0,
    minutes: int = 15,
    cpus: int = 1,
    gpus: int = 0,
    name: str = "sweep",
    environment: str = "",
) -> Script:
    """A job array: `command` once for each number from 0 to `tasks - 1`, in `SLURM_ARRAY_TASK_ID`.

    Args:
        command: what each task runs.
        at_once: how many tasks may run at the same time; 0: as many as there is room for.
        minutes: the longest a task may take.
        cpus, gpus: what each task gets.
        environment: a conda environment to activate first, or the folder (with a `/`) of one made by venv.
    """
    if tasks < 1:
        raise ValueError(f"An array needs at least 1 task, not {tasks}.")
    throttle = f"%{at_once}" if at_once else ""
    lines = [
        *_head(
            name,
            minutes,
            f"{name}-%A_%a.out",
            "`%A` is the array's job number, `%a` the task's: a file each.",
        ),
        Line(
            f"#SBATCH --array=0-{tasks - 1}{throttle}",
            f"{tasks} tasks, numbered from 0 as Python counts rows"
            + (f"; at most {at_once} run at a time." if at_once else ".")
            + " In `0-9:2` the step 2 gives 0, 2, 4, ...",
        ),
        Line("#SBATCH --ntasks=1", "Each task of the array is a job of its own, with one process."),
        Line(
            f"#SBATCH --cpus-per-task={cpus}",
            "The CPU cores of that process: its threads, its loader's workers.",
        ),
        *_gpus(gpus),
        *_environment(environment),
        Line(command, "The task reads its number from `SLURM_ARRAY_TASK_ID` and picks its work by it."),
    ]
    return Script(tuple(lines))


def alone(
    command: str,
    *,
    minutes: int = 15,
    cpus: int = 1,
    gpus: int = 1,
    name: str = "train",
    environment: str = "",
) -> Script:
    """A job of one process, by default with one GPU."""
    lines = [
        *_head(name, minutes, f"{name}-%j.out", "`%j` is the job's number."),
        Line("#SBATCH --ntasks=1", "One process is started."),
        Line(f"#SBATCH --cpus-per-task={cpus}", "The CPU cores of that process."),
        *_gpus(gpus),
        *_environment(environment),
        Line(command, "No srun is needed for one process. Its exit status is the job's."),
    ]
    return Script(tuple(lines))


def by_srun(
    command: str,
    *,
    nodes: int,
    ranks_per_node: int,
    minutes: int = 15,
    cpus_per_rank: int = 1,
    gpus_per_node: int = 0,
    name: str = "train",
    environment: str = "",
    partition: str = "",
    signal_seconds: int = 0,
) -> Script:
    """A job of `nodes` x `ranks_per_node` ranks, each of them started by srun.

    Args:
        command: what each rank runs; it finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        signal_seconds: send the ranks USR1 so many seconds before the time is up, or when a more important
            job needs the nodes; a program that saves then and exits with status 75 is queued again.
        partition: where to queue; "" leaves it to the cluster.
    """
    _check_counts(nodes=nodes, ranks_per_node=ranks_per_node, cpus_per_rank=cpus_per_rank)
    where = f" --partition={partition}" if partition else ""
    inside = (
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
        f"LOCAL_WORLD_SIZE={ranks_per_node}; exec {command}"
    )
    # the first rank to leave with status 75 is no failure that the others must be ended for at once
    end = "--wait=30" if signal_seconds else "--kill-on-bad-exit=1"
    start = f"srun --cpus-per-task=$SLURM_CPUS_PER_TASK {end} \\\n    bash -c {shlex.quote(inside)}"
    lines = [
        *_head(
            name, minutes, f"{name}-%j.out", "`%j` is the job's number. All ranks write to this one file."
        ),
        *(
            [Line(f"#SBATCH{where}", "The queue for jobs that may be stopped for others.")]
            if partition
            else []
        ),
        Line(f"#SBATCH --nodes={nodes}", "How many machines."),
        Line(
            f"#SBATCH --ntasks-per-node={ranks_per_node}",
            "How many processes on each: one per GPU. A sum (`--ntasks=4`) might be placed 3 + 1.",
        ),
        Line(f"#SBATCH --cpus-per-task={cpus_per_rank}", "The CPU cores of each rank."),
        *_gpus(gpus_per_node, per="node"),
        *(_leave_in_time(signal_seconds) if signal_seconds else ()),
        *_environment(environment),
        *_rendezvous("MASTER_ADDR", "MASTER_PORT"),
        _threads("$SLURM_CPUS_PER_TASK"),
        Line(
            start,
            "srun starts every rank. RANK and LOCAL_RANK are set inside the task: above srun they would be "
            "read once, on the first node, and all ranks would be rank 0. In Slurm 22.05 and 23.02 srun does not "
            "take `--cpus-per-task` over from sbatch, so it is said again. "
            + (
                "When one rank ends, the others have 30 s to end too: time to save."
                if signal_seconds
                else "When one rank fails, the others are ended."
            ),
        ),
        *(_requeue() if signal_seconds else ()),
    ]
    return Script(tuple(lines))


def by_torchrun(
    command: str,
    *,
    nodes: int,
    ranks_per_node: int,
    minutes: int = 15,
    cpus_per_rank: int = 1,
    gpus_per_node: int = 0,
    name: str = "train",
    environment: str = "",
    max_restarts: int = 0,
    min_nodes: int = 0,
) -> Script:
    """A job of `nodes` x `ranks_per_node` ranks: srun starts one torchrun on each node, torchrun the ranks.

    Args:
        command: the script that each rank runs, with its words; torchrun puts python before it.
        max_restarts: how often all ranks are started again after one of them died.
        min_nodes: go on with the nodes that are left, if there are still so many; 0: all are needed.
    """
    _check_counts(nodes=nodes, ranks_per_node=ranks_per_node, cpus_per_rank=cpus_per_rank)
    if min_nodes > nodes:
        raise ValueError(f"min_nodes={min_nodes} is more than the {nodes} nodes of the job.")
    if min_nodes and not max_restarts:
        raise ValueError("min_nodes needs max_restarts: a lost node is a restart of the others.")
    elastic = bool(min_nodes) and min_nodes < nodes
    count = f"{min_nodes}:{nodes}" if elastic else str(nodes)
    options = [
        f"--nnodes={count}",
        f"--nproc-per-node={ranks_per_node}",
        *([f"--max-restarts={max_restarts}"] if max_restarts else []),
        "--rdzv-backend=c10d",
        "--rdzv-id=$SLURM_JOB_ID",
        "--rdzv-endpoint=$head:$port",
        *(
            ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
            if elastic
            else []
        ),
    ]
    kept = "--no-kill --wait=0" if elastic else "--kill-on-bad-exit=1"
    start = " \\\n    ".join(
        [
            f"srun --cpus-per-task=$SLURM_CPUS_PER_TASK {kept}",
            "torchrun " + " ".join(options[:2]),
            *options[2:],
            command,
        ]
    )
    why = (
        "One torchrun per node; they meet at the endpoint (c10d rendezvous), agree who is who and start the "
        "ranks with RANK, LOCAL_RANK and WORLD_SIZE set. Nodes are numbered in the alphabetical order of their "
        "names (node10 comes before node2), whoever arrives first: `--node-rank` would not fix it."
    )
    if max_restarts:
        why += f" When a rank dies, all are ended and started again, {max_restarts} times at most."
    if elastic:
        why += (
            f" With {count} nodes the rest goes on when one is lost: after three missed signs of life, one "
            "each second, and 5 s in which late comers may join (`--rdzv-conf`). Without `--no-kill` srun "
            "would end them all."
        )
    lines = [
        *_head(
            name, minutes, f"{name}-%j.out", "`%j` is the job's number. All ranks write to this one file."
        ),
        Line(f"#SBATCH --nodes={nodes}", "How many machines."),
        Line("#SBATCH --ntasks-per-node=1", "One process on each: torchrun. It starts the ranks itself."),
        Line(
            f"#SBATCH --cpus-per-task={cpus_per_rank * ranks_per_node}",
            f"The CPU cores of a node's {ranks_per_node} ranks together.",
        ),
        *_gpus(gpus_per_node, per="node"),
        *([Line("#SBATCH --no-kill", "The job lives on when a node is lost.")] if elastic else []),
        *_environment(environment),
        *_rendezvous("head", "port"),
        _threads(str(cpus_per_rank)),
    ]
    if max_restarts:
        lines.append(
            Line(
                "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
                "A new store for each restart. torch 2.13 keeps one for all of them: the ranks then find the "
                "addresses of the dead ones in it and fail or hang (pytorch issue 135712).",
            )
        )
    return Script((*lines, Line(start, why)))


def _head(name: str, minutes: int, output: str, why: str) -> list[Line]:
    if minutes < 1:
        raise ValueError(f"A job needs at least 1 minute, not {minutes}.")
    hours, rest = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    limit = f"{days}-{hours:02}:{rest:02}:00" if days else f"{hours:02}:{rest:02}:00"
    return [
        Line(
            "#!/bin/bash",
            "sbatch reads the directives below as comments of this shell, up to the first command.",
        ),
        Line(f"#SBATCH --job-name={name}", "What squeue calls it."),
        Line(f"#SBATCH --output={output}", f"Where its output goes. {why}"),
        Line(
            f"#SBATCH --time={limit}",
            "Hours:minutes:seconds, then it is ended. `15:00` would be 15 minutes, `15` too; a day is "
            "`1-00:00:00`.",
        ),
    ]


def _gpus(count: int, per: str = "job") -> list[Line]:
    if not count:
        return []
    if per == "node":
        why = "The GPUs of each node; each of its ranks sees them all and takes the one of its LOCAL_RANK."
        return [Line(f"#SBATCH --gpus-per-node={count}", why)]
    return [Line(f"#SBATCH --gpus={count}", "How many GPUs; the process sees no others.")]


def _environment(name: str) -> list[Line]:
    if not name:
        return []
    if "/" in name:
        why = "The Python and packages of this folder (made by `python -m venv`), whatever was active at `sbatch`."
        return [Line(f"source {shlex.quote(name)}/bin/activate", why)]
    return [
        Line(
            'source "$(conda info --base)/etc/profile.d/conda.sh"',
            "A job inherits variables, but not the shell function `conda`: this defines it.",
        ),
        Line(
            f"conda activate {shlex.quote(name)}",
            "The same Python and packages as in the notebook, whatever was active at `sbatch`.",
        ),
    ]


def _rendezvous(host: str, port: str) -> list[Line]:
    mark = "export " if host.isupper() else ""
    return [
        Line(
            f'{mark}{host}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "The first node's name: where the ranks meet. Slurm's own list is short, as in `node[1-2]`.",
        ),
        Line(
            f"{mark}{port}=$((20000 + SLURM_JOB_ID % 10000))",
            "A port from the job's number. With a fixed one two jobs that share a node disturb each other.",
        ),
    ]


def _threads(count: str) -> Line:
    return Line(
        f"export OMP_NUM_THREADS={count}",
        "As many threads as cores. Left out, a rank starts one for every core that it may use; under torchrun, one.",
    )


def _leave_in_time(seconds: int) -> list[Line]:
    return [
        Line(
            f"#SBATCH --signal=USR1@{seconds}",
            f"Tell the ranks {seconds} s before the end, so that they can save. (`B:USR1@{seconds}` would "
            "tell only this shell.)",
        ),
        Line("#SBATCH --requeue", "It may be queued again under the same number, also when a node fails."),
        Line("#SBATCH --open-mode=append", "The second start writes behind the first, not over it."),
    ]


def _requeue() -> list[Line]:
    return [
        Line("status=$?", "What the ranks ended with."),
        Line(
            f'[ $status = {STOPPED} ] && scontrol requeue "$SLURM_JOB_ID"',
            f"{STOPPED} is the program's way to say: told to stop, saved, not finished.",
        ),
        Line("exit $status", "Any other status is the job's own end."),
    ]


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}.")


def _wrap(text: str, width: int = 96) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    if line:
        yield line


def _code(text: str) -> str:
    """`text` as HTML, what stands between backticks as code."""
    parts: Sequence[str] = html.escape(text).split("`")
    return "".join(f"<code>{p}</code>" if k % 2 else p for k, p in enumerate(parts))
