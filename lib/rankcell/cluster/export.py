"""The rank cells of a notebook as a script for torchrun and srun, with a job script for Slurm.

    rankcell export 08_ddp.ipynb --nodes 2 --gpus-per-node 2 --to job

A start to go on from, no compiler: the rank cells of the world size that most have are copied as they stand, in order,
below a few lines that join the process group. Ordinary cells stay behind, and rank cells that no script can run are
named. The script imports what its cells import, rankcell too; it records and draws nothing.
"""

import argparse
import ast
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import source as cell_source
from . import scripts


class ExportError(ValueError):
    """The notebook cannot become a script, and why."""


@dataclass(frozen=True)
class RankCell:
    """A rank cell of a notebook: its number, its Python, its tags, and the options of its line."""

    number: str
    source: str
    tags: tuple[str, ...]
    options: argparse.Namespace

    @property
    def obstacle(self) -> str:
        """Why the cell is not copied, as the end of a sentence that begins with "it"; "" if it is."""
        if "raises-exception" in self.tags:
            return "fails on purpose"
        if self.options.only:
            return "ran on some of the ranks only: write it under `if rank in ...:`"
        if self.options.push:
            return f"needs names of the notebook: define {', '.join(self.options.push)} in the script"
        try:
            ast.parse(self.source)
        except SyntaxError:
            return "has a magic or a shell command"
        return ""

    @property
    def part(self) -> str:
        """The cell in the script. Its last expression is shown, unless a semicolon silences it."""
        _, shown = cell_source.split(self.source)
        lines = self.source.rstrip().splitlines()
        if shown is not None:
            line, column = shown.body.lineno - 1, shown.body.col_offset
            before, value = lines[line].encode()[:column].decode(), lines[line].encode()[column:].decode()
            lines[line] = f"{before}_value = {value}"
            lines.append(f'show("In [{self.number}]", _value)')
        return "\n".join([f"# In [{self.number}]", *lines])


@dataclass(frozen=True)
class Exported:
    """A notebook as a script: its text, how many rank cells it holds, which are left out and why."""

    text: str
    world_size: int
    kept: int
    left_out: tuple[tuple[str, str], ...]


def read(path: Path) -> list[RankCell]:
    """The rank cells of the notebook at `path`. Raises ExportError where there is no notebook."""
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{path} is no notebook of format 4.") from None
    found = []
    for place, cell in enumerate((c for c in cells if c["cell_type"] == "code"), 1):
        number, tags = str(cell.get("execution_count") or place), tuple(cell["metadata"].get("tags", ()))
        first, _, rest = "".join(cell["source"]).strip("\n").partition("\n")
        # a rehearsal (1 of N) has one process and no values: it stays with the notebook, as other magics do
        if first.startswith("%%ranks") and not cell_source.rehearsed(first.removeprefix("%%ranks"))[1]:
            try:
                found.append(RankCell(number, rest, tags, cell_source.parse(first.split()[1:])))
            except argparse.ArgumentError as error:
                raise ExportError(f"In [{number}]: the line `{first}` is not understood: {error}.") from None
    if not found:
        raise ExportError(f"{path} has no cell that begins with %%ranks, rehearsals (1 of N) aside.")
    return found


def convert(path: Path) -> Exported:
    """The rank cells of the notebook at `path` as a script, nothing written.

    Raises:
        ExportError: there is no such notebook, or no rank cell in it.
    """
    found = read(path)
    sizes = Counter(c.options.world_size for c in found)
    world_size = max(sizes, key=lambda size: (sizes[size], size))
    chosen = [c for c in found if c.options.world_size == world_size]
    parts = [c.part for c in chosen if not c.obstacle]
    text = files(__package__).joinpath("script.txt").read_text("utf-8").format(
        notebook=path.name, stem=path.stem, world_size=world_size,
        gpus=any(c.options.device != "cpu" for c in chosen), cells="\n\n\n".join(parts),
    )  # fmt: skip
    left_out = tuple((f"In [{c.number}]", f"it {c.obstacle}") for c in chosen if c.obstacle)
    return Exported(text, world_size, len(parts), left_out)


def add_command(commands: Any) -> None:
    """Add `export` to the sub-commands of an argument parser."""
    command = commands.add_parser(
        "export",
        help="turn the rank cells of a notebook into a script for torchrun and srun",
        description="Copy a notebook's rank cells into a script for torchrun and srun, and write a job script.",
    )
    command.add_argument("notebook", type=Path)
    command.add_argument(
        "--to", type=Path, metavar="FOLDER", help="where to write; default: named as the notebook"
    )
    command.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="how many nodes the job asks for (1)"
    )
    command.add_argument(
        "--gpus-per-node", type=int, default=0, metavar="N", help="how many GPUs on each (0)"
    )
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Export as the options say and print what was written; the number for the shell is 0 when all went well."""
    stem, nodes = options.notebook.stem, options.nodes
    try:
        exported = convert(options.notebook)
        if nodes < 1 or exported.world_size % nodes:
            raise ExportError(
                f"{exported.world_size} ranks cannot be spread evenly over {nodes} nodes. Choose a number of nodes "
                f"that divides {exported.world_size}."
            )
    except ExportError as error:
        print(f"rankcell export: {error}", file=sys.stderr)
        return 1
    job = scripts.by_srun(
        f"python {stem}.py", nodes=nodes, ranks_per_node=exported.world_size // nodes, name=stem,
        gpus_per_node=options.gpus_per_node, environment=os.environ.get("CONDA_DEFAULT_ENV", ""),
    )  # fmt: skip
    folder = options.to or Path(stem)
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{stem}.py"
    script.write_text(exported.text, "utf-8")
    written = job.write(folder / f"{stem}.sbatch")
    print(f"{script}: {exported.kept} cell{'s' * (exported.kept != 1)} for {exported.world_size} ranks")
    for name, reason in exported.left_out:
        print(f"  left out {name}: {reason}")
    print(f"{written}: the job script; in {folder}: sbatch {written.name}")
    print(
        "  if it hangs: write `rankcell run --` before its srun, or before torchrun; it says which rank, and where"
    )
    return 0
