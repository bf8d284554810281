"""Turns the rank cells of a notebook into one script for torchrun and srun, with a job script for Slurm.

    rankcell export 08_ddp.ipynb --nodes 2 --gpus-per-node 2 --to job

The script needs no rankcell: modules of ours that the cells import are copied beside it. It holds the cells
of one world size, in order, and what ordinary cells made for `--push`. What has no place in it (pictures,
recorded events, cells that fail on purpose) is left out, and the script says so where it stood. What is
pushed is found by reading the ordinary cells, not by running them: the statements that define a pushed name,
those that these need, and those that change them.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import re
import shutil
import sys
import textwrap
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import source as cell_source
from ..errors import OptionError
from . import dataflow, scripts

MODULES = "lesson_modules"  # the folder of copied modules, beside the script
_HERE = Path(__file__).parent
_OURS = _HERE.parent
# what runs cells, records them and draws them: it stays with the notebook
_NOTEBOOK_ONLY = {"magics", "engine", "draw", "cluster/slurm"}


class ExportError(ValueError):
    """The notebook cannot become a script, and why."""


class _NotPortable(Exception):
    """One cell cannot become a part of the script; the message ends a sentence that begins with "it"."""


@dataclass(frozen=True)
class Cell:
    """One code cell: what the notebook calls it, its Python, and for a rank cell the options of its line."""

    name: str
    source: str
    tags: tuple[str, ...]
    options: argparse.Namespace | None = None


@dataclass(frozen=True)
class Exported:
    """A notebook as a script: its text, the modules it needs beside it, what was left out and why."""

    text: str
    world_size: int
    modules: tuple[str, ...]
    kept: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


def export(
    path: str | Path,
    *,
    world_size: int | None = None,
    to: str | Path | None = None,
    nodes: int = 1,
    gpus_per_node: int = 0,
) -> list[Path]:
    """Write the rank cells of the notebook at `path` as a script, and the job script that starts it.

    Args:
        path: the notebook.
        world_size: of which cells; None: of the world size that most rank cells have.
        to: the folder to write to; None: a folder named after the notebook, where this process works.
        nodes: how many nodes the job asks for.
        gpus_per_node: how many GPUs on each of them, one for each rank; 0: none, the ranks run on CPUs.

    Returns:
        The script, the job script, then the modules copied beside them.

    Raises:
        ExportError: there is no such notebook, it has no such cells, or they do not fit the nodes.
    """
    path = Path(path)
    exported = convert(path, world_size=world_size)
    job = job_script(path.stem, exported.world_size, nodes=nodes, gpus_per_node=gpus_per_node)
    folder = Path(to) if to is not None else Path(path.stem)
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{path.stem}.py"
    script.write_text(exported.text, "utf-8")
    return [script, job.write(folder / f"{path.stem}.sbatch"), *_copy_modules(exported.modules, folder)]


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
    return scripts.by_srun(
        f"python {stem}.py",
        nodes=nodes,
        ranks_per_node=world_size // nodes,
        gpus_per_node=gpus_per_node,
        name=stem,
        environment=os.environ.get("CONDA_DEFAULT_ENV", ""),
    )


def convert(path: str | Path, *, world_size: int | None = None) -> Exported:
    """The notebook at `path` as a script, nothing written. Raises ExportError as `export` does."""
    cells = read(path)
    sizes = Counter(cell.options.world_size for cell in cells if cell.options)
    if not sizes:
        raise ExportError(
            f"{path} has no cell that begins with %%ranks, rehearsals (1 of N) aside: there is nothing to export."
        )
    if world_size is None:
        world_size = max(sizes, key=lambda size: (sizes[size], size))
    if world_size not in sizes:
        known = ", ".join(map(str, sorted(sizes)))
        raise ExportError(f"{path} has no cells for {world_size} ranks. It has cells for {known}.")
    return _Conversion(Path(path), cells, world_size).result()


def read(path: str | Path) -> list[Cell]:
    """The code cells of the notebook at `path`. Raises ExportError where there is no notebook."""
    try:
        notebook = json.loads(Path(path).read_text("utf-8"))
        found = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{path} is no notebook of format 4.") from None
    cells = []
    for place, cell in enumerate(found, 1):
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        name = f"In [{cell.get('execution_count') or place}]"
        tags = tuple(cell["metadata"].get("tags", ()))
        first, _, rest = source.lstrip("\n").partition("\n")
        words = first.split()
        # a rehearsal has one process and no values: it is the notebook's, as other magics are
        if words[:1] == ["%%ranks"] and not cell_source.rehearsed(" ".join(words[1:]))[1]:
            cells.append(Cell(name, rest, tags, _options(words[1:], name)))
        elif first.startswith("%%"):
            cells.append(Cell(name, f"get_ipython().run_cell_magic({first!r})", tags))
        else:
            cells.append(Cell(name, source, tags))
    return cells


def _options(words: Sequence[str], name: str) -> argparse.Namespace:
    """What the line of a rank cell asks for. Recording and time limits mean nothing in a script."""
    try:
        options = cell_source.parse(words)
        options.push, options.pull = tuple(options.push or ()), tuple(options.pull or ())
        options.out = options.out or ""
        options.only = None if options.only is None else tuple(options.only)
        return options
    except argparse.ArgumentError as error:
        raise ExportError(
            f"{name}: the line `%%ranks {' '.join(words)}` is not understood: {error}."
        ) from None


class _Conversion:
    """The way through one notebook, cell by cell."""

    def __init__(self, path: Path, cells: Sequence[Cell], world_size: int) -> None:
        self.path = path
        self.cells = cells
        self.world_size = world_size
        self.devices = {c.options.device for c in cells if c.options and c.options.world_size == world_size}
        self.parts: list[str] = []
        self.kept: list[str] = []
        self.left_out: list[tuple[str, str]] = []
        self.modules: set[str] = set()
        self.statements: list[dataflow.Statement] = []  # of the ordinary cells so far
        self.lost: dict[str, str] = {}  # names that only cells left out would define: name -> cell
        self.defined = set(cell_source.LENT)
        self.read: set[str] = set()  # pulled names that what is pushed later is made of

    def result(self) -> Exported:
        """The script of all cells."""
        for cell in self.cells:
            if cell.options is None:
                self._ordinary(cell)
                continue
            try:
                part = self._rank_cell(cell)
            except _NotPortable as reason:
                self._leave_out(cell, str(reason))
            else:
                self.parts.append(part)
                self.kept.append(cell.name)
        return Exported(
            text=self._text(),
            world_size=self.world_size,
            modules=tuple(sorted(self.modules)),
            kept=tuple(self.kept),
            left_out=tuple(self.left_out),
        )

    def _ordinary(self, cell: Cell) -> None:
        tree = dataflow.parsed(cell.source)
        if tree is None:
            return
        if "raises-exception" in cell.tags:
            return
        lines = dataflow.transformed(cell.source).splitlines()
        for k, node in enumerate(tree.body):
            last = k == len(tree.body) - 1
            self.statements += dataflow.statements_of(node, lines, shown=last, obstacle_of=_obstacle)

    def _rank_cell(self, cell: Cell) -> str:
        options = cell.options
        assert options is not None
        if options.world_size != self.world_size:
            raise _NotPortable(f"ran on {options.world_size} ranks")
        if "raises-exception" in cell.tags:
            raise _NotPortable("fails on purpose")
        tree = dataflow.parsed(cell.source)
        if tree is None:
            raise _NotPortable("is no Python that can be read")
        source = dataflow.transformed(cell.source)
        if "get_ipython" in dataflow.uses_and_binds(source)[0]:
            raise _NotPortable("uses a magic or a shell command of the notebook")
        pushed = self._pushed(cell) if options.push else ""
        self._check_names(cell, tree)
        source, modules = _without_rankcell(source)
        body, has_value = _with_value(source)
        self.modules |= modules
        binds = dataflow.uses_and_binds(source)[1]
        self.defined |= binds | set(options.push)
        for name in binds | set(options.push):
            self.lost.pop(name, None)
        return self._placed(cell, pushed, body, has_value)

    def _placed(self, cell: Cell, pushed: str, body: str, has_value: bool) -> str:
        """The text of a rank cell: pushes, body, what to show, pulls."""
        options = cell.options
        assert options is not None
        lines = [
            f"# {cell.name}: %%ranks {self.world_size}" + (f" --only {options.only}" if options.only else "")
        ]
        if options.fresh:
            lines.append("torch.set_rng_state(_first_random)  # --fresh: the notebook started new ranks here")
        lines.append(pushed)
        if options.only is None:
            lines.append(body)
        else:
            lines += ["_value = None", f"if rank in {options.only!r}:", _indented(body)]
        shown = ["value=_value"] if has_value else []
        missing = 'globals().get("{0}")' if options.only is not None else "{0}"
        shown += [f"{name}={missing.format(name)}" for name in options.pull]
        if shown:
            ranks = [f"ranks={options.only!r}"] if options.only is not None else []
            lines.append(f'_results.show("{cell.name}", {", ".join(ranks + shown)})')
        statements = []
        for name in options.pull:
            if options.only is None:
                lines.append(f"_pulled_{name} = _pull({name})")
                statements.append(
                    dataflow.Statement(f"{name} = _pulled_{name}", frozenset({name}), pulled=True)
                )
            else:
                statements.append(
                    dataflow.lost(name, f"needs {name}, which {cell.name} gave to the notebook")
                )
        if options.out:
            statements.append(
                dataflow.lost(
                    options.out, f"needs {options.out}, the record of {cell.name}, which only rankcell makes"
                )
            )
        self.statements += statements
        return "\n".join(line for line in lines if line)

    def _leave_out(self, cell: Cell, reason: str) -> None:
        options = cell.options
        assert options is not None
        self.left_out.append((cell.name, f"it {reason}"))
        quoted = textwrap.indent(cell.source.rstrip("\n"), "#     ", lambda line: True)
        self.parts.append(f"# {cell.name} is left out: it {reason}.\n{quoted}" if cell.source.strip() else "")
        for name in (*options.pull, *filter(None, [options.out])):
            self.statements.append(
                dataflow.lost(name, f"needs {name}, which {cell.name} made, which is left out")
            )
        tree = dataflow.parsed(cell.source)
        if options.world_size == self.world_size and tree is not None:
            binds = dataflow.uses_and_binds(dataflow.transformed(cell.source))[1]
            self.lost.update(dict.fromkeys((binds | set(options.push)) - self.defined, cell.name))

    def _check_names(self, cell: Cell, tree: ast.Module) -> None:
        """Raise for a name that only a cell left out defines."""
        assert cell.options is not None
        bound = set(cell.options.push)
        whole = dataflow.uses_and_binds(dataflow.transformed(cell.source))[1]
        for node in tree.body:
            uses, binds = dataflow.uses_and_binds(ast.unparse(node))
            later = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            for name in sorted(uses - bound - (whole if later else set())):
                if name in self.lost:
                    raise _NotPortable(f"needs {name}, which {self.lost[name]} made, which is left out")
            bound |= binds

    def _pushed(self, cell: Cell) -> str:
        """A function that makes what the notebook pushed to this cell, and its call."""
        assert cell.options is not None
        names = cell.options.push
        chosen, unknown = dataflow.makers(self.statements, names)
        if unknown := unknown.difference(cell_source.LENT):
            raise _NotPortable(f"needs {', '.join(sorted(unknown))}, which no ordinary cell before it makes")
        number = len([p for p in self.parts if "def _pushed_" in p]) + 1
        lines, modules = [], set()
        for statement in chosen:
            if statement.obstacle:
                raise _NotPortable(statement.obstacle)
            source, needed = _without_rankcell(statement.source)
            modules |= needed
            if statement.pulled:
                self.read |= statement.binds
            space = "\n" if isinstance(statement.node, (ast.FunctionDef, ast.ClassDef)) else ""
            lines.append(f"{space}{_indented(source)}{space}")
        given = ", ".join(names)
        self.modules |= modules
        return (
            f"def _pushed_{number}():\n"
            f'    """What the notebook made for the next cell: {given}."""\n'
            + "\n".join(lines)
            + f"\n    return {given}\n\n\nwith _as_notebook():\n    {given} = _pushed_{number}()\n"
        )

    def _text(self) -> str:
        stem = self.path.stem
        about = [
            f'"""The cells of {self.path.name} for {self.world_size} ranks, as a program without rankcell.',
            "",
            f"    torchrun --standalone --nproc-per-node={self.world_size} {stem}.py",
            f"    sbatch {stem}.sbatch",
            "",
            "Rank 0 prints what the last line of each cell was on each rank, and what the notebook pulled;",
            "`--save FILE` keeps these values.",
        ]
        if self.left_out:
            about += [
                "",
                "Left out, each with its reason where it stood: "
                + ", ".join(n for n, _ in self.left_out)
                + ".",
            ]
            about = [
                line for part in about for line in (textwrap.wrap(part, 100) if len(part) > 100 else [part])
            ]
        unread = re.compile(r"^_pulled_(\w+) = _pull\(\1\)\n?", re.MULTILINE)
        parts = [
            unread.sub(lambda m: m[0] if m[1] in self.read else "", part).strip("\n") for part in self.parts
        ]
        runtime = (_HERE / "standalone.py").read_text("utf-8")
        runtime = runtime.split('"""', 2)[2].strip("\n")
        cpu = ", cpu=True" if self.devices == {"cpu"} else ""
        start = f"_results = _Results()\nrank, world_size, device = _join({self.world_size}{cpu})"
        return "\n\n\n".join(
            ["\n".join(about) + '\n"""\n\n' + runtime, start, *filter(None, parts), "_results.leave()\n"]
        )


def _obstacle(node: ast.Import | ast.ImportFrom) -> str:
    """Why the import cannot stand in the script; empty if it can."""
    try:
        _portable(node)
    except _NotPortable as reason:
        return str(reason)
    return ""


def _portable(node: ast.Import | ast.ImportFrom) -> tuple[str, set[str]]:
    """The import as the script has it, and the modules of ours to copy for it."""
    if isinstance(node, ast.Import):
        ours = [a for a in node.names if a.name.split(".")[0] == "rankcell"]
        if not ours:
            return ast.unparse(node), set()
        if any(a.name == "rankcell" or a.asname is None for a in ours):
            raise _NotPortable(
                "imports rankcell as a whole (name what it needs: `from rankcell.models import MLP`)"
            )
        modules = set().union(*(_closure(a.name.split(".", 1)[1].replace(".", "/")) for a in ours))
        names = [
            ast.alias(a.name.replace("rankcell", MODULES, 1), a.asname) if a in ours else a
            for a in node.names
        ]
        return ast.unparse(ast.Import(names)), modules
    head, _, tail = (node.module or "").partition(".")
    if head != "rankcell" or node.level:
        return ast.unparse(node), set()
    lines, modules = [], set()
    for alias in node.names:
        inside = f"{tail.replace('.', '/')}/{alias.name}".lstrip("/")
        if inside == "span":
            lines.append(f"{alias.asname or 'span'} = _span")
            continue
        module = inside if _file_of(inside) else tail.replace(".", "/")
        if not module:
            raise _NotPortable(f"needs rankcell.{alias.name}, which works in a notebook only")
        modules |= _closure(module)
        package = f"{MODULES}.{tail}" if tail else MODULES
        lines.append(ast.unparse(ast.ImportFrom(package, [alias], 0)))
    return "\n".join(lines), modules


def _without_rankcell(source: str) -> tuple[str, set[str]]:
    """`source` with imports of ours from the copied modules, and which modules these are."""
    lines, modules = source.splitlines(), set()
    imports = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    for node in sorted(imports, key=lambda n: n.lineno, reverse=True):
        text, needed = _portable(node)
        if needed or text != ast.unparse(node):
            modules |= needed
            indent = lines[node.lineno - 1][: node.col_offset]
            if indent.strip() or dataflow.shares_its_last_line(node, lines):
                raise _NotPortable("imports from rankcell on a line with other statements")
            lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in text.splitlines()]
    return "\n".join(lines), modules


def _file_of(module: str) -> Path | None:
    """The file of our module "parallel/ddp", or None."""
    for file in (_OURS / f"{module}.py", _OURS / module / "__init__.py"):
        if module and file.exists():
            return file
    return None


def _closure(module: str) -> set[str]:
    """Our modules that `module` imports, itself included. Raises _NotPortable if the engine is among them."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if name in found or file is None:
            continue
        if name in _NOTEBOOK_ONLY or name.split("/")[0] in _NOTEBOOK_ONLY:
            raise _NotPortable(f"needs rankcell.{module.replace('/', '.')}, which works in a notebook only")
        found.add(name)
        package = file.parent.relative_to(_OURS)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package
                for _ in range(node.level - 1):
                    base = base.parent
                inside = "/".join([*base.parts, *(node.module or "").split(".")]).strip("/")
                waiting += [inside, *("/".join(filter(None, [inside, a.name])) for a in node.names)]
    return found


def _copy_modules(modules: Sequence[str], folder: Path) -> list[Path]:
    """Copy our modules, and the data they read, into `folder`; the files written."""
    if not modules:
        return []
    root, written = folder / MODULES, []
    (root).mkdir(exist_ok=True)
    written.append(root / "__init__.py")
    written[0].write_text(
        '"""Modules of the course that the script imports, as they were when it was made."""\n', "utf-8"
    )
    for module in modules:
        file = _file_of(module)
        assert file is not None
        parts = [file, *(p / "__init__.py" for p in file.relative_to(_OURS).parents if p != Path())]
        for source in (part if part.is_absolute() else _OURS / part for part in parts):
            target = root / source.relative_to(_OURS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            written.append(target)
        if "files(__package__)" in file.read_text("utf-8"):
            shutil.copytree(_OURS / "data", root / "data", dirs_exist_ok=True)
            written += sorted((root / "data").iterdir())
    return list(dict.fromkeys(written))


def _with_value(source: str) -> tuple[str, bool]:
    """The cell with its last expression assigned to `_value`, and whether it has one that is shown."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    lines = source.rstrip("\n").splitlines()
    if not isinstance(last, ast.Expr) or cell_source.is_silenced(source):
        return source.strip("\n"), False
    encoded = lines[last.lineno - 1].encode()
    # a value in brackets begins inside them: take the statement's own place
    lines[last.lineno - 1] = (encoded[: last.col_offset] + b"_value = " + encoded[last.col_offset :]).decode()
    return "\n".join(lines).strip("\n"), True


def _indented(source: str) -> str:
    """`source` four spaces to the right, except lines that begin inside a string."""
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            inside |= set(range(token.start[0] + 1, token.end[0] + 1))
        elif tokenize.tok_name[token.type] == "FSTRING_START":
            starts.append(token.start[0])
        elif tokenize.tok_name[token.type] == "FSTRING_END":
            inside |= set(range(starts.pop() + 1, token.end[0] + 1))
    return "\n".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(source.splitlines(), 1)
    )


def add_command(commands: Any) -> None:
    """Add `export` to the sub-commands of an argument parser."""
    command = commands.add_parser(
        "export",
        help="turn the rank cells of a notebook into a script for torchrun and srun",
        description="Turn a notebook's rank cells into a script for torchrun and srun, and a job script.",
    )
    command.add_argument("notebook", type=Path)
    command.add_argument(
        "--world-size", type=int, metavar="N", help="the cells for N ranks; default: those that are most"
    )
    command.add_argument(
        "--to", type=Path, metavar="FOLDER", help="where to write; default: a folder named as the notebook"
    )
    command.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="how many nodes the job asks for (1)"
    )
    command.add_argument(
        "--gpus-per-node", type=int, default=0, metavar="N", help="how many GPUs on each node (0)"
    )
    command.set_defaults(run=run)


def run(options: Any) -> int:
    """Export as the options say and print what was written; the number for the shell is 0 when all went well."""
    try:
        exported = convert(options.notebook, world_size=options.world_size)
        written = export(
            options.notebook,
            world_size=options.world_size,
            to=options.to,
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
        )
    except ExportError as error:
        print(f"rankcell export: {error}", file=sys.stderr)
        return 1
    script, job, *modules = written
    count = f"{len(exported.kept)} cell{'s' * (len(exported.kept) != 1)}"
    print(f"{script}: {count} for {exported.world_size} ranks")
    for name, reason in exported.left_out:
        print(f"  left out {name}: {reason}")
    print(f"{job}: the job script; in {script.parent}: sbatch {job.name}")
    print(
        "  if it hangs: write `rankcell run --` before its srun, or before torchrun; it says which rank, and where"
    )
    if modules:
        print(f"{script.parent / MODULES}: what the script imports")
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


if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
