"""Job scripts for Slurm, line by line, each with the reason why it stands there (in `lines.toml`). A `Script` is shown
as a table in a notebook, and is a plain script when written to a file.
"""

import html
import shlex
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

_LINES: dict[str, dict[str, str]] = tomllib.loads(files(__package__).joinpath("lines.toml").read_text("utf-8"))


class Line(NamedTuple):
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
        wrap = partial(textwrap.wrap, width=96, break_long_words=False, break_on_hyphens=False)
        return "\n".join("\n    # ".join((line.text, *wrap(line.why))) for line in self.lines)

    def _repr_html_(self) -> str:
        left = ' style="text-align:left'
        rows = "".join(
            f'<tr><td{left};vertical-align:top"><pre style="margin:0;white-space:pre-wrap">{html.escape(line.text)}'
            f'</pre></td><td{left};vertical-align:top">{_code(line.why)}</td></tr>'
            for line in self.lines
        )
        head = f'<tr><th{left}">job script</th><th{left}">why</th></tr>'
        return f'<table class="dataframe"><thead>{head}</thead><tbody>{rows}</tbody></table>'

    def write(self, path: str | Path) -> Path:
        """Write the script, without the explanations, to `path`. Returns the path."""
        path = Path(path)
        path.write_text(str(self), "utf-8")
        path.chmod(0o755)
        return path


def array(command: str, *, tasks: int, at_once: int = 0) -> Script:
    """A job array: `command` once for each number from 0 to `tasks - 1`, in `SLURM_ARRAY_TASK_ID`; `at_once` tasks may
    run at the same time (0: as many as there is room for).
    """
    _check_counts(tasks=tasks)
    keys = "shell name output-of-task time array task-of-array cpus-of-task command-of-task".split()
    return _script(
        keys, command=command, name="sweep", tasks=tasks, last=tasks - 1, throttle=f"%{at_once}" if at_once else "",
        at_most=f"; at most {at_once} run at a time" if at_once else "",
    )  # fmt: skip


def alone(command: str, *, gpus: int = 1, name: str = "train", environment: str = "") -> Script:
    """A job of one process; `environment` is the folder of one made by venv, to activate first."""
    keys = ["shell", "name", "output-alone", "time", "task-alone", "cpus-alone"]
    keys += ["gpus"] * bool(gpus) + ["venv"] * bool(environment) + ["command-alone"]
    return _script(keys, command=command, name=name, gpus=gpus, environment=environment)


def by_srun(command: str, *, nodes: int, ranks_per_node: int, partition: str = "", signal_seconds: int = 0) -> Script:
    """A job of `nodes` x `ranks_per_node` ranks, each of them started by srun.

    Args:
        command: what each rank runs; it finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        signal_seconds: send the ranks USR1 so many seconds before the time is up, or when a more important
            job needs the nodes; a program that saves then and exits with status 75 is queued again.
        partition: where to queue; "" leaves it to the cluster.
    """
    _check_counts(nodes=nodes, ranks_per_node=ranks_per_node)
    signals = bool(signal_seconds)
    keys = ["shell", "name", "output", "time", *["partition"] * bool(partition), "nodes", "ranks-per-node"]
    keys += ["cpus-per-rank", *["signal", "requeue", "append"] * signals]
    keys += ["host", "port", "threads", "srun", *["status", "queue-again", "exit"] * signals]
    place = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
    inside = f"export {place} LOCAL_WORLD_SIZE={ranks_per_node}; exec {command}"
    # the first rank to leave with status 75 is no failure that the others must be ended for at once
    in_time = "When one rank ends, the others have 30 s to end too: time to save."
    return _script(
        keys, partition=partition, nodes=nodes, ranks_per_node=ranks_per_node,
        seconds=signal_seconds, host="export MASTER_ADDR", port="export MASTER_PORT", threads="$SLURM_CPUS_PER_TASK",
        inside=shlex.quote(inside), end="--wait=30" if signals else "--kill-on-bad-exit=1",
        at_the_end=in_time if signals else "When one rank fails, the others are ended.",
    )  # fmt: skip


def by_torchrun(command: str, *, nodes: int, ranks_per_node: int, minutes: int = 15, cpus_per_rank: int = 1) -> Script:
    """A job of `nodes` x `ranks_per_node` ranks: srun starts one torchrun on each node, torchrun the ranks.

    `command` is the script that each rank runs, with its words; torchrun puts python before it.
    """
    _check_counts(nodes=nodes, ranks_per_node=ranks_per_node, cpus_per_rank=cpus_per_rank)
    options = [f"--nnodes={nodes} --nproc-per-node={ranks_per_node}"]
    options += ["--rdzv-backend=c10d", "--rdzv-id=$SLURM_JOB_ID", "--rdzv-endpoint=$head:$port"]
    keys = ["shell", "name", "output", "time", "nodes", "torchrun-per-node", "cpus-per-node"]
    return _script(
        [*keys, "host", "port", "threads", "torchrun"], command=command, minutes=minutes, nodes=nodes,
        ranks_per_node=ranks_per_node, cpus=cpus_per_rank * ranks_per_node, host="head", port="port",
        threads=cpus_per_rank, end="--kill-on-bad-exit=1", options=" \\\n    ".join(options),
    )  # fmt: skip


def _script(keys: Iterable[str], *, minutes: int = 15, environment: str = "", **more: Any) -> Script:
    """The script of the lines called `keys` in lines.toml, with these values filled in."""
    values = {"name": "train", "cpus": 1, "limit": f"{minutes // 60:02}:{minutes % 60:02}:00", **more}
    values["environment"] = shlex.quote(environment)
    found = (_LINES[key] for key in keys)
    return Script(tuple(Line(e["text"].format(**values), e["why"].format(**values)) for e in found))


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}.")


def _code(text: str) -> str:
    """`text` as HTML, what stands between backticks as code."""
    return "".join(f"<code>{p}</code>" if k % 2 else p for k, p in enumerate(html.escape(text).split("`")))
