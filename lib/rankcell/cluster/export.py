"""The rank cells of a notebook as a script for torchrun and srun, with a job script for Slurm.

    rankcell export 08_ddp.ipynb --nodes 2 --gpus-per-node 2 --to job

A start to go on from, no compiler: the cells are copied as they stand, in order, below a few lines that join the
process group. What the notebook pushed to them is not looked for: `--push model,data` takes along the ordinary cells
that define these names. The script imports what its cells import, rankcell too; it records and draws nothing.
"""

import argparse
import ast
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import source as cell_source
from ..errors import OptionError
from . import scripts


class ExportError(ValueError):
    """The notebook cannot become a script, and why."""


@dataclass(frozen=True)
class CodeCell:
    """A code cell: its number and its id, its Python, and for a rank cell the options of its line."""

    names: tuple[str, str]
    source: str
    tags: tuple[str, ...]
    options: argparse.Namespace | None

    def obstacle(self, pushed: Collection[str]) -> str:
        """Why the cell is not copied, as the end of a sentence that begins with "it"; "" if it is."""
        if "raises-exception" in self.tags:
            return "fails on purpose"
        try:
            ast.parse(self.source)
        except SyntaxError:
            return "has a magic or a shell command"
        if self.options and self.options.only:
            return "ran on some of the ranks only: write it under `if rank in ...:`"
        absent = [name for name in self.options.push or () if name not in pushed] if self.options else []
        return f"needs names of the notebook: export with --push {','.join(absent)}" if absent else ""

    def defines(self) -> Iterator[str]:
        """The names that the cell binds at its top level."""
        for node in ast.parse(self.source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
            else:
                names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                yield from (n.id for n in names if isinstance(n.ctx, ast.Store))

    def as_part(self) -> str:
        """The cell in the script. Of a rank cell the last expression is shown, unless a semicolon silences it."""
        lines, body = self.source.rstrip().splitlines(), ast.parse(self.source).body
        if (
            self.options
            and body
            and isinstance(body[-1], ast.Expr)
            and not cell_source.is_silenced(self.source)
        ):
            line, column = body[-1].lineno - 1, body[-1].col_offset
            before, value = lines[line].encode()[:column].decode(), lines[line].encode()[column:].decode()
            lines[line] = f"{before}_value = {value}"
            lines.append(f'show("In [{self.names[0]}]", _value)')
        return "\n".join([f"# In [{self.names[0]}]", *lines])


@dataclass(frozen=True)
class Exported:
    """A notebook as a script: its text, how many rank cells it holds, which are left out and why."""

    text: str
    world_size: int
    kept: int
    left_out: tuple[tuple[str, str], ...]


def read(path: str | Path) -> list[CodeCell]:
    """The code cells of the notebook at `path`. Raises ExportError where there is no notebook."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))["cells"]
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{path} is no notebook of format 4.") from None
    return [_cell(place, c) for place, c in enumerate((c for c in found if c["cell_type"] == "code"), 1)]


def _cell(place: int, cell: dict[str, Any]) -> CodeCell:
    source, options = "".join(cell["source"]).strip("\n"), None
    number = str(cell.get("execution_count") or place)
    first, _, rest = source.partition("\n")
    # a rehearsal (1 of N) has one process and no values: it stays with the notebook, as other magics do
    if first.startswith("%%ranks") and not cell_source.rehearsed(first.removeprefix("%%ranks"))[1]:
        try:
            source, options = rest, cell_source.parser().parse_known_args(first.split()[1:])[0]
        except argparse.ArgumentError as error:
            raise ExportError(f"In [{number}]: the line `{first}` is not understood: {error}.") from None
    return CodeCell((number, cell.get("id", "")), source, tuple(cell["metadata"].get("tags", ())), options)


def convert(path: str | Path, *, cells: Collection[str] = (), push: Collection[str] = ()) -> Exported:
    """The rank cells of the notebook at `path` as a script, nothing written.

    Args:
        cells: numbers or ids of rank cells; none: all of the world size that most rank cells have.
        push: names whose ordinary cells go along.

    Raises:
        ExportError: there is no such notebook or cell, or no ordinary cell that defines a name of `push`.
    """
    found = read(path)
    chosen = [c for c in found if c.options and (not cells or {*c.names} & {*cells})]
    if missing := {*cells}.difference(*(c.names for c in chosen)):
        raise ExportError(
            f"{path} has no rank cell {min(missing)}. Name them by number (4 for In [4]) or by id."
        )
    sizes = Counter(c.options.world_size for c in chosen if c.options)
    if not sizes:
        raise ExportError(f"{path} has no cell that begins with %%ranks, rehearsals (1 of N) aside.")
    world_size = max(sizes, key=lambda size: (sizes[size], size))
    chosen = [c for c in chosen if c.options and c.options.world_size == world_size]
    plain = {id(c): {*c.defines()} & {*push} for c in found if c.options is None and not c.obstacle(push)}
    if unknown := {*push}.difference(*plain.values()):
        raise ExportError(f"No ordinary cell of {path} defines {min(unknown)}.")
    left_out = [(f"In [{c.names[0]}]", f"it {c.obstacle(push)}") for c in chosen if c.obstacle(push)]
    parts = [c for c in found if plain.get(id(c)) or (c in chosen and not c.obstacle(push))]
    template = files(__package__).joinpath("script.txt").read_text("utf-8")
    text = template.format(
        notebook=Path(path).name,
        stem=Path(path).stem,
        world_size=world_size,
        gpus=any(c.options.device != "cpu" for c in chosen if c.options),
        cells="\n\n\n".join(c.as_part() for c in parts),
    )
    return Exported(text, world_size, len(chosen) - len(left_out), tuple(left_out))


def job_script(stem: str, world_size: int, *, nodes: int = 1, gpus_per_node: int = 0) -> scripts.Script:
    """The job script that starts the script `stem`.py with `world_size` ranks."""
    if nodes < 1 or world_size % nodes:
        raise ExportError(
            f"{world_size} ranks cannot be spread evenly over {nodes} nodes. Choose a number of nodes that "
            f"divides {world_size}."
        )
    if gpus_per_node and nodes * gpus_per_node != world_size:
        raise ExportError(
            f"{nodes} nodes with {gpus_per_node} GPUs each hold {nodes * gpus_per_node} ranks; the cells ran "
            f"on {world_size}. That takes {world_size // nodes} per node."
        )
    conda = os.environ.get("CONDA_DEFAULT_ENV", "")
    return scripts.by_srun(
        f"python {stem}.py", nodes=nodes, ranks_per_node=world_size // nodes, gpus_per_node=gpus_per_node,
        name=stem, environment=conda,
    )  # fmt: skip


def add_command(commands: Any) -> None:
    """Add `export` to the sub-commands of an argument parser."""
    command = commands.add_parser(
        "export",
        help="turn the rank cells of a notebook into a script for torchrun and srun",
        description="Copy a notebook's rank cells into a script for torchrun and srun, and write a job script.",
    )
    add, listed = command.add_argument, lambda text: text.split(",")
    add("notebook", type=Path)
    add(
        "--cells",
        type=listed,
        default=(),
        metavar="CELLS",
        help="these rank cells only, by number or id: 4,train",
    )
    add(
        "--push",
        type=listed,
        default=(),
        metavar="NAMES",
        help="and the ordinary cells that define these names",
    )
    add("--to", type=Path, metavar="FOLDER", help="where to write; default: a folder named as the notebook")
    add("--nodes", type=int, default=1, metavar="N", help="how many nodes the job asks for (1)")
    add("--gpus-per-node", type=int, default=0, metavar="N", help="how many GPUs on each node (0)")
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Export as the options say and print what was written; the number for the shell is 0 when all went well."""
    stem = options.notebook.stem
    try:
        exported = convert(options.notebook, cells=options.cells, push=options.push)
        job = job_script(stem, exported.world_size, nodes=options.nodes, gpus_per_node=options.gpus_per_node)
    except ExportError as error:
        print(f"rankcell export: {error}", file=sys.stderr)
        return 1
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


def main(arguments: Sequence[str] | None = None) -> int:
    """`rankcell export` alone; the number for the shell is 0 when all went well."""
    parser = argparse.ArgumentParser(prog="rankcell")
    add_command(parser.add_subparsers(required=True, metavar="COMMAND"))
    options: Any = parser.parse_args(arguments)
    return options.run(options)


def line(words: Sequence[str]) -> None:
    """`%ranks export`: this notebook, or the one that `words` name, as the command `rankcell export` does."""
    if not any(w.endswith(".ipynb") for w in words):
        # Jupyter's server tells its kernels which notebook they belong to
        notebook = os.environ.get("JPY_SESSION_NAME", "")
        if not notebook.endswith(".ipynb"):
            raise OptionError(
                "which notebook? Name it, and save it first: `%ranks export 08_ddp.ipynb --nodes 2`."
            )
        words = [notebook, *words]
    with contextlib.suppress(SystemExit):  # argparse has said what is wrong with the words
        main(["export", *words])
