"""The ranks of one world size: start them, send a cell, collect what they say, free, replace and stop them.

A world is a set of processes that live on from cell to cell. The notebook's process holds, per rank, two
channels (work and control) and the read ends of its stdout and stderr. It knows nothing of IPython and draws
nothing.
"""

import ast
import atexit
import contextlib
import itertools
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from typing import Any

import cloudpickle

from . import channel, diagnose, errors, system
from .results import Display, NotSent, RankFailure, RankResult, Run, name_ranks

MEMORY_PER_RANK = 40 << 20  # bytes; measured: 20-60 MB (PSS) for an idle rank
FILES_PER_RANK = 8  # descriptors that the notebook's process needs
FIRST_POLL, POLL = (
    0.1,
    0.2,
)  # seconds until the ranks are first asked what they do, and between two such questions
CONFIRM = 0.04  # seconds between the two looks that must agree before a deadlock is reported
GRACE = 1.0  # seconds that a freed or interrupted rank has to come back before it is replaced
START_TIMEOUT = 120.0  # seconds for ranks to start: the first ones wait for torch to be imported

_worlds = itertools.count()


def warm_up() -> None:
    """Start the process that the ranks are forked from; it imports torch while the notebook goes on."""
    multiprocessing.set_forkserver_preload(["rankcell.preload"])
    # the server must find our package and torch as this process does, but not inherit a slow or noisy set-up
    forkserver.ensure_running()


@dataclass
class _Member:
    """What the notebook's process holds of one rank."""

    rank: int
    context: Any  # torch.multiprocessing.ProcessContext of its one process
    work: channel.Channel
    control: channel.Channel
    stdout: int
    stderr: int
    answers: dict[int, Any] = field(default_factory=dict)
    ready: int = -1  # the last generation of the process group that it joined

    @property
    def process(self) -> Any:
        return self.context.processes[0]

    @property
    def pid(self) -> int:
        return self.process.pid


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

    Raises:
        WorldSizeError: the machine cannot hold that many ranks.
    """

    def __init__(self, world_size: int, *, device: str = "auto") -> None:
        self.world_size = world_size
        self.device, self.backend, self.device_note = choose_device(world_size, device)
        _check_size(world_size)
        self.generation = 0
        self.cells = 0
        self.started_at = time.monotonic()
        self.notes: list[str] = []
        self.names: tuple[str, ...] = ()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._asked = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._parts: dict[int, _Part] = {}
        self._members: dict[int, _Member] = {}
        self._cpu: dict[int, float | None] = {}
        self._start_store()
        self._board = system.shared_file(_board_nbytes(world_size))
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
    def alive(self) -> bool:
        """Whether the world can run cells."""
        return bool(self._members)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [m.pid for _, m in sorted(self._members.items())]

    def memory(self) -> list[int | None]:
        """Bytes of memory each rank stands for (PSS), by rank; None where the system does not tell."""
        return [system.process_memory(pid) for pid in self.pids]

    def stop(self) -> None:
        """End the ranks. Safe to call twice; a world that was stopped cannot be used again."""
        if os.getpid() != self._pid:  # a fork of the notebook's process must not end its ranks
            return
        with self._lock:
            atexit.unregister(self.stop)
            members, self._members = list(self._members.values()), {}
            for member in members:
                self._forget(member)
            for member in members:
                _end(member, wait=0.0)
            for member in members:
                _end(member, wait=1.0)
            if self._board >= 0:
                os.close(self._board)
                self._board = -1
            self._selector.close()
            self._store = None

    def restart(self) -> None:
        """End the ranks and start new ones: all names are gone."""
        with self._lock:
            for member in list(self._members.values()):
                self._forget(member)
                _end(member, wait=0.0)
            for member in list(self._members.values()):
                _end(member, wait=1.0)
            self._members.clear()
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

    def _start_store(self) -> None:
        """A key-value store on loopback, held by this process, at which the ranks find each other."""
        import torch.distributed as dist

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._store_address = ("127.0.0.1", port)

    def _start_all(self) -> None:
        warm_up()
        for rank in range(self.world_size):
            self._members[rank] = self._start(rank)
        self._await_ready(range(self.world_size), START_TIMEOUT)

    def _start(self, rank: int) -> _Member:
        import torch.multiprocessing

        from . import worker

        environment = dict(os.environ)
        if self.device == "cpu":
            environment.setdefault("GLOO_SOCKET_IFNAME", system.LOOPBACK)
        birth = worker.Birth(
            rank=rank,
            world_size=self.world_size,
            device=self.device,
            backend=self.backend,
            store=self._store_address,
            generation=self.generation,
            environment=environment,
            folder=os.getcwd(),  # noqa: PTH109
            path=tuple(sys.path),
        )
        ours, theirs = socket.socketpair()
        control, control_theirs = channel.pair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        system.enlarge_pipe(out_read)
        try:
            fds = [control_theirs.fileno(), out_write, err_write, self._board]
            socket.send_fds(ours, [b"f"], fds)
            with _hidden_main():
                context = torch.multiprocessing.start_processes(
                    worker.main,
                    (birth, theirs),
                    nprocs=1,
                    join=False,
                    daemon=False,
                    start_method="forkserver",
                )
        finally:
            theirs.close()
            control_theirs.close()
            os.close(out_write)
            os.close(err_write)
        os.set_blocking(out_read, False)
        os.set_blocking(err_read, False)
        member = _Member(rank, context, channel.Channel(ours), control, out_read, err_read)
        for fd, kind in (
            (member.work, "work"),
            (member.control, "control"),
            (out_read, "out"),
            (err_read, "err"),
        ):
            self._selector.register(fd, selectors.EVENT_READ, (member, kind))
        return member

    def _await_ready(self, ranks: Sequence[int], timeout: float) -> None:
        """Wait until `ranks` have joined the process group of this generation."""
        deadline = time.monotonic() + timeout
        parts, self._parts = self._parts, {r: _Part() for r in self._members}
        try:
            while waiting := [r for r in ranks if self._members[r].ready < self.generation]:
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
        began = time.monotonic()
        self._parts = {r: _Part(runs=r in ranks) for r in self._members}
        self._cpu = {}
        message = pickle.dumps(("run", task), pickle.HIGHEST_PROTOCOL)
        cause: BaseException | None = None  # why we ended the cell, if the ranks did not
        freed = False
        with _deferred_interrupt() as interrupted:
            for rank in ranks:
                try:
                    self._members[rank].work.send(message)
                except OSError:
                    self._mark_lost(rank)
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
            raise errors.lost_error(run, lost, groups_closed=True)
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

    def _pump(self, timeout: float) -> None:
        """Take in whatever has arrived from the ranks, waiting at most `timeout` seconds for something."""
        for key, _ in self._selector.select(timeout):
            member, kind = key.data
            if self._members.get(member.rank) is not member:
                continue
            if kind == "work":
                self._take_work(member)
            elif kind == "control":
                try:
                    for number, answer in member.control.poll():
                        member.answers[number] = answer
                except (EOFError, OSError):
                    self._selector.unregister(member.control)
            else:
                self._read(member, kind)

    def _read(self, member: _Member, kind: str) -> None:
        fd = member.stdout if kind == "out" else member.stderr
        part = self._parts.get(member.rank)
        for _ in range(16):  # then give the others a turn
            try:
                data = os.read(fd, 1 << 18)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)
                return
            if part is not None:
                (part.stdout if kind == "out" else part.stderr).extend(data)

    def _take_work(self, member: _Member) -> None:
        try:
            messages = member.work.poll()
        except EOFError:
            self._mark_lost(member.rank)
            return
        part = self._parts.get(member.rank)
        for message in messages:
            if message[0] == "ready":
                member.ready = message[1]
            elif message[0] == "failed":
                self._mark_lost(member.rank)
            elif part is not None and message[0] == "display":
                _add_display(part.displays, message[1], update=message[2])
            elif part is not None and message[0] == "done":
                # what the rank wrote before its answer already lies in the pipes
                self._drain(member)
                part.outcome = message[1]

    def _drain(self, member: _Member) -> None:
        for fd, kind in ((member.stdout, "out"), (member.stderr, "err")):
            part = self._parts[member.rank]
            while True:
                try:
                    data = os.read(fd, 1 << 20)
                except BlockingIOError:
                    break
                if not data:
                    break
                (part.stdout if kind == "out" else part.stderr).extend(data)

    def _mark_lost(self, rank: int) -> None:
        member, part = self._members[rank], self._parts.get(rank)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.work)
        if part is not None and part.lost is None:
            self._drain(member)
            member.process.join(1.0)
            part.lost = RankFailure("RankLost", _how_it_ended(member.process.exitcode), at=time.monotonic())

    def _ask(
        self, ranks: Sequence[int], request: str, argument: Any = None, *, wait: float
    ) -> dict[int, Any]:
        """Ask the control threads of `ranks`; the answers that came within `wait` seconds."""
        number = next(self._asked)
        asked = []
        for rank in ranks:
            try:
                self._members[rank].control.send((number, request, argument))
                asked.append(rank)
            except OSError:  # it has just died: its work channel tells
                continue
        deadline = time.monotonic() + wait
        while True:
            answers = {
                r: self._members[r].answers[number] for r in asked if number in self._members[r].answers
            }
            left = deadline - time.monotonic()
            if len(answers) == len(asked) or left <= 0:
                for r in answers:
                    del self._members[r].answers[number]
                return answers
            self._pump(left)

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
        for rank, part in self._parts.items():
            if not part.over:
                member = self._members[rank]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
                self._drain(member)
                part.lost = RankFailure("RankLost", "did not react and was ended", caused_by_abort=True)

    def _repair(self, lost: Sequence[int]) -> None:
        """Replace lost ranks and have all ranks join a new process group. The others keep their names."""
        self.generation += 1
        for rank in lost:
            member = self._members[rank]
            self._forget(member)
            _end(member, wait=1.0)
        for rank in lost:
            self._members[rank] = self._start(rank)
        message = pickle.dumps(("join", self.generation))
        for rank, member in self._members.items():
            if rank not in lost:
                with contextlib.suppress(OSError):
                    member.work.send(message)
        try:
            self._await_ready(list(self._members), 20.0)
        except RuntimeError:  # a rank died meanwhile: start over, and say so with the next cell
            self.notes.append(f"All {self.world_size} ranks had to be started anew: their names are gone.")
            self.restart()

    def _replace_dead(self) -> None:
        """Replace ranks that ended between two cells."""
        self._parts = {r: _Part(runs=False) for r in self._members}
        self._pump(0.0)
        lost = [r for r, p in self._parts.items() if p.lost]
        if lost:
            self.notes.append(
                f"{name_ranks(lost)} ended between two cells and {'was' if len(lost) == 1 else 'were'} "
                f"replaced: "
                f"names defined there are gone."
            )
            self._repair(lost)

    def _forget(self, member: _Member) -> None:
        """Stop listening to a rank and close our ends."""
        for fd in (member.work, member.control, member.stdout, member.stderr):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        member.work.close()
        member.control.close()
        os.close(member.stdout)
        os.close(member.stderr)

    def _unmatched(self, ranks: Sequence[int]) -> str | None:
        """A sentence if all ranks came to the end, but some called more collectives than others."""
        if len(ranks) < self.world_size:
            return None
        return diagnose.unmatched({r: self._parts[r].outcome.counts for r in ranks})

    def _result(self, source: str, began: float, pull: Sequence[str]) -> Run:
        results = tuple(self._rank_result(r, p) for r, p in sorted(self._parts.items()))
        ran = [self._parts[r.rank] for r in results if r.state == "ok"]
        pulled = {}
        for name in pull:
            pulled[name] = [_unpack(p.outcome.pulled[name]) for p in ran]
        if ran and ran[0].outcome is not None:
            self.names = ran[0].outcome.names
        return Run(source, results, self.device, self.backend, time.monotonic() - began, pulled)

    def _so_far(self, source: str, began: float) -> Run:
        results = tuple(self._rank_result(r, p) for r, p in sorted(self._parts.items()))
        return Run(source, results, self.device, self.backend, time.monotonic() - began)

    @staticmethod
    def _rank_result(rank: int, part: _Part) -> RankResult:
        outcome = part.outcome
        common = {
            "rank": rank,
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
            dropped_events=outcome.dropped,
        )


def run(
    work: str | Callable[..., Any],
    *,
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    device: str = "auto",
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
    with Ranks(world_size, device=device) as ranks:
        return ranks.run(work, args=args, kwargs=kwargs, timeout=timeout, values=values)


def choose_device(world_size: int, device: str) -> tuple[str, str, str]:
    """Device, backend and a sentence that says why, for a world of `world_size` ranks."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r} does not exist. Choose cpu, cuda or auto.")
    if device == "cpu":
        return "cpu", "gloo", "gloo on the CPU, as asked"
    import torch

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


def _check_size(world_size: int) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise errors.WorldSizeError(f"a world needs at least 1 rank, got {world_size!r}.")
    memory = system.available_memory()
    by_memory = memory // MEMORY_PER_RANK if memory is not None else 256
    by_files = (system.open_file_limit() - 200) // FILES_PER_RANK
    # every rank holds a connection to every other one
    most = min(by_memory, by_files, 512)
    if world_size > most:
        room = f"{memory / 2**30:.1f} GiB of memory are free" if memory is not None else "its limits"
        raise errors.WorldSizeError(
            f"{world_size} ranks do not fit on this machine: a rank takes about {MEMORY_PER_RANK >> 20} MiB "
            f"and "
            f"{FILES_PER_RANK} open files, and {room}. It has room for {most} ranks."
        )


def _board_nbytes(world_size: int) -> int:
    from .record import Board

    return Board.nbytes(world_size)


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


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "lost contact"
    if exitcode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL). Nothing in Python does that: memory may have run out, or somebody ended it"
        )
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        crash = " (a crash in C code)" if name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL") else ""
        return f"was ended by {name}{crash}"
    return f"left with exit code {exitcode} (os._exit)"


def _end(member: _Member, *, wait: float) -> None:
    """End the process of a rank and reap it."""
    process = member.process
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    process.join(wait)


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
def _hidden_main() -> Iterator[None]:
    """Start a process without its parent's `__main__`: a rank must not run the learner's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


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
