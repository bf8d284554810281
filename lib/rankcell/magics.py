"""The IPython side: `%%ranks` runs a cell on the ranks, `%ranks` shows, stops and restarts them.

The worlds live in the one `RankMagics` that `%load_ext rankcell` makes. It draws nothing and knows no other part: those
answer to words of `extensions.TABLE`.
"""

import ast
import asyncio
import contextlib
import inspect
import os
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from IPython.core.completer import SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import clear_output, display

from . import errors, extensions, source, versions
from .draw import page
from .engine import devices, launch, world
from .results import NotSent, Run

# Where the kernel has ended nobody takes the line of its last second away; the page itself says so then.
_ENDED = (
    "<style>@keyframes rankcell-ended{to{font-size:1em}}</style><span style='font-size:0;"
    "animation:rankcell-ended 0s 9s forwards'> (no news for 9 s: has the kernel ended?)</span>"
)
_TRAINED = (
    "The ranks have trained copies of `{0}`, and this one is as it was: end the rank cell with `weights = "
    "{0}.state_dict()`, add `--pull weights`, and load them here: `{0}.load_state_dict(weights[0])`."
)
_CHANGED = (
    "The ranks have changed copies of `{0}`, and this one is as it was: add `--pull {0}` to the line of the rank cell, "
    "and `{0}` is a list, with the copy of each rank: `{0}[0]` is rank 0's."
)
KEPT = 20  # runs that Out keeps whole; of older ones what was printed and the values (`-o NAME` keeps all)


@magics_class
class RankMagics(Magics):
    """`%%ranks` and `%ranks`, and the worlds that they have started."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.shell: Any = shell
        self.worlds: dict[tuple[int, str, int | None], world.Ranks] = {}
        self._latest: deque[Run] = deque()  # the values of the latest rank cells
        self._copied: dict[str, Any] = {}  # whose copies ranks have changed: this one, and its `marks`
        self._started = False  # a world; the first one waits for torch, and tells of one that was not tried

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on several real ranks, and show what each of them said.

        On every rank the names rank, world_size, device, torch and dist are there, and all names that earlier %%ranks
        cells of the same world defined. The value is a Run: run.ranks[2].stdout, run.values, run.events.

            %%ranks 4 --pull x -o run
            x = torch.ones(3, device=device) * rank
            dist.all_reduce(x)
            x

        As a line: `%ranks` lists the worlds alive, `%ranks stop` ends their processes, `%ranks restart` gives fresh
        ones, `%ranks doctor` says what this machine can do, `%ranks progress` shows what is solved.
        """
        if cell is None:
            return self._line(line)
        options = source.parse_line(line)
        names = self.shell.user_ns
        if missing := [n for n in options.push or () if n not in names]:
            how = "Define it in an ordinary cell first. No rank has run."
            raise errors.PushError(f"{', '.join(missing)} cannot be pushed: the notebook has no such name. {how}")
        text = self._translated(cell)
        number = len(names.get("In", ())) - 1  # execution_count is ahead by one in newer IPython
        live = _Live()
        ranks, figures = self._world(options, live), _open_figures()
        try:
            run = ranks.run(
                text,
                only=options.only,
                push={n: names[n] for n in options.push or ()},
                pull=options.pull or (),
                timeout=options.timeout,
                values=options.values,
                filename=f"<cell {number}>" if number > 0 else "<cell>",
                on_update=live.update,
            )
        except (errors.RankError, errors.RanksInterrupted, errors.PullError) as error:
            self._keep(error.run, options)
            live.end()
            _tell(ranks)
            if any(r.stdout or r.stderr or r.displays or r.data for r in error.run.ran):
                display(error.run)  # what the ranks printed before it went wrong
            for hint in _hints(error.run, names, options.push or (), options.out):
                error.add(hint)
            raise
        finally:  # a figure that came from a rank stands under its rank; matplotlib would show it again
            for number in _open_figures() - figures:
                sys.modules["matplotlib.pyplot"].close(number)
        live.end()
        for name in [n for n in run.pulled if hasattr(names.get(n), "state_dict")]:  # the notebook's own model
            ranks.notes.append(f"`{name}` is a list now, with the value of each rank: `{name}[0]` is rank 0's.")
        _tell(ranks)
        self._copied = {n: copied for n, copied in self._copied.items() if n not in (options.push or ())}
        self._copied |= {n: (names[n], source.marks(names[n])) for n in ranks.changed if n not in run.pulled}
        return self._keep(run, options)

    def _translated(self, cell: str) -> str:
        """The cell with its magics translated; `%%ranks` is line 1, as the notebook counts."""
        text = "\n" + self.shell.input_transformer_manager.transform_cell(cell)
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise errors.CellSyntaxError(error) from None
        return text

    def _world(self, options: Any, live: "_Live") -> world.Ranks:
        """The world of the cell: the one that is alive, or a new one."""
        size, nodes, kind = options.world_size, options.nodes, options.device
        if not self._started:  # a slow disk takes a minute for it
            live.show("", "", f"starting {_count(size)}: torch is being imported, once for all of this notebook")
        try:
            if nodes is None:
                kind = devices.choose(size, options.device, devices.look(mps=False)).device
            key = size, f"{kind} {options.start}", nodes
            ranks = self.worlds.get(key)
            if ranks is not None and ranks.alive:
                return ranks
            ranks = self.worlds[key] = world.Ranks(size, device=options.device, nodes=nodes, start=options.start)
        except errors.WorldSizeError:
            raise
        except ValueError as error:  # one of the line's: its message is enough
            raise errors.OptionError(str(error)) from None
        finally:
            live.end()
        ranks.notes.append(f"{_count(size)} talk{'s' * (size == 1)} over {ranks.device_note}.")
        if not self._started and (said := versions.untried(version("torch"))):
            ranks.notes.append(said)
        self._started = True
        return ranks

    def _keep(self, run: Run, options: Any) -> Run:
        """Give the notebook the names it asked for; the run for Out, without what was pulled: `del name` frees it."""
        for name, values in run.pulled.items():
            if any(not isinstance(value, NotSent) or value.text for value in values):  # or no rank has the name
                self.shell.user_ns[name] = list(values)
        if options.out:
            self.shell.user_ns[options.out] = run
        kept = replace(run, pulled={})
        self._latest.append(kept)
        if len(self._latest) > KEPT:
            self._latest.popleft().forget_details()
        return kept

    def _line(self, line: str) -> Any:
        word, *more = line.split() or [""]
        alive = [w for w in self.worlds.values() if w.alive]
        if word == "":
            rows = [f"{_count(w.world_size)} on {w.device} ({w.backend}), pids {str(w.pids)[1:-1]}" for w in alive]
            print("\n".join(rows) or "No ranks are alive. A `%%ranks 4` cell starts four.")
            return None
        if f"%ranks {word}" in extensions.TABLE:
            return extensions.find(f"%ranks {word}")(more)
        if word == "stop":
            self.stop()
            print(f"Stopped {len(alive)} world{'s' * (len(alive) != 1)}. The next %%ranks cell starts new ranks.")
        elif word == "restart":
            for ranks in alive:
                ranks.restart()
            sizes = ", ".join(_count(w.world_size) for w in alive) or "nothing: no world is alive"
            print(f"Started anew: {sizes}.")
        elif word[0].isdigit():
            how = f"To run a cell on the ranks, begin it with `%%ranks {line}`."
            raise errors.OptionError(f"`%ranks {line}` runs nothing. {how}")
        else:
            known = ["stop", "restart", *extensions.words_of("%ranks")]
            raise errors.OptionError(errors.unknown_option(line, known, "%ranks"))

    def stop(self) -> None:
        for ranks in self.worlds.values():
            ranks.stop()
        self.worlds.clear()

    def tell_where_names_are(self, result: Any) -> None:
        """Below the error of an ordinary cell that uses what only ranks have."""
        error = result.error_in_exec
        name = error.name if isinstance(error, NameError) else None
        theirs = [w.world_size for w in self.worlds.values() if w.alive and name in w.names]
        outside = isinstance(error, ValueError) and "Default process group has not been" in str(error)
        if name in ("rank", "world_size", "device", "dist") or outside:
            print("Only ranks have that: put `%%ranks 4` on the first line of the cell.", file=sys.stderr)
        elif theirs:
            here = f"or define {name} here, too (`--pull {name}` in the line of a rank cell fetches its values)."
            print(f"Only the ranks have {name}: begin the cell with `%%ranks {theirs[-1]}`, {here}", file=sys.stderr)
        text = str(result.info.raw_cell)
        for name in [n for n in self._copied if re.search(rf"\b{n}\b", text) and not text.lstrip().startswith("%%")]:
            ours, before = self._copied.pop(name)
            if self.shell.user_ns.get(name) is ours and source.marks(ours)[0] == before[0]:
                print((_TRAINED if hasattr(type(ours), "load_state_dict") else _CHANGED).format(name), file=sys.stderr)

    @context_matcher(identifier="rankcell")
    def match(self, context: Any) -> SimpleMatcherResult:
        """What IPython's completer asks: the options on the first line of a rank cell, names below it."""
        head = re.match(r"\s*%%ranks\s+(\d+)?", context.full_text)
        if head and not context.cursor_line and context.token.startswith("-"):
            options = [o for o in source.option_strings() if o.startswith(context.token)]
            return SimpleMatcherResult(completions=[SimpleCompletion(text=o) for o in options], suppress=True)
        before = context.line_with_cursor[: context.cursor_position] or context.token
        word = (re.search(r"[\w.]*$", before) or [""])[0]  # the name, dotted or not, that ends at the cursor
        worlds = [w for w in self.worlds.values() if w.alive and head and str(w.world_size) == head[1]]
        known: Iterable[str] = ()
        if "." in word:
            known = [name for w in worlds[-1:] for name in w.complete(word)]
        elif head:
            known = dict.fromkeys((*source.LENT, *(name for w in worlds for name in w.names)))
        known = [name[len(word) - len(context.token) :] for name in known if name.startswith(word)]
        return SimpleMatcherResult(completions=[SimpleCompletion(text=name) for name in known])


# `%%ranks?` shows the options, too
RankMagics.ranks.__doc__ = f"{inspect.cleandoc(RankMagics.ranks.__doc__ or '')}\n\n{source.parser().format_help()}"


def _count(world_size: int) -> str:
    return f"{world_size} rank{'s' * (world_size != 1)}"


def _open_figures() -> set[int]:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return set(pyplot.get_fignums()) if pyplot else set()


def _tell(ranks: world.Ranks) -> None:
    """Print what the learner must know about the ranks; after the cell, whose live output wipes."""
    while ranks.notes:
        print(ranks.notes.pop(0))


def _hints(run: Run, notebook: dict[str, Any], pushed: Sequence[str], out: str | None) -> list[str]:
    """What to do where a rank failed for want of something that the notebook has."""
    failures = [r.error for r in run.failed if r.error is not None]
    hints: list[str] = []
    strange = (re.match(r"No module named '(\w+)'", f.message) for f in failures if f.type == "ModuleNotFoundError")
    for name in dict.fromkeys(m[1] for m in strange if m):
        if file := getattr(sys.modules.get(name), "__file__", None):
            folder = Path(file).parent
            hints.append(f"The notebook found {name} in {folder}: `sys.path.append('{folder}')` in a rank cell, too.")
    for name in (n for n in errors.missing_names(run) if n in notebook):
        if isinstance(notebook[name], types.ModuleType):
            hints.append(f"The notebook has imported {name}; the ranks have not: import it in a rank cell, too.")
        elif name == out:
            what = "names what came of the cell, in the notebook, when it is over"
            hints.append(f"`-o {name}` {what}: use it in a cell below.")
        elif name not in pushed:
            hints.append(f"The notebook has {name}: `--push {name}` in the `%%ranks` line copies it to the ranks.")
    return hints


class _Live:
    """Shows a cell's output while it runs; gone when the cell ends, its value stands there then."""

    def __init__(self) -> None:
        self.shown: tuple[str, str] | None = None

    def update(self, run: Run, doing: str) -> None:
        text = page.as_html(run) if any(r.stdout or r.stderr or r.displays for r in run.ran) else ""
        # shown anew each second, which says that it lives
        self.show(text, f"{page.as_text(run)}\n", f"running for {run.seconds:.0f} s: {doing}")

    def show(self, html: str, text: str, doing: str) -> None:
        """Show the output so far, in two forms, and a line below that says what happens."""
        if self.shown == (html, doing):
            return
        self.end()
        self.shown = (html, doing)
        line = f'<div style="font-size:0.85em;opacity:0.75">{doing}{_ENDED * doing.startswith("running")}</div>'
        display({"text/html": html + line, "text/plain": f"{text}{doing}"}, raw=True)

    def end(self) -> None:
        if self.shown:
            clear_output(wait=True)
            self.shown = None


def _misplaced(line: str) -> None:
    """What IPython runs for a `%%ranks` that is not the first line of its cell."""
    how = "put what stands above it into a cell of its own."
    raise errors.OptionError(f"`%%ranks {line}` must be the first line of its cell: {how}")


def load(shell: Any) -> RankMagics:
    """Register the magics, the display of a Run and the completion with an IPython shell."""
    magics = RankMagics(shell)
    shell.register_magics(magics)
    shell.register_magic_function(_misplaced, "line", "%ranks")
    shell.events.register("post_run_cell", magics.tell_where_names_are)
    formatters = shell.display_formatter.formatters
    formatters["text/plain"].for_type(Run, lambda run, p, cycle: p.text(page.as_text(run)))
    formatters["text/html"].for_type(Run, page.as_html)
    shell.Completer.custom_matchers.append(magics.match)
    shell.object_inspect_mime = partial(_inspect, shell)  # what Shift+Tab asks
    # Threads of OpenMP that spin take the cores from the ranks: a small training takes 20 times as long on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torch takes over a second to import: the fork server does it meanwhile, and so does this process when it is idle
    launch.warm_up()
    with contextlib.suppress(RuntimeError):  # there is no event loop in a terminal
        asyncio.get_running_loop().call_later(0.2, _import_torch)
    return magics


def unload(shell: Any, magics: RankMagics) -> None:
    magics.stop()
    shell.events.unregister("post_run_cell", magics.tell_where_names_are)
    del shell.object_inspect_mime
    shell.Completer.custom_matchers.remove(magics.match)
    for kind, name in (("cell", "ranks"), ("line", "ranks"), ("line", "%ranks")):
        shell.magics_manager.magics[kind].pop(name, None)


def _inspect(shell: Any, name: str, *args: Any, **more: Any) -> Any:
    """What the shell says of `name`, which may begin with a module that only the ranks have imported."""
    import torch.distributed

    lent, first = {"torch": torch, "dist": torch.distributed}, name.partition(".")[0]
    ask = type(shell).object_inspect_mime
    if first not in lent or first in shell.user_ns:
        return ask(shell, name, *args, **more)
    shell.user_ns[first] = lent[first]
    try:
        return ask(shell, name, *args, **more)
    finally:
        del shell.user_ns[first]


def _import_torch() -> None:
    """Only while no cell runs: of two threads that import parts of torch at once, Python may raise in one."""
    with contextlib.suppress(Exception):  # whoever needs it meets the error
        import torch.multiprocessing  # noqa: F401
