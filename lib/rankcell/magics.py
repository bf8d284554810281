"""The IPython side: `%%ranks` runs a cell on the ranks, `%ranks` shows, stops and restarts them.

Parses the magic's line, calls `Ranks.run`, returns its value. The worlds live in the one `RankMagics`
instance that `%load_ext rankcell` makes.
"""

import ast
import asyncio
import contextlib
import gc
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from IPython.core.completer import SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser, argument, magic_arguments
from IPython.display import clear_output, display

from . import errors, progress, source, versions
from .draw import page
from .draw.svg import format_bytes
from .engine import devices, world
from .results import Run

KEPT = 20  # runs that Out keeps whole; of older ones what was printed and the values (`-o NAME` keeps all)
_WORDS = ("stop", "restart", "export", "doctor", "progress")


def _with_options(method: Any) -> Any:
    """The magic with the options of `source.OPTIONS`, which `%%ranks?` explains."""
    for flags, how in reversed(source.OPTIONS):
        method = argument(*flags, **how)(method)
    return method


@magics_class
class RankMagics(Magics):
    """`%%ranks` and `%ranks`, and the worlds that they have started."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.shell: Any = shell
        self.worlds: dict[tuple[int, str, int | None], world.Ranks] = {}
        self.matcher: Any = None  # completes names in rank cells
        self._latest: deque[Run] = deque()  # the values of the latest rank cells
        self._warned = False  # of a torch on which nobody has tried this
        self.progress = progress.Progress.of_this_kernel()

    @magic_arguments()
    @argument(
        "world_size",
        nargs="?",
        help="how many ranks: `%%%%ranks 4`. As a line, `%%ranks` lists the worlds alive, "
        "`%%ranks stop` ends their processes, `%%ranks restart` gives fresh ones, `%%ranks export` writes "
        "the notebook's rank cells as a script for torchrun and srun, `%%ranks doctor` says what this machine can do, "
        "`%%ranks progress` shows what is solved.",
    )
    @_with_options
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on several real ranks, and show what each of them said.

        On every rank the names rank, world_size, device, torch and dist are there, and all names that earlier
        %%ranks cells of the same world defined. The value is a Run: run.ranks[2].stdout, run.values,
        run.events.

            %%ranks 4 --pull x -o run
            x = torch.ones(3, device=device) * rank
            dist.all_reduce(x)
            x
        """
        if cell is None:
            return self._line(line)
        line, rehearses = source.rehearsed(line)
        options = _parse(RankMagics.ranks.parser, line)
        if rehearses:
            options.on, options.as_rank = options.on or "h100", options.as_rank or 0
        elif options.on is not None or options.as_rank is not None:
            raise errors.OptionError(
                "`--on` and `--as` belong to a rehearsal, which begins with `%%ranks 1 of 1024`. Write for example "
                "`%%ranks 1 of 1024 --on 128xh100x8 --as 7`."
            )
        if options.world_size is None:
            raise errors.OptionError("how many ranks? Write for example `%%ranks 4`.")
        if not re.fullmatch("[0-9]+", options.world_size) or int(options.world_size) < 1:
            raise errors.OptionError(
                f"{options.world_size!r} is no number of ranks. Write for example `%%ranks 4`."
            )
        push = self._pushed(options.push or ())
        dense = self._dense(options.against)
        text = self._source(cell)
        ranks = self._world(int(options.world_size), options)
        live = _Live()
        try:
            run = ranks.run(
                text,
                only=options.only,
                push=push,
                pull=options.pull or (),
                timeout=options.timeout,
                values=options.values,
                follow=options.against is not None,
                filename=self._name_of_cell(),
                on_update=live.update,
            )
        except (errors.RankError, errors.RanksInterrupted, errors.PullError) as error:
            self._keep(error.run, options)
            live.end()
            self._tell(ranks)
            _show_before_error(error.run)
            raise
        live.end()
        self._tell(ranks)
        if dense is not None:
            run = self._compared(run, dense, options)
        return self._keep(run, options)

    def _dense(self, names: Sequence[str] | None) -> Any:
        """The model that `--against` names."""
        if names is None:
            return None
        dense = self.shell.user_ns.get(names[0])
        if not hasattr(dense, "named_modules"):
            what = f"is {errors.plain_value(dense)}" if names[0] in self.shell.user_ns else "is not there"
            raise errors.OptionError(
                f"--against needs a model of the notebook, and {names[0]} {what}. Define it in an ordinary cell first."
            )
        return dense

    def _compared(self, run: Run, dense: Any, options: Any) -> Run:
        """The run with what one process says of it; the run is kept if it cannot say anything."""
        from . import check, twin

        try:
            verdict = check.against(run, twin.trace(dense, run))
        except ValueError:
            self._keep(run, options)
            raise
        ranks = tuple(replace(r, trace=twin.without_inputs(r.trace)) for r in run.ranks)
        return replace(run, ranks=ranks, against=verdict)

    def _source(self, cell: str) -> str:
        """The cell with its magics translated, and lines counted as the notebook counts them: `%%ranks` is
        line 1.
        """
        text = "\n" + self.shell.input_transformer_manager.transform_cell(cell)
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise errors.CellSyntaxError(error) from None
        return text

    def _name_of_cell(self) -> str:
        """What tracebacks call this cell: its number is the one in front of it, as in In [3]."""
        number = len(self.shell.user_ns.get("In", ())) - 1  # execution_count is ahead by one in newer IPython
        return f"<cell {number}>" if number > 0 else "<cell>"

    def _pushed(self, names: Sequence[str]) -> dict[str, Any]:
        missing = [n for n in names if n not in self.shell.user_ns]
        if missing:
            raise errors.PushError(
                f"{', '.join(missing)} cannot be pushed: the notebook has no such name. Define it in an ordinary "
                f"cell first. No rank has run."
            )
        return {n: self.shell.user_ns[n] for n in names}

    def _world(self, world_size: int, options: Any) -> world.Ranks:
        device, nodes, on = options.device, options.nodes, options.on or ""
        kind = f"{on} {options.as_rank}" if on else device
        if nodes is None and not on:
            try:
                kind = devices.choose(world_size, device, devices.look(mps=False)).device
            except errors.WorldSizeError:
                raise
            except ValueError as error:
                raise errors.OptionError(str(error)) from None
        if options.start == "spawn":
            kind += " spawn"
        key = (world_size, kind, nodes)
        ranks = self.worlds.get(key)
        if ranks is not None and ranks.alive:
            if options.fresh:
                ranks.restart()
        else:
            if nodes is None and not on:
                self._wait_for_torch(world_size)
            try:
                ranks = world.Ranks(
                    world_size,
                    device=device,
                    nodes=nodes,
                    start=options.start,
                    on=on,
                    as_rank=options.as_rank or 0,
                )
            except ValueError as error:
                if not on:
                    raise
                raise errors.OptionError(str(error)) from None
            self.worlds[key] = ranks
            ranks.notes.append(
                ranks.device_note if on else f"{world_size} ranks talk over {ranks.device_note}."
            )
            if not self._warned and (said := versions.beyond(version("torch"))):
                ranks.notes.append(said)
            self._warned = True
        return ranks

    def _wait_for_torch(self, world_size: int) -> None:
        """The first world of a notebook has to wait until torch is imported: say so, as a slow disk takes a minute."""
        live = _Live()
        what = f"starting {world_size} ranks: torch is being imported, once for all of this notebook"
        try:
            world.warm_up(lambda seconds: live.show("", "", f"{what} ({seconds:.0f} s)"))
        finally:
            live.end()

    def _tell(self, ranks: world.Ranks) -> None:
        """Print what the learner must know about the ranks; after the cell, whose live output wipes."""
        while ranks.notes:
            print(ranks.notes.pop(0))

    def _keep(self, run: Run, options: Any) -> Run:
        """Give the notebook the names that it asked for; the run that is the cell's value, which Out keeps.

        Pulled values are held by their names alone, so that `del name` frees them.
        """
        for name, values in run.pulled.items():
            self.shell.user_ns[name] = list(values)
        if options.out:
            self.shell.user_ns[options.out[0]] = run
        kept = replace(run, pulled={})
        self._latest.append(kept)
        if len(self._latest) > KEPT:
            self._latest.popleft().forget_details()
        return kept

    def _line(self, line: str) -> Any:
        word = line.strip()
        if word == "":
            return Worlds.of(self.worlds.values())
        if word == "stop":
            count = sum(w.alive for w in self.worlds.values())
            self.stop()
            worlds = "world" if count == 1 else "worlds"
            print(f"Stopped {count} {worlds}. The next %%ranks cell starts new ranks.")
            return None
        if word == "restart":
            alive = [w for w in self.worlds.values() if w.alive]
            for ranks in alive:
                ranks.restart()
            sizes = ", ".join(f"{w.world_size} ranks" for w in alive) or "nothing: no world is alive"
            print(f"Started anew: {sizes}.")
            return None
        if word.split()[0] == "doctor":
            from . import doctor

            doctor.main(nodes="--nodes" in word.split())
            return None
        if word.split()[0] == "progress":
            return self._progress(word.split()[1:])
        if word.split()[0] == "export":
            return self._export(word.split()[1:])
        if re.match(r"\d", word):
            raise errors.OptionError(
                f"`%ranks {word}` runs nothing. To run a cell on the ranks, begin it with `%%ranks {word}`."
            )
        raise errors.OptionError(errors.unknown_option(word, _WORDS, "%ranks"))

    def _progress(self, words: Sequence[str]) -> Any:
        """`%ranks progress`: which exercises are solved; `share WHERE NAME` sends it, `private` ends that."""
        if not words:
            return self.progress.view()
        try:
            if words[0] == "share" and len(words) >= 3:
                print(self.progress.share(words[1], " ".join(words[2:])))
            elif words == ["private"]:
                print(self.progress.keep_private())
            else:
                raise errors.OptionError(
                    "write `%ranks progress`, `%ranks progress share FOLDER-OR-ADDRESS NAME`, or "
                    "`%ranks progress private`."
                )
        except progress.ProgressError as error:
            raise errors.OptionError(str(error)) from None
        return None

    def heard(self, result: Any) -> None:
        """A cell of the notebook has run: IPython calls this."""
        error = result.error_before_exec or result.error_in_exec
        self.progress.heard(getattr(result.info, "cell_id", None), error)

    def _export(self, words: Sequence[str]) -> None:
        """`%ranks export`: the notebook's rank cells as a script, as the command `rankcell export` does."""
        from .cluster import export

        if not any(w.endswith(".ipynb") for w in words):
            # Jupyter's server tells its kernels which notebook they belong to
            notebook = os.environ.get("JPY_SESSION_NAME", "")
            if not notebook.endswith(".ipynb"):
                raise errors.OptionError(
                    "which notebook? Name it, and save it first: `%ranks export 08_ddp.ipynb --nodes 2`."
                )
            words = [notebook, *words]
        try:
            export.main(["export", *words])
        except SystemExit:  # argparse has said what is wrong with the words
            return

    def stop(self) -> None:
        """End all worlds."""
        for ranks in self.worlds.values():
            if ranks.alive:
                ranks.stop()
        self.worlds.clear()

    def completions(self, text: str, word: str) -> list[str]:
        """Names that complete `word` in the rank cell `text`: predefined ones and the ranks'."""
        head = re.match(r"\s*%%ranks\s+(?:1\s+of\s+)?(\d+)", text)
        if not head:
            return []
        ranks = next(
            (w for (size, *_), w in reversed(list(self.worlds.items())) if size == int(head[1]) and w.alive),
            None,
        )
        if "." in word:
            return ranks.complete(word) if ranks else []
        known = dict.fromkeys((*source.LENT, *(ranks.names if ranks else ())))
        return [n for n in known if n.startswith(word)]


def _with_verdict(run: Run, text: str, how: str) -> str:
    """What a run shows, and below it what `--against` found."""
    return text if run.against is None else f"{text}\n{getattr(run.against, how)()}"


class Worlds:
    """What `%ranks` shows: a row per world, with its processes and their memory."""

    def __init__(self, rows: list[tuple[str, str, list[int], list[int | None]]]) -> None:
        self.rows = rows

    @classmethod
    def of(cls, worlds: Any) -> "Worlds":
        """The rows for these worlds."""
        alive = [w for w in worlds if w.alive]
        return cls(
            [
                (
                    f"{'1 of ' if w.backend == 'fake' else ''}{w.world_size} ranks",
                    f"{w.device} ({w.backend})",
                    w.pids,
                    w.memory(),
                )
                for w in alive
            ]
        )

    def __repr__(self) -> str:
        if not self.rows:
            return "No ranks are alive. A `%%ranks 4` cell starts four."
        lines = []
        for size, device, pids, memory in self.rows:
            known = [m for m in memory if m is not None]
            used = format_bytes(sum(known)) if len(known) == len(memory) else "unknown memory"
            lines.append(f"{size} on {device}, {used} in all, pids {', '.join(map(str, pids))}")
        return "\n".join(lines)


class _Live:
    """Shows a cell's output while it runs; gone when the cell ends, its value stands there then."""

    def __init__(self) -> None:
        self.shown = False
        self._last: tuple[str, str] | None = None

    def update(self, run: Run, doing: str) -> None:
        """Called while the ranks run."""
        text = page.as_html(run) if any(r.stdout or r.stderr or r.displays for r in run.ran) else ""
        # shown anew each second, which says that it lives
        self.show(text, f"{page.as_text(run)}\n", f"running for {run.seconds:.0f} s: {doing}")

    def show(self, html: str, text: str, doing: str) -> None:
        """Show the output so far, in two forms, and a line below that says what happens."""
        if self._last == (html, doing):
            return
        self._last = (html, doing)
        if self.shown:
            clear_output(wait=True)
        self.shown = True
        line = f'<div style="font-size:0.85em;opacity:0.75">{doing}</div>'
        display({"text/html": html + line, "text/plain": f"{text}{doing}"}, raw=True)

    def end(self) -> None:
        """Take the live output away."""
        if self.shown:
            clear_output(wait=True)
            self.shown = False


def _show_before_error(run: Run) -> None:
    """Show what the ranks printed before something went wrong."""
    if any(r.stdout or r.stderr or r.displays or r.data for r in run.ran):
        display(run)


def _parse(parser: MagicArgumentParser, line: str) -> Any:
    try:
        return parser.parse_argstring(line)
    except ValueError as error:  # a quotation mark without its other one
        raise errors.OptionError(f"`%%ranks {line}`: {error}.") from None
    except UsageError as error:
        text = str(error)
        unknown = re.search(r"unrecognized arguments: (\S+)", text)
        if unknown:
            word = unknown[1]
            known = sorted(
                {o for action in parser._actions for o in action.option_strings if o != "-h"} - {"--help"}
            )
            if not word.startswith("-"):
                raise errors.OptionError(
                    f"{word!r} is one word too many in the `%%ranks` line. Write `%%ranks N [options]`; names "
                    f"are separated by commas without spaces. `%%ranks?` explains the options."
                ) from None
            raise errors.OptionError(errors.unknown_option(word.split("=")[0], known, "%%ranks")) from None
        lacking = re.match(r"argument (?:\S+/)?(\S+): expected one argument", text)
        if lacking:
            wanted = next(how["metavar"] for flags, how in source.OPTIONS if lacking[1] in flags)
            raise errors.OptionError(
                f"{lacking[1]} needs {wanted} behind it. `%%ranks?` explains the options."
            ) from None
        raise errors.OptionError(re.sub(r"^argument ", "", text)) from None


def load(shell: Any) -> RankMagics:
    """Register the magics, the display of a Run and the completion with an IPython shell."""
    magics = RankMagics(shell)
    shell.register_magics(magics)
    shell.events.register("post_run_cell", magics.heard)
    formatters = shell.display_formatter.formatters
    formatters["text/plain"].for_type(
        Run, lambda run, p, cycle: p.text(_with_verdict(run, page.as_text(run), "__repr__"))
    )
    formatters["text/html"].for_type(Run, lambda run: _with_verdict(run, page.as_html(run), "_repr_html_"))

    @context_matcher(identifier="rankcell")
    def matcher(context: Any) -> SimpleMatcherResult:
        first = context.full_text.lstrip().startswith("%%ranks") and not context.cursor_line
        if first and context.token.startswith("-"):
            options = [o for o in source.option_strings() if o.startswith(context.token)]
            return SimpleMatcherResult(completions=[SimpleCompletion(text=o) for o in options], suppress=True)
        found = magics.completions(
            context.full_text, _dotted_word(context.line_with_cursor or context.token, context)
        )
        prefix = len(_dotted_word(context.line_with_cursor, context)) - len(context.token)
        return SimpleMatcherResult(completions=[SimpleCompletion(text=n[prefix:]) for n in found])

    shell.Completer.custom_matchers.append(matcher)
    magics.matcher = matcher
    shell.object_inspect_mime = partial(_inspect, shell)  # what Shift+Tab asks
    # Threads of OpenMP spin while they wait for the next product, and take the cores from the ranks: on two busy cores
    # a small training of one process takes 20 times as long. Asleep they cost some microseconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torch takes over a second to import: the fork server does it meanwhile, and so does this process when it is idle
    world.warm_up()
    with contextlib.suppress(RuntimeError):  # there is no event loop in a terminal
        asyncio.get_running_loop().call_later(0.2, _import_torch)
    return magics


def _inspect(shell: Any, name: str, *args: Any, **more: Any) -> Any:
    """What the shell says of `name`, which may begin with a module that only the ranks have imported."""
    import torch.distributed

    lent = {"torch": torch, "dist": torch.distributed}
    first = name.partition(".")[0]
    ask = type(shell).object_inspect_mime
    if first not in lent or first in shell.user_ns:
        return ask(shell, name, *args, **more)
    shell.user_ns[first] = lent[first]
    try:
        return ask(shell, name, *args, **more)
    finally:
        del shell.user_ns[first]


def _dotted_word(line: str, context: Any) -> str:
    """The name, dotted or not, that ends at the cursor."""
    match = re.search(
        r"[\w.]*$", line[: context.cursor_position] if line is context.line_with_cursor else line
    )
    return match[0] if match else ""


def _import_torch() -> None:
    """Only while no cell runs or the one that runs waits for us: two threads that import parts of torch at once may
    each hold a lock that the other one needs, and Python then raises in one of them.
    """
    collects = gc.isenabled()
    gc.disable()  # a quarter of the import's time is garbage collection, and imports leave no garbage
    try:
        import torch.multiprocessing  # noqa: F401
    except Exception:  # noqa: BLE001, S110 - whoever needs it meets the error
        pass
    finally:
        if collects:
            gc.enable()


def unload(shell: Any, magics: RankMagics) -> None:
    """Stop the worlds and take the completion away."""
    magics.stop()
    shell.events.unregister("post_run_cell", magics.heard)
    del shell.object_inspect_mime
    if magics.matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(magics.matcher)
    shell.magics_manager.magics["cell"].pop("ranks", None)
    shell.magics_manager.magics["line"].pop("ranks", None)
