"""The ranks of one world size: send a cell, collect what they say, free, replace and stop them.

A world is a set of processes that live on from cell to cell, on this machine (`local.py`) or on the nodes of
an allocation (`nodes.py`): what is written here is the same for both. It knows nothing of IPython and draws
nothing.
"""

import ast
import atexit
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from . import diagnose, errors
from .local import Local, room, warm_up
from .nodes import Nodes
from .results import Display, NotSent, RankFailure, RankResult, Run, name_ranks

FIRST_POLL, POLL = (
    0.1,
    0.2,
)  # seconds until the ranks are first asked what they do, and between two such questions
CONFIRM = 0.04  # seconds between the two looks that must agree before a deadlock is reported
GRACE = 1.0  # seconds that a freed or interrupted rank has to come back before it is replaced
START_TIMEOUT = 120.0  # seconds for ranks to start: the first ones wait for torch to be imported


@dataclass
class _Part:
    """What has come from one rank in the current cell."""

    runs: bool = True
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    displays: list[Display] = field(default_factory=list)
    stdout_before: int = 0  # bytes of stdout that the rank had written before this cell
    outcome: Any = None
    lost: RankFailure | None = None
    freed: bool = False  # we ended its cell: what it raised then is our doing

    @property
    def over(self) -> bool:
        return not self.runs or self.outcome is not None or self.lost is not None


class Ranks:
    """A world of `world_size` ranks: real processes with an initialised process group and names that persist.

        with Ranks(4) as ranks:
            run = ranks.run("dist.get_rank()")
            run.values  # [0, 1, 2, 3]

    Args:
        world_size: how many ranks.
        device: "cpu", "cuda", or "auto": cuda (and nccl) where every rank can have a GPU of its own, else cpu
        (gloo).
        nodes: spread the ranks over so many nodes of the Slurm allocation that this process runs in, in
        blocks of equal size; None: all on this machine.

    Raises:
        WorldSizeError: the machine cannot hold that many ranks. AllocationError: Slurm has not given so many
        nodes.
    """

    def __init__(self, world_size: int, *, device: str = "auto", nodes: int | None = None) -> None:
        self._host: Local | Nodes
        if not isinstance(world_size, int) or world_size < 1:
            raise errors.WorldSizeError(f"a world needs at least 1 rank, got {world_size!r}.")
        self.world_size = world_size
        if nodes is None:
            self.device, self.backend, self.device_note = choose_device(world_size, device)
            most, why = room()
            if world_size > most:
                raise errors.WorldSizeError(f"{world_size} ranks do not fit on this machine: {why}")
            self._host = Local(world_size, self.device)
            self._start_store("127.0.0.1")
        else:
            self._host = Nodes(world_size, nodes)
            try:
                self.device, self.backend, self.device_note = choose_device(
                    world_size, device, gpus=self._host.gpus * nodes
                )
            except ValueError:  # no such device, or too few of them: the nodes are not needed
                self._host.stop()
                raise
            self.device_note += f", on the nodes {', '.join(self._host.names)}"
            self._start_store("")
            self._host.begin(world_size, self.device)
        self.nodes = nodes
        self.alive = True  # whether the world can run cells
        self.generation = 0
        self.cells = 0
        self.started_at = time.monotonic()
        self.notes: list[str] = []
        self.names: tuple[str, ...] = ()
        self._pid = os.getpid()
        self._began = time.monotonic()  # of the cell
        self._lock = threading.RLock()
        self._asked = itertools.count()
        self._parts: dict[int, _Part] = {}
        self._answers: dict[int, dict[int, Any]] = {}  # number of a question -> rank -> answer
        self._joined = dict.fromkeys(range(world_size), -1)  # the last process group that each rank joined
        self._cpu: dict[int, float | None] = {}
        atexit.register(self.stop)
        try:
            self._start_all()
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
    def pids(self) -> list[int]:
        """Process ids, by rank (each on its node)."""
        return [pid for _, pid in sorted(self._host.pids.items())]

    def memory(self) -> list[int | None]:
        """Bytes of memory each rank stands for (PSS), by rank; None where nobody tells."""
        with self._lock:
            answers = self._ask(range(self.world_size), "memory", wait=0.5)
            return [answers.get(rank) for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the ranks. Safe to call twice; a world that was stopped cannot be used again."""
        if os.getpid() != self._pid:  # a fork of the notebook's process must not end its ranks
            return
        with self._lock:
            atexit.unregister(self.stop)
            self.alive = False
            self._host.stop()
            self._store = None

    def restart(self) -> None:
        """End the ranks and start new ones: all names are gone."""
        with self._lock:
            self._host.end(range(self.world_size))
            self.generation += 1
            self.names = ()
            self._start_all()

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
        step: Sequence[str] | None = None,
        filename: str = "<cell>",
        on_update: Callable[[Run, str], None] | None = None,
    ) -> Run:
        """Run source text or a function on the ranks and return what each of them did.

        Args:
            work: source of a cell, or a function: it is called with `args` and `kwargs` on every rank. It may
            be
                defined anywhere, in a notebook cell too.
            only: the ranks to run on; all by default.
            push: names and values to define on the ranks first.
            pull: names to fetch from the ranks afterwards, into `run.pulled` (lists by rank).
            timeout: seconds after which the ranks are interrupted; None waits as long as somebody makes
            progress. values: record the contents of every communication's tensors (their first 64 numbers).
            on_update: called while the cell runs, with the run so far and a line that says what the ranks do.

        Raises:
            RankError: a rank raised; Deadlock, RankTimeout, RankLost: its kinds. `error.run` holds the run.
            SyntaxError: before any rank has run. PushError, PullError: a name could not travel.
        """
        with self._lock:
            if not self.alive:
                raise RuntimeError(
                    "this world was stopped. Start another one: Ranks(world_size) or `%%ranks N`."
                )
            members = self._chosen(only)
            task = self._task(work, args, kwargs, push, pull, values, step, filename)
            self._replace_dead()
            return self._run(task, members, pull, timeout, work, on_update)

    def complete(self, text: str, timeout: float = 0.2) -> list[str]:
        """Names known on rank 0 that begin with `text`, for completion. Empty while the rank is busy."""
        if not self.alive or not self._lock.acquire(blocking=False):
            return []
        try:
            answers = self._ask([0], "complete", text, wait=timeout)
            return answers.get(0, [])
        finally:
            self._lock.release()

    def _start_store(self, address: str) -> None:
        """A key-value store, held by this process, at which the ranks find each other."""
        import torch.distributed as dist

        listener = socket.create_server((address, 0), backlog=1024)
        self._port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", self._port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _start_all(self) -> None:
        everybody = range(self.world_size)
        self._start(everybody)
        self._await_ready(everybody, START_TIMEOUT)

    def _start(self, ranks: Sequence[int]) -> None:
        from . import worker

        if self.nodes is None:
            warm_up()
        births = []
        for rank in ranks:
            self._joined[rank] = -1
            place, address = {"local_rank": rank, "local_world_size": self.world_size}, "127.0.0.1"
            if isinstance(self._host, Nodes):
                place, address = self._host.place_of(rank), self._host.address_for(rank)
            births.append(
                worker.Birth(
                    rank=rank,
                    world_size=self.world_size,
                    device=self.device,
                    backend=self.backend,
                    store=(address, self._port),
                    generation=self.generation,
                    folder=os.getcwd(),  # noqa: PTH109
                    path=tuple(sys.path),
                    **place,
                )
            )
        self._host.start(births)

    def _await_ready(self, ranks: Sequence[int], timeout: float) -> None:
        """Wait until `ranks` have joined the process group of this generation."""
        deadline = time.monotonic() + timeout
        parts, self._parts = self._parts, {r: _Part() for r in range(self.world_size)}
        try:
            while waiting := [r for r in ranks if self._joined[r] < self.generation]:
                self._pump(min(0.5, max(deadline - time.monotonic(), 0.0)))
                gone = [r for r in waiting if self._parts[r].lost]
                if gone or time.monotonic() > deadline:
                    text = (
                        b"".join(bytes(self._parts[r].stderr) for r in gone).decode(errors="replace").strip()
                    )
                    what = (
                        f"{name_ranks(gone)} ended while starting"
                        if gone
                        else f"no answer within {timeout:.0f} s"
                    )
                    raise RuntimeError(
                        f"{self.world_size} ranks could not be started: {what}.\n{text[-2000:]}".rstrip()
                    )
        finally:
            self._parts = parts

    def _chosen(self, only: Sequence[int] | None) -> list[int]:
        if only is None:
            return list(range(self.world_size))
        wrong = [r for r in only if not 0 <= r < self.world_size]
        if wrong or not only:
            raise ValueError(
                f"{name_ranks(wrong) if wrong else 'an empty list of ranks'} cannot run the cell: this "
                f"world has "
                f"ranks 0-{self.world_size - 1}."
            )
        return sorted(set(only))

    def _task(
        self,
        work: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        push: Mapping[str, Any] | None,
        pull: Sequence[str],
        values: bool,
        step: Sequence[str] | None,
        filename: str,
    ) -> Any:
        from . import worker

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
            for name, value in push.items():
                _pickle(name, value)
            pushed = _pickle("the pushed names", dict(push))
        self.cells += 1
        return worker.Task(
            began=time.monotonic(),
            cell=f"{self.generation}.{self.cells}",
            source=source,
            filename=filename,
            call=call,
            push=pushed,
            pull=tuple(pull),
            values=values,
            step=None if step is None else tuple(step),
        )

    def _run(
        self,
        task: Any,
        ranks: Sequence[int],
        pull: Sequence[str],
        timeout: float | None,
        work: str | Callable[..., Any],
        on_update: Callable[[Run, str], None] | None,
    ) -> Run:
        source = work if isinstance(work, str) else getattr(work, "__name__", "function")
        began = self._began = time.monotonic()
        self._parts = {r: _Part(runs=r in ranks) for r in range(self.world_size)}
        self._cpu = {}
        cause: BaseException | None = None  # why we ended the cell, if the ranks did not
        freed = False
        with _deferred_interrupt() as interrupted:
            self._send(task, ranks)
            next_poll, seen = began + FIRST_POLL, None
            states: list[diagnose.State] = []
            while not all(p.over for p in self._parts.values()):
                now = time.monotonic()
                end = began + timeout if timeout is not None else now + 3600
                self._pump(max(min(next_poll, end) - now, 0.0))
                now = time.monotonic()
                if all(p.over for p in self._parts.values()):
                    break
                if interrupted():
                    states = self._states()
                    cause = errors.RanksInterrupted(
                        _where_they_were(states, self.world_size, "interrupted"), None
                    )  # type: ignore[arg-type]
                elif timeout is not None and now >= end:
                    states = self._states()
                    # type: ignore[arg-type]
                    cause = errors.RankTimeout(_timeout_text(states, self.world_size, timeout), None)
                elif now >= next_poll:
                    states = self._states()
                    diagnosis = diagnose.diagnose(states)
                    if diagnosis is not None and seen == _fingerprint(states):
                        cause = errors.Deadlock(str(diagnosis), None)  # type: ignore[arg-type]
                    seen = _fingerprint(states) if diagnosis is not None else None
                    next_poll = time.monotonic() + (CONFIRM if diagnosis is not None else POLL)
                    if on_update is not None and cause is None:
                        on_update(self._so_far(source, began), diagnose.summary(states))
                if cause is not None:
                    self._free()
                    freed = True
                    break
            lost = [r for r, p in self._parts.items() if p.lost]
            unmatched = self._unmatched(ranks) if not (freed or lost) else None
            run = replace(
                self._result(source, began, pull), standstill=diagnose.standings(states) if freed else ()
            )
            mismatched = any(r.error and r.error.mismatch for r in run.ran)
            broken = any(p.outcome is not None and p.outcome.broken for p in self._parts.values())
            if freed or lost or unmatched or mismatched or broken:
                self._repair(lost)
        return self._conclude(run, cause, unmatched, pull)

    def _conclude(
        self, run: Run, cause: BaseException | None, unmatched: str | None, pull: Sequence[str]
    ) -> Run:
        """Return `run`, or raise what went wrong first."""
        lost = [r for r in run.ran if r.state == "lost" and not (r.error and r.error.caused_by_abort)]
        raised = [r for r in run.failed if r.error and not r.error.caused_by_abort and r.state == "error"]
        if isinstance(cause, (errors.RanksInterrupted, errors.RankTimeout)):
            replaced = [r.rank for r in run.ran if r.state == "lost"]
            if replaced:
                were = "was" if len(replaced) == 1 else "were"
                gone = (
                    f"{name_ranks(replaced)} did not react and {were} replaced: names defined there are gone."
                )
                cause = type(cause)(f"{cause}\n{gone}", run)
            cause.run = run
            raise cause
        if lost:
            raise errors.lost_error(run, lost, replaced=self.alive)
        if any(r.error.mismatch for r in raised if r.error):
            raise errors.mismatch_error(run)
        if raised:
            raise errors.rank_error(run)
        if isinstance(cause, errors.Deadlock):
            cause.run = run
            raise cause
        if unmatched:
            raise errors.Deadlock(unmatched, run)
        if run.failed:
            raise errors.rank_error(run)
        problems = [
            f"{name} on {name_ranks(ranks)}: {why}"
            for name in pull
            for why, ranks in _by_reason(run.pulled[name])
        ]
        if problems:
            raise errors.PullError(
                "the cell ran, but not every name could be pulled. " + "; ".join(problems) + ".", run
            )
        return run

    def _send(self, task: Any, ranks: Sequence[int]) -> None:
        """Give the task to `ranks`, its beginning as the clock of each one's machine shows it."""
        by_offset: dict[float, list[int]] = {}
        for rank in ranks:
            by_offset.setdefault(self._host.clock_offset(rank), []).append(rank)
        for offset, mine in by_offset.items():
            message = ("run", replace(task, began=task.began + offset) if offset else task)
            self._host.send(mine, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _pump(self, timeout: float) -> None:
        """Take in whatever has arrived from the ranks, waiting at most `timeout` seconds for something."""
        for kind, rank, what in self._host.pump(timeout):
            part = self._parts.get(rank)
            if kind == "control":
                number, answer = pickle.loads(what)
                if number in self._answers:
                    self._answers[number][rank] = answer
            elif kind == "gone":
                self._mark_lost(rank, what)
            elif kind == "work":
                self._take(rank, part, *pickle.loads(what))
            elif part is not None:
                (part.stdout if kind == "out" else part.stderr).extend(what)

    def _take(self, rank: int, part: _Part | None, kind: str, what: Any, *more: Any) -> None:
        """Take in one message of a rank's main thread."""
        if kind == "ready":
            self._joined[rank] = what
        elif kind == "failed":
            self._host.kill([rank])
            self._mark_lost(rank, "could not join the process group")
        elif part is not None and kind == "display":
            _add_display(part.displays, what, update=more[0])
        elif part is not None and kind == "done":
            part.outcome = what

    def _mark_lost(self, rank: int, how: str) -> None:
        part = self._parts.get(rank)
        if part is not None and part.lost is None:
            part.lost = RankFailure("RankLost", how, at=time.monotonic() - self._began)

    def _ask(
        self, ranks: Sequence[int], request: str, argument: Any = None, *, wait: float
    ) -> dict[int, Any]:
        """Ask the control threads of `ranks`; the answers that came within `wait` seconds."""
        number = next(self._asked)
        answers = self._answers[number] = {}
        self._host.ask(ranks, pickle.dumps((number, request, argument)))
        deadline = time.monotonic() + wait
        while any(r not in answers and not self._is_lost(r) for r in ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._pump(left)
        return self._answers.pop(number)

    def _is_lost(self, rank: int) -> bool:
        part = self._parts.get(rank)
        return part is not None and part.lost is not None

    def _states(self) -> list[diagnose.State]:
        """What every rank is doing now."""
        running = [r for r, p in self._parts.items() if not p.over]
        answers = self._ask(running, "status", wait=0.3)
        states = []
        for rank, part in sorted(self._parts.items()):
            if not part.runs:
                states.append(diagnose.State(rank, "absent"))
            elif part.lost:
                states.append(diagnose.State(rank, "lost", why=part.lost.message))
            elif part.outcome is not None:
                failure = part.outcome.error
                phase, why = ("error", str(failure)) if failure else ("finished", "")
                states.append(
                    diagnose.State(rank, phase, counts=part.outcome.counts, calls=part.outcome.calls, why=why)
                )
            elif rank in answers:
                states.append(diagnose.from_status(answers[rank], self._cpu.get(rank)))
                self._cpu[rank] = answers[rank]["cpu"]
            else:  # it holds the interpreter in a long C call: busy, as far as anybody can tell
                states.append(diagnose.State(rank, "running"))
        return states

    def _free(self) -> None:
        """Get every rank out of the cell: close its connections, interrupt it, in the end kill it."""
        running = [r for r, p in self._parts.items() if not p.over]
        for rank in running:
            self._parts[rank].freed = True
        deadline = time.monotonic() + GRACE
        self._ask(running, "interrupt", wait=GRACE / 2)
        again = time.monotonic() + GRACE / 4
        while not all(p.over for p in self._parts.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._pump(min(left, 0.05))
            if time.monotonic() > again:  # a first interrupt may have been swallowed by an `except`
                again = time.monotonic() + GRACE / 4
                self._ask([r for r, p in self._parts.items() if not p.over], "interrupt", wait=0.05)
        stubborn = [r for r, p in self._parts.items() if not p.over]
        self._host.kill(stubborn)
        self._pump(0.0)  # what they wrote until then
        for rank in stubborn:
            self._parts[rank].lost = RankFailure(
                "RankLost", "did not react and was ended", caused_by_abort=True
            )

    def _repair(self, lost: Sequence[int]) -> None:
        """Replace lost ranks and have all ranks join a new process group. The others keep their names."""
        if not all(self._host.reachable(r) for r in lost):
            self.stop()  # a node is gone: nobody can take the place of its ranks
            return
        self.generation += 1
        self._host.end(lost)
        self._start(lost)
        others = [r for r in range(self.world_size) if r not in lost]
        self._host.send(others, pickle.dumps(("join", self.generation)))
        try:
            self._await_ready(range(self.world_size), 20.0)
        except RuntimeError:  # a rank died meanwhile: start over, and say so with the next cell
            self.notes.append(f"All {self.world_size} ranks had to be started anew: their names are gone.")
            self.restart()

    def _replace_dead(self) -> None:
        """Replace ranks that ended between two cells."""
        self._parts = {r: _Part(runs=False) for r in range(self.world_size)}
        self._pump(0.0)
        lost = [r for r, p in self._parts.items() if p.lost]
        if lost:
            self.notes.append(
                f"{name_ranks(lost)} ended between two cells and {'was' if len(lost) == 1 else 'were'} "
                f"replaced: "
                f"names defined there are gone."
            )
            self._repair(lost)

    def _unmatched(self, ranks: Sequence[int]) -> str | None:
        """A sentence if all ranks came to the end, but some called more collectives than others."""
        if len(ranks) < self.world_size:
            return None
        return diagnose.unmatched({r: self._parts[r].outcome.counts for r in ranks})

    def _result(self, source: str, began: float, pull: Sequence[str]) -> Run:
        results = self._results()
        ran = [self._parts[r.rank] for r in results if r.state == "ok"]
        pulled = {}
        for name in pull:
            pulled[name] = [_unpack(p.outcome.pulled[name]) for p in ran]
        if ran and ran[0].outcome is not None:
            self.names = ran[0].outcome.names
        return Run(source, results, self.device, self.backend, time.monotonic() - began, pulled)

    def _so_far(self, source: str, began: float) -> Run:
        return Run(source, self._results(), self.device, self.backend, time.monotonic() - began)

    def _results(self) -> tuple[RankResult, ...]:
        parts = sorted(self._parts.items())
        return tuple(self._rank_result(rank, part, self._host.node_of(rank)) for rank, part in parts)

    @staticmethod
    def _rank_result(rank: int, part: _Part, node: str) -> RankResult:
        outcome = part.outcome
        common = {
            "rank": rank,
            "node": node,
            "stdout": part.stdout.decode("utf-8", "replace"),
            "stderr": part.stderr.decode("utf-8", "replace"),
            "displays": tuple(part.displays),
        }
        if not part.runs:
            return RankResult(**common, state="skipped")
        if part.lost is not None:
            return RankResult(**common, state="lost", error=part.lost)
        if outcome is None:
            return RankResult(**common, state="running")
        error = outcome.error
        if error and part.freed and not error.mismatch:
            message = "freed from an operation that could not finish, or interrupted"
            error = replace(error, type="RankFreed", message=message, caused_by_abort=True)
        return RankResult(
            **common,
            state="error" if error else "ok",
            value=_unpack(outcome.value),
            data=outcome.data,
            error=error,
            seconds=outcome.seconds,
            events=tuple(outcome.events),
            connections=outcome.wire,
            steps=outcome.steps,
            dropped=outcome.dropped,
            memory=outcome.memory,
        )


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


def choose_device(world_size: int, device: str, *, gpus: int | None = None) -> tuple[str, str, str]:
    """Device, backend and a sentence that says why, for a world of `world_size` ranks on a machine (or nodes)
    with so many `gpus`; those of this machine by default.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r} does not exist. Choose cpu, cuda or auto.")
    if device == "cpu":
        return "cpu", "gloo", "gloo on the CPU, as asked"
    import torch

    if gpus is None:
        gpus = torch.cuda.device_count()  # counts without starting CUDA in this process
    if gpus >= world_size and torch.distributed.is_nccl_available():
        return "cuda", "nccl", f"nccl, one of {gpus} GPUs for each rank"
    if device == "cuda":
        raise errors.WorldSizeError(
            f"{world_size} ranks on cuda need a GPU each, and this machine has {gpus}. Use `--device cpu`, "
            f"or a world "
            f"of {gpus} ranks."
            if gpus
            else "this machine has no GPU that torch can use. Use `--device cpu`."
        )
    why = f"{gpus} GPUs are too few for {world_size} ranks" if gpus else "no GPU here"
    return "cpu", "gloo", f"gloo on the CPU: {why}"


def _pickle(what: str, value: Any) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - a __reduce__ may raise anything, and it is raised on
        raise errors.PushError(
            f"{what} cannot be sent to the ranks: {type(error).__name__}: {error}. Push plain data, tensors, "
            f"functions or classes, and make anything else on the ranks. No rank has run."
        ) from None


def _unpack(packed: Any) -> Any:
    if not isinstance(packed, bytes):
        return NotSent("", packed) if isinstance(packed, str) else packed
    try:
        return pickle.loads(packed)
    except Exception as error:  # noqa: BLE001 - kept as the reason why there is no value
        return NotSent("", f"cannot be read here: {type(error).__name__}: {error}")


def _by_reason(values: Sequence[Any]) -> list[tuple[str, list[int]]]:
    reasons: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if isinstance(value, NotSent):
            reasons.setdefault("no such name" if value.reason == "missing" else value.reason, []).append(rank)
    return list(reasons.items())


def _add_display(displays: list[Display], new: Display, *, update: bool) -> None:
    if update and new.display_id is not None:
        for i, old in enumerate(displays):
            if old.display_id == new.display_id:
                displays[i] = new
                return
    displays.append(new)


def _fingerprint(states: Sequence[diagnose.State]) -> Any:
    """What must not change between two looks for a deadlock to be believed."""
    return [
        (s.rank, s.phase, tuple((w.key, w.seq) for w in s.blocking), dict(s.counts or {})) for s in states
    ]


def _where_they_were(states: Sequence[diagnose.State], world_size: int, what: str) -> str:
    lines = [f"  {diagnose.describe(s, world_size)}" for s in states if s.phase != "absent"]
    return "\n".join([f"the ranks were {what} while they were here:", *lines])


def _timeout_text(states: Sequence[diagnose.State], world_size: int, timeout: float) -> str:
    lines = [f"  {diagnose.describe(s, world_size)}" for s in states if s.phase != "absent"]
    return "\n".join(
        [
            f"the ranks did not all finish within {timeout:g} s.",
            *lines,
            "Nobody waits for a rank that cannot answer, so this is slow rather than stuck: give it more "
            "time with "
            "`--timeout`, or less to do.",
        ]
    )


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of raising in the middle of a message; the caller asks whether it came."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
