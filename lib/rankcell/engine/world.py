"""The ranks of one world: start them, run cells on them, repair what a cell has broken, stop them.

A world is a set of processes that live on from cell to cell, on this machine (`local.py`) or on the nodes of
an allocation (`nodes.py`): what is written here is the same for both. It knows nothing of IPython and draws
nothing.
"""

import ast
import atexit
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from .. import errors
from ..results import Run, name_ranks
from . import devices, launch, system
from .cell import Cell, Ending, OnUpdate, World, deferred_interrupt
from .host import Host
from .local import Local, Rehearsing, room
from .mailbox import Mailbox
from .messages import Join, StartRank, Task
from .nodes import Nodes
from .parts import Part
from .verdict import conclude

START_TIMEOUT = 120.0  # seconds for ranks to join their first process group
REJOIN_TIMEOUT = 30.0  # seconds for ranks to join a new one, before all are started anew
MANY_COUNTS = 500  # kinds of operations (groups, pairs, tags) after which the books are begun anew
STOP_PATIENCE = 2.0  # seconds that `stop` waits for a cell in another thread


class Ranks:
    """A world of `world_size` ranks: real processes with an initialised process group and names that persist.

        with Ranks(4) as ranks:
            run = ranks.run("dist.get_rank()")
            run.values  # [0, 1, 2, 3]

    Args:
        world_size: how many ranks.
        device: "cpu", "cuda" (with fewer GPUs than ranks they share them), or "auto": cuda where every rank can
            have a GPU of its own, else cpu. `devices.choose` says which backend that means.
        nodes: spread the ranks over so many nodes of the Slurm allocation that this process runs in, in
            blocks of equal size; None: all on this machine.
        start: how the processes are started: "forkserver", or "spawn", as `torch.multiprocessing.spawn` does it.
        on: a cluster such as "128xh100x8": one rank, `as_rank`, rehearses a job of `world_size` ranks there,
            without the others and without computing.

    Raises:
        WorldSizeError: the machine cannot hold that many ranks. AllocationError: Slurm has not given so many
            nodes. StartError: the ranks could not be started.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "auto",
        nodes: int | None = None,
        start: str = "forkserver",
        on: str = "",
        as_rank: int = 0,
    ) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise errors.WorldSizeError(f"a world needs at least 1 rank, got {world_size!r}.")
        if start not in launch.METHODS:
            raise ValueError(
                f"start={start!r} is no way to start ranks: take one of {', '.join(launch.METHODS)}."
            )
        self.world_size = world_size
        self.nodes, self._method = nodes, start
        self.here: Sequence[int] = range(world_size)  # the ranks that are processes
        self._on = on
        self._host: Host
        self._mps = devices.MpsDaemon()
        self._choice: devices.Choice
        if on:
            host_of_one = Rehearsing(world_size, on, as_rank)
            self.here = (as_rank,)
            self._choice = devices.Choice(
                "cpu",
                "fake",
                f"Rank {as_rank} of {world_size} rehearses alone, as on {host_of_one.cluster}: its tensors have shapes "
                f"and no numbers, and its times are predicted.",
            )
            self._host = host_of_one
        elif nodes is None:
            self._choice = devices.choose(world_size, device, devices.look(mps=device == "cuda"))
            most, why = room()
            if world_size > most:
                raise errors.WorldSizeError(f"{world_size} ranks do not fit on this machine: {why}")
            self._host = self._local_host()
        else:
            host = Nodes(world_size, nodes)
            try:
                machine = devices.look(host.gpus * nodes, nodes)
                self._choice = devices.choose(world_size, device, machine)
            except ValueError:  # no such device, or too few of them: the nodes are not needed
                host.stop()
                raise
            host.begin(world_size, self.backend, self._choice.environment)
            self._host = host
        self.alive = True  # whether the world can run cells
        self.generation = 0
        self.cells = 0
        self.notes: list[str] = list(self._host.notes)
        self.names: tuple[str, ...] = ()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._mailbox = Mailbox(self._host, world_size)
        self._counts: dict[int, Mapping[Any, int]] = {}  # what each rank had called when it was last heard
        self._forget_counts = False
        self._with_threads: set[int] = set()  # ranks on which a thread of a cell is still there
        self._port = system.free_port()  # the same for all ranks, also for those that come later
        atexit.register(self.stop)
        try:
            while True:
                try:
                    self._start_all()
                    break
                except errors.StartError as error:
                    if nodes is not None or self._choice.instead is None:
                        raise
                    self._do_with_less(error)
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
        return self._choice.device

    @property
    def backend(self) -> str:
        """What the ranks talk over."""
        return self._choice.backend

    @property
    def device_note(self) -> str:
        """Device and backend, and why, to follow "4 ranks talk over"; and how to get a better one."""
        where = f", on the nodes {', '.join(self._host.names)}" if isinstance(self._host, Nodes) else ""
        return f"{self._choice.note}{where}. {self._choice.better}".removesuffix(". ")

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank (each on its node)."""
        return [pid for _, pid in sorted(self._host.pids.items())]

    def memory(self) -> list[int | None]:
        """Bytes of memory each rank stands for (PSS), by rank; None where nobody tells."""
        with self._lock:
            answers = self._mailbox.ask(self.here, "memory", wait=0.5)
            return [answers.get(rank) for rank in self.here]

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
            self._mps.stop()
        finally:
            if ours:
                self._lock.release()

    def restart(self) -> None:
        """End the ranks and start new ones: all names are gone."""
        with self._lock:
            self._host.end(self.here)
            self.generation += 1
            self.names = ()
            self._with_threads.clear()
            try:
                self._start_all()
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
        around: str = "",
        filename: str = "<cell>",
        on_update: OnUpdate | None = None,
    ) -> Run:
        """Run source text or a function on the ranks and return what each of them did.

        Args:
            work: source of a cell, or a function: it is called with `args` and `kwargs` on every rank. It may
                be defined anywhere, in a notebook cell too.
            only: the ranks to run on; all by default.
            push: names and values to define on the ranks first.
            pull: names to fetch from the ranks afterwards, into `run.pulled` (lists by rank).
            timeout: seconds after which the ranks are interrupted; None waits as long as somebody makes
                progress.
            values: record the contents of every communication's tensors (their first 64 numbers).
            around: "module:name" of a context manager inside which each rank runs the cell, given its recorder.
            on_update: called while the cell runs, with the run so far (its newest lines) and a line that says
                what the ranks do.

        Raises:
            RankError: a rank raised; Deadlock, RankMismatch, RankTimeout, RankLost: its kinds. `error.run`
                holds the run.
            SyntaxError: before any rank has run. PushError, PullError: a name could not travel. EngineError:
                something unforeseen happened here; the ranks were started anew.
        """
        with self._lock:
            if not self.alive:
                raise RuntimeError(
                    "this world was stopped. Start another one: Ranks(world_size) or `%%ranks N`."
                )
            members = self._chosen(only)
            name = f"{self.generation}.{self.cells + 1}"
            # all ranks or none: a rank that counts on is out of step with those that begin anew
            forget = self._forget_counts and len(members) == len(self.here)
            task = _task(
                work,
                args,
                kwargs,
                push,
                pull,
                values,
                filename,
                cell=name,
                around=around,
                forget_counts=forget,
            )
            self.cells += 1
            source = work if isinstance(work, str) else getattr(work, "__name__", "function")
            trouble = ""
            try:
                self._replace_dead()
                if not self.alive:
                    raise errors.StartError(
                        "a node of this world is gone, and its ranks with it. " + _NEXT_CELL
                    )
                cell = Cell(
                    self._mailbox,
                    World(self.world_size, self.device, self.backend),
                    task,
                    members,
                    source=source,
                    timeout=timeout,
                    counts=self._counts,
                    with_threads=self._with_threads,
                    on_update=on_update,
                )
                # an interrupt that comes while ranks are being replaced ends nothing
                with deferred_interrupt() as interrupted:
                    ending = cell.run(interrupted)
                    try:
                        self._take_in(ending, members)
                    except errors.StartError as error:
                        self.stop()
                        trouble = (
                            f"The ranks could not be set up for the next cell, which starts new ones: {error}"
                        )
            except (errors.StartError, errors.AllocationError):
                raise
            except BaseException as error:
                if not self.alive:  # stopped from another thread, in the middle of the cell
                    raise RuntimeError("the world was stopped while it ran this cell.") from error
                self._start_over()
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise errors.EngineError(
                    f"something unforeseen happened while the cell ran ({type(error).__name__}: {error}). All "
                    f"{self.world_size} ranks were started anew: names defined there are gone. Run the cells that "
                    f"define them again."
                ) from error
            run = conclude(ending, pull, trouble=trouble, alive=self.alive)
            if trouble:
                self.notes.append(trouble)
            return run

    def complete(self, text: str, timeout: float = 0.2) -> list[str]:
        """Names known on rank 0 that begin with `text`, for completion. Empty while the rank is busy."""
        if not self.alive or not self._lock.acquire(blocking=False):
            return []
        try:
            return self._mailbox.ask([0], "complete", text, wait=timeout).get(0) or []
        finally:
            self._lock.release()

    def _local_host(self) -> Local:
        """The ranks' place on this machine, with a CUDA MPS of their own where the choice wants one."""
        if self._choice.start_mps and (problem := self._mps.start()):
            assert self._choice.instead is not None
            self._choice = self._choice.instead
            self._choice = replace(self._choice, better=f"{problem}. {self._choice.better}")
        # what the learner has set himself stays
        environment = {k: v for k, v in self._choice.environment.items() if k not in os.environ}
        return Local(self.world_size, self.backend, environment | self._mps.environment, self._method)

    def _do_with_less(self, error: errors.StartError) -> None:
        """Ranks that share a GPU could not be started with the best choice: take the next one, and say so."""
        better = self._choice
        assert better.instead is not None
        self._host.stop()
        self._mps.stop()
        self._choice = better.instead
        why = (str(error).splitlines() or [""])[-1][:200]
        self.notes.append(f"The ranks did not start over {better.note}: {why}")
        self._host = self._local_host()
        self._mailbox = Mailbox(self._host, self.world_size)

    def _start_all(self) -> None:
        everybody = self.here
        self._start(everybody)
        self._await_ready(everybody, START_TIMEOUT)

    def _start(self, ranks: Sequence[int]) -> None:
        try:
            folder = os.getcwd()  # noqa: PTH109
        except FileNotFoundError:  # it was removed
            folder = ""
        orders = []
        for rank in ranks:
            self._mailbox.joined[rank] = -1
            self._mailbox.problems.pop(rank, None)
            local_rank, per_node, node = self._host.place_of(rank)
            orders.append(
                StartRank(
                    rank=rank,
                    world_size=self.world_size,
                    device=self.device,
                    backend=self.backend,
                    store=self._host.address_for(rank),
                    port=self._port,
                    generation=self.generation,
                    folder=folder,
                    path=tuple(map(str, sys.path)),
                    local_rank=local_rank,
                    local_world_size=per_node or self.world_size,
                    node=node,
                    on=self._on,
                    memory_fraction=self._choice.memory_fraction,
                )
            )
        self._mailbox.parts = {r: Part(runs=False) for r in range(self.world_size)}
        self._host.start(orders)

    def _await_ready(self, ranks: Sequence[int], timeout: float) -> None:
        """Wait until `ranks` have joined the process group of this generation."""
        mailbox = self._mailbox
        deadline = time.monotonic() + timeout
        while waiting := [r for r in ranks if mailbox.joined[r] < self.generation]:
            mailbox.pump(min(0.5, max(deadline - time.monotonic(), 0.0)))
            gone = [r for r in waiting if mailbox.is_lost(r)]
            failed = [r for r in waiting if r in mailbox.problems]
            if not gone and not failed and time.monotonic() < deadline:
                continue
            texts = [part.stderr.whole() for r in gone if (part := mailbox.parts[r])]
            texts += [mailbox.problems[r] for r in failed]
            if gone:
                lost = mailbox.parts[gone[0]].lost
                what = f"{name_ranks(gone)} {lost.message if lost else 'ended'}"
            elif failed:
                what = f"{name_ranks(failed)} could not join the process group"
            else:
                what = f"{name_ranks(waiting)} did not join the process group within {timeout:.0f} s"
            said = "\n".join(dict.fromkeys(t.strip()[-2000:] for t in texts if t.strip()))
            raise errors.StartError(f"{self.world_size} ranks could not be started: {what}.\n{said}".rstrip())
        if isinstance(self._host, Local) and self.generation:
            self._host.forget_store(self.generation - 1)
        self._counts = {}
        self._forget_counts = False

    def _chosen(self, only: Sequence[int] | None) -> list[int]:
        if only is None:
            return list(self.here)
        wrong = [r for r in only if r not in self.here]
        if wrong or not only:
            raise errors.OptionError(
                f"{name_ranks(wrong) if wrong else 'an empty list of ranks'} cannot run the cell: this world has "
                f"{name_ranks(list(self.here))}."
            )
        return sorted(set(only))

    def _take_in(self, ending: Ending, members: Sequence[int]) -> None:
        """Keep what matters of a cell that is over, and repair what it has broken."""
        outcomes = {r: p.outcome for r, p in self._mailbox.parts.items() if p.outcome is not None}
        # what a thread prints from now on belongs to the next cell; all else of this one is in `ending.run`
        parts, self._mailbox.parts = self._mailbox.parts, {}
        for rank, part in parts.items():
            idle = self._mailbox.parts[rank] = Part(runs=False, lost=part.lost)
            idle.inherit(part)
        notes: dict[str, list[int]] = {}
        for rank, outcome in outcomes.items():
            self._counts[rank] = outcome.counts
            (self._with_threads.add if outcome.threads else self._with_threads.discard)(rank)
            for note in outcome.notes:
                notes.setdefault(note, []).append(rank)
        self.notes += [f"On {name_ranks(ranks)}: {note}" for note, ranks in notes.items()]
        if good := [o for o in outcomes.values() if o.error is None]:
            self.names = good[0].names
        if ending.left:
            self.notes.append(
                f"The cell destroyed the process group on {name_ranks(ending.left)}: all ranks have joined a new one, "
                f"as a notebook's ranks live on. Groups made with new_group are closed."
            )
        # the books are begun anew only if that changes nothing: everything matched, and nothing under way
        self._forget_counts = (
            len(outcomes) == len(self.here)
            and any(len(o.counts) > MANY_COUNTS for o in outcomes.values())
            and not any(o.open or o.threads for o in outcomes.values())
            and _balanced({r: o.counts for r, o in outcomes.items()})
        )
        if ending.broken:
            self._repair(ending.lost)

    def _repair(self, lost: Sequence[int]) -> None:
        """Replace lost ranks and have all ranks join a new process group. The others keep their names."""
        if not all(self._host.reachable(r) for r in lost):
            self.stop()  # a node is gone: nobody can take the place of its ranks
            return
        self.generation += 1
        try:
            if lost:
                self._host.end(lost)
                idle = self._mailbox.parts
                self._start(lost)
                self._mailbox.parts = {r: Part(runs=False) if r in lost else p for r, p in idle.items()}
            others = [r for r in self.here if r not in lost]
            self._host.address_for(
                self.here[0]
            )  # the ranks find each other there: it may have been cleaned away
            self._host.send(others, pickle.dumps(Join(self.generation)))
            self._await_ready(self.here, REJOIN_TIMEOUT)
        except errors.StartError:  # a rank died meanwhile: start over, and say so with the next cell
            self._start_over()

    def _start_over(self) -> None:
        """Give up all ranks, and start new ones."""
        self.restart()
        self.notes.append(f"All {self.world_size} ranks had to be started anew: their names are gone.")

    def _replace_dead(self) -> None:
        """Replace ranks that ended between two cells."""
        mailbox = self._mailbox
        mailbox.pump(0.0)
        lost = [r for r, p in mailbox.parts.items() if p.lost]
        if lost:
            self.notes.append(
                f"{name_ranks(lost)} ended between two cells and {'was' if len(lost) == 1 else 'were'} replaced: "
                f"names defined there are gone."
            )
            self._repair(lost)


_NEXT_CELL = "The next cell starts new ones, as far as the allocation still has the nodes."


def run(
    work: str | Callable[..., Any],
    *,
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    device: str = "auto",
    nodes: int | None = None,
    values: bool = False,
) -> Run:
    """Run a function (or source text) on `world_size` fresh ranks and return what each of them did.

        def mean_rank():
            x = torch.tensor([float(rank)])
            dist.all_reduce(x)
            return x / world_size

        rankcell.run(mean_rank, world_size=4).values  # four times tensor([1.5000])

    The function may be defined in a notebook cell, a script or a module. For ranks that live on, use
    `%%ranks` or `with Ranks(4) as ranks: ranks.run(...)`.
    """
    with Ranks(world_size, device=device, nodes=nodes) as ranks:
        return ranks.run(work, args=args, kwargs=kwargs, timeout=timeout, values=values)


def rehearse(
    work: str | Callable[..., Any],
    *,
    world_size: int,
    as_rank: int = 0,
    on: str = "h100",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Run:
    """Run a function (or source text) as rank `as_rank` of `world_size`, without the others and without computing.

        def step():
            model = fully_shard(make_model())
            model(batch).sum().backward()

        run = rankcell.rehearse(step, world_size=1024, as_rank=7, on="128xh100x8")
        run.ranks[7].peak, run.events

    Tensors are fake: they have shapes, dtypes and storages, and no numbers. What comes back is a `Run` as of real
    ranks, of which one ran: its communication, its memory over time, and times in seconds of a clock that goes by the
    planner's numbers for the GPUs and links of `on` ("128xh100x8": 128 nodes of 8 H100).

    Raises:
        ValueError: there is no such cluster, or it has not `world_size` GPUs. RankError: the program failed, or asked
            for a number (`.item()`), which a rehearsal does not have.
    """
    with Ranks(world_size, on=on, as_rank=as_rank) as ranks:
        return ranks.run(work, args=args, kwargs=kwargs, timeout=timeout)


def warm_up(on_wait: Callable[[float], None] | None = None) -> None:
    """Have torch imported for the ranks while the notebook goes on; or wait for it, and have `on_wait` hear each
    second how many seconds that has taken so far.
    """
    if on_wait is None:
        launch.warm_up()
    else:
        launch.wait(on_wait)


def _task(
    work: str | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    push: Mapping[str, Any] | None,
    pull: Sequence[str],
    values: bool,
    filename: str,
    *,
    cell: str,
    around: str,
    forget_counts: bool,
) -> Task:
    source, call = "", b""
    if isinstance(work, str):
        source = work
        ast.parse(source, filename)  # a syntax error is raised here, once, before any rank has run
    elif callable(work):
        call = _pickle("the function", (work, tuple(args), dict(kwargs or {})))
    else:
        raise TypeError(f"expected source text or a function, got {errors.plain_value(work)}.")
    pushed = b""
    if push:
        try:
            pushed = cloudpickle.dumps(dict(push))
        except Exception:  # noqa: BLE001 - a __reduce__ may raise anything: which name is it?
            for name, value in push.items():
                _pickle(name, value)
            pushed = _pickle("the pushed names", dict(push))
    return Task(
        began=time.monotonic(),
        cell=cell,
        source=source,
        filename=filename,
        call=call,
        push=pushed,
        pull=tuple(pull),
        values=values,
        around=around,
        forget_counts=forget_counts,
    )


def _pickle(what: str, value: Any) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - a __reduce__ may raise anything, and it is raised on
        raise errors.PushError(
            f"{what} cannot be sent to the ranks: {type(error).__name__}: {error}. Push plain data, tensors, "
            f"functions or classes, and make anything else on the ranks. No rank has run."
        ) from None


def _balanced(counts: Mapping[int, Mapping[Any, int]]) -> bool:
    """Whether every operation was called equally often on all ranks that take part in it."""
    for mine in counts.values():
        for key, count in mine.items():
            if len(key) == 2:
                others = [counts[r].get(key, 0) for r in key[1] if r in counts]
            else:
                group, kind, source, destination, tag, side = key
                if source is None or destination is None:
                    continue
                peer = source if side == "recv" else destination
                other = (group, kind, source, destination, tag, "send" if side == "recv" else "recv")
                others = [counts[peer].get(other, 0)] if peer in counts else []
            if any(other != count for other in others):
                return False
    return True
