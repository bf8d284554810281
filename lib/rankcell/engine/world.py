"""The ranks of one world: run cells on them, repair what a cell has broken, stop them.

A world is a set of processes that live on from cell to cell, on this machine or on the nodes of an allocation
(`host.py`): what is written here is the same for both. It knows nothing of IPython and draws nothing.
"""

import ast
import atexit
import functools
import io
import linecache
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from .. import errors, extensions
from ..results import Run, grouped, name_ranks
from . import channel, launch, settings
from .cell import Cell, Ending, OnUpdate, deferred_interrupt
from .host import Host
from .local import this_machine
from .messages import Task, with_cache
from .workers import Workers

STOP_PATIENCE = 2.0  # seconds that `stop` waits for a cell in another thread


class Ranks:
    """A world of `world_size` ranks: real processes with an initialised process group and names that persist.

        with Ranks(4) as ranks:
            run = ranks.run("dist.get_rank()")
            run.values  # [0, 1, 2, 3]

    Args:
        world_size: how many ranks.
        device: "cpu", "cuda" (ranks share what GPUs there are), or "auto": cuda if there is a GPU for each rank.
        nodes: spread the ranks over so many nodes of this Slurm allocation, in blocks; None: all on this machine.
        start: how the processes are started: "forkserver", or "spawn", as `torch.multiprocessing.spawn` does it.

    Raises WorldSizeError if the machine cannot hold that many ranks, AllocationError if Slurm has not given so many
    nodes, StartError if the ranks could not be started.
    """

    def __init__(
        self, world_size: int, *, device: str = "auto", nodes: int | None = None, start: str = "forkserver"
    ) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise errors.WorldSizeError(f"a world needs at least 1 rank, got {world_size!r}.")
        if start not in launch.METHODS:
            raise ValueError(f"start={start!r} is none of {', '.join(launch.METHODS)}.")
        self.world_size = world_size
        self.alive = True  # whether the world can run cells
        self.names: tuple[str, ...] = ()
        self.changed: tuple[str, ...] = ()  # names that the last cell was given, and has changed in place
        self._cells, self._pid, self._lock = 0, os.getpid(), threading.RLock()
        self.notes: list[str] = []  # what the learner should know about the ranks
        make: Callable[..., Host] = this_machine if nodes is None else extensions.find("--nodes")
        self._host = make(world_size, device, start) if nodes is None else make(world_size, nodes, device)
        self._workers = Workers(self._host, world_size)
        atexit.register(self.stop)
        try:
            self._workers.start_all()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"{self.world_size} ranks on {self.device} ({self.backend})" if self.alive else "stopped"
        return f"<Ranks: {state}>"

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._host.choice.device

    @property
    def backend(self) -> str:
        """What the ranks talk over."""
        return self._host.choice.backend

    @property
    def device_note(self) -> str:
        """Device and backend, and why, to follow "4 ranks talk over"; and how to get a better one."""
        choice, names = self._host.choice, ", ".join(self._host.names)
        where = f", on the nodes {names}" if names else ""
        return f"{choice.note}{where}. {choice.better}".removesuffix(". ")

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank (each on its node)."""
        return [pid for _, pid in sorted(self._host.pids.items())]

    def stop(self) -> None:
        """End the ranks. Safe to call twice; a world that was stopped cannot be used again."""
        if os.getpid() != self._pid:  # a fork of the notebook's process must not end its ranks
            return
        # a thread of the learner's may be in a cell, and a daemon thread does not even end at exit
        ours = self._lock.acquire(timeout=STOP_PATIENCE)
        try:
            atexit.unregister(self.stop)
            self.alive = False
            self._host.stop()
        finally:
            if ours:
                self._lock.release()

    def restart(self) -> None:
        """End the ranks and start new ones: all names are gone."""
        with self._lock:
            self.names = ()
            try:
                self._workers.restart()
            except BaseException:
                self.stop()
                raise

    def run(
        self,
        work: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        only: Sequence[int] | None = None,
        push: Mapping[str, Any] | None = None,
        pull: Sequence[str] = (),
        timeout: float | None = None,
        values: bool = False,
        filename: str = "<cell>",
        on_update: OnUpdate | None = None,
    ) -> Run:
        """Run source text or a function on the ranks and return what each of them did.

        Args:
            work: source of a cell, or a function, defined anywhere, to be called with `args` and `kwargs`.
            only: the ranks to run on; all by default. push: names and values to define on the ranks first.
            pull: names to fetch from the ranks afterwards, into `run.pulled` (lists by rank).
            timeout: seconds after which the ranks are interrupted; None waits as long as somebody makes progress.
            values: record the contents of every communication's tensors (their first 64 numbers).
            on_update: called while the cell runs, with the run so far and a line that says what the ranks do.

        Raises:
            RankError, or one of its kinds (Deadlock, RankMismatch, RankTimeout, RankLost): `error.run` holds the run.
            SyntaxError: before any rank has run. PushError, PullError: a name could not travel. EngineError:
            something unforeseen happened here; the ranks were started anew.
        """
        with self._lock:
            if not self.alive:
                raise RuntimeError("this world was stopped. Start another one: Ranks(world_size) or `%%ranks N`.")
            members = _chosen(self._host.ranks, only)
            self._cells += 1
            task = Task(
                began=time.monotonic(),
                cell=f"{self._workers.generation}.{self._cells}",
                filename=filename,
                settings=settings.read(),
                pull=tuple(pull),
                values=values,
                # all ranks or none: a rank that counts on is out of step with those that begin anew
                forget_counts=self._workers.can_reset_counts and len(members) == len(self._host.ranks),
                push=_pushed(push or {}),
                pushed=tuple(push or ()),
                **_work(work, args, kwargs, filename),
            )
            source = work if isinstance(work, str) else getattr(work, "__name__", "function")
            ending = self._run(Cell(self._workers, task, members, source=source, timeout=timeout, on_update=on_update))
            if ending.error is not None:
                raise ending.error
            return ending.run

    def _run(self, cell: Cell) -> Ending:
        """Run a cell, and leave ranks that can run the next one."""
        try:
            self._replace_dead()
            if not self.alive:
                how = "The next cell starts new ones, as far as the allocation still has the nodes."
                raise errors.StartError(f"a node of this world is gone, and its ranks with it. {how}")
            # an interrupt that comes while ranks are being replaced ends nothing
            with deferred_interrupt() as interrupted:
                ending = cell.run(interrupted)
                self._go_on(ending)
        except (errors.StartError, errors.AllocationError):
            raise
        except BaseException as error:
            if not self.alive:  # stopped from another thread, in the middle of the cell
                raise RuntimeError("the world was stopped while it ran this cell.") from error
            self.restart()
            self.notes.append(f"All {self.world_size} ranks had to be started anew: their names are gone.")
            if isinstance(error, KeyboardInterrupt):
                raise
            said = f"something unforeseen happened while the cell ran ({type(error).__name__}: {error})."
            gone = f"All {self.world_size} ranks were started anew: names defined there are gone."
            raise errors.EngineError(f"{said} {gone} Run the cells that define them again.") from error
        return ending

    def complete(self, text: str, timeout: float = 0.2) -> list[str]:
        """Names known on rank 0 that begin with `text`, for completion. Empty while the rank is busy."""
        if not self.alive or not self._lock.acquire(blocking=False):
            return []
        try:
            return self._workers.ask([0], "complete", text, wait=timeout).get(0) or []
        finally:
            self._lock.release()

    def _go_on(self, ending: Ending) -> None:
        """Keep what matters of a cell that is over, and repair what it has broken."""
        self._workers.next_cell("", [])  # what a thread prints from now on belongs to the next cell
        self._workers.keep(ending.states)
        self.notes += _notes(ending)
        if good := [s for rank, s in ending.states.items() if ending.run.ranks[rank].error is None]:
            self.names = good[0].names
            self.changed = tuple(dict.fromkeys(name for state in good for name in state.changed))
        if not ending.broken:
            return
        try:
            self._repair(ending.lost)
        except errors.StartError as error:
            self.stop()
            trouble = f"The ranks could not be set up for the next cell, which starts new ones: {error}"
            if isinstance(ending.error, (errors.RankError, errors.RanksInterrupted)):
                ending.error.add(trouble)
            else:
                self.notes.append(trouble)

    def _repair(self, lost: Sequence[int]) -> None:
        """Replace lost ranks and have all ranks join a new process group. The others keep their names."""
        if not all(self._host.reachable(r) for r in lost):
            self.stop()  # a node is gone: nobody can take the place of its ranks
        elif note := self._workers.repair(lost):
            self.names = ()
            self.notes.append(note)

    def _replace_dead(self) -> None:
        """Replace ranks that ended between two cells."""
        self._workers.pump(0.0)
        if lost := [rank for rank, received in self._workers.received.items() if received.lost]:
            replaced = f"{'was' if len(lost) == 1 else 'were'} replaced: names defined there are gone."
            self.notes.append(f"{name_ranks(lost)} ended between two cells and {replaced}")
            self._repair(lost)


def _chosen(ranks: Sequence[int], only: Sequence[int] | None) -> list[int]:
    if only is None:
        return list(ranks)
    wrong = [r for r in only if r not in ranks]
    if wrong or not only:
        who = name_ranks(wrong) if wrong else "an empty list of ranks"
        raise errors.OptionError(f"{who} cannot run the cell: this world has {name_ranks(list(ranks))}.")
    return sorted(set(only))


def _notes(ending: Ending) -> list[str]:
    """What the learner should know of a cell, although nothing failed."""
    ended = "ended the cell. The rank lives on, with its names."
    said = {rank: (*s.notes, s.exit and f"{s.exit} {ended}") for rank, s in ending.states.items()}
    notes = grouped((note, rank) for rank, notes in said.items() for note in notes)
    found = [f"On {name_ranks(ranks)}: {note}" for note, ranks in notes.items() if note]
    if ending.left:
        new = "all ranks have joined a new one, as a notebook's ranks live on. Groups made with new_group are closed."
        found.append(f"The cell destroyed the process group on {name_ranks(ending.left)}: {new}")
    return found


def run(
    work: str | Callable[..., Any], *, world_size: int, device: str = "auto", nodes: int | None = None, **how: Any
) -> Run:
    """Run a function (or source text) on `world_size` fresh ranks and return what each of them did.

        def mean_rank():
            x = torch.tensor([float(rank)])
            dist.all_reduce(x)
            return x / world_size

        rankcell.run(mean_rank, world_size=4).values  # four times tensor([1.5000])

    The function may be defined in a notebook cell, a script or a module; `how` is as in `Ranks.run`: args, kwargs,
    timeout, values. For ranks that live on, use `%%ranks` or `with Ranks(4) as ranks: ranks.run(...)`.
    """
    with Ranks(world_size, device=device, nodes=nodes) as ranks:
        return ranks.run(work, **how)


def _work(
    work: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, filename: str
) -> dict[str, Any]:
    """What a `Task` says of the work: its source, or a call."""
    if isinstance(work, str):
        ast.parse(work, filename)  # a syntax error is raised here, once, before any rank has run
        linecache.cache[filename] = (len(work), None, work.splitlines(True), filename)  # for the lines of a crash
        return {"source": work}
    if callable(work):
        return {"call": _pickle("the function", (work, tuple(args), dict(kwargs or {})))}
    raise TypeError(f"expected source text or a function, got {repr(work)[:60]}.")


class _Pickler(cloudpickle.Pickler):
    """Sends a function of the notebook with a cache as the function: its wrapper knows no more than its name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__":
            return with_cache, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)


def _dumps(value: Any) -> bytes:
    _Pickler(written := io.BytesIO()).dump(value)
    return written.getvalue()


def _pushed(names: Mapping[str, Any]) -> bytes:
    try:
        return _dumps(dict(names)) if names else b""
    except Exception:  # noqa: BLE001 - a __reduce__ may raise anything: which name is it?
        for name, value in names.items():
            _pickle(name, value)
        return _pickle("the pushed names", dict(names))


def _pickle(what: str, value: Any) -> bytes:
    try:
        return _dumps(value)
    except Exception as error:  # noqa: BLE001 - a __reduce__ may raise anything, and it is raised on
        part = channel.odd_part(what, value, _dumps)
        uses = part.removeprefix(f"{what}, which uses ")
        because = f", because it uses {uses}" if uses != part else f", because of {part}" if part != what else ""
        said = f"{what} cannot be sent to the ranks{because}: {type(error).__name__}: {error}."
        how = "Push plain data, tensors, functions or classes; make the rest on the ranks, whose values `-o run` has."
        raise errors.PushError(f"{said} {how} No rank has run.") from None
