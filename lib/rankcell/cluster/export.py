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
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from .. import source as cell_source
from . import scripts


class ExportError(ValueError):
    """The notebook cannot become a script, and why."""


class RankCell(NamedTuple):
    """A rank cell of a notebook: its number, its Python, its tags, and the options of its line."""

    number: str
    source: str
    tags: Sequence[str]
    options: argparse.Namespace


def obstacle(cell: RankCell) -> str:
    """Why a cell is not copied, as the end of a sentence that begins with "it"; "" if it is."""
    if "raises-exception" in cell.tags:
        return "fails on purpose"
    if cell.options.only:
        return "ran on some of the ranks only: write it under `if rank in ...:`"
    if cell.options.push:
        return f"needs names of the notebook: define {', '.join(cell.options.push)} in the script"
    try:
        ast.parse(cell.source)
    except SyntaxError:
        return "has a magic or a shell command"
    return ""


def _part(cell: RankCell) -> str:
    """The cell in the script. Its last expression is shown, unless a semicolon silences it."""
    _, shown = cell_source.split(cell.source)
    lines = cell.source.rstrip().splitlines()
    if shown is not None:
        line, column = shown.body.lineno - 1, shown.body.col_offset
        before, value = lines[line].encode()[:column].decode(), lines[line].encode()[column:].decode()
        lines[line] = f"{before}_value = {value}"
        lines.append(f'show("In [{cell.number}]", _value)')
    return "\n".join([f"# In [{cell.number}]", *lines])


def read(path: Path) -> list[RankCell]:
    """The rank cells of the notebook at `path`, those of the world size that most have.

    Raises:
        ExportError: there is no such notebook, or no rank cell in it.
    """
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{path} is no notebook of format 4.") from None
    found = []
    for place, cell in enumerate((c for c in cells if c["cell_type"] == "code"), 1):
        number, tags = str(cell.get("execution_count") or place), cell["metadata"].get("tags", ())
        first, _, rest = "".join(cell["source"]).strip("\n").partition("\n")
        # a rehearsal (1 of N) has one process and no values: it stays with the notebook, as other magics do
        if first.startswith("%%ranks") and not cell_source.rehearsed(first.removeprefix("%%ranks"))[1]:
            try:
                found.append(
                    RankCell(number, rest, tags, cell_source.parser().parse_known_args(first.split()[1:])[0])
                )
            except argparse.ArgumentError as error:
                raise ExportError(f"In [{number}]: the line `{first}` is not understood: {error}.") from None
    if not found:
        raise ExportError(f"{path} has no cell that begins with %%ranks, rehearsals (1 of N) aside.")
    sizes = Counter(c.options.world_size for c in found)
    most = max(sizes, key=lambda size: (sizes[size], size))
    return [c for c in found if c.options.world_size == most]


def script(path: Path, cells: Sequence[RankCell]) -> str:
    """The `cells` of the notebook at `path` as a script."""
    template = files(__package__).joinpath("script.txt").read_text("utf-8")
    return template.format(
        notebook=path.name, stem=path.stem, world_size=cells[0].options.world_size,
        gpus=any(c.options.device != "cpu" for c in cells),
        cells="\n\n\n".join(_part(c) for c in cells if not obstacle(c)),
    )  # fmt: skip


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
        cells = read(options.notebook)
        world_size = cells[0].options.world_size
        if nodes < 1 or world_size % nodes:
            raise ExportError(
                f"{world_size} ranks cannot be spread evenly over {nodes} nodes. Choose a number of nodes that divides "
                f"{world_size}."
            )
    except ExportError as error:
        print(f"rankcell export: {error}", file=sys.stderr)
        return 1
    job = scripts.by_srun(
        f"python {stem}.py", nodes=nodes, ranks_per_node=world_size // nodes, name=stem,
        gpus_per_node=options.gpus_per_node, environment=os.environ.get("CONDA_DEFAULT_ENV", ""),
    )  # fmt: skip
    folder = options.to or Path(stem)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.py").write_text(script(options.notebook, cells), "utf-8")
    written = job.write(folder / f"{stem}.sbatch")
    left_out = [f"  left out In [{c.number}]: it {obstacle(c)}" for c in cells if obstacle(c)]
    kept = len(cells) - len(left_out)
    print(
        f"{folder / f'{stem}.py'}: {kept} cell{'s' * (kept != 1)} for {world_size} ranks", *left_out, sep="\n"
    )
    print(f"{written}: the job script; in {folder}: sbatch {written.name}")
    print(
        "  if it hangs: write `rankcell run --` before its srun, or before torchrun; it says which rank, and where"
    )
    return 0
